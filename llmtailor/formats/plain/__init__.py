"""The Hugging Face Trainer's checkpoint without DeepSpeed: optimizer.pt and safetensors."""
