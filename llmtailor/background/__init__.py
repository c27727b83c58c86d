"""Saves in the background: copies of live tensors, the threads that write them, publishing, and a second tier."""
