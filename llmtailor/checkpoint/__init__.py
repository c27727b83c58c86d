"""What a checkpoint is, as data: frozen dataclasses and pure functions. No file is opened here."""
