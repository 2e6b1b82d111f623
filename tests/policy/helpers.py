"""Calls and platforms in one line, for tests of policies."""

from __future__ import annotations

from typing import Any

from commbench.types import DTYPES, CallSignature, Platform

MIB = 1 << 20


def call(dtype: str = "bfloat16", size_bytes: int = MIB, **more: Any) -> CallSignature:
    collective = more.pop("collective", "all_reduce")
    return CallSignature(
        collective, more.pop("op", "sum"), dtype, size_bytes, size_bytes // DTYPES[dtype].itemsize, **more
    )


def h100(world_size: int = 8, *requested: str, **more: Any) -> Platform:
    """An NVSwitch machine. requested: switches, with the group's own NCCL communicator; none: the engine's defaults."""
    return Platform(
        device="cuda",
        capability=more.pop("capability", (9, 0)),
        world_size=world_size,
        one_host=True,
        nvlink=more.pop("nvlink", True),
        multicast=more.pop("multicast", True),
        requested=frozenset({*requested, "pynccl"}) if requested else None,
        **more,
    )


def mi300x(world_size: int = 8, **more: Any) -> Platform:
    return Platform(device="hip", capability=(9, 4), world_size=world_size, one_host=True, nvlink=True, **more)


def cpu(world_size: int = 2, one_host: bool | None = True, **more: Any) -> Platform:
    return Platform(device="cpu", world_size=world_size, one_host=one_host, **more)
