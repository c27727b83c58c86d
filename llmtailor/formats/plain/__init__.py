"""The Hugging Face Trainer's checkpoint without DeepSpeed: optimizer.pt, safetensors, and names from elsewhere."""
