"""How a point is timed, as an interface: on the host (host.py), or on a device eagerly and in graphs (on_device.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from commbench.measure.correctness import Check
from commbench.measure.loop import Call
from commbench.measure.point_state import PointState
from commbench.measure.team import Team


class Timing(ABC):
    """All methods are collective. sync: what the column of that name says."""

    sync: str

    def __init__(self, team: Team) -> None:
        self._team = team
        self.largest_block = team.capacity  # samples

    @abstractmethod
    def prepare(self, s: PointState, picked: str) -> None:
        """Bind what this way of timing calls. picked: the backend that the policy picks."""

    @abstractmethod
    def warm_up(self, s: PointState, time_cap: float) -> None:
        """Until times are steady, or a part of ``time_cap`` (seconds) is used up; then the size of blocks.

        Sets s.status and s.reason where the point cannot be timed.
        """

    @abstractmethod
    def take(self, s: PointState, n: int, keep: bool = True) -> None:
        """Take n samples on all ranks; ``keep`` adds them to the point, else they are warm-up."""

    def label(self, s: PointState) -> str:
        """What the column ``timing`` says."""
        return "batched" if s.batch > 1 else "single"

    def remark(self) -> str:
        """What stands in the reason of every point timed so, "" for nothing."""
        return ""

    def once(self, s: PointState) -> Call:
        """A call of the point's first buffers for checks, which counts itself."""

        def call() -> object:
            s.calls_made += 1
            return s.calls[0]()

        return call

    def check(self, s: PointState, seed: int, exact: bool) -> None:
        """One call on fresh inputs, held against the right answer."""
        s.buffers[0].refill(seed, exact)
        self._team.barrier()
        self.once(s)()
        s.check.add(self._checked(s, seed, exact))

    @staticmethod
    def _checked(s: PointState, seed: int, exact: bool) -> Check:
        s.checked = s.point.collective != "barrier"
        return s.buffers[0].check(seed, exact)
