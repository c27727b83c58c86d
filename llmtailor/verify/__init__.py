"""Whether an unmodified Trainer or DeepSpeed resumes from a checkpoint correctly. Nothing is written."""
