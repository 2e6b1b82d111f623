"""The world group and the facts about this machine that dispatch depends on."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist

from commbench.backends.base import Group
from commbench.coordinator.hosts import prove_one_host
from commbench.types import Platform


def world_group(device: torch.device, timeout: datetime.timedelta) -> Group:
    """Initialise torch.distributed from the environment (as torchrun sets it) and give the group of all ranks.

    The CPU group is gloo; on another device its own library carries the device group.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cpu":
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timeout)
        cpu_group = device_group = dist.group.WORLD
    else:
        dist.init_process_group("nccl", rank=rank, world_size=size, timeout=timeout, device_id=device)
        device_group = dist.group.WORLD
        cpu_group = dist.new_group(list(range(size)), backend="gloo", timeout=timeout)
    return Group("world", tuple(range(size)), rank, device, cpu_group, device_group, prove_one_host(cpu_group))


def local_platform(device: torch.device) -> Platform:
    """What this process knows of its device; the coordinator adds the group's facts."""
    env = dict(os.environ)
    if device.type == "cpu":
        return Platform(device="cpu", cpu_flags=_cpu_flags(), group="world", env=env)
    kind = "hip" if torch.version.hip else device.type
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return Platform(device=kind, capability=capability, group="world", env=env)


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
