"""Watching one job from outside: when a rank is dead, when the job hangs, and how it is ended for good.

What is decided here depends on the pulses of the ranks and on a monotonic clock only, so that it is tested with neither
processes nor waiting. Time in which this process itself did not run (a suspended machine, Ctrl-Z) does not count
against the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from commbench.harness.supervision.heartbeat import BETWEEN, DONE, FINISHING, VISITING, Pulse, born
from commbench.harness.supervision.stacks import process_state
from commbench.types import Point

PATIENCE_S = 30.0  # that ranks wait for each other longer than any point may take
LEAST_POINT_S = 60.0  # of a point's limit where the user names none
COMPILING_S = 120.0  # more for a point that is captured or compiled
START_S = 300.0  # for ranks to come up: imports from a network disk and communicators of many ranks take minutes
FOREIGN_S = 1.0  # a longer gap between two looks means that this process did not run
DEAD_GRACE_S = 1.0  # for the launcher to say why a rank died
TERM_GRACE_S = 1.0  # between asking processes to end and ending them
LINGER_S = 15.0  # for the launcher to end after its last rank


@dataclass(frozen=True, slots=True)
class Limits:
    """point_s: longest time that a point may take in a launch, all its visits together; None: by its size. launch_s:
    longest time of a launch from its command to its end; None: START_S for the start, and what its points may take.
    slack_s: more of each, for a command that leaves it to another one to notice first."""

    point_s: float | None = None
    launch_s: float | None = None
    slack_s: float = 0.0

    def of_point(self, point: Point, max_time_per_point_s: float) -> float:
        """Seconds. Unless told: ten times the sampling time, and buffers handled at a twentieth of the usual speed."""
        if self.point_s is not None:
            return self.point_s + self.slack_s
        made = 0.0 if point.mode == "eager" else COMPILING_S
        handled = 60 * point.size_bytes * point.world_size / 1e9
        return LEAST_POINT_S + made + 10 * max_time_per_point_s + handled + self.slack_s

    def patience_s(self, points: Iterable[Point], max_time_per_point_s: float) -> float:
        """How long ranks wait for each other: longer than any point may take, so that the watching command, which can
        say who stopped, is the first to lose its patience."""
        longest = max((self.of_point(p, max_time_per_point_s) for p in points), default=PATIENCE_S)
        return PATIENCE_S + longest

    @property
    def start_s(self) -> float:
        return (START_S if self.launch_s is None else self.launch_s) + self.slack_s


@dataclass(frozen=True, slots=True)
class Trouble:
    """kind: ``dead`` (ranks are gone), ``hang`` (a point takes too long), ``start`` (the ranks do not come up),
    ``launch`` (the launch takes too long), ``linger`` (all ranks are gone, and the launcher is not). order: the point
    that the ranks are at, where they are at one."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    order: int | None = None


class Watchdog:
    """Looks at the pulses again and again; says when something is wrong, once."""

    def __init__(
        self,
        limits: Limits,
        ranks: int,
        points: Mapping[int, Point],
        max_time_per_point_s: float,
        already_s: float = 0.0,
    ) -> None:
        """already_s: what earlier jobs of the launch have taken of its time."""
        self._limits, self._ranks, self._points = limits, ranks, points
        self._already_s = already_s
        self._max_time_s = max_time_per_point_s
        self._last: float | None = None
        self._total = 0.0
        self._outside = 0.0  # time since the ranks came up, or since they left a point
        self._gone = self._stopped = 0.0
        self._spent: dict[int, float] = {}
        self._came_up = False

    @property
    def lasted_s(self) -> float:
        """Seconds of watching so far."""
        return self._total

    def look(
        self, pulses: Sequence[Pulse], now_s: float, state: Callable[[Pulse], str], heard: bool = False
    ) -> Trouble | None:
        """pulses: of the ranks that have joined. state: the kernel's letter for a rank's process, "" if it is gone.
        heard: rank 0 is known to measure, though perhaps on a host from which no pulse comes; then only the limit of
        the launch counts."""
        passed = 0.0 if self._last is None else min(now_s - self._last, FOREIGN_S)
        self._last = now_s
        self._total += passed
        states = {p.rank: state(p) for p in pulses}
        gone = [p for p in pulses if not states[p.rank]]
        lost = [p.rank for p in gone if p.stage != DONE]
        first = pulses[0] if pulses else None
        order = first.order if first is not None and first.stage == VISITING else None
        if lost:
            names = ", ".join(str(rank) for rank in lost)
            text = f"ranks {names} are gone" if len(lost) > 1 else f"rank {names} is gone"
            return Trouble("dead", text, tuple(lost), order)
        self._gone = self._gone + passed if pulses and len(gone) == len(pulses) else 0.0
        if self._gone > LINGER_S:
            return Trouble("linger", f"its ranks are done, but the launcher did not end within {LINGER_S:.0f} s")
        lasted_s = self._already_s + self._total - self._limits.slack_s
        if self._limits.launch_s is not None and lasted_s > self._limits.launch_s and not gone:
            measured = self._came_up or heard or self._already_s > 0
            what = "took longer than its limit of" if measured else "did not come up within"
            kind = "launch" if measured else "start"
            return Trouble(kind, f"the launch {what} {self._limits.launch_s:g} s", (), order)
        if heard and not pulses:
            return None
        self._came_up = self._came_up or any(p.stage in (VISITING, BETWEEN, FINISHING, DONE) for p in pulses)
        stopped = [rank for rank, letter in states.items() if letter == "T"]
        self._stopped = self._stopped + passed if stopped else 0.0
        if self._stopped > self._least_s:
            kind = "hang" if self._came_up else "start"
            return Trouble(kind, f"rank {stopped[0]} has been stopped for {self._least_s:g} s", (stopped[0],), order)
        if order is not None:
            self._outside = 0.0
            self._spent[order] = self._spent.get(order, 0.0) + passed
            limit = self._limits.of_point(self._points[order], self._max_time_s)
            if self._spent[order] > limit:
                return Trouble("hang", f"no result within {limit:g} s", (), order)
            return None
        self._outside += passed
        if not self._came_up:
            if self._outside > self._limits.start_s:
                return Trouble("start", f"the ranks did not come up within {self._limits.start_s:g} s")
            return None
        if self._outside > max(LEAST_POINT_S, self._least_s) and not gone:
            return Trouble("hang", f"the ranks did not go on to the next point within {self._outside:.0f} s")
        return None

    @property
    def _least_s(self) -> float:
        """A time in which something must have happened, whatever point it is."""
        least_s = LEAST_POINT_S if self._limits.point_s is None else self._limits.point_s
        return least_s + self._limits.slack_s


def state_of(pulse: Pulse) -> str:
    """The kernel's letter for what a rank's process does; "" when it is gone."""
    return process_state(pulse.pid, pulse.born)


# ---- ending -------------------------------------------------------------------------------------------------


def end_job(job: subprocess.Popen[bytes], pulses: Sequence[Pulse], grace_s: float = TERM_GRACE_S) -> None:
    """End a job so that no process of it is left: its launcher, its ranks by their recorded numbers (torchrun gives
    each rank a session of its own, so no group of processes holds them all), and what either has started.

    Asks first and insists after grace_s; a stopped rank is continued, so that it can end. Processes that have the
    number of one that ended are left alone.
    """
    ranks = _family([p.pid for p in pulses if process_state(p.pid, p.born)])
    others = {} if job.poll() is not None else _family([job.pid])
    others = {pid: since for pid, since in others.items() if pid not in ranks and pid != job.pid}
    if grace_s > 0:
        _signal(ranks, signal.SIGTERM)
        _signal(ranks, signal.SIGCONT)
        if job.poll() is None:
            job.terminate()
        _wait(job, ranks, grace_s)
    _signal(ranks, signal.SIGKILL)
    # without its ranks torchrun ends by itself, and tells in its log which of them failed
    _wait(job, ranks, grace_s)
    if job.poll() is None:
        job.kill()
    job.wait()
    # what a launcher keeps beside its ranks (Python's tracker of semaphores) cleans up once it is gone
    _wait(job, {**ranks, **others}, TERM_GRACE_S)
    _signal({**ranks, **others}, signal.SIGKILL)


def _wait(job: subprocess.Popen[bytes], family: Mapping[int, int], at_most_s: float) -> None:
    """Until the job and all these processes have ended."""
    deadline = time.monotonic() + at_most_s
    while (job.poll() is None or _left(family)) and time.monotonic() < deadline:
        time.sleep(0.02)


def kill_job(pid: int, pulses: Sequence[Pulse]) -> None:
    """End its processes at once and wait for none; for a signal handler. pid: the launcher's."""
    ranks = _family([p.pid for p in pulses if process_state(p.pid, p.born)])
    _signal({**ranks, pid: born(pid)}, signal.SIGKILL)


def _family(pids: Sequence[int]) -> dict[int, int]:
    """Processes and all that they have started, with their starts."""
    import psutil

    found: dict[int, int] = {}
    for pid in pids:
        try:
            members = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for member in members:
            found[member.pid] = born(member.pid)
    return found


def _left(family: Mapping[int, int]) -> dict[int, int]:
    return {pid: since for pid, since in family.items() if process_state(pid, since)}


def _signal(family: Mapping[int, int], number: int) -> None:
    for pid, since in family.items():
        if process_state(pid, since):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


# ---- memory that ran out -------------------------------------------------------------------------------------


def kills_for_memory() -> int:
    """How often the kernel has killed a process for want of memory: in this process's control group where it tells,
    else on the whole machine; 0 where neither does."""
    for path in (*_group_events(), Path("/proc/vmstat")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.strip().isdigit():
                return int(count)
    return 0


def _group_events() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = [line.rpartition(":")[2].lstrip("/") for line in lines if line.startswith("0::")]
    return [Path("/sys/fs/cgroup") / group / "memory.events" for group in groups]


# ---- being stopped -------------------------------------------------------------------------------------------


class StopAtOnce(KeyboardInterrupt):
    """The user has asked twice."""


@dataclass(slots=True)
class Stopping:
    """How often this command was asked to stop, and what ends the running job without further ado. active: whether
    being asked comes here at present."""

    count: int = 0
    active: bool = False
    at_once: list[Callable[[], None]] = field(default_factory=list)

    @property
    def hurried(self) -> bool:
        return self.count > 1

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if number == signal.SIGHUP:
            leave_terminal()
        if self.count == 1:
            raise KeyboardInterrupt
        for end in list(self.at_once):
            end()
        raise StopAtOnce


stopping = Stopping()


def leave_terminal() -> None:
    """The terminal is gone: what still would be written there goes nowhere, and fails nobody."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # ValueError: no real file, as under a test
            # a terminal that has hung up is none any more, but a device still
            if stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
                os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def interruptible() -> Iterator[Stopping]:
    """Inside, SIGINT, SIGTERM and SIGHUP (unless ignored, as under nohup) raise KeyboardInterrupt, and a second one
    ends the running job at once and raises StopAtOnce. One inside another adds nothing: the outer one counts."""
    if threading.current_thread() is not threading.main_thread() or stopping.active:
        yield stopping
        return
    stopping.count, stopping.active = 0, True
    before: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, stopping)
    try:
        yield stopping
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)
        stopping.count, stopping.active = 0, False
