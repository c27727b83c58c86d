"""What lies on disk: one file per format. A format indexes and lays out; it never moves tensor bytes."""
