"""How an iteration starts: in a common time window, at a spin barrier, or not at all.

A gate is called right before every timed call and gives 1 if this rank was late for its window, else 0.
"""

from __future__ import annotations

from collections.abc import Callable

from commbench.errors import BackendUnavailable
from commbench.measure.clock import Clock, now_ns
from commbench.measure.team import PageTeam, Team
from commbench.measure.team_hosts import HostsTeam
from commbench.native import load, why_unavailable

TIMEOUT_S = 60.0  # for a peer to come to the native gate
_HAND_OVERS = 30  # that are timed to know how far ahead a window across hosts must lie
Gate = Callable[[], int]
SYNCS = ("window", "barrier", "none")


class WindowGate:
    """Round-Time (Hunold & Carpen-Amarie): all ranks meet, rank 0 publishes now + δ, all spin to that moment.

    A rank that reads the deadline when it is already past is late, and that iteration invalid. ``delta_ns`` may be
    changed between blocks, on rank 0.
    """

    def __init__(self, team: PageTeam, delta_ns: int = 5_000, clock: Clock = now_ns) -> None:
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


class HostsWindowGate(WindowGate):
    """The same for ranks of several hosts: all meet, rank 0 publishes a moment of its clock, each waits for it on its
    own. The window lies ahead by what handing over a number takes (measured when the gate is made: the slowest
    rank's p90 of some), and ``delta_ns``. Made by all ranks together."""

    def __init__(self, team: HostsTeam, delta_ns: int = 5_000, clock: Clock = now_ns) -> None:
        self.delta_ns = delta_ns
        self._hosts, self._clock = team, clock
        times = []
        for _ in range(_HAND_OVERS):
            team.barrier()
            start = clock()
            team.from_first(0)
            times.append(clock() - start)
        times.sort()
        self._ahead_ns = 2 * int(team.gather_numbers(float(times[int(0.9 * _HAND_OVERS)])).max())

    def __call__(self) -> int:
        team, clock = self._hosts, self._clock
        team.barrier()
        (moment,) = team.from_first(clock() + self._ahead_ns + self.delta_ns)
        deadline = team.from_first_clock(moment)
        if clock() > deadline:
            return 1
        while clock() < deadline:
            pass
        return 0


class NativeGate:
    """The same start in compiled code: less skew, and a window that can be closer. delta_ns 0 is a barrier only.

    Raises BackendUnavailable where the native module is missing.
    """

    def __init__(self, team: PageTeam, delta_ns: int, timeout_s: float = TIMEOUT_S) -> None:
        module = load()
        needed, room = module.gate_bytes(team.size), team.gate_bytes
        if needed > room:
            raise BackendUnavailable("the native start gate", f"it needs {needed} bytes, the team's page has {room}")
        self.delta_ns = delta_ns
        self.native = module.StartGate(team.gate_address(), team.size, team.rank, team.oversubscribed, timeout_s)
        self._enter = self.native.enter

    def __call__(self) -> int:
        return self._enter(self.delta_ns)  # type: ignore[no-any-return]


class DelayedGate:
    """Another gate, and then a wait: this rank enters every call late by ``delay_s``, as a straggler would.

    For seeing what skew does to a number (the flags -z and -a of rccl-tests). Python only: it wraps any gate.
    """

    def __init__(self, gate: Gate, delay_s: float) -> None:
        self._gate = gate
        self._delay_ns = round(delay_s * 1e9)

    def __call__(self) -> int:
        late = self._gate()
        end = now_ns() + self._delay_ns
        while now_ns() < end:
            pass
        return late


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


def make_gate(sync: str, team: Team, timeout_s: float = TIMEOUT_S) -> Gate:
    """The gate for a name of SYNCS: on one host native where the module is there, in Python otherwise. Collective.

    timeout_s: how long the native gate waits for a peer.
    """
    if sync == "none":
        return OpenGate()
    if isinstance(team, PageTeam):
        if not why_unavailable():
            return NativeGate(team, 5_000 if sync == "window" else 0, timeout_s)
        return WindowGate(team) if sync == "window" else BarrierGate(team)
    if sync == "window" and isinstance(team, HostsTeam):
        return HostsWindowGate(team)
    return BarrierGate(team)
