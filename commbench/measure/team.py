"""How the ranks meet during a measurement: never through the library under test.

``Team`` is what measuring needs of the ranks. ``PageTeam`` is the one of ranks that share a host, and has a shared page
for it; ranks of several hosts make a team_hosts.HostsTeam.

The page holds, per rank, a barrier slot on a cache line of its own; a line with the deadline of the present time
window; a few words that rank 0 hands to all; an error line; and a block per rank for its samples. Stores of
aligned 8-byte words are single stores. On x86-64 they are seen in order; elsewhere each protocol below uses one
word only to hand over (a deadline is itself the signal), or a barrier, whose waiting loop goes through the
interpreter's own fences.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from commbench.errors import CommbenchError, PeerLost
from commbench.measure import offset
from commbench.measure.settings import CAPACITY
from commbench.native.segment import make_file

_LINE = 64
_REMEDY = "enlarge /dev/shm (docker run --shm-size=1g)"
_REACHED, _ARRIVED, _READ = 1, 2, 3  # words of a rank's line, after its barrier slot
_QUESTION, _REPLY = 4, 5  # the same, for comparing clocks
_WORDS = 64  # words that rank 0 can hand over at once
TEXT_BYTES = 8192  # room for a text of each rank


class Objects(Protocol):
    """Set-up traffic among the ranks; the worker gives one over its process group."""

    def all_gather(self, value: Any) -> list[Any]: ...


def _aligned(offset: int) -> int:
    return -(-offset // 128) * 128


def _gate_bytes(size: int) -> int:
    """Room for the native start gate: two cache lines for the head and for each rank."""
    return 128 * (size + 1)


class PointFailed(CommbenchError):
    """Some rank could not go on with the present point; the message says which and why."""


def checked_text(text: str) -> bytes:
    """A text as ranks exchange it. Raises ValueError for one longer than TEXT_BYTES - 1 in UTF-8."""
    data = text.encode()
    if len(data) >= TEXT_BYTES:
        raise ValueError(f"a text of {len(data)} bytes does not fit the {TEXT_BYTES} that ranks exchange")
    return data


def _file() -> tuple[int, Path]:
    """A new file of random name, mode 0600, in memory where there is /dev/shm, else in the temporary folder."""
    return make_file(Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir()))


class Team(ABC):
    """The ranks of one launch. Every method but ``fail`` is called by all ranks, in one order.

    ``oversubscribed``: there are more ranks than cores. ``capacity``: the most iterations that ``share`` takes at once.
    """

    def __init__(self, rank: int, size: int, oversubscribed: bool, capacity: int = CAPACITY) -> None:
        self.rank = rank
        self.size = size
        self.oversubscribed = oversubscribed
        self.capacity = capacity

    @abstractmethod
    def barrier(self, timeout_s: float = 300.0) -> None:
        """Wait for all ranks. Raises PointFailed if a rank has failed, PeerLost if one died or none came."""

    @abstractmethod
    def fail(self, message: str) -> None:
        """Tell the others that this rank cannot go on with the present point."""

    @abstractmethod
    def raise_if_failed(self) -> None:
        """Raise PointFailed if any rank is known to have called ``fail`` since the last ``recover``."""

    @abstractmethod
    def recover(self, timeout_s: float) -> None:
        """After a failed point: all ranks meet, and the failure is cleared. Raises PeerLost if one stays away."""

    @abstractmethod
    def from_first(self, *values: int) -> tuple[int, ...]:
        """Rank 0's integers, on every rank. Ranks other than 0 pass as many (ignored) values."""

    @abstractmethod
    def share(
        self, starts: NDArray[np.int64], ends: NDArray[np.int64], late: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """Blocks of samples, three arrays (ranks, n), all times as rank 0's clock shows them.

        Rank 0 gets every rank's; another rank is sure to get its own only. All ranks pass the same n ≤ capacity.
        """

    @abstractmethod
    def gather_texts(self, text: str) -> list[str]:
        """Every rank's text (up to TEXT_BYTES of UTF-8), on every rank. Raises ValueError for a longer one."""

    @abstractmethod
    def gather_numbers(self, *values: float) -> NDArray[np.float64]:
        """Every rank's numbers: an array (ranks, len(values)) on every rank."""

    @abstractmethod
    def compare_clocks(self) -> offset.Clocks:
        """Whether times of different ranks may be subtracted, and how well that is known; the same on every rank."""

    @property
    def clock_error_s(self) -> float:
        """What ``share``'s times of different ranks may be wrong by against each other, as of now; 0 for one clock."""
        return 0.0

    @abstractmethod
    def close(self) -> None:
        """Give back what the team holds; nothing may be called after it."""


class PageTeam(Team):
    """The ranks of one launch on one host. Oversubscribed ranks give up the core at once when they wait."""

    def __init__(self, rank: int, size: int, page: mmap.mmap, pids: Sequence[int], oversubscribed: bool) -> None:
        super().__init__(rank, size, oversubscribed)
        self._page = page
        self._pids = tuple(pids)
        self._words = memoryview(page).cast("q")
        self._line = _LINE // 8
        self._mine = rank * self._line
        self._deadline = size * self._line
        self._control = self._deadline + self._line
        self._failed = self._control + _WORDS
        self._messages = self._failed + self._line
        self._gate = _aligned(self._messages * 8 + size * TEXT_BYTES)
        self._samples = (self._gate + _gate_bytes(size)) // 8
        self._epoch = 0
        self._recoveries = 0
        self._others = [r * self._line for r in range(size) if r != rank]

    @staticmethod
    def page_bytes(size: int) -> int:
        words = size * _LINE + _LINE + _WORDS * 8 + _LINE
        return _aligned(words + size * TEXT_BYTES) + _gate_bytes(size) + size * CAPACITY * 17

    @classmethod
    def form(cls, rank: int, size: int, objects: Objects, oversubscribed: bool) -> PageTeam:
        """Make the shared page: rank 0 creates it, all map it, then its name is removed.

        Raises CommbenchError on every rank when some rank cannot see rank 0's page (another host, another /dev/shm).
        """
        handle, path, problem = -1, Path(), ""
        bytes_needed = cls.page_bytes(size)
        if rank == 0:
            try:
                handle, path = _file()
                os.posix_fallocate(handle, 0, bytes_needed)
            except OSError as error:
                where = path.parent if path.name else Path("/dev/shm")
                what = f"no room for {bytes_needed} bytes of shared memory in {where}"
                problem = f"{what}: {error.strerror}; {_REMEDY}"
        path = Path(objects.all_gather((str(path), problem))[0][0])
        page = None
        try:
            if rank != 0:
                handle = os.open(path, os.O_RDWR)
            if not problem:
                page = mmap.mmap(handle, bytes_needed)
        except (OSError, ValueError) as error:
            problem = f"cannot map rank 0's shared page: {error}"
        finally:
            if handle >= 0:
                os.close(handle)
        answers = objects.all_gather((problem, os.getpid()))
        if rank == 0 and path.name:
            path.unlink(missing_ok=True)
        for other, (text, _) in enumerate(answers):
            if text:
                raise CommbenchError(f"rank {other}: {text}")
        assert page is not None  # no answer had a problem
        return cls(rank, size, page, [pid for _, pid in answers], oversubscribed)

    @property
    def gate_bytes(self) -> int:
        return _gate_bytes(self.size)

    def gate_address(self) -> int:
        """Where the native start gate's own part of the page begins, in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._page, self._gate))

    def close(self) -> None:
        self._words.release()
        with contextlib.suppress(BufferError):  # a sample view may still be alive; the page goes with the process
            self._page.close()

    # ---- waiting ----------------------------------------------------------------------------------------

    def barrier(self, timeout_s: float = 300.0) -> None:
        words = self._words
        self._epoch += 1
        epoch = self._epoch
        words[self._mine] = epoch
        for slot in self._others:
            if words[slot] < epoch:
                self._wait(slot, epoch, timeout_s)

    def _wait(self, slot: int, epoch: int, timeout_s: float) -> None:
        words, spins = self._words, 0
        start = time.monotonic()
        while words[slot] < epoch:
            spins += 1
            if self.oversubscribed or spins > 2000:
                os.sched_yield()
            if spins % 64 == 0:
                self.check_peer(slot // self._line, start, timeout_s)
                if spins > 20000:
                    time.sleep(50e-6)  # a rank is busy for long: leave it the core

    def check_peer(self, rank: int, start: float, timeout_s: float) -> None:
        """For a loop that has waited for a rank since ``start`` (monotonic): raises as ``barrier`` does."""
        self.raise_if_failed()
        waited = time.monotonic() - start
        if waited < 0.5:
            return
        try:
            os.kill(self._pids[rank], 0)
        except ProcessLookupError:
            raise PeerLost(f"rank {rank} (pid {self._pids[rank]}) is gone", rank) from None
        except PermissionError:  # another user's process: it is alive
            pass
        if waited > timeout_s:
            raise PeerLost(f"rank {rank} did not come within {timeout_s:.0f} s", rank)

    # ---- failing together -------------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        text = message.encode(errors="replace")[: TEXT_BYTES - 1]
        start = self._messages * 8 + self.rank * TEXT_BYTES
        self._page[start : start + len(text) + 1] = text + b"\0"
        self._words[self._failed] = self.rank + 1

    def raise_if_failed(self) -> None:
        who = self._words[self._failed]
        if who:
            start = self._messages * 8 + (who - 1) * TEXT_BYTES
            text = bytes(self._page[start : start + TEXT_BYTES]).partition(b"\0")[0].decode(errors="replace")
            raise PointFailed(f"rank {who - 1}: {text}")

    def recover(self, timeout_s: float) -> None:
        """As of every team. Ranks may have failed at different barriers, so they go on counting from the largest number
        among them. They meet at words of their own: at the barrier's, a failed rank would look as if it had arrived.
        """
        words, mine = self._words, self._mine
        self._recoveries += 1
        words[mine + _REACHED] = self._epoch
        self._meet(_ARRIVED, timeout_s)
        epoch = max(words[slot + _REACHED] for slot in range(0, self.size * self._line, self._line))
        if self.rank == 0:
            words[self._failed] = 0
        self._meet(_READ, timeout_s)
        words[mine] = self._epoch = epoch
        self.barrier(timeout_s)

    def _meet(self, step: int, timeout_s: float) -> None:
        start = time.monotonic()
        self._words[self._mine + step] = self._recoveries
        for slot in self._others:
            while self._words[slot + step] < self._recoveries:
                time.sleep(1e-3)
                if time.monotonic() - start > timeout_s:
                    rank = slot // self._line
                    raise PeerLost(
                        f"rank {rank} did not come back from the failed point within {timeout_s:.0f} s", rank
                    )

    def clock_words(self, rank: int) -> tuple[int, int]:
        """Places of two words in the page through which rank 0 and ``rank`` compare clocks (offset.PageLink)."""
        return rank * self._line + _QUESTION, rank * self._line + _REPLY

    # ---- handing over -----------------------------------------------------------------------------------

    def from_first(self, *values: int) -> tuple[int, ...]:
        words = self._words
        if self.rank == 0:
            for index, value in enumerate(values):
                words[self._control + index] = value
        self.barrier()
        result = tuple(words[self._control + index] for index in range(len(values)))
        self.barrier()
        return result

    def share(
        self, starts: NDArray[np.int64], ends: NDArray[np.int64], late: NDArray[np.uint8]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """As of every team, with every rank's block on every rank."""
        n = len(starts)
        whole = np.frombuffer(self._page, dtype=np.uint8)
        base = self._samples * 8
        times = whole[base : base + self.size * CAPACITY * 16].view(np.int64).reshape(self.size, 2, CAPACITY)
        flags = whole[base + self.size * CAPACITY * 16 :].reshape(self.size, CAPACITY)
        times[self.rank, 0, :n] = starts
        times[self.rank, 1, :n] = ends
        flags[self.rank, :n] = late
        self.barrier()
        result = times[:, 0, :n].copy(), times[:, 1, :n].copy(), flags[:, :n].copy()
        self.barrier()
        return result

    def gather_texts(self, text: str) -> list[str]:
        data = checked_text(text)
        area = self._messages * 8
        mine = area + self.rank * TEXT_BYTES
        self._page[mine : mine + len(data) + 1] = data + b"\0"
        self.barrier()
        texts = []
        for rank in range(self.size):
            start = area + rank * TEXT_BYTES
            texts.append(bytes(self._page[start : start + TEXT_BYTES]).partition(b"\0")[0].decode())
        self.barrier()
        return texts

    def gather_numbers(self, *values: float) -> NDArray[np.float64]:
        packed = np.array(values, dtype=np.float64).view(np.int64)
        starts, _, _ = self.share(packed, packed, np.zeros(len(packed), dtype=np.uint8))
        return np.ascontiguousarray(starts).view(np.float64)

    def compare_clocks(self) -> offset.ClockAgreement:
        return offset.agreement(self)
