"""Frees disk space in a run's folder without taking away a state that is promised: `thin` and `gc`."""
