"""Moves bytes as the plan says, into a staging folder, and publishes it by one rename. Decides nothing."""
