"""Plays Ascend's package: importing it makes torch know ``npu`` and its library hccl."""

import torch
from scripted_accelerator import install

torch.utils.rename_privateuse1_backend("npu")
install("npu", "PrivateUse1", "hccl")
