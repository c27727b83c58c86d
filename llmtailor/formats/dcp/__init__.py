"""Folders of torch.distributed.checkpoint (DCP): what FSDP trainings save. See `read` for the layouts."""
