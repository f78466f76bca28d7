"""`stagewright bench`: this runtime beside torch.distributed.pipelining, in one run. See `command`."""
