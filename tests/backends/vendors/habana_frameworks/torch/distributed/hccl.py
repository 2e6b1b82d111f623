"""Importing it makes torch.distributed know hccl."""

from scripted_accelerator import install

install("hpu", "HPU", "hccl", timed=False, one_each=True)
