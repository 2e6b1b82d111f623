"""Which ranks form which group, without processes: plain arithmetic on rank numbers.

Ranks of one tensor-parallel (TP) group are consecutive; a pipeline (PP) group takes one rank of each TP group. Inside
a TP group of size tp, with expert parallelism ep, the MoE-TP groups are runs of tp/ep consecutive ranks, and a MoE-EP
group takes one rank of each run. With 8 ranks, tp=4, pp=2, ep=2:

  TP      0 1 2 3 · 4 5 6 7
  PP      0 4 · 1 5 · 2 6 · 3 7
  MoE-TP  0 1 · 2 3 · 4 5 · 6 7
  MoE-EP  0 2 · 1 3 · 4 6 · 5 7
"""

from __future__ import annotations

from dataclasses import dataclass

from commbench.errors import UsageError

Groups = tuple[tuple[int, ...], ...]
GROUP_KINDS = ("world", "tp", "pp", "moe_ep", "moe_tp")


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of each kind; each kind holds every rank exactly once."""

    world: Groups
    tp: Groups
    pp: Groups
    moe_ep: Groups
    moe_tp: Groups

    def of(self, kind: str) -> Groups:
        """The groups of one of GROUP_KINDS."""
        groups: Groups = getattr(self, kind)
        return groups


def check_sizes(world_size: int, tp: int, ep: int, pp: int) -> None:
    """Raises UsageError unless world_size = tp × pp and ep divides tp."""
    for name, size in (("tensor", tp), ("expert", ep), ("pipeline", pp)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{name} parallel size {size!r} must be a whole number, at least 1")
    if tp * pp != world_size:
        raise UsageError(
            f"tensor × pipeline parallel size {tp} × {pp} = {tp * pp} must equal the world size, {world_size}"
        )
    if tp % ep:
        raise UsageError(f"expert parallel size {ep} must divide the tensor parallel size {tp}")


def parallel_layout(world_size: int, tp: int = 1, ep: int = 1, pp: int = 1) -> Layout:
    """All groups for these sizes. Raises UsageError where they do not fit."""
    check_sizes(world_size, tp, ep, pp)
    run = tp // ep
    blocks = [range(start, start + tp) for start in range(0, world_size, tp)]
    return Layout(
        world=(tuple(range(world_size)),),
        tp=tuple(tuple(block) for block in blocks),
        pp=tuple(tuple(range(first, world_size, tp)) for first in range(tp)),
        moe_ep=tuple(tuple(block[first::run]) for block in blocks for first in range(run)),
        moe_tp=tuple(tuple(block[first : first + run]) for block in blocks for first in range(0, tp, run)),
    )
