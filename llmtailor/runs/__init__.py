"""A run's folder and its history: scan, lineage, thin, gc."""
