"""How an iteration starts: in a common time window, at a spin barrier, or not at all.

A gate is called right before every timed call and gives 1 if this rank was late for its window, else 0.
"""

from __future__ import annotations

from collections.abc import Callable

from commbench.measure.clock import Clock, now_ns
from commbench.measure.team import Team

Gate = Callable[[], int]
SYNCS = ("window", "barrier", "none")


class WindowGate:
    """Round-Time (Hunold & Carpen-Amarie): all ranks meet, rank 0 publishes now + δ, all spin to that moment.

    A rank that reads the deadline when it is already past is late, and that iteration invalid. ``delta_ns`` may be
    changed between blocks, on rank 0.
    """

    def __init__(self, team: Team, delta_ns: int = 5_000, clock: Clock = now_ns) -> None:
        self.delta_ns = delta_ns
        self._team = team
        self._clock = clock
        self._last = 0

    def __call__(self) -> int:
        team, clock = self._team, self._clock
        words, slot = team._words, team._deadline
        team.barrier()
        if team.rank == 0:
            deadline = clock() + self.delta_ns
            words[slot] = deadline
        else:
            spins = 0
            while (deadline := words[slot]) == self._last:
                spins += 1
                if spins % 4096 == 0:
                    team.raise_if_failed()
        self._last = deadline
        if clock() > deadline:
            return 1
        while clock() < deadline:
            pass
        return 0


class BarrierGate:
    """All ranks meet at a spin barrier; nobody is late."""

    def __init__(self, team: Team) -> None:
        self._barrier = team.barrier

    def __call__(self) -> int:
        self._barrier()
        return 0


class OpenGate:
    """No synchronisation: iterations follow each other at once, as in the loops of other tools."""

    def __call__(self) -> int:
        return 0


def make_gate(sync: str, team: Team) -> Gate:
    """The gate for a name of SYNCS."""
    if sync == "window":
        return WindowGate(team)
    return BarrierGate(team) if sync == "barrier" else OpenGate()
