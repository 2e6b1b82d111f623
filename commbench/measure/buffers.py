"""The tensors of a point on one rank: made, filled, called upon and checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from commbench.measure import correctness
from commbench.measure.correctness import ROOT, Check, compare, fill, poison
from commbench.types import CallSignature, Point

if TYPE_CHECKING:
    from commbench.backends.base import Backend
    from commbench.coordinator.group import GroupCoordinator
    from commbench.native._shm import BoundCall

COLD_CAP_BYTES = 256 << 20  # per rank: virtual machines report a whole socket's cache


def copies_for(point: Point, cache_bytes: int) -> int:
    """How many sets of buffers a point rotates through: 1 when hot, else enough to hold twice the cache, capped."""
    if point.cache != "cold":
        return 1
    each = max(1, 2 * point.size_bytes)
    wanted = -(-2 * cache_bytes // each)
    return max(2, min(wanted, max(2, COLD_CAP_BYTES // each), 4096))


class Buffers:
    """One set of input and output tensors of a point on this rank, with the right answers for its inputs.

    ``input`` is None on ranks that give nothing (scatter away from the root), ``output`` on ranks that get nothing.
    In place, the two share memory. quantised: the level at which the backend's data travel ("" exact), which widens
    what ``check`` allows an all-reduce.
    """

    quantised = ""

    def __init__(self, point: Point, rank: int, device: torch.device) -> None:
        self.point = point
        self.rank = rank
        self._device = device
        n, total = point.world_size, point.numel
        part = total // n
        strided = point.layout == "strided"
        in_place = point.placement == "in"
        kind = point.collective
        self.input: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        if kind == "barrier":
            return
        if kind in ("all_gather", "gather"):
            if kind == "gather" and rank != ROOT:
                self.input = self._tensor(part, strided)
            else:
                self.output = self._tensor(total)
                mine = slice(rank * part, (rank + 1) * part)
                self.input = self.output[mine] if in_place else self._tensor(part, strided)
        elif kind in ("reduce_scatter", "scatter"):
            if kind == "reduce_scatter" or rank == ROOT:
                self.input = self._tensor(total, strided)
            if in_place and self.input is not None:
                self.output = self.input[rank * part : (rank + 1) * part]
            else:
                self.output = self._tensor(part)
        else:
            self.input = self._tensor(total, strided)
            self.output = self.input if in_place else self._tensor(total)

    def _tensor(self, numel: int, strided: bool = False) -> torch.Tensor:
        """Uninitialised; strided tensors are every other element of a storage twice as long."""
        dtype = getattr(torch, self.point.dtype)
        storage = torch.empty(numel * 2 if strided else numel, dtype=dtype, device=self._device)
        return storage[::2] if strided else storage

    def call(self, coordinator: GroupCoordinator) -> Callable[[], object]:
        """The collective on these tensors, bound: what a timed iteration calls."""
        point = self.point
        x: Any = self.input  # present wherever the collective takes it
        y: Any = self.output
        n = point.world_size
        match point.collective:
            case "all_reduce":
                return partial(coordinator.all_reduce, x, point.op, y)
            case "all_gather":
                return partial(coordinator.all_gather_into_tensor, y, x)
            case "reduce_scatter":
                return partial(coordinator.reduce_scatter_tensor, y, x, point.op)
            case "broadcast":
                return partial(coordinator.broadcast, x, ROOT)
            case "all_to_all":
                return partial(coordinator.all_to_all, x, y)
            case "reduce":
                return partial(coordinator.reduce, x, ROOT, point.op, y)
            case "gather":
                return partial(coordinator.gather_into_tensor, y, x, ROOT)
            case "scatter":
                return partial(coordinator.scatter, x, y, ROOT)
            case "send_recv":
                return partial(coordinator.send_recv, x, y, (self.rank + 1) % n, (self.rank - 1) % n)
            case "barrier":
                return coordinator.barrier
        raise AssertionError(point.collective)  # the sweep admits no other

    def signature(self, coordinator: GroupCoordinator) -> CallSignature:
        """What the policy sees of the call."""
        tensor = self.output if self.point.collective == "scatter" else self.input
        return coordinator.signature(self.point.collective, tensor, self.point.op, self.point.placement)

    def native_call(self, backend: Backend) -> BoundCall | None:
        """The collective on these tensors as a call of compiled code; None where the backend has none."""
        if self.point.collective == "barrier" or self.input is None:
            return None
        return backend.native_call(self.point.collective, self.input, self.output, self.point.op or "sum", ROOT)

    def refill(self, seed: int, exact: bool) -> None:
        """Fresh random inputs, poisoned outputs."""
        if self.point.collective == "barrier":
            return
        if self.output is not None:
            poison(self.output)
        if self.input is not None:
            mine = correctness.table(self.point, self.rank, seed, exact).to(self._device)
            fill(self.input, mine)

    def check(self, seed: int, exact: bool) -> Check:
        """Hold the results of one call after ``refill`` (same arguments) against the right answers."""
        point, n = self.point, self.point.world_size
        if point.collective == "barrier" or self.output is None or point.numel == 0:
            return Check()
        if point.collective == "reduce" and self.rank != ROOT:
            return Check()

        def table_of(rank: int) -> torch.Tensor:
            return correctness.table(point, rank, seed, exact).to(self._device)

        part = point.numel // n
        match point.collective:
            case "all_reduce" | "reduce" | "reduce_scatter":
                tables = [table_of(r) for r in range(n)]
                answer = correctness.reduction(point.op, tables)
                # an average is not exact even of integers: 1/n rounds
                strict = exact and point.op != "avg"
                allowed = None if strict else correctness.tolerance(point.op, tables, point.dtype)
                if self.quantised:
                    allowed = correctness.quantised_tolerance(point.op, tables, point.dtype, self.quantised)
                phase = self.rank * part if point.collective == "reduce_scatter" else 0
                return compare(self.output, answer, allowed, phase)
            case "all_gather" | "gather":
                check = Check()
                for r in range(n):
                    check.add(compare(self.output[r * part : (r + 1) * part], table_of(r), None))
                return check
            case "all_to_all":
                check = Check()
                for r in range(n):
                    check.add(compare(self.output[r * part : (r + 1) * part], table_of(r), None, self.rank * part))
                return check
            case "scatter":
                return compare(self.output, table_of(ROOT), None, self.rank * part)
            case "broadcast":
                return compare(self.output, table_of(ROOT), None)
            case "send_recv":
                return compare(self.output, table_of((self.rank - 1) % n), None)
        raise AssertionError(point.collective)
