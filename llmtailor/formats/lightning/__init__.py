"""Lightning's one file."""
