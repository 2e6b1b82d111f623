"""A page of memory per launch in which every rank says where it is, and which the watching command reads.

The ranks write to it between blocks of iterations only. The timestamps of the present block stand in the page too (they
have to stand somewhere): so the command can count the finished iterations of a rank that does not answer any more.
On Linux the page is an anonymous file of the watching command, which the ranks open through /proc: it has no name,
needs no room in /dev/shm or on the disk, and is gone with the last process that has mapped it, however that ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from commbench.measure.observer import Observer

if TYPE_CHECKING:
    from commbench.measure.observer import BlockSeen
    from commbench.types import Point

FORMAT = 1  # of the page; another number for every change of it: ranks of another commbench may be asked for theirs
VARIABLE = "COMMBENCH_HEARTBEAT"  # the page's path, for the ranks of a watched launch
STARTING, JOINING, CALIBRATING, VISITING, BETWEEN, FINISHING, DONE = range(7)
STAGES = (
    "starting",
    "joining the process group",
    "calibrating",
    "visiting a point",
    "between points",
    "finishing",
    "done",
)
# kinds of errors: what ended the rank; the run directory cannot be written any more; the rank cannot go on with its
# point, and waits for the others to leave it too
FATAL, STORE_LOST, POINT_LOST = range(3)

_NAME = "commbench-heartbeat"
_HEADER = 4096
_RECORD = 8192
# words of a rank's record
_PID, _BORN, _STEPS, _STAGE, _PHASE, _ORDER, _BASE, _COLD, _ERROR_KIND, _ERROR_NS = range(10)
_PICKED, _PICKED_BYTES = 1024, 128
_ERROR, _ERROR_BYTES = 2048, 6000
_CLOSED = 0  # word of the header
_PHASES = ("", "prepare", "check", "warm-up", "return", "sample")


def born(pid: int) -> int:
    """When a process started, in the kernel's ticks since boot: with its number it names one process for good.
    0 where the system does not say or there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a rank last said of itself. steps: how many things it has begun (all ranks begin the same ones, in the same
    order). iteration: number of the sample that it is in, None outside of the timed loop; warming: that is a sample of
    the warm-up. error: why it ended or, by its kind, why it left its point, at error_ns of the monotonic clock."""

    rank: int
    pid: int
    born: int
    steps: int
    stage: int
    phase: str
    order: int | None
    iteration: int | None
    warming: bool
    picked: str
    error: str
    error_kind: int
    error_ns: int

    def where(self) -> str:
        """In words: the stage, or inside a point the phase and the iteration."""
        if self.stage != VISITING:
            return STAGES[self.stage]
        if self.iteration is None:
            return self.phase or STAGES[self.stage]
        return f"{self.phase}, iteration {self.iteration}"


class Page:
    """The page. The watching command creates it, a rank opens it."""

    def __init__(self, fd: int, ranks: int, capacity: int, path: str, *, owner: bool) -> None:
        self.path = path
        self._fd, self._ranks, self._capacity, self._owner = fd, ranks, capacity, owner
        self._map = mmap.mmap(fd, page_bytes(ranks, capacity))
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, ranks: int, capacity: int) -> Page:
        """Room for ``ranks`` ranks and blocks of ``capacity`` samples. Raises OSError where there is no memory."""
        if sys.platform == "linux":
            fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{fd}"
        else:
            fd, path = tempfile.mkstemp(prefix=f"{_NAME}-")
        try:
            os.truncate(fd, page_bytes(ranks, capacity))
            page = cls(fd, ranks, capacity, path, owner=True)
        except BaseException:
            os.close(fd)
            raise
        page._words[1], page._words[2] = ranks, capacity
        return page

    @classmethod
    def open(cls, path: str) -> Page:
        """Raises OSError when the watching command is gone, or runs on another host, where its path means nothing."""
        # the number of a process may be another one's on this host, and its file be anything
        if sys.platform == "linux" and not str(Path(path).readlink()).startswith(f"/memfd:{_NAME}"):
            raise OSError(f"{path} is no heartbeat")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            head = memoryview(os.pread(fd, 64, 0)).cast("q")
            if head[_CLOSED]:
                raise OSError(f"{path}: the watching command has given this launch up")
            return cls(fd, head[1], head[2], path, owner=False)
        except BaseException:
            os.close(fd)
            raise

    def refuse(self) -> None:
        """From now on no rank can join: one that is late ends itself."""
        self._words[_CLOSED] = 1

    def close(self) -> None:
        """Let go of the page. A view of a block may still be in use: then the memory goes with the process."""
        if self._fd < 0:
            return
        self._words.release()
        with contextlib.suppress(BufferError):  # a view of a block
            self._map.close()
        os.close(self._fd)
        self._fd = -1
        if self._owner and sys.platform != "linux":
            Path(self.path).unlink(missing_ok=True)

    # ---- reading ------------------------------------------------------------------------------------------

    def pulses(self, *, iterations: bool = True) -> list[Pulse]:
        """Of every rank that has joined, by rank. iterations: count the finished ones too, which takes longer."""
        found = (self._pulse(rank, iterations) for rank in range(self._ranks))
        return [pulse for pulse in found if pulse is not None]

    def _pulse(self, rank: int, iterations: bool) -> Pulse | None:
        at = _HEADER + rank * _RECORD
        words = self._words[at // 8 : at // 8 + 16]
        if not words[_PID]:
            return None
        phase = _PHASES[words[_PHASE]]
        timed = iterations and words[_STAGE] == VISITING and phase in ("warm-up", "return", "sample")
        return Pulse(
            rank,
            words[_PID],
            words[_BORN],
            words[_STEPS],
            words[_STAGE],
            phase,
            words[_ORDER] if words[_STAGE] in (VISITING, BETWEEN) else None,
            words[_BASE] + self._finished(rank) if timed else None,
            bool(words[_COLD]),
            self._text(at + _PICKED, _PICKED_BYTES),
            self._text(at + _ERROR, _ERROR_BYTES),
            words[_ERROR_KIND],
            words[_ERROR_NS],
        )

    def _finished(self, rank: int) -> int:
        """How many samples of the present block have an end: they are written one after the other."""
        first = (self._block_at(rank) + 8 * self._capacity) // 8
        low, high = 0, self._capacity
        while low < high:
            middle = (low + high) // 2
            if self._words[first + middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def _block_at(self, rank: int) -> int:
        return _HEADER + self._ranks * _RECORD + rank * _block_bytes(self._capacity)

    def _text(self, start: int, room: int) -> str:
        return bytes(self._map[start : start + room]).partition(b"\0")[0].decode(errors="replace")

    # ---- writing ------------------------------------------------------------------------------------------

    def block_room(self, rank: int) -> memoryview:
        """Memory for a rank's ``Block``."""
        start = self._block_at(rank)
        return memoryview(self._map)[start : start + _block_bytes(self._capacity)]

    def put_text(self, start: int, room: int, text: str) -> None:
        data = text.encode(errors="replace")[: room - 1]
        self._map[start : start + len(data) + 1] = data + b"\0"


def _block_bytes(capacity: int) -> int:
    """Starts, ends and flags, rounded up to whole pages."""
    return -(-17 * capacity // 4096) * 4096


def page_bytes(ranks: int, capacity: int) -> int:
    return _HEADER + ranks * (_RECORD + _block_bytes(capacity))


class Heartbeat(Observer):
    """One rank's side: joins the page, and says there what the meter does."""

    def __init__(self, page: Page, rank: int) -> None:
        at = _HEADER + rank * _RECORD
        self._page, self._at, self._rank = page, at, rank
        self._words = page._words[at // 8 : at // 8 + 16]
        self._words[_BORN] = born(os.getpid())
        self._words[_PID] = os.getpid()  # last: with it the record counts
        ends = page._block_at(rank) + 8 * page._capacity
        self._ends = memoryview(page._map)[ends : ends + 8 * page._capacity]
        self._nothing = bytes(8 * page._capacity)
        self._visits = 0
        self._taken: dict[int, list[int]] = {}  # order → samples so far: of the warm-up, kept

    @property
    def capacity(self) -> int:
        """Samples of the block that ``room`` is for."""
        return self._page._capacity

    @property
    def room(self) -> memoryview:
        """Memory for this rank's ``Block``."""
        return self._page.block_room(self._rank)

    def stage(self, stage: int) -> None:
        """Outside of points: one of STAGES begins."""
        self._words[_STAGE] = stage
        self._words[_STEPS] += 1

    def fail(self, message: str, kind: int = FATAL) -> None:
        """Why this rank ends: read by the watching command also when no file can be written any more."""
        self._page.put_text(self._at + _ERROR, _ERROR_BYTES, message)
        self._words[_ERROR_KIND] = kind
        self._words[_ERROR_NS] = time.monotonic_ns()

    def failed(self, reason: str) -> None:
        self.fail(reason, POINT_LOST)

    def visit(self, order: int, point: Point, number: int) -> None:
        words = self._words
        if words[_ERROR_NS]:  # of a point that all ranks have left
            self._page.put_text(self._at + _ERROR, _ERROR_BYTES, "")
            words[_ERROR_NS] = 0
        if number == 0:
            self._taken[order] = [0, 0]
            self._page.put_text(self._at + _PICKED, _PICKED_BYTES, "" if point.backend == "auto" else point.backend)
        words[_ORDER] = order
        words[_PHASE] = 0
        words[_STAGE] = VISITING
        self._visits += 1  # after a point that failed, ranks may have begun different numbers of things
        words[_STEPS] = self._visits << 20

    def decided(self, backend: str) -> None:
        self._page.put_text(self._at + _PICKED, _PICKED_BYTES, backend)

    def phase(self, name: str) -> None:
        words = self._words
        cold = name != "sample"
        words[_PHASE] = _PHASES.index(name)
        words[_COLD] = cold
        words[_BASE] = self._taken.setdefault(words[_ORDER], [0, 0])[not cold]
        words[_STEPS] += 1
        self._ends[:] = self._nothing

    def block(self, seen: BlockSeen) -> None:
        taken = self._taken.setdefault(self._words[_ORDER], [0, 0])
        n = seen.ends_ns.shape[1]
        taken[seen.kept] += n
        self._words[_BASE] = taken[seen.kept]
        self._words[_STEPS] += 1
        self._ends[: 8 * n] = self._nothing[: 8 * n]

    def left(self, status: str, reason: str) -> None:
        if status:
            self._taken.pop(self._words[_ORDER], None)
        self._words[_STAGE] = BETWEEN
        self._words[_STEPS] += 1


def join(rank: int, environment: Mapping[str, str]) -> Heartbeat | None:
    """The heartbeat of this process, or None where nobody watches it (a launcher that the user started).

    Raises OSError when the command that watched is gone.
    """
    path = environment.get(VARIABLE)
    return Heartbeat(Page.open(path), rank) if path else None
