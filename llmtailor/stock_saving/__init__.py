"""Stock checkpoints, saved in the background: the files of the framework itself."""
