"""A device made of numbers: a host that takes time to queue, a stream that runs what is queued, and the rules of both.

What would hang on hardware (waiting for a held stream, a full queue behind one) is an AssertionError here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from commbench.measure.device import DeviceError


class ScriptedEvent:
    def __init__(self) -> None:
        self.at_ns: int | None = None


Work = Callable[[], None]  # what an entry of the stream does when it runs; it moves stream_ns on


class ScriptedDevice:
    """One rank's device. Times are whole nanoseconds: queue_ns to queue anything, launch_ns to start a graph there.

    ``log`` holds what was queued or done, in order. ``op`` makes a call of a given device time.
    """

    def __init__(
        self, *, queue_ns: int = 5_000, launch_ns: int = 7_000, event_ns: int = 0, queue_depth: int = 64
    ) -> None:
        self.queue_depth = queue_depth
        self.graphs = self.isolated = True
        self.identity, self.remark = "scripted", ""
        self.barrier_depth = 2
        self.queue_ns, self.launch_ns, self.event_ns = queue_ns, launch_ns, event_ns
        self.barrier_ns = 1_000
        self.host_ns = 0
        self.stream_ns = 0
        self.held = False
        self.abandoned = False
        self.log: list[str] = []
        self.deepest = 0
        self._pending: list[tuple[int, Work]] = []  # when it was queued, and what it does
        self._behind: list[tuple[int, Work]] = []  # the same, behind a hold
        self._capturing: list[Work] | None = None

    # ---- what the tests use ------------------------------------------------------------------------------

    def op(self, duration_ns: int | Callable[[], int], name: str = "op") -> Callable[[], None]:
        def call() -> None:
            def run() -> None:
                self.stream_ns += duration_ns() if callable(duration_ns) else duration_ns

            self._queue(run, name)

        return call

    def waiting_op(self, host_ns: int, duration_ns: int) -> Callable[[], None]:
        """A call that waits on the host for the device, as a first collective does."""
        inner = self.op(duration_ns, "connect")

        def call() -> None:
            inner()
            self.synchronize()
            self.host_ns += host_ns

        return call

    def _queue(self, work: Work, name: str) -> None:
        self.log.append(name)
        if self._capturing is not None:
            self._capturing.append(work)
            return
        self.host_ns += self.queue_ns
        (self._behind if self.held else self._pending).append((self.host_ns, work))
        if self.held:
            self.deepest = max(self.deepest, len(self._behind))
            assert len(self._behind) <= self.queue_depth, "the queue behind the held stream is full: a deadlock"

    # ---- Device ------------------------------------------------------------------------------------------

    def event(self) -> ScriptedEvent:
        return ScriptedEvent()

    def record(self, event: ScriptedEvent) -> None:
        def run() -> None:
            self.stream_ns += self.event_ns
            event.at_ns = self.stream_ns

        self._queue(run, "record")

    def elapsed_s(self, start: ScriptedEvent, end: ScriptedEvent) -> float:
        assert start.at_ns is not None, "the start was never reached"
        assert end.at_ns is not None, "the end was never reached"
        return (end.at_ns - start.at_ns) * 1e-9

    def hold(self) -> None:
        if self.held:
            raise DeviceError("the stream is held already")
        self.log.append("hold")
        self.held = True

    def release(self) -> None:
        if self.held:
            self.log.append("release")
            # what was queued meanwhile starts now at the earliest
            self._pending += [(self.host_ns, work) for _, work in self._behind]
            self._behind = []
        self.held = False

    def barrier(self) -> None:
        def run() -> None:
            self.stream_ns += self.barrier_ns

        self._queue(run, "barrier")

    def abandon(self) -> None:
        self.log.append("abandon")
        self.abandoned = True

    def rejoin(self, meet: Callable[[], None]) -> None:
        for _ in range(3):
            meet()
        self.abandoned = False

    def capture(self, body: Callable[[], None], around: AbstractContextManager[Any] | None = None) -> ScriptedGraph:
        assert not self.held, "a capture waits for the device: a deadlock"
        with around if around is not None else nullcontext():
            self.log.append("capture")
            self._capturing = works = []
            try:
                body()
            finally:
                self._capturing = None
        return ScriptedGraph(self, works)

    def synchronize(self) -> None:
        assert not self.held, "waiting for a held stream: a deadlock"
        self.log.append("synchronize")
        for queued_ns, work in self._pending:
            self.stream_ns = max(self.stream_ns, queued_ns)
            work()
        self._pending = []
        self.host_ns = max(self.host_ns, self.stream_ns)

    def now_ns(self) -> int:
        return self.host_ns


class ScriptedGraph:
    def __init__(self, device: ScriptedDevice, works: list[Work]) -> None:
        self._device, self.works = device, works

    def replay(self) -> None:
        def run() -> None:
            self._device.stream_ns += self._device.launch_ns
            for work in self.works:
                work()

        self._device._queue(run, f"replay {len(self.works)}")


class ReplayingDevice(ScriptedDevice):
    """Captures a body by keeping it, and replays it by running it: for calls that really compute."""

    def capture(self, body: Callable[[], None], around: AbstractContextManager[Any] | None = None) -> Any:
        with around if around is not None else nullcontext():
            pass

        class Kept:
            @staticmethod
            def replay() -> None:
                body()

        return Kept()


class ScriptedRanks:
    """The ranks beside this one: each gives this rank's numbers times its factor."""

    def __init__(self, factors: Sequence[float] = (1.0,), log: list[str] | None = None) -> None:
        self.rank, self.size = 0, len(factors)
        self._factors = np.array(factors)
        self._log = log

    def barrier(self) -> None:
        if self._log is not None:
            self._log.append("meet")

    def from_first(self, *values: int) -> tuple[int, ...]:
        return values

    def gather_numbers(self, *values: float) -> np.ndarray:
        return self._factors[:, None] * np.array(values)
