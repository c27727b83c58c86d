"""Checks whether an unmodified Trainer or DeepSpeed resumes correctly from a checkpoint. Nothing is written."""
