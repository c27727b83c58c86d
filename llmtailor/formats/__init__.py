"""A reader and a writer for each checkpoint format on disk. No tensor bytes are moved here."""
