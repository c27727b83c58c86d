"""What ZeRO, universal checkpoints and partial checkpoints of DeepSpeed trainings share."""
