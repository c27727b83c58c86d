"""Lightning's checkpoint without DeepSpeed and FSDP: one torch file with everything."""
