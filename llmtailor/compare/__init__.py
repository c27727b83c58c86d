"""How two checkpoints differ: in what a training continues from, and in the values of their states."""
