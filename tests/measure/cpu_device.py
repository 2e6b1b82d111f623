"""The CPU as a device, with a scripted clock: calls really run, at once, and take the time that a script says.

A backend reports what its call takes (``spend``); events read the sum. Rules of a real device are checked: nothing
waits for a held stream, the queue behind it has an end, a capture happens on no held stream.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from commbench.backends.base import Availability, Backend, Group
from commbench.backends.torch_dist import TorchDistBackend
from commbench.errors import CollectiveError
from commbench.measure.device import DeviceError

BARRIER_NS, LAUNCH_NS, EVENT_NS, QUEUE_NS = 900, 4_000, 300, 2_000
MICROSECOND = 1_000


class CpuEvent:
    def __init__(self) -> None:
        self.at_ns = -1


class CpuDevice:
    """``Device`` of one rank. log: what happened, in order."""

    queue_depth = 256
    barrier_depth = 2
    remark = ""

    def __init__(self, identity: str = "cpu0", graphs: bool = True, isolated: bool = True) -> None:
        self.identity, self.graphs, self.isolated = identity, graphs, isolated
        self.device_ns = self.host_ns = 0
        self.held = False
        self.queued = 0
        self.log: list[str] = []
        self.rejoined = 0
        self.replaying = False

    def spend(self, ns: int) -> None:
        """What one call takes on the device, and to queue."""
        self._queue("call")
        self.device_ns += ns

    def _queue(self, name: str) -> None:
        self.log.append(name)
        self.host_ns += QUEUE_NS
        if self.held:
            self.queued += 1
            assert self.queued <= self.queue_depth, "the queue behind the held stream is full: a deadlock"

    def event(self) -> CpuEvent:
        return CpuEvent()

    def record(self, event: CpuEvent) -> None:
        self._queue("record")
        self.device_ns += EVENT_NS
        event.at_ns = self.device_ns

    def elapsed_s(self, start: CpuEvent, end: CpuEvent) -> float:
        assert 0 <= start.at_ns <= end.at_ns
        return (end.at_ns - start.at_ns) * 1e-9

    def hold(self) -> None:
        if self.held:
            raise DeviceError("the stream is held already")
        self.log.append("hold")
        self.held, self.queued = True, 0

    def release(self) -> None:
        self.log.append("release")
        self.held = False

    def barrier(self) -> None:
        self._queue("barrier")
        self.device_ns += BARRIER_NS

    def abandon(self) -> None:
        self.log.append("abandon")

    def rejoin(self, meet: Callable[[], None]) -> None:
        for _ in range(3):
            meet()
        self.rejoined += 1

    def capture(self, body: Callable[[], None], around: AbstractContextManager[Any] | None = None) -> Any:
        assert not self.held, "a capture waits for the device: a deadlock"
        with around if around is not None else nullcontext():
            self.log.append("capture")
            body()  # what a capture would only write down runs here, too; only replays count time
        return CpuGraph(self, body)

    def synchronize(self) -> None:
        assert not self.held, "waiting for a held stream: a deadlock"
        self.host_ns = max(self.host_ns, self.device_ns)

    def now_ns(self) -> int:
        return self.host_ns


class CpuGraph:
    def __init__(self, device: CpuDevice, body: Callable[[], None]) -> None:
        self._device, self._body = device, body

    def replay(self) -> None:
        device = self._device
        device._queue("replay")
        device.device_ns += LAUNCH_NS
        queued, host_ns = device.queued, device.host_ns
        device.replaying = True  # work of a graph is queued by its launch alone, and counted when it was captured
        try:
            self._body()
        finally:
            device.replaying = False
        device.queued, device.host_ns = queued, host_ns


class DeviceBackend(Backend):
    """Collectives over gloo that take a scripted time on a ``CpuDevice``, which ``settings`` names.

    eager_ns, graph_ns: how long a call lasts. fail_at: all ranks raise in that call. frozen: replays give the result
    that the capture had.
    """

    name = "scripted_device"
    collectives = TorchDistBackend.collectives
    opens_inputs = True
    device: CpuDevice
    eager_ns = 20 * MICROSECOND
    graph_ns = 12 * MICROSECOND
    fail_at: int | None = None
    frozen: bool = False

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._inner = TorchDistBackend(group)
        self._capturing = False
        self._first: torch.Tensor | None = None
        self.entered = self.left = 0

    @classmethod
    def availability(cls, device: str) -> Availability:
        return Availability(True, provider="scripted")

    def capture(self) -> AbstractContextManager[None]:
        backend = self

        class Around:
            def __enter__(self) -> None:
                backend.entered += 1
                backend._capturing = True

            def __exit__(self, *error: object) -> None:
                backend.left += 1
                backend._capturing = False

        return Around()

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        cls, device = type(self), type(self).device
        if device.replaying:
            device.device_ns += cls.graph_ns
        else:
            self.calls += 1
            device.spend(0 if self._capturing else cls.eager_ns)
            if cls.fail_at is not None and self.calls >= cls.fail_at:
                cls.fail_at = None
                raise CollectiveError("scripted failure")
        if cls.frozen and device.replaying and self._first is not None and self._first.shape == output.shape:
            output.copy_(self._first)  # a graph that kept the data of its capture
            return
        self._inner.all_reduce(input, output, op)
        if self._capturing:
            self._first = output.clone()

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.calls += 1
        type(self).device.spend(type(self).eager_ns)
        self._inner.broadcast(tensor, src)

    def barrier(self) -> None:
        self.calls += 1
        self._inner.barrier()
