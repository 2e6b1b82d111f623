"""How the ranks of several hosts meet: over a process group of their own, with times put on rank 0's clock.

Everything goes through a few operations of a ``Wire``. What ranks hand over starts with one maximum over all ranks of
a few words, in which any rank can say that it failed: so all of them learn of it at one point, without a shared page.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from commbench.errors import PeerLost
from commbench.measure.clock import Clock, now_ns
from commbench.measure.offset import (
    FEWEST_WINDOWS,
    ROUNDS,
    ClockError,
    Correction,
    Exchanges,
    Link,
    OffsetLine,
    ProcessGroupLink,
    answer,
    correction,
    ping_pong,
)
from commbench.measure.settings import CAPACITY
from commbench.measure.team import TEXT_BYTES, Objects, PageTeam, PointFailed, Team, checked_text
from commbench.units import format_time

HEADER = 16  # words of a meeting: who failed, and what is handed over
NOTHING = np.iinfo(np.int64).min  # below every value that is handed over
BYTES_PER_SAMPLE = 17  # two times and a flag
BLOCK_BYTES = 64 << 20  # of all ranks' samples that rank 0 holds at once
FEWEST_PER_BLOCK = 1024  # iterations that a block must be able to hold
REFRESH_ROUNDS = 30  # exchanges of a window that renews a clock's offset
REFRESH_S = 0.25  # an offset older than this is renewed …
REFRESH_SHARE = 20  # … unless renewing all of them takes more than one part in so many of the time
MOST_WINDOWS = 64  # that a line is laid through: a clock's rate changes over minutes
_FIRST_SPACING_S = 0.02  # between the windows at a launch's start
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Wire(Protocol):
    """What a team across hosts needs of its process group. Collective, except ``link``. Each raises PeerLost when a
    rank is gone or does not come in time (where a time is given; else the group's own)."""

    def all_max(self, words: NDArray[np.int64], timeout_s: float | None = None) -> NDArray[np.int64]:
        """Element by element, the largest over ranks; on every rank."""
        ...

    def gather(self, row: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """(ranks, bytes) on rank 0, None elsewhere. All pass as many bytes."""
        ...

    def all_gather(self, row: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(ranks, bytes) on every rank. All pass as many bytes."""
        ...

    def broadcast(self, data: NDArray[np.uint8], source: int) -> NDArray[np.uint8]:
        """The source's bytes, on every rank. All pass as many bytes."""
        ...

    def link(self, peer: int) -> Link:
        """To one other rank, which makes one to this."""
        ...


class TorchWire:
    """A wire over a torch process group on CPU tensors (gloo) that nobody else uses."""

    def __init__(self, group: Any) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._group = torch, dist, group
        self._size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def _wait(self, work: Any, timeout_s: float | None) -> None:
        try:
            work.wait() if timeout_s is None else work.wait(datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            said = str(error).strip().splitlines()[0]
            raise PeerLost(f"the ranks of the other hosts did not come or are gone: {said}") from error

    def all_max(self, words: NDArray[np.int64], timeout_s: float | None = None) -> NDArray[np.int64]:
        tensor = self._torch.from_numpy(words.copy())
        work = self._dist.all_reduce(tensor, op=self._dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._wait(work, timeout_s)
        found: NDArray[np.int64] = tensor.numpy()
        return found

    def gather(self, row: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        tensor = self._torch.from_numpy(row)
        whole = np.empty((self._size, len(row)), dtype=np.uint8) if self._rank == 0 else None
        rows = list(self._torch.from_numpy(whole).unbind(0)) if whole is not None else None
        first = self._dist.get_global_rank(self._group, 0)
        self._wait(self._dist.gather(tensor, rows, dst=first, group=self._group, async_op=True), None)
        return whole

    def all_gather(self, row: NDArray[np.uint8]) -> NDArray[np.uint8]:
        whole = np.empty((self._size, len(row)), dtype=np.uint8)
        rows = list(self._torch.from_numpy(whole).unbind(0))
        tensor = self._torch.from_numpy(row)
        self._wait(self._dist.all_gather(rows, tensor, group=self._group, async_op=True), None)
        return whole

    def broadcast(self, data: NDArray[np.uint8], source: int) -> NDArray[np.uint8]:
        tensor = self._torch.from_numpy(data.copy())
        source = self._dist.get_global_rank(self._group, source)
        self._wait(self._dist.broadcast(tensor, src=source, group=self._group, async_op=True), None)
        found: NDArray[np.uint8] = tensor.numpy()
        return found

    def link(self, peer: int) -> Link:
        return ProcessGroupLink(self._group, self._dist.get_global_rank(self._group, peer))


def _words(c: Correction) -> list[int]:
    """A correction as five words, for the wire."""
    floats = np.array([c.slope, c.error_s, c.slope_error]).view(np.int64)
    return [c.at_ns, c.offset_ns, *floats.tolist()]


def _correction(words: NDArray[np.int64]) -> Correction:
    slope, error_s, slope_error = words[2:].view(np.float64).tolist()
    return Correction(int(words[0]), int(words[1]), slope, error_s, slope_error)


def clock_of_this_process() -> str:
    """What two processes that read one clock have in common: the running kernel and its time namespace."""
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = os.uname().nodename
    try:
        space = str(Path("/proc/self/ns/time").readlink())
    except OSError:  # a kernel without time namespaces has one clock
        space = ""
    return f"{boot} {space}"


def machine_of_this_process() -> str:
    """What processes that share cores have in common: the running kernel (containers of one machine share it)."""
    return clock_of_this_process().partition(" ")[0]


@dataclass(frozen=True, slots=True)
class AcrossClocks:
    """What a team across hosts knows of its clocks: how each differs from rank 0's, and how well that is known.

    clocks: each rank's clock by number; leaders: the rank that each clock is compared by. lines: through the windows of
    the launch so far (None while there are too few); rank 0 alone has them. moved: the clocks that jumped or went back.
    """

    clocks: tuple[int, ...]
    leaders: tuple[int, ...]
    hosts: tuple[str, ...]
    corrections: tuple[Correction, ...]
    lines: tuple[OffsetLine | None, ...]
    moved: tuple[int, ...]
    largest_s: float

    @property
    def ok(self) -> bool:
        return not self.moved

    def verdict(self) -> str:
        if self.moved:
            who = ", ".join(f"rank {self.leaders[c]} on {self.hosts[self.leaders[c]]}" for c in self.moved)
            return (
                f"the clock of {who} jumped against rank 0's, or rank 0's did: times of different hosts cannot be "
                "subtracted"
            )
        if len(self.leaders) == 1:
            return f"{len(self.clocks)} ranks read one clock"
        return (
            f"the ranks read {len(self.leaders)} clocks, which were compared over the network and are known to "
            f"{format_time(self.largest_s)}"
        )

    def to_dict(self) -> dict[str, Any]:
        found = []
        for clock, (leader, c, line) in enumerate(zip(self.leaders, self.corrections, self.lines, strict=True)):
            found.append(
                {
                    "rank": leader,
                    "host": self.hosts[leader],
                    "ranks": [rank for rank, of in enumerate(self.clocks) if of == clock],
                    **asdict(c),
                    "line": None if line is None else line.to_dict(),
                }
            )
        return {"ok": self.ok, "largest_s": self.largest_s, "verdict": self.verdict(), "across_hosts": found}


class HostsTeam(Team):
    """The ranks of one launch on several hosts.

    hosts: each rank's host by name; clocks: what ``clock_of_this_process`` says on each rank. capacity is such that
    rank 0 never holds more than about BLOCK_BYTES of samples, however many ranks there are. ``clock`` is for tests.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        wire: Wire,
        hosts: Sequence[str],
        clocks: Sequence[str],
        oversubscribed: bool,
        clock: Clock = now_ns,
    ) -> None:
        capacity = min(CAPACITY, max(FEWEST_PER_BLOCK, BLOCK_BYTES // (BYTES_PER_SAMPLE * size)))
        super().__init__(rank, size, oversubscribed, capacity)
        self.hosts = tuple(hosts)
        self._wire = wire
        self._clock = clock
        self._failed = 0  # this rank + 1, from ``fail`` until the others know
        self._message = ""
        names = list(dict.fromkeys(clocks))
        self._clocks = [names.index(name) for name in clocks]  # rank → its clock's number; rank 0's is 0
        self._leaders = [self._clocks.index(c) for c in range(len(names))]  # clock → first rank that reads it
        self._corrections = [Correction() for _ in names]
        self._windows: list[list[Exchanges]] = [[] for _ in names]  # of rank 0
        self._lines: list[OffsetLine | None] = [None for _ in names]
        self._back = False  # rank 0's clock went back while it was compared
        self._refreshed_s = self._cost_s = 0.0
        for index in range(FEWEST_WINDOWS):
            if index and len(names) > 1:
                time.sleep(_FIRST_SPACING_S)
            self._refresh(ROUNDS // FEWEST_WINDOWS)

    @classmethod
    def form(cls, rank: int, size: int, objects: Objects, process_group: Any, oversubscribed: bool) -> HostsTeam:
        """Collective. process_group: a gloo group of all ranks, in rank order, that nobody else uses."""
        facts = objects.all_gather((os.uname().nodename, clock_of_this_process()))
        hosts, clocks = [str(f[0]) for f in facts], [str(f[1]) for f in facts]
        return cls(rank, size, TorchWire(process_group), hosts, clocks, oversubscribed)

    # ---- meeting ----------------------------------------------------------------------------------------

    def _meet(self, values: Sequence[int] = (), timeout_s: float | None = None) -> list[int]:
        """One maximum over all ranks: of ``values`` (at most HEADER − 1), after who failed. Raises PointFailed."""
        words = np.full(HEADER, NOTHING, dtype=np.int64)
        words[0] = self._failed
        words[1 : 1 + len(values)] = values
        found = self._wire.all_max(words, timeout_s)
        if found[0]:
            who = int(found[0]) - 1
            self._failed = 0
            text = np.zeros(TEXT_BYTES, dtype=np.uint8)
            if who == self.rank:
                data = self._message.encode(errors="replace")[: TEXT_BYTES - 1]
                text[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            said = self._wire.broadcast(text, who).tobytes().partition(b"\0")[0].decode(errors="replace")
            raise PointFailed(f"rank {who}: {said}")
        return [int(v) for v in found[1 : 1 + len(values)]]

    def barrier(self, timeout_s: float = 300.0) -> None:
        self._meet(timeout_s=timeout_s)

    def fail(self, message: str) -> None:
        """As of every team; the others hear of it the next time that they meet."""
        self._failed, self._message = self.rank + 1, message

    def raise_if_failed(self) -> None:
        if self._failed:
            raise PointFailed(f"rank {self.rank}: {self._message}")

    def recover(self, timeout_s: float) -> None:
        """As of every team. A failed rank first meets the others wherever they are, and so tells them."""
        if self._failed:
            with contextlib.suppress(PointFailed):  # its own, or of a rank that failed at the same time
                self._meet(timeout_s=timeout_s)
        self._meet(timeout_s=timeout_s)

    # ---- handing over -----------------------------------------------------------------------------------

    def from_first(self, *values: int) -> tuple[int, ...]:
        found: list[int] = []
        for start in range(0, max(1, len(values)), HEADER - 1):
            some = values[start : start + HEADER - 1]
            found += self._meet(some if self.rank == 0 else [NOTHING] * len(some))
        return tuple(found)

    def share(
        self, starts: NDArray[np.int64], ends: NDArray[np.int64], late: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """As of every team: other ranks than 0 see their own row only. The offsets of clocks are renewed when due."""
        n = len(starts)
        (due,) = self.from_first(int(self._refresh_is_due()))
        if due:
            self._refresh(REFRESH_ROUNDS)
        to_first = self._corrections[self._clocks[self.rank]].to_local
        row = np.zeros(-(-BYTES_PER_SAMPLE * n // 8) * 8, dtype=np.uint8)
        row[: 8 * n].view(np.int64)[:] = to_first(starts)
        row[8 * n : 16 * n].view(np.int64)[:] = to_first(ends)
        row[16 * n : 17 * n] = late
        whole = self._wire.gather(row)
        if whole is None:
            whole = row[None]
        return whole[:, : 8 * n].view(np.int64), whole[:, 8 * n : 16 * n].view(np.int64), whole[:, 16 * n : 17 * n]

    def gather_texts(self, text: str) -> list[str]:
        data = checked_text(text)
        (longest,) = self._meet([len(data)])
        row = np.zeros(longest + 1, dtype=np.uint8)
        row[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return [r.tobytes().partition(b"\0")[0].decode() for r in self._wire.all_gather(row)]

    def gather_numbers(self, *values: float) -> NDArray[np.float64]:
        self._meet()
        row = np.array(values, dtype=np.float64).view(np.uint8)
        return self._wire.all_gather(row).view(np.float64)

    def close(self) -> None:
        """Nothing to do: the process group goes with torch's own."""

    # ---- clocks -----------------------------------------------------------------------------------------

    def _refresh_is_due(self) -> bool:
        age = time.monotonic() - self._refreshed_s
        return len(self._leaders) > 1 and age > max(REFRESH_S, REFRESH_SHARE * self._cost_s)

    def _refresh(self, rounds: int) -> None:
        """Compare the clock of every host with rank 0's once more. Collective."""
        started = time.monotonic()
        for number, leader in enumerate(self._leaders):
            if number and self.rank == 0:
                try:
                    self._windows[number].append(ping_pong(self._wire.link(leader), rounds, self._clock))
                except ClockError:  # rank 0's went back: none of the earlier windows fits any more
                    self._back = True
                    self._windows[number].clear()
                if len(self._windows[number]) > MOST_WINDOWS:
                    del self._windows[number][0]
                if self._windows[number]:
                    self._corrections[number], self._lines[number] = correction(self._windows[number])
            elif number and self.rank == leader:
                answer(self._wire.link(0), rounds, self._clock)
        table = np.array([_words(c) for c in self._corrections], dtype=np.int64)
        told = self._wire.broadcast(table.reshape(-1).view(np.uint8), 0).view(np.int64).reshape(-1, 5)
        self._corrections = [_correction(row) for row in told]
        self._refreshed_s = time.monotonic()
        self._cost_s = self._refreshed_s - started

    def from_first_clock(self, reading_ns: int) -> int:
        """What this rank's clock shows when rank 0's shows ``reading_ns``."""
        return self._corrections[self._clocks[self.rank]].to_remote(reading_ns)

    @property
    def clock_error_s(self) -> float:
        """On rank 0, of the clock that is known worst; on other ranks, of their own clock."""
        now = self._clock()
        if self.rank:
            c = self._corrections[self._clocks[self.rank]]
            return c.error_at(now - c.offset_ns)
        return max(c.error_at(now) for c in self._corrections)

    def compare_clocks(self) -> AcrossClocks:
        moved = [n for n, line in enumerate(self._lines) if self._back or (line is not None and line.jumped)]
        error_ns, count = self.from_first(round(self.clock_error_s * 1e9), len(moved))
        moved = list(self.from_first(*(moved if self.rank == 0 else [0] * count)))
        return AcrossClocks(
            tuple(self._clocks),
            tuple(self._leaders),
            self.hosts,
            tuple(self._corrections),
            tuple(self._lines),
            tuple(moved),
            error_ns * 1e-9,
        )


def is_oversubscribed(machines: Sequence[tuple[str, Sequence[int]]]) -> bool:
    """Whether some machine has more ranks than they have cores together. machines: per rank, the machine and the
    cores that this rank may use."""
    ranks: dict[str, int] = {}
    cores: dict[str, set[int]] = {}
    for machine, own in machines:
        ranks[machine] = ranks.get(machine, 0) + 1
        cores.setdefault(machine, set()).update(own)
    return any(n > len(cores[machine]) for machine, n in ranks.items())


def form_team(rank: int, size: int, objects: Objects, *, one_host: bool, oversubscribed: bool, new_group: Any) -> Team:
    """The team of a launch. Collective. one_host: all ranks share memory, as was proven. ``new_group()`` makes a gloo
    group of all ranks for the team's own use, where it needs one."""
    if one_host:
        return PageTeam.form(rank, size, objects, oversubscribed)
    return HostsTeam.form(rank, size, objects, new_group(), oversubscribed)
