"""Timing on a device: a point's blocks between events (eager_gpu.py) or from the slope of graphs (graph.py).

Both run on any ``Device``, so that a meter can be driven without hardware, on a scripted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from commbench.measure import eager_gpu, graph
from commbench.measure.aggregate import TIMER_SHARE
from commbench.measure.clock import TimerFacts
from commbench.measure.device import Device
from commbench.measure.host import VISIT_S, WARMUP_SHARE, Keep
from commbench.measure.loop import Call
from commbench.measure.observer import BlockSeen, Observer
from commbench.measure.point_state import PointState
from commbench.measure.settings import Settings
from commbench.measure.team import Team
from commbench.measure.timing import Timing
from commbench.statistics import Array

FIRST_BLOCK = 8  # samples that tell how long one takes
LARGEST_BLOCK = 1024  # samples; each needs two events
LARGEST_TURN = 4  # replays that make one sample: of two graphs, and of those with barriers alone
LONGEST_GRAPH = 256  # calls
LONG_CALL_S = 1e-3  # from here on a few calls make a graph: 32 of them would take longer than a visit
FEW_CALLS = (2, 8)


class DeviceTiming(Timing):
    """What both ways of timing on a device share. ``timer``: what two events with nothing between them cost."""

    sync = "barrier"  # of the ranks' streams: no clock is common to devices, so no window exists

    def __init__(
        self,
        device: Device,
        team: Team,
        settings: Settings,
        timer: TimerFacts,
        *,
        keep: Keep | None,
        observer: Observer,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(team)
        self.largest_block = min(LARGEST_BLOCK, team.capacity // LARGEST_TURN - 1)
        self._device = device
        self._settings = settings
        self.timer = timer
        self._keep = keep
        self._observer = observer
        self._clock_s = clock_s

    def prepare(self, s: PointState, picked: str) -> None:
        pass  # calls go through the coordinator as they are

    def remark(self) -> str:
        return self._device.remark

    def _connect(self, s: PointState, time_cap: float) -> None:
        """First calls, until communicators are there and times are steady."""
        started = self._clock_s()
        warm = eager_gpu.warm_up(
            self._device,
            self._team,
            s.calls,
            afford=lambda: self._clock_s() - started < WARMUP_SHARE * time_cap,
        )
        s.calls_made += warm.iterations
        s.warmup_iterations += warm.iterations
        s.steady = warm.steady

    def _first_block(self, s: PointState) -> Array:
        """Some single calls between events: about how long one takes, in seconds."""
        block = eager_gpu.take(
            self._device, self._team, s.calls, FIRST_BLOCK, overhead_s=self.timer.overhead_s, first=s.calls_made
        )
        s.calls_made += FIRST_BLOCK
        s.warmup_iterations += FIRST_BLOCK
        return block.latency_s

    def _size_blocks(self, s: PointState) -> None:
        wanted = int(VISIT_S / max(s.each_s, 1e-9))
        (s.block_n,) = self._team.from_first(max(2, min(self.largest_block, wanted)))

    def _record(
        self,
        s: PointState,
        latency: Array,
        starts_s: NDArray[np.float64],
        ends_s: NDArray[np.float64],
        enqueue_s: NDArray[np.float64],
        *,
        valid: bool,
        keep: bool,
    ) -> None:
        """Add a block. latency: (n,). starts_s, ends_s, enqueue_s: (ranks, n), on no common clock."""
        n = len(latency)
        starts, ends = np.rint(starts_s * 1e9).astype(np.int64), np.rint(ends_s * 1e9).astype(np.int64)
        late = np.full(starts.shape, not valid, dtype=np.uint8)
        self._observer.block(BlockSeen(starts, ends, late, s.batch, keep, s.iteration))
        if not keep:
            return
        if self._team.rank == 0:
            if self._keep is not None:
                self._keep(s.point.point_id, s.iteration, starts, ends, late == 0)
            s.enqueue.append(np.asarray(enqueue_s.max(0)))
            if valid:
                s.latencies.append(np.maximum(latency, 0.0))
            else:
                s.n_invalid += n
        s.iteration += n


class EventTiming(DeviceTiming):
    """Eager calls: device barrier, event, call, event, behind a held stream."""

    def warm_up(self, s: PointState, time_cap: float) -> None:
        self._connect(s, time_cap)
        typical = float(np.median(self._first_block(s)))
        (batch,) = self._team.from_first(self._batch_for(typical))
        if batch == 0:
            s.status = "refused"
            s.reason = (
                f"events leave {self.timer.uncertainty_s * 1e9:.0f} ns uncertain, and as many calls as may be queued "
                f"behind a held stream cannot bring that under {TIMER_SHARE:.0%} of the latency"
            )
            return
        s.batch = batch
        self.take(s, FIRST_BLOCK, keep=False)
        self._size_blocks(s)

    def _batch_for(self, typical_s: float) -> int:
        """Calls per sample so that the events' uncertainty is at most TIMER_SHARE of it; 0 if so many cannot queue."""
        device = self._device
        room = device.queue_depth - device.barrier_depth - eager_gpu.EVENTS_DEPTH
        most = max(1, room // eager_gpu.CALL_DEPTH)
        needed = math.ceil(self.timer.uncertainty_s / (TIMER_SHARE * typical_s)) if typical_s > 0 else most + 1
        return max(1, needed) if needed <= most else 0

    def take(self, s: PointState, n: int, keep: bool = True) -> None:
        started = self._clock_s()
        batch = s.batch
        block = eager_gpu.take(
            self._device,
            self._team,
            s.calls if batch == 1 else [in_batches(s.calls, batch)],
            n,
            overhead_s=self.timer.overhead_s,
            first=s.calls_made,
            depth=batch * eager_gpu.CALL_DEPTH,
        )
        s.each_s = (self._clock_s() - started) / n
        s.calls_made += n * batch
        if not keep:
            s.warmup_iterations += n * batch
        self._record(
            s,
            block.latency_s / batch,
            np.zeros_like(block.device_s),
            block.device_s,
            block.enqueue_s / batch,
            valid=True,
            keep=keep,
        )


class GraphTiming(DeviceTiming):
    """Captured calls: the slope over graphs of two lengths, ``isolated`` or ``chained`` as the settings say.

    A sample is the difference of one replay of each; where it means nothing (Slope.void) the block counts as invalid.
    Raw samples hold, per rank, the short replay's time as start and the long one's as end, barriers taken off.
    """

    def label(self, s: PointState) -> str:
        return self._settings.graph_timing

    def once(self, s: PointState) -> Call:
        if s.one_call is None:
            s.one_call = graph.capture_calls(
                self._device, s.calls[:1], 1, barriers=False, around=s.place.coordinator.graph_capture
            )
            s.calls_made += 1
            self._team.barrier()
        replay, device = s.one_call.replay, self._device

        def call() -> object:
            replay()
            device.synchronize()
            return None

        return call

    def check(self, s: PointState, seed: int, exact: bool) -> None:
        """Results inside replays, whose inputs are overwritten right after each call."""
        if not s.visits and not s.warmup_iterations:
            for call in s.calls:  # a first call connects and allocates, which cannot be captured
                call()
            self._device.synchronize()
            s.calls_made += len(s.calls)
            s.warmup_iterations += len(s.calls)
        subject = graph.GraphBuffers(s.buffers[0], s.calls[0], exact)
        found = graph.check_replays(
            self._device,
            self._team,
            subject,
            (seed, seed + 1),
            lengths=FEW_CALLS,
            around=s.place.coordinator.graph_capture,
        )
        s.calls_made += sum(FEW_CALLS)
        s.check.add(found)
        s.checked = s.point.collective != "barrier"

    def warm_up(self, s: PointState, time_cap: float) -> None:
        self._connect(s, time_cap)
        typical = float(np.median(self._first_block(s)))
        short, long = self._team.from_first(*self._lengths_for(typical))
        if not long:
            s.status = "refused"
            s.reason = (
                f"events leave {self.timer.uncertainty_s * 1e9:.0f} ns uncertain, and graphs of {LONGEST_GRAPH} calls "
                f"cannot bring that under {TIMER_SHARE:.0%} of the latency"
            )
            return
        s.graphs = graph.capture_graphs(
            self._device,
            self._team,
            s.calls,
            kind=self._settings.graph_timing,
            lengths=(short, long),
            around=s.place.coordinator.graph_capture,
        )
        s.calls_made += short + long
        s.batch = long - short
        self.take(s, 2, keep=False)
        self._size_blocks(s)

    def _lengths_for(self, typical_s: float) -> tuple[int, int]:
        """Calls in the two graphs, so that the events' uncertainty is at most TIMER_SHARE of the slope; (0, 0) if none
        of at most LONGEST_GRAPH calls are."""
        if typical_s >= LONG_CALL_S:
            return FEW_CALLS
        needed = math.ceil(self.timer.uncertainty_s / (TIMER_SHARE * typical_s)) if typical_s > 0 else LONGEST_GRAPH
        long = max(graph.LONG, graph.SHORT + needed)
        return (graph.SHORT, long) if long <= LONGEST_GRAPH else (0, 0)

    def take(self, s: PointState, n: int, keep: bool = True) -> None:
        assert s.graphs is not None
        started = self._clock_s()
        slope = graph.replay_graphs(self._device, self._team, s.graphs, n)
        s.each_s = (self._clock_s() - started) / n
        if slope.void and keep:
            s.void = slope.void
        enqueue = slope.enqueue_s.reshape(slope.enqueue_s.shape[0], n, 2)[:, :, 1]
        self._record(
            s,
            slope.samples_s,
            slope.ranks_s[:, :, 0],
            slope.ranks_s[:, :, 1],
            enqueue,
            valid=not slope.void,
            keep=keep,
        )


def in_batches(calls: Sequence[Call], batch: int) -> Call:
    """One call that makes ``batch`` of them, walking on through ``calls``."""
    endless = cycle(calls)

    def call() -> None:
        for one in islice(endless, batch):
            one()

    return call
