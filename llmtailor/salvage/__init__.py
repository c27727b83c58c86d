"""Makes something resumable out of what a crash left: recipe and merge, with sources that were verified first."""
