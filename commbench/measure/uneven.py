"""The v-variants: collectives where each rank has its own number of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from commbench.measure import correctness
from commbench.measure.buffers import Buffers
from commbench.measure.correctness import Check, compare
from commbench.types import CallSignature, Point

if TYPE_CHECKING:
    from commbench.backends.base import Backend
    from commbench.coordinator.group import GroupCoordinator
    from commbench.native._shm import BoundCall


def sizes_of(point: Point) -> list[int]:
    """Elements of each rank: as equal as can be, or (skewed) each half of what is left, the last the rest."""
    n, left = point.world_size, point.numel
    if not point.collective.endswith("_skewed"):
        return [left // n + (r < left % n) for r in range(n)]
    sizes = []
    for _ in range(n - 1):
        sizes.append(-(-left // 2))
        left -= sizes[-1]
    return [*sizes, left]


class UnevenBuffers(Buffers):
    """all_gatherv and reduce_scatterv, balanced and skewed. A row is one element."""

    def __init__(self, point: Point, rank: int, device: torch.device) -> None:
        self.point = point
        self.rank = rank
        self._device = device
        self.sizes = sizes_of(point)
        self.collective = point.collective.removesuffix("_skewed")
        strided = point.layout == "strided"
        mine, total = self.sizes[rank], point.numel
        gathers = self.collective == "all_gatherv"
        self.input = self._tensor(mine if gathers else total, strided)
        self.output = self._tensor(total if gathers else mine)

    def call(self, coordinator: GroupCoordinator) -> Callable[[], object]:
        x, y = self.input, self.output
        assert x is not None
        if self.collective == "all_gatherv":
            return partial(coordinator.all_gatherv, x, self.sizes, y)
        return partial(coordinator.reduce_scatterv, x, y, self.sizes, self.point.op)

    def signature(self, coordinator: GroupCoordinator) -> CallSignature:
        # equal sizes take the plain collective
        name = self.collective if len(set(self.sizes)) > 1 else self.collective.removesuffix("v")
        return coordinator.signature(name, self.input, self.point.op, "out")

    def native_call(self, backend: Backend) -> BoundCall | None:
        return None

    def check(self, seed: int, exact: bool) -> Check:
        point = self.point
        tables = [correctness.table(point, r, seed, exact).to(self._device) for r in range(point.world_size)]
        assert self.output is not None
        if self.collective == "all_gatherv":
            check, first = Check(), 0
            for rows, table in zip(self.sizes, tables, strict=True):
                check.add(compare(self.output[first : first + rows], table, None))
                first += rows
            return check
        answer = correctness.reduction(point.op, tables)
        allowed = None if exact and point.op != "avg" else correctness.tolerance(point.op, tables, point.dtype)
        return compare(self.output, answer, allowed, sum(self.sizes[: self.rank]))
