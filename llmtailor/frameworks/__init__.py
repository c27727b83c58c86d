"""Which files a framework has besides the states: the Trainer's, accelerate's, Lightning's, a DeepSpeed engine's."""
