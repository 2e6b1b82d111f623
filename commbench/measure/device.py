"""What measuring on a device needs of it, as an interface, and a barrier of streams on flags.

``Device`` is everything that eager_gpu.py, graph.py and on_device.py touch. They run on any object with these methods,
so their logic is tested without hardware on a scripted one; torch_device.py has those over torch. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from commbench.errors import CommbenchError

Event = Any  # what a device records
Meet = Callable[[], None]  # all ranks meet on the host, such as Team.barrier

FLAG_BYTES = 64  # a rank's flags, a cache line of their own


class DeviceError(CommbenchError):
    """A driver call that failed; the message names it and the driver's own word for the failure."""


class Graph(Protocol):
    """Captured work. It refers to the buffers it was captured with."""

    def replay(self) -> None:
        """Queue all of it once on the current stream."""
        ...


class Device(Protocol):
    """One rank's device and its current stream. Everything but ``synchronize`` and ``now_ns`` only queues work.

    Order of calls is order on the stream. While the stream is held nothing that is queued runs, so a host call that
    waits for the stream (an allocation that must free memory, a first collective that connects) would never return:
    hold only after warm-up, and queue at most ``queue_depth`` pieces of work meanwhile.
    """

    queue_depth: int  # work that may be queued behind a held stream
    barrier_depth: int  # pieces of work that one barrier queues
    graphs: bool  # whether ``capture`` works
    isolated: bool  # whether ``barrier`` holds streams back, so that calls in graphs can be isolated
    identity: str  # which device this is, of all hosts: ranks with the same one share it
    remark: str  # what every time taken on it must be read with, "" for nothing

    def event(self) -> Event: ...

    def record(self, event: Event) -> None: ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Device time between two recorded events; the stream must have been synchronised after them."""
        ...

    def hold(self) -> None:
        """Work queued from here on waits for ``release``. Raises DeviceError where the stream is held already."""
        ...

    def release(self) -> None:
        """Let the stream go on. Does nothing where it is not held."""
        ...

    def barrier(self) -> None:
        """Queue a barrier of all ranks' streams, on flags that no tested backend knows. May be captured."""
        ...

    def abandon(self) -> None:
        """Let all ranks' streams pass every barrier that they queue, once this one has come to its last, after a
        failure. ``rejoin`` mends it."""
        ...

    def rejoin(self, meet: Meet) -> None:
        """Barriers work again. Collective, with nothing queued on any rank; ``meet`` is called three times."""
        ...

    def capture(self, body: Callable[[], None], around: AbstractContextManager[Any] | None = None) -> Graph:
        """Run ``body`` once without effect and keep what it queues. ``around``: entered around the capture, such as
        GroupCoordinator.graph_capture(). Nothing stays captured where body raises."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream is empty. Raises PeerLost if it is not within the device's limit."""
        ...

    def now_ns(self) -> int:
        """The host's clock."""
        ...


class Held:
    """A stream held for the length of a ``with`` block.

    It is released on the way out, and after an error barriers are opened for all ranks too: what was queued must not
    leave the others' streams waiting for this one's.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._device.hold()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is not None:
                self._device.abandon()
        finally:
            self._device.release()


class MemoryOps(Protocol):
    """Work on a stream with one 32-bit word of memory."""

    def write(self, stream: int, word: int, value: int) -> None: ...

    def wait(self, stream: int, word: int, value: int, equal: bool) -> None:
        """Wait until the word is ``value``, or (not equal) until (int32)(word − value) ≥ 0."""
        ...


class FlagBarrier:
    """A barrier of all ranks' streams on flags: three words for each rank, FLAG_BYTES apart, zero at first.

    Outside graphs a barrier writes a number that grows and waits until all ranks' are as large. A graph replays the
    same numbers for ever, so there a barrier has two steps, arrive and leave, that wait for equal numbers: no rank
    writes its next arrival before all have seen the last. Two captured barriers in a row, and the last of one replay
    and the first of the next, must have different numbers: hence a graph holds two barriers or more, or none.
    """

    def __init__(self, ops: MemoryOps, rank: int, size: int, flags: int) -> None:
        self._ops, self._rank, self._size, self._flags = ops, rank, size, flags
        self._epoch = 0
        self.captured = 0  # barriers in the present capture

    def queue(self, stream: int) -> None:
        self._epoch += 1
        self._signal(stream, 0, self._epoch, equal=False)

    def capture(self, stream: int) -> None:
        self.captured += 1
        for word in (1, 2):
            self._signal(stream, word, self.captured, equal=True)

    def open(self, stream: int) -> None:
        """Nobody waits for this rank any more, once its stream is here; for barriers outside graphs."""
        # On the stream, behind the barriers that are queued: from the host, their own writes would undo it. The number
        # is larger than any that is waited for, also in a cyclic comparison.
        self._ops.write(stream, self._flag(self._rank, 0), self._epoch + (1 << 20))

    def restart(self) -> None:
        """Count from the beginning again; all flags must be zero by the next barrier."""
        self._epoch = 0

    def _signal(self, stream: int, word: int, value: int, equal: bool) -> None:
        """Write this rank's word, then wait for everybody's."""
        self._ops.write(stream, self._flag(self._rank, word), value)
        for rank in range(self._size):
            if rank != self._rank:
                self._ops.wait(stream, self._flag(rank, word), value, equal)

    def _flag(self, rank: int, word: int) -> int:
        return self._flags + rank * FLAG_BYTES + 4 * word
