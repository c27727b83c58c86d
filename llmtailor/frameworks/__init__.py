"""Which files a loader has besides the states: the Trainer's, accelerate's, Lightning's, a DeepSpeed engine's."""
