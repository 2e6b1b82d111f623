"""Who may watch a meter: one place for hooks, all of them outside the timed path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from commbench.types import Point

PHASES = ("prepare", "check", "warm-up", "return", "sample")  # in the order in which a point meets them


@dataclass(frozen=True, slots=True)
class BlockSeen:
    """A block of samples over all ranks. starts_ns, ends_ns, late: (ranks, n), on this host's clock; on a device, whose
    clocks cannot be compared, starts are 0 and ends are durations. kept: false for warm-up. first: number of the
    first sample among those that are kept."""

    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    late: NDArray[np.uint8]
    iters_per_sample: int
    kept: bool
    first: int


class Observer:
    """Hears what a ``Meter`` does on this rank; override what you need.

    Calls come between blocks, never between the start gate and a reading of the clock; what they cost lengthens the run
    and no sample. They must not call collectives or raise. ``visit`` … ``left`` frame everything about one visit.
    """

    def visit(self, order: int, point: Point, number: int) -> None:
        """Visit ``number`` (from 0) of a point begins."""

    def decided(self, backend: str) -> None:
        """The coordinator has decided which backend the point's calls take."""

    def phase(self, name: str) -> None:
        """A phase of PHASES begins; the one before it is over."""

    def failed(self, reason: str) -> None:
        """This rank cannot go on with the point; the others may not know yet."""

    def block(self, seen: BlockSeen) -> None:
        """A block was taken, and all ranks have shared it."""

    def left(self, status: str, reason: str) -> None:
        """The visit is over; status is "" while the point goes on."""


class Observers(Observer):
    """Several observers as one, in order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._all = tuple(observers)

    def visit(self, order: int, point: Point, number: int) -> None:
        for observer in self._all:
            observer.visit(order, point, number)

    def decided(self, backend: str) -> None:
        for observer in self._all:
            observer.decided(backend)

    def phase(self, name: str) -> None:
        for observer in self._all:
            observer.phase(name)

    def failed(self, reason: str) -> None:
        for observer in self._all:
            observer.failed(reason)

    def block(self, seen: BlockSeen) -> None:
        for observer in self._all:
            observer.block(seen)

    def left(self, status: str, reason: str) -> None:
        for observer in self._all:
            observer.left(status, reason)
