"""The world group and the facts about this machine that dispatch depends on."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commbench.backends.accelerators import VENDORS, device_module
from commbench.backends.base import Group
from commbench.backends.shm import prove_one_host
from commbench.errors import UsageError
from commbench.types import Platform

MULTI_RANK_NCCL = (2, 30)  # the first NCCL that lets ranks share a GPU, with NCCL_MULTI_RANK_GPU_ENABLE=1


def library_for_shared_gpus() -> str:
    """What carries the device group where ranks share a GPU: an older NCCL would fail when it is set up."""
    if not dist.is_nccl_available() or torch.version.hip:
        return "gloo"
    return "nccl" if tuple(torch.cuda.nccl.version())[:2] >= MULTI_RANK_NCCL else "gloo"  # type: ignore[no-untyped-call]


def world_group(device: torch.device, timeout: datetime.timedelta, library: str = "") -> Group:
    """Initialise torch.distributed from the environment (as torchrun sets it) and give the group of all ranks.

    The CPU group is gloo; on another device ``library`` carries the device group, "" for the device's own.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.type == "cpu" or library == "gloo":
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timeout)
        cpu_group = device_group = dist.group.WORLD
    else:
        library = library or collective_library(device.type)
        # NCCL connects at once where it is told the device; others make nothing of it
        bound = device if device.type == "cuda" else None
        dist.init_process_group(library, rank=rank, world_size=size, timeout=timeout, device_id=bound)
        device_group = dist.group.WORLD
        cpu_group = dist.new_group(list(range(size)), backend="gloo", timeout=timeout)
    return Group("world", tuple(range(size)), rank, device, cpu_group, device_group, prove_one_host(cpu_group))


def take_device(kind: str, *, share: bool = False) -> torch.device:
    """This process's device of that kind (cpu, cuda, xpu, hpu, npu), made the current one: the one of its place on the
    host (LOCAL_RANK), counted among those that it sees.

    share: with fewer devices than ranks they go round. Raises UsageError for a kind that commbench does not know.
    """
    if kind == "cpu":
        return torch.device("cpu")
    collective_library(kind)  # makes torch know the device
    if kind in VENDORS and VENDORS[kind].exclusive:
        return torch.device(kind, 0)
    module: Any = torch.get_device_module(kind)
    # a launcher may show each rank its own device only
    index, visible = int(os.environ["LOCAL_RANK"]), max(1, module.device_count())
    if share or visible == 1:
        index %= visible
    device = torch.device(kind, index)
    module.set_device(device)
    return device


def collective_library(device: str) -> str:
    """The torch.distributed library of a device: gloo, nccl, or a vendor's. Raises UsageError for a device unknown."""
    if device == "cpu":
        return "gloo"
    if device == "cuda":
        return "nccl"
    if device not in VENDORS:
        raise UsageError(f"{device} is no device that commbench knows; it knows cpu, cuda, {', '.join(VENDORS)}")
    device_module(device)  # makes torch know the device and its library
    return VENDORS[device].library


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


def new_group(
    group_ranks: Sequence[Sequence[int]],
    name: str,
    device: torch.device,
    backend: str,
    timeout: datetime.timedelta | None,
) -> Group:
    """The one of these groups that this process is in. Collective over the world: every rank passes the same lists.

    Each group gets a gloo process group and, unless backend is gloo, one of ``backend`` for its device. Raises
    UsageError unless every group lists different ranks and this process is in exactly one.
    """
    rank = dist.get_rank()
    listed = [r for ranks in group_ranks for r in ranks]
    if len(set(listed)) != len(listed):
        raise UsageError(f"groups {[list(r) for r in group_ranks]} ({name}): a rank is listed twice")
    if any(not 0 <= r < dist.get_world_size() for r in listed):
        raise UsageError(
            f"groups {[list(r) for r in group_ranks]} ({name}): the world has {dist.get_world_size()} ranks"
        )
    if rank not in listed:
        raise UsageError(f"groups {[list(r) for r in group_ranks]} ({name}): rank {rank} is in none of them")
    mine: tuple[tuple[int, ...], Any, Any] | None = None
    for ranks in group_ranks:
        cpu_group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
        device_group = cpu_group if backend == "gloo" else dist.new_group(list(ranks), backend=backend, timeout=timeout)
        if rank in ranks:
            mine = tuple(ranks), cpu_group, device_group
    assert mine is not None
    ranks, cpu_group, device_group = mine
    return Group(name, ranks, ranks.index(rank), device, cpu_group, device_group, prove_one_host(cpu_group))
