"""A page about a run: what was saved, how old each part is, what a merge would compose, and what is wrong."""
