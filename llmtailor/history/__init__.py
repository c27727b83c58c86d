"""What a run has saved when, and what is still needed of it. Pure; nothing but the standard library."""
