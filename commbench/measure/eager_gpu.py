"""Timing of eager calls on a device: event, op, event, behind a barrier of the ranks' streams.

The host takes longer to queue a short collective than the device to run it. So the stream is held while a few
iterations are queued, and then runs them without waiting for the host: what the events tell is the device's time. What
the host needed for each call is told apart. Every iteration starts at a barrier on the device, and an iteration's
latency is the maximum over ranks, as clocks of devices cannot be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from commbench.measure.clock import TimerFacts
from commbench.measure.device import Device, Event, Held
from commbench.measure.loop import Call, no_collection, nothing
from commbench.statistics import Array, is_steady, quantile

EVENT_RESOLUTION_S = 0.5e-6  # of events, as the CUDA runtime's documentation of cudaEventElapsedTime states it
CALL_DEPTH = 8  # pieces of work that one collective is taken to queue
EVENTS_DEPTH = 2
WARMUP_BLOCK = 8
LARGEST_WARMUP = 2000  # iterations


class Ranks(Protocol):
    """What measuring needs of the other ranks; ``Team`` is one."""

    rank: int
    size: int

    def barrier(self) -> None: ...

    def from_first(self, *values: int) -> tuple[int, ...]: ...

    def gather_numbers(self, *values: float) -> NDArray[np.float64]:
        """Every rank's numbers, as many from each: an array (ranks, n)."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """n iterations seen over all ranks, in seconds: arrays (ranks, n).

    device_s: between the events around the op, the events' own cost taken off. enqueue_s: the host in the call.
    """

    device_s: NDArray[np.float64]
    enqueue_s: NDArray[np.float64]

    @property
    def latency_s(self) -> Array:
        """(n,): the maximum over ranks, per iteration, before anything is averaged."""
        return np.asarray(self.device_s.max(0))


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What it took: iterations, and whether the series was steady twice running before they were used up."""

    iterations: int
    steady: bool


def iterations_per_hold(device: Device, calls: int = CALL_DEPTH) -> int:
    """How many iterations may be queued behind a held stream: few, for a full queue would block the host for ever.

    calls: pieces of work that one iteration queues beside the barrier and the events.
    """
    return max(1, device.queue_depth // (device.barrier_depth + EVENTS_DEPTH + calls))


def warm_up(
    device: Device, ranks: Ranks, calls: Sequence[Call], *, afford: Callable[[], bool] = lambda: True
) -> WarmUp:
    """Call until the communicators are connected and times are steady; the stream is never held meanwhile.

    First calls connect: they wait for other ranks on the host and would never return behind a held stream. After each
    block the device is waited for, so that a connection that is made by the first call's work is there, too. All ranks
    make the same number of calls: rank 0 decides, by the slowest rank's times. ``afford`` (asked on rank 0) ends it
    when time is used up. Collective.
    """
    seen: list[Array] = []
    made = agreed = 0
    done = 0
    while not done:
        times = np.empty(WARMUP_BLOCK)
        for i in range(WARMUP_BLOCK):
            start = device.now_ns()
            calls[(made + i) % len(calls)]()
            device.synchronize()
            times[i] = (device.now_ns() - start) * 1e-9
        made += WARMUP_BLOCK
        seen.append(ranks.gather_numbers(*times).max(0))
        agreed = agreed + 1 if is_steady(np.concatenate(seen)) else 0
        enough = agreed >= 2 or made >= LARGEST_WARMUP or not afford()
        done, agreed = ranks.from_first(int(enough), agreed)
    return WarmUp(made, agreed >= 2)


def take(
    device: Device,
    ranks: Ranks,
    calls: Sequence[Call],
    n: int,
    *,
    overhead_s: float = 0.0,
    first: int = 0,
    depth: int = CALL_DEPTH,
) -> DeviceBlock:
    """Take n samples, after ``warm_up``. Collective: same n (at most team.CAPACITY) and first on all ranks.

    A call may not wait on the host for the device: behind a held stream it would never return.

    calls are walked through in turn from ``first`` on; depth: work that one of them queues. overhead_s: what
    ``event_facts`` found, taken off (a time that it exceeds becomes zero).

    If a call raises, this rank's stream is released and no rank's stream stays at a barrier; the error goes on. The
    caller then lets all ranks know (Team.fail), and all of them ``recover`` and ``device.rejoin(team.barrier)``.
    """
    if n < 1:
        raise ValueError(f"{n} samples: a block has one at least")
    starts, ends = [device.event() for _ in range(n)], [device.event() for _ in range(n)]
    enqueue = np.empty(n)
    step = iterations_per_hold(device, depth)
    with no_collection():
        for low in range(0, n, step):
            ranks.barrier()  # nobody's stream runs ahead into a barrier that a failed rank never queues
            with Held(device):
                for i in range(low, min(n, low + step)):
                    enqueue[i] = _queue(device, calls[(first + i) % len(calls)], starts[i], ends[i])
            device.synchronize()
    durations = np.array([device.elapsed_s(s, e) for s, e in zip(starts, ends, strict=True)])
    ranks.barrier()  # raises where another rank failed: its streams passed the barriers unmet
    device_s = ranks.gather_numbers(*np.maximum(durations - overhead_s, 0.0))
    return DeviceBlock(device_s, ranks.gather_numbers(*enqueue))


def _queue(device: Device, call: Call, start: Event, end: Event) -> float:
    """Queue one iteration; the host's time in the call, in seconds."""
    device.barrier()
    device.record(start)
    before = device.now_ns()
    call()
    after = device.now_ns()
    device.record(end)
    return (after - before) * 1e-9


def event_facts(device: Device, ranks: Ranks, n: int = 200) -> TimerFacts:
    """What two events with nothing between them cost, over all ranks; the same facts on every rank. Collective."""
    empty = take(device, ranks, [nothing], n, depth=0).device_s.reshape(-1)
    spread = quantile(empty, 0.75) - quantile(empty, 0.25)
    return TimerFacts(EVENT_RESOLUTION_S, float(np.median(empty)), spread)
