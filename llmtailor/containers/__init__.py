"""File formats that know nothing of training: safetensors, torch's zip files, pickles, JSON."""
