"""Checkpoints of Megatron-LM, read: a file for each rank, joined tensor by tensor."""
