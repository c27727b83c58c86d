"""What is on disk: a reader and a writer for each checkpoint format. No tensor bytes are moved here."""
