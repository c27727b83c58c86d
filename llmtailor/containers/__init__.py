"""File formats, independent of training: safetensors, torch's zip files, pickles, JSON."""
