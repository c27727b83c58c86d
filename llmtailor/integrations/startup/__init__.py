"""The folder that ``llmtailor run`` puts on ``PYTHONPATH``: Python imports its ``sitecustomize`` at startup."""
