"""The version, which other modules import from here."""

__version__ = "0.1.0"
