"""The collectives as torch custom ops, for torch.compile.

Dynamo cannot pass a coordinator into a graph, so an op takes the group's unique name, the reduction as an int (its
place in types.OPS) and the method: a backend's name, or "" to let the policy decide when the op runs. Deciding then,
and not while tracing, keeps a graph with dynamic shapes right for every size. Each op has a fake implementation, so
``torch.compile(fullgraph=True)`` traces through. Eager calls bypass the ops.
"""

from __future__ import annotations

from typing import Any

import torch

from commbench.coordinator.names import find
from commbench.types import OPS

# untyped in torch
_library: Any = torch.library.Library("commbench", "FRAGMENT")  # type: ignore[no-untyped-call]


def _all_reduce_(tensor: torch.Tensor, group: str, op: int, method: str) -> None:
    with find(group).compiled(method) as coordinator:
        coordinator.all_reduce(tensor, OPS[op])


def _all_reduce(tensor: torch.Tensor, group: str, op: int, method: str) -> torch.Tensor:
    output = torch.empty_like(tensor)
    with find(group).compiled(method) as coordinator:
        coordinator.all_reduce(tensor, OPS[op], output)
    return output


def _all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group: str, method: str) -> None:
    with find(group).compiled(method) as coordinator:
        coordinator.all_gather_into_tensor(output, input)


def _reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, group: str, op: int, method: str) -> None:
    with find(group).compiled(method) as coordinator:
        coordinator.reduce_scatter_tensor(output, input, OPS[op])


def _all_to_all(output: torch.Tensor, input: torch.Tensor, group: str, method: str) -> None:
    with find(group).compiled(method) as coordinator:
        coordinator.all_to_all(input, output)


def _broadcast_(tensor: torch.Tensor, group: str, src: int, method: str) -> None:
    with find(group).compiled(method) as coordinator:
        coordinator.broadcast(tensor, src)


def _all_reduce_fake(tensor: torch.Tensor, group: str, op: int, method: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def _nothing(*arguments: object) -> None:
    """The fake of an op that only writes into its arguments."""


for _schema, _run, _fake in (
    ("all_reduce_(Tensor(a!) tensor, str group, int op, str method) -> ()", _all_reduce_, _nothing),
    ("all_reduce(Tensor tensor, str group, int op, str method) -> Tensor", _all_reduce, _all_reduce_fake),
    (
        "all_gather_into_tensor(Tensor(a!) output, Tensor input, str group, str method) -> ()",
        _all_gather_into_tensor,
        _nothing,
    ),
    (
        "reduce_scatter_tensor(Tensor(a!) output, Tensor input, str group, int op, str method) -> ()",
        _reduce_scatter_tensor,
        _nothing,
    ),
    ("all_to_all(Tensor(a!) output, Tensor input, str group, str method) -> ()", _all_to_all, _nothing),
    ("broadcast_(Tensor(a!) tensor, str group, int src, str method) -> ()", _broadcast_, _nothing),
):
    _name = _schema.partition("(")[0]
    _library.define(_schema)
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"commbench::{_name}", _fake, lib=_library)
