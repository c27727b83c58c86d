"""Recovery from damaged checkpoints: verifies the sources first, then merges what is intact."""
