"""What disturbed a block of iterations: cheap snapshots before and after, their difference, and a marking rule.

Read from Linux's own counters: CPU steal, involuntary context switches, time spent runnable but waiting
for a CPU, pressure stalls (PSI), throttling by a CPU quota, and CPU frequency. What a machine does not offer
is None and marks nothing. A point measured in noise is kept and marked; nothing is dropped because of it.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from commbench.measure import gpu_noise
from commbench.measure.gpu_noise import GpuState, ReadGpu

# The marking rule. Beyond these a number says something about the moment, not about the library:
# The p99 is reported, so a disturbance of 1 % of the time or of the iterations already shows in it.
STEAL_SHARE = 0.01
RUN_DELAY_SHARE = 0.01
THROTTLED_SHARE = 0.01
SWITCHES_PER_ITERATION = 0.01
# Memory reclaim and swapping stop tasks for milliseconds; on a quiet machine this counter stands still.
PSI_MEMORY_SHARE = 0.01
# Tasks of the system wait for each other for moments on a quiet machine too.
PSI_CPU_SHARE = 0.10
# Work of others takes caches and memory bandwidth besides the time; and latency follows the clock. 5 % of a latency is
# the largest uncertainty that the timer may have, so these get no more.
OTHER_CPU_SHARE = 0.05
FREQUENCY_CHANGE = 0.05
# A rank's other threads (progress threads of a library) count as at work from this share of the time.
HELPER_CPU_SHARE = 0.01

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters at one moment, in seconds since boot or process start unless said otherwise. None: not offered here.

    place: the host and the CPUs that this process may use (``cpus`` of them).
    process_cpu_s, thread_cpu_s: CPU time of all threads of this process, and of the calling one.
    steal_s, busy_s: sums over those CPUs.
    involuntary_switches: of all threads of the process.
    run_delay_s: time that the thread which made the meter was runnable but had no CPU.
    psi_*_s: time in which some task of the machine (of the container, where it counts its own) waited for the resource.
    throttled_s: time that the CPU quota of the control group stopped it.
    frequency_hz: of the CPU that the thread last ran on.
    """

    time_s: float
    cpus: int
    place: str = ""
    process_cpu_s: float = 0.0
    thread_cpu_s: float = 0.0
    steal_s: float | None = None
    busy_s: float | None = None
    involuntary_switches: int | None = None
    run_delay_s: float | None = None
    psi_cpu_s: float | None = None
    psi_memory_s: float | None = None
    psi_io_s: float | None = None
    throttled_s: float | None = None
    frequency_hz: float | None = None
    gpu: GpuState | None = None


@dataclass(frozen=True, slots=True)
class Noise:
    """The difference of two snapshots of one rank.

    Shares are of the wall time between them; steal_share of its product with the number of CPUs.
    """

    duration_s: float
    cpus: int
    place: str = ""
    own_cpu_s: float = 0.0  # of all threads of the rank
    helper_cpu_share: float = 0.0  # of its threads but the measuring one
    busy_s: float | None = None  # of the CPUs, with whatever
    steal_s: float | None = None
    steal_share: float | None = None
    involuntary_switches: int | None = None
    run_delay_share: float | None = None
    psi_cpu_share: float | None = None
    psi_memory_share: float | None = None
    psi_io_share: float | None = None
    throttled_share: float | None = None
    frequency_change: float | None = None  # (after - before) / before
    sm_clock_change: float | None = None  # the same of the rank's GPU
    gpu_throttle: int | None = None  # bits of gpu_noise.REASONS that held before or after


class NoiseMeter:
    """Takes snapshots. Opens its files once, so that a snapshot costs some ten microseconds.

    Make it in the thread that measures, after affinity is set, and close it (or use it as a context manager).
    ``proc``, ``sys`` and ``clock`` (seconds) exist for tests. A file that cannot be opened leaves its counter None.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        clock: Callable[[], float] = time.monotonic,
        cpus: frozenset[int] | None = None,
        gpu: ReadGpu | None = None,
    ) -> None:
        self._gpu = gpu
        if cpus is None:
            affinity = getattr(os, "sched_getaffinity", None)
            cpus = frozenset(affinity(0)) if affinity else frozenset(range(os.cpu_count() or 1))
        self._cpus = cpus
        self._place = f"{os.uname().nodename}:{','.join(map(str, sorted(cpus)))}"
        self._clock = clock
        self._sys = sys
        self._fds: list[int] = []
        self._frequency_fds: dict[int, int | None] = {}
        self._stat = self._open(proc / "stat")
        self._schedstat = self._open(proc / "thread-self" / "schedstat")
        self._thread_stat = self._open(proc / "thread-self" / "stat")
        self._pressure = {name: self._open_pressure(proc, sys, name) for name in ("cpu", "memory", "io")}
        # Version 2 of control groups counts microseconds, version 1 nanoseconds.
        self._throttled = self._open(sys / "fs/cgroup/cpu.stat")
        self._throttled_key, self._throttled_unit = b"throttled_usec ", 1e-6
        if self._throttled is None:
            self._throttled = self._open(sys / "fs/cgroup/cpu/cpu.stat")
            self._throttled_key, self._throttled_unit = b"throttled_time ", 1e-9

    def __enter__(self) -> NoiseMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
        # A later snapshot must not read a number that by then is another file.
        self._stat = self._schedstat = self._thread_stat = self._throttled = None
        self._pressure = dict.fromkeys(self._pressure)
        self._frequency_fds = {}

    def snapshot(self) -> Snapshot:
        busy_s, steal_s = self._read_stat()
        return Snapshot(
            time_s=self._clock(),
            cpus=len(self._cpus),
            place=self._place,
            process_cpu_s=time.process_time(),
            thread_cpu_s=time.thread_time(),
            steal_s=steal_s,
            busy_s=busy_s,
            involuntary_switches=resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
            run_delay_s=self._read_run_delay(),
            psi_cpu_s=self._read_pressure("cpu"),
            psi_memory_s=self._read_pressure("memory"),
            psi_io_s=self._read_pressure("io"),
            throttled_s=self._read_throttled(),
            frequency_hz=self._read_frequency(),
            gpu=None if self._gpu is None else self._gpu(),
        )

    def _open(self, path: Path) -> int | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        self._fds.append(fd)
        return fd

    def _open_pressure(self, proc: Path, sys: Path, name: str) -> int | None:
        """The container's own pressure where the kernel offers it, else the machine's."""
        own = self._open(sys / "fs" / "cgroup" / f"{name}.pressure")
        return own if own is not None else self._open(proc / "pressure" / name)

    def _read_stat(self) -> tuple[float | None, float | None]:
        """Busy and stolen seconds of this process's CPUs."""
        busy, steal, seen = 0, 0, False
        for line in (_read(self._stat, 1 << 20) or b"").split(b"\n"):
            if not line.startswith(b"cpu"):
                break  # the CPUs come first
            words = line.split()
            if words[0][3:].isdigit() and int(words[0][3:]) in self._cpus and len(words) > 8:
                user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, words[1:9])
                busy += user + nice + system + irq + softirq
                steal += stolen
                seen = True
        return (busy * _TICK_S, steal * _TICK_S) if seen else (None, None)

    def _read_run_delay(self) -> float | None:
        text = _read(self._schedstat)
        return int(text.split()[1]) * 1e-9 if text else None

    def _read_pressure(self, name: str) -> float | None:
        text = _read(self._pressure[name])
        if not text:
            return None
        return int(text.split(b"\n", 1)[0].rpartition(b"total=")[2]) * 1e-6  # "some avg10=… total=MICROSECONDS"

    def _read_throttled(self) -> float | None:
        for line in (_read(self._throttled) or b"").split(b"\n"):
            if line.startswith(self._throttled_key):
                return int(line.split()[1]) * self._throttled_unit
        return None

    def _read_frequency(self) -> float | None:
        text = _read(self._thread_stat)
        if not text:
            return None
        cpu = int(text.rpartition(b")")[2].split()[36])  # field 39: the CPU last run on
        if cpu not in self._frequency_fds:
            self._frequency_fds[cpu] = self._open(self._sys / f"devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq")
        text = _read(self._frequency_fds[cpu])
        return float(text) * 1e3 if text else None  # the file is in kHz


def _read(fd: int | None, size: int = 4096) -> bytes | None:
    """The file from its start, or None if it is not there or cannot be read (PSI that is switched off)."""
    if fd is None:
        return None
    try:
        return os.pread(fd, size, 0)
    except OSError:
        return None


def between(before: Snapshot, after: Snapshot) -> Noise:
    """What happened from one snapshot of a meter to a later one.

    Raises ValueError if ``after`` is not later.
    """
    duration = after.time_s - before.time_s
    if duration <= 0:
        raise ValueError(f"the second snapshot is {-duration:.9f} s before the first")

    def grown(name: str) -> float | None:
        first, last = getattr(before, name), getattr(after, name)
        # Steal can step back by a tick when a virtual machine migrates; that is no negative steal.
        return None if first is None or last is None else max(0.0, last - first)

    def share(name: str, of_s: float = duration) -> float | None:
        growth = grown(name)
        return None if growth is None else growth / of_s

    switches = grown("involuntary_switches")
    change = None
    if before.frequency_hz and after.frequency_hz:
        change = (after.frequency_hz - before.frequency_hz) / before.frequency_hz
    sm_change = throttle = None
    if before.gpu and after.gpu:
        throttle = before.gpu.throttle | after.gpu.throttle
        # a GPU that was idle had its clock down; that it went up is no disturbance
        if before.gpu.sm_clock_hz and not (before.gpu.throttle | after.gpu.throttle) & gpu_noise.IDLE:
            sm_change = after.gpu.sm_clock_hz / before.gpu.sm_clock_hz - 1
    own = after.process_cpu_s - before.process_cpu_s
    return Noise(
        duration_s=duration,
        cpus=before.cpus,
        place=before.place,
        own_cpu_s=own,
        helper_cpu_share=max(0.0, own - (after.thread_cpu_s - before.thread_cpu_s)) / duration,
        busy_s=grown("busy_s"),
        steal_s=grown("steal_s"),
        steal_share=share("steal_s", duration * before.cpus),
        involuntary_switches=None if switches is None else int(switches),
        run_delay_share=share("run_delay_s"),
        psi_cpu_share=share("psi_cpu_s"),
        psi_memory_share=share("psi_memory_s"),
        psi_io_share=share("psi_io_s"),
        throttled_share=share("throttled_s"),
        frequency_change=change,
        sm_clock_change=sm_change,
        gpu_throttle=throttle,
    )


def other_cpu_share(by_rank: Sequence[Noise]) -> float | None:
    """The share of the ranks' CPUs that went to other processes: (busy - the ranks' own) / (time × CPUs).

    CPUs that several ranks share count once; sets that overlap only in part count twice, so that the share is then too
    high. None where the machine does not say. The kernel samples busy time at its tick: see ``_other_threshold``.
    """
    busy: dict[str, float] = {}
    capacity: dict[str, float] = {}
    for noise in by_rank:
        if noise.busy_s is None:
            return None
        busy[noise.place] = max(busy.get(noise.place, 0.0), noise.busy_s)
        capacity[noise.place] = max(capacity.get(noise.place, 0.0), noise.duration_s * noise.cpus)
    if not capacity:
        return None
    return max(0.0, sum(busy.values()) - sum(n.own_cpu_s for n in by_rank)) / sum(capacity.values())


def crowded(by_rank: Sequence[Noise]) -> bool:
    """Whether the ranks push each other off their CPUs by design.

    So it is when the ranks with their working helper threads (counted as one each) outnumber the CPUs they share.
    """
    threads: dict[str, int] = {}
    cpus: dict[str, int] = {}
    for noise in by_rank:
        threads[noise.place] = threads.get(noise.place, 0) + (2 if noise.helper_cpu_share > HELPER_CPU_SHARE else 1)
        cpus[noise.place] = noise.cpus
    return any(threads[place] > cpus[place] for place in threads)


def marks(by_rank: Sequence[Noise], iterations: int) -> list[str]:
    """Why this block counts as measured in noise, in words; empty if it does not.

    by_rank: the noise of every rank in the block. iterations: collective calls of one rank in it. One disturbed rank
    slows a collective, so the worst rank is judged. Where the ranks are crowded by design, context switches, waiting
    and CPU pressure come from themselves and are not judged; the work of other processes is, there too.
    Raises ValueError if ``by_rank`` is empty.
    """
    found = []

    def judge(name: str, threshold: float, text: str) -> None:
        value = _worst(by_rank, name)
        if value is not None and abs(value) > threshold:
            found.append(text.format(value))

    # Steal is counted in ticks: a single one may have gathered before the block.
    if (_worst(by_rank, "steal_s") or 0) >= 2 * _TICK_S:
        judge("steal_share", STEAL_SHARE, "the hypervisor took {:.1%} of the CPU time (steal)")
    judge("throttled_share", THROTTLED_SHARE, "a CPU quota stopped the ranks for {:.1%} of the time")
    judge("psi_memory_share", PSI_MEMORY_SHARE, "tasks waited for memory for {:.1%} of the time (PSI)")
    judge("frequency_change", FREQUENCY_CHANGE, "the CPU frequency changed by {:+.1%}")
    judge("sm_clock_change", FREQUENCY_CHANGE, "a GPU's SM clock changed by {:+.1%}")
    held_down = gpu_noise.reasons_of(_throttle(by_rank))
    if held_down:
        found.append(f"a GPU's clock was held down: {', '.join(held_down)}")
    other = other_cpu_share(by_rank)
    if other is not None and other > _other_threshold(by_rank):
        found.append(f"other processes used {other:.1%} of the CPU time")
    if not crowded(by_rank):
        switches = "{:.0f} involuntary context switches in " + f"{iterations} iterations"
        judge("involuntary_switches", SWITCHES_PER_ITERATION * iterations, switches)
        judge("run_delay_share", RUN_DELAY_SHARE, "a rank waited for a CPU for {:.1%} of the time")
        judge("psi_cpu_share", PSI_CPU_SHARE, "tasks waited for a CPU for {:.1%} of the time (PSI)")
    return found


def record(by_rank: Sequence[Noise], iterations: int) -> dict[str, Any]:
    """The ``noise`` column of a point, to be written as JSON.

    It holds the worst of each counter over the ranks, other_cpu_share, crowded and ``marks``. A counter that
    this machine does not offer is left out. Raises ValueError if ``by_rank`` is empty.
    """
    names = [f.name for f in fields(Noise) if f.name not in ("place", "cpus", "busy_s", "own_cpu_s", "gpu_throttle")]
    values: dict[str, Any] = {name: _worst(by_rank, name) for name in names}
    values["other_cpu_share"] = other_cpu_share(by_rank)
    if any(n.gpu_throttle is not None for n in by_rank):
        values["gpu_throttle"] = gpu_noise.reasons_of(_throttle(by_rank))
    kept = {n: round(v, 6) if isinstance(v, float) else v for n, v in values.items() if v is not None}
    return kept | {"crowded": crowded(by_rank), "marks": marks(by_rank, iterations)}


def _throttle(noises: Sequence[Noise]) -> int:
    """All reasons that held anywhere."""
    return reduce(or_, (n.gpu_throttle or 0 for n in noises), 0)


def _worst(by_rank: Sequence[Noise], name: str) -> float | None:
    if not by_rank:
        raise ValueError("no noise was given; pass every rank's")
    known = [value for value in (getattr(noise, name) for noise in by_rank) if value is not None]
    return max(known, key=abs) if known else None


def _other_threshold(by_rank: Sequence[Noise]) -> float:
    """OTHER_CPU_SHARE plus three standard errors of a share sampled at N ticks, at most 3 × 0.5 / √N."""
    ticks = sum({n.place: n.duration_s * n.cpus for n in by_rank}.values()) / _TICK_S
    return OTHER_CPU_SHARE + 1.5 / math.sqrt(max(ticks, 1.0))


def combine(blocks: Sequence[Noise]) -> Noise:
    """One rank's noise over several blocks: sums of times and counts, shares weighted by time, the largest change.

    A counter that any block lacks is None. Raises ValueError if ``blocks`` is empty.
    """
    if not blocks:
        raise ValueError("no noise was given; pass at least one block's")
    if len(blocks) == 1:
        return blocks[0]
    duration = sum(b.duration_s for b in blocks)

    def added(name: str) -> Any:
        values = [getattr(b, name) for b in blocks]
        return None if None in values else sum(values)

    def weighted(name: str) -> Any:
        values = [getattr(b, name) for b in blocks]
        if None in values:
            return None
        if not duration:
            return max(values)
        return sum(v * b.duration_s for v, b in zip(values, blocks, strict=True)) / duration

    def largest(name: str) -> float | None:
        changes = [getattr(b, name) for b in blocks]
        return None if None in changes else max(changes, key=abs)

    shares = [f.name for f in fields(Noise) if f.name.endswith("_share")]
    return Noise(
        duration_s=duration,
        cpus=blocks[0].cpus,
        place=blocks[0].place,
        own_cpu_s=added("own_cpu_s"),
        busy_s=added("busy_s"),
        steal_s=added("steal_s"),
        involuntary_switches=added("involuntary_switches"),
        frequency_change=largest("frequency_change"),
        sm_clock_change=largest("sm_clock_change"),
        gpu_throttle=None if all(b.gpu_throttle is None for b in blocks) else _throttle(blocks),
        **{name: weighted(name) for name in shares},
    )


def to_dict(noise: Noise) -> dict[str, Any]:
    """Plain data, for handing a rank's noise to another."""
    return asdict(noise)


def from_dict(values: dict[str, Any]) -> Noise:
    """The reverse of ``to_dict``."""
    return Noise(**values)
