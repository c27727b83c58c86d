"""What the formats of torch optimizers share: Trainer, accelerate, Lightning, FSDP, and partial checkpoints."""
