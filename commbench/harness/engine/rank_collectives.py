"""Collectives on real data, on a rank: the calls, and tensors as they come from the driver and go back to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from commbench.coordinator.group import GroupCoordinator
from commbench.errors import CollectiveError, UsageError

Message = dict[str, Any]


def _reduce_scatter(group: GroupCoordinator, x: torch.Tensor, m: Message) -> torch.Tensor:
    rows = _rows_each(group, x, "reduce_scatter")
    return group.reduce_scatter_tensor(x.new_empty(rows, *x.shape[1:]), x, m["op"])


def _all_to_all(group: GroupCoordinator, x: torch.Tensor, m: Message) -> torch.Tensor:
    _rows_each(group, x, "all_to_all")
    return group.all_to_all(x, torch.empty_like(x))


def _scatter(group: GroupCoordinator, x: torch.Tensor, m: Message) -> torch.Tensor:
    rows = _rows_each(group, x, "scatter")
    mine = x if group.rank_in_group == m["src"] else None
    return group.scatter(mine, x.new_empty(rows, *x.shape[1:]), m["src"])


def _reduce(group: GroupCoordinator, x: torch.Tensor, m: Message) -> torch.Tensor | None:
    result = group.reduce(x, m["dst"], m["op"])
    return result if group.rank_in_group == m["dst"] else None


def _send_recv(group: GroupCoordinator, x: torch.Tensor, m: Message) -> torch.Tensor:
    n, rank = group.world_size, group.rank_in_group
    return group.send_recv(x, torch.empty_like(x), (rank + 1) % n, (rank - 1) % n)


def _all_gatherv(group: GroupCoordinator, x: torch.Tensor, m: Message) -> Any:
    return group.all_gatherv(x, [m["sizes"][r] for r in group.ranks])


def _barrier(group: GroupCoordinator, x: torch.Tensor, m: Message) -> None:
    group.barrier()


def _rows_each(group: GroupCoordinator, x: torch.Tensor, what: str) -> int:
    """Rows of each rank's part. Raises CollectiveError where they do not divide evenly."""
    rows = x.shape[0] if x.dim() else 1
    if not x.dim() or rows % group.world_size:
        raise CollectiveError(
            f"{what}: the first dimension of shape {tuple(x.shape)} is no multiple of {group.world_size} ranks"
        )
    return rows // group.world_size


CALLS: Mapping[str, Callable[[GroupCoordinator, torch.Tensor, Message], torch.Tensor | None]] = {
    "all_reduce": lambda group, x, m: group.all_reduce(x, m["op"]),
    "reduce": _reduce,
    "all_gather": lambda group, x, m: group.all_gather(x, m["dim"]),
    "all_gatherv": _all_gatherv,
    "reduce_scatter": _reduce_scatter,
    "broadcast": lambda group, x, m: group.broadcast(x, m["src"]),
    "all_to_all": _all_to_all,
    "gather": lambda group, x, m: group.gather(x, m["dst"], m["dim"]),
    "scatter": _scatter,
    "send_recv": _send_recv,
    "barrier": _barrier,
}


# ---- tensors on their way ----------------------------------------------------------------------------------------


def tensor_of(spec: Message, data: bytes) -> torch.Tensor:
    dtype = getattr(torch, spec["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"torch {torch.__version__} has no dtype {spec['dtype']!r}")
    if not data:
        return torch.empty(spec["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(spec["shape"])


def spec_of(tensor: torch.Tensor) -> Message:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
