"""Cut, compose and resume LLM training checkpoints.

>>> import llmtailor
>>> report = llmtailor.merge(Path("recipe.yaml"), Path("runs/x/checkpoint-400-merged"))

``plan_merge`` plans without writing, ``write`` writes a plan, ``inspect_checkpoint`` says what a folder holds,
``verify_checkpoint`` whether a stock resume will take it, ``find_latest`` the newest of a run that it will take.
Everything raised on purpose is an `errors.TailorError`.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "merge": "llmtailor.compose.write",
    "plan_merge": "llmtailor.compose.plan",
    "write": "llmtailor.compose.write",
    "Options": "llmtailor.compose.plan",
    "inspect_checkpoint": "llmtailor.verify.inspect",
    "verify_checkpoint": "llmtailor.verify.verify",
    "find_latest": "llmtailor.runs.latest",
    "Verdict": "llmtailor.verify.verdict",
    "Finding": "llmtailor.findings",
    "TailorError": "llmtailor.errors",
    "Problem": "llmtailor.errors",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    """Import on first use: ``import llmtailor`` and ``llmtailor --help`` stay instant."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'llmtailor' has no attribute {name!r}")
