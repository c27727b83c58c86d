"""Will a stock resume take a checkpoint for what it claims to be? Nothing is written, and no framework imported."""
