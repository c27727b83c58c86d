"""DeepSpeed's checkpoints of any ZeRO stage, with AutoTP, and its universal checkpoints."""
