"""The slow, obvious way to read checkpoints, which the fast way must equal bit for bit."""
