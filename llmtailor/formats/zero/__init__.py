"""DeepSpeed ZeRO checkpoints inside a Hugging Face Trainer folder. DeepSpeed itself is never imported."""
