"""Folders of torch.distributed.checkpoint (DCP), and what the formats made of them share."""
