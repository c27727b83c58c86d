"""Storage: local files and folders, locks, checksums, casts. Nothing here decides anything."""
