"""Bytes: reading, writing, checksums, casts. Nothing here decides anything."""
