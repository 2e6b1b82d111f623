"""Timing on the host: blocks of samples between a start gate and a clock, their warm-up, and the facts of the timer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commbench.measure.aggregate import (
    LARGEST_BATCH,
    TIMER_SHARE,
    Samples,
    adapted_delta_ns,
    aggregate,
    batch_for,
    smallest_delta_ns,
)
from commbench.measure.clock import TimerFacts, resolution_s, timer_facts
from commbench.measure.gate import DelayedGate, NativeGate, WindowGate, make_gate
from commbench.measure.loop import Block, nothing, run_block, run_native_block
from commbench.measure.observer import BlockSeen, Observer
from commbench.measure.offset import times_across
from commbench.measure.point_state import PointState
from commbench.measure.settings import Settings
from commbench.measure.stopping import FIRST_WARMUP, WarmUpRule
from commbench.measure.team import Team
from commbench.measure.timing import Timing
from commbench.native import load, why_unavailable
from commbench.statistics import Array, quantile
from commbench.types import COLLECTIVES

VISIT_S = 0.02  # time one visit of a point aims at
WARMUP_SHARE = 0.4  # of max_time_per_point, at most, goes into the first warm-up
CALIBRATION_S = 0.5  # longest that one series of empty iterations takes (a start across hosts can take milliseconds)
KNOWN_DURATIONS = ((1e-6, 400), (10e-6, 200), (1e-3, 10))  # seconds, samples

Keep = Callable[..., None]


class HostTiming(Timing):
    """Times calls with the host's clock, on all ranks in step.

    sync: how iterations start here; ``window`` needs a core for each rank and one clock for all (``windows``).
    ``keep(point_id, first, starts, ends, valid)`` takes the raw samples on rank 0.
    """

    def __init__(
        self,
        team: Team,
        settings: Settings,
        *,
        windows: bool,
        keep: Keep | None,
        observer: Observer,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(team)
        self._settings = settings
        self._keep = keep
        self._observer = observer
        self._clock_s = clock_s
        self.sync = "barrier" if settings.sync == "window" and not windows else settings.sync
        self._gate = make_gate(self.sync, team, settings.patience_s)
        self._window = self._gate if isinstance(self._gate, WindowGate | NativeGate) else None
        # a delay that is asked for falls on points; the instrument itself is calibrated without it
        delayed = settings.skew_rank == team.rank and settings.skew_s > 0
        self._point_gate = DelayedGate(self._gate, settings.skew_s) if delayed else self._gate
        self._block = Block(team.capacity)
        self._most = 20  # empty samples of one series
        self.native_timer: TimerFacts | None = None
        self.timer = self._calibrate()

    def write_times_to(self, block: Block) -> None:
        """Take samples into this block from now on: one that others may read."""
        self._block = block

    # ---- calibration ------------------------------------------------------------------------------------

    def _timer_of(self, s: PointState) -> TimerFacts:
        return self.native_timer if s.native and self.native_timer is not None else self.timer

    def _empty_ns(self, n: int, batch: int, native: bool = False) -> NDArray[np.int64]:
        """Durations of empty samples of all ranks, in nanoseconds: n of each, or as many as there is time for."""
        n = min(n, self._most)
        if native:
            run_native_block([load().BoundCall.empty()], self._gate, n, self._block, batch)
        else:
            run_block([nothing], self._gate, n, self._block, batch)
        starts, ends, late = self._team.share(self._block.starts[:n], self._block.ends[:n], self._block.late[:n])
        self._last_starts, self._last_late = starts, late
        return (ends - starts).reshape(-1)

    def _calibrate(self) -> TimerFacts:
        """Resolution, empty-iteration cost and its spread, over all ranks (the same facts on every rank)."""
        resolution = float(self._team.gather_numbers(resolution_s()).max())
        started = time.perf_counter()
        self._empty_ns(self._most, 1)
        each_s = (time.perf_counter() - started) / self._most
        (self._most,) = self._team.from_first(max(self._most, min(self._team.capacity, int(CALIBRATION_S / each_s))))
        if self._settings.loop == "native":
            self._empty_ns(200, 1, native=True)
            self.native_timer = timer_facts(self._empty_ns(1000, 1, native=True), resolution)
        self._empty_ns(200, 1)
        return timer_facts(self._empty_ns(1000, 1), resolution)

    def start_skew_s(self) -> tuple[float, float, float]:
        """Of the calibration's empty iterations: p50 and p99 of the distance between first and last start, and
        the fraction that missed its window."""
        valid = ~self._last_late.any(0)
        starts = self._last_starts[:, valid] if valid.any() else self._last_starts
        skew = (starts.max(0) - starts.min(0)) * 1e-9
        return float(np.median(skew)), quantile(skew, 0.99), float(1 - valid.mean())

    def known_answers(self) -> list[dict[str, Any]]:
        """What the loops report for calls that last 1 µs, 10 µs and 1 ms by script; [] without the native module.

        Times as of a point: window, subtraction of the empty iteration, median over valid samples. Collective.
        """
        if why_unavailable():
            return []
        answers: list[dict[str, Any]] = []
        resolution = self.timer.resolution_s
        for native in (False, True):
            overhead = timer_facts(self._empty_ns(500, 1, native), resolution).overhead_s
            for scripted_s, n in KNOWN_DURATIONS:
                call = load().BoundCall.busy_wait([round(scripted_s * 1e9)])
                run, n = run_native_block if native else run_block, min(n, self._most)
                run([call], self._gate, n, self._block)
                shared = self._team.share(self._block.starts[:n], self._block.ends[:n], self._block.late[:n])
                samples = aggregate(*shared, synchronising=True, sync="barrier", batch=1, overhead_s=overhead)
                valid = samples.latency[samples.valid] if samples.valid.any() else samples.latency
                answers.append(
                    {
                        "loop": "native" if native else "python",
                        "scripted_s": scripted_s,
                        "reported_s": float(np.median(valid)),
                        "samples": len(valid),
                    }
                )
        return answers

    # ---- a point ----------------------------------------------------------------------------------------

    def prepare(self, s: PointState, picked: str) -> None:
        s.delta_ns = smallest_delta_ns(self._team.size)
        if self._settings.loop == "native" and COLLECTIVES[s.point.collective].dispatched:
            s.backend = s.place.coordinator.backend(picked)
            bound = [b.native_call(s.backend) for b in s.buffers]
            s.native = [] if None in bound else bound

    def take(self, s: PointState, n: int, keep: bool = True) -> None:
        self._seen(s, n, keep)

    def _seen(self, s: PointState, n: int, keep: bool) -> Samples:
        """Take n samples on all ranks and see them over all ranks."""
        block, gate = self._block, self._point_gate
        if self.sync == "window" and self._window is not None:
            self._window.delta_ns = s.delta_ns
        started = self._clock_s()
        if s.native and s.backend is not None:
            run_native_block(s.native, gate, n, block, s.batch)
            s.backend.calls += n * s.batch
        else:
            run_block(s.calls, gate, n, block, s.batch)
        s.each_s = (self._clock_s() - started) / n
        s.calls_made += n * s.batch
        starts, ends, late = self._team.share(block.starts[:n], block.ends[:n], block.late[:n])
        samples = aggregate(
            starts,
            ends,
            late,
            synchronising=COLLECTIVES[s.point.collective].synchronising,
            sync="barrier" if s.local else self.sync,
            batch=s.batch,
            overhead_s=s.overhead_s if s.batch > 1 else self._timer_of(s).overhead_s,
        )
        s.delta_ns = adapted_delta_ns(s.delta_ns, float(1 - samples.valid.mean()), self._team.size)
        self._observer.block(BlockSeen(starts, ends, late, s.batch, keep, s.iteration))
        if keep and self._team.rank == 0:
            if self._keep is not None:
                self._keep(s.point.point_id, s.iteration, starts, ends, late == 0)
            s.latencies.append(samples.latency[samples.valid])
            s.t_win.append(samples.t_win[samples.valid])
            s.skew.append(samples.skew[samples.valid])
            s.n_invalid += int((~samples.valid).sum())
        if keep:
            s.iteration += n
        else:
            s.warmup_iterations += n * s.batch
        return samples

    def warm_up(self, s: PointState, time_cap: float) -> None:
        """Until the series is steady twice running, or WARMUP_SHARE of the time is used up; then batch and block."""
        started = self._clock_s()
        seen: list[Array] = []
        rule = WarmUpRule(WARMUP_SHARE * time_cap)
        n = min(FIRST_WARMUP * len(s.calls), self._team.capacity)
        iterations = done = steady = 0
        while not done:
            samples = self._seen(s, n, keep=False)
            iterations += n
            seen.append(samples.latency)
            elapsed = self._clock_s() - started
            ends = rule.look(np.concatenate(seen), elapsed)
            affordable = max(2, int((rule.limit_s - elapsed) / s.each_s))
            wanted = min(self._team.capacity, rule.next_n(iterations), affordable)
            done, n, steady = self._team.from_first(int(ends), wanted, int(rule.steady))
        s.steady = bool(steady)
        series = np.concatenate(seen)
        typical = float(np.median(series[len(series) // 2 :]))
        clock_error_s = self._team.clock_error_s
        across = times_across(clock_error_s, typical)
        local = int(clock_error_s > 0 and across.local)
        batch, local = self._team.from_first(batch_for(self._timer_of(s).uncertainty_s, typical), local)
        s.local = bool(local)
        if self.sync == "window" and s.local:
            s.reason = across.reason
        if batch == 0:
            s.status = "refused"
            s.reason = (
                f"the timer leaves {self._timer_of(s).uncertainty_s * 1e9:.0f} ns uncertain, and batches of "
                f"{LARGEST_BATCH} iterations cannot bring that under {TIMER_SHARE:.0%} of the latency"
            )
            return
        if batch > 1:
            s.batch = batch
            durations = self._empty_ns(200, batch, native=bool(s.native))
            s.overhead_s = timer_facts(durations, self.timer.resolution_s).overhead_s
        (s.block_n,) = self._team.from_first(max(2, min(self._team.capacity, int(VISIT_S / (s.each_s * s.batch)))))
