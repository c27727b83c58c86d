"""Ranks: the processes that do one thing together, how they exchange values and errors, and who is alive."""
