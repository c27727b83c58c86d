"""A page about a run: its saves, the age of its parts, what a merge would compose, what is wrong."""
