"""Measuring points: visits, warm-up, blocks, the look at the interval, checks, and the row that comes out.

All ranks run this in step. Whatever depends on time is decided by rank 0 and handed to the others.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from commbench.backends.base import Backend
from commbench.bandwidth import algbw_gb_per_s, busbw_gb_per_s
from commbench.coordinator.group import GroupCoordinator
from commbench.errors import BackendUnavailable, CommbenchError, PeerLost
from commbench.measure import noise as noise_module
from commbench.measure.buffers import Buffers, copies_for
from commbench.measure.clock import TimerFacts, resolution_s, timer_facts
from commbench.measure.correctness import Check
from commbench.measure.gate import DelayedGate, NativeGate, WindowGate, make_gate
from commbench.measure.loop import Block, Call, nothing, run_block, run_native_block
from commbench.measure.offset import agreement
from commbench.measure.places import Place, Places, buffers_for
from commbench.measure.settings import Settings
from commbench.measure.stopping import FEWEST_VISITS, Progress, StoppingRule
from commbench.measure.team import CAPACITY, PointFailed, Team
from commbench.native import load, why_unavailable
from commbench.policy import Policy
from commbench.statistics import Array, is_steady, median_interval, quantile, remarks
from commbench.types import AUTO, COLLECTIVES, Point

VISIT_S = 0.02  # time one visit of a point aims at
FIRST_WARMUP = 4  # iterations of the first warm-up block
WARMUP_SHARE = 0.4  # of max_time_per_point, at most, goes into the first warm-up
KNOWN_DURATIONS = ((1e-6, 400), (10e-6, 200), (1e-3, 10))  # seconds, samples
TIMER_SHARE = 0.05  # largest part of a latency that the timer may leave uncertain
LARGEST_BATCH = 1000
LARGEST_DELTA_NS = 500_000
RECOVERY_S = 5.0  # for all ranks to leave a failed point
INTERLEAVED = 8  # points whose visits alternate
INTERLEAVED_BYTES = 512 << 20  # buffers that alternating points may hold per rank

Row = dict[str, Any]


@dataclass(slots=True)
class Samples:
    """A block seen over all ranks, per sample, in seconds per iteration; ``valid`` tells missed windows."""

    latency: Array
    t_win: Array
    skew: Array
    valid: NDArray[np.bool_]


def aggregate(
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    late: NDArray[np.uint8],
    *,
    synchronising: bool,
    sync: str,
    batch: int,
    overhead_s: float,
) -> Samples:
    """Per sample: t_last = max end − max start, t_win = max end − min start, skew = t_win − t_last.

    The latency is t_last of a synchronising collective and t_win of another; where iterations do not start in a
    window, or are batched, it is the maximum over ranks of local durations. starts, ends, late: (ranks, n) in ns.
    overhead_s (per sample) is taken off every time; a time that it exceeds becomes zero.
    """
    t_win = (ends.max(0) - starts.min(0)) * 1e-9
    t_last = (ends.max(0) - starts.max(0)) * 1e-9
    local = (ends - starts).max(0) * 1e-9
    if sync != "window" or batch > 1:
        latency = local
    else:
        latency = t_last if synchronising else t_win
    return Samples(
        np.maximum(latency - overhead_s, 0.0) / batch,
        np.maximum(t_win - overhead_s, 0.0) / batch,
        t_win - t_last,
        np.asarray(~late.any(0)),
    )


def smallest_delta_ns(ranks: int) -> int:
    """How far ahead a window is announced on a quiet machine: all ranks must have seen it before it opens."""
    return 4_000 + 1_000 * ranks


def adapted_delta_ns(delta_ns: int, missed: float, ranks: int) -> int:
    """The next block's δ: twice as long when more than 10 % of the windows were missed, half when under 1 %."""
    if missed > 0.1:
        return min(2 * delta_ns, LARGEST_DELTA_NS)
    if missed < 0.01:
        return max(delta_ns // 2, smallest_delta_ns(ranks))
    return delta_ns


def batch_for(uncertainty_s: float, typical_s: float) -> int:
    """Iterations per sample so that the timer's uncertainty is at most TIMER_SHARE of it; 0 if that takes too many."""
    if typical_s <= 0:
        return LARGEST_BATCH
    needed = math.ceil(uncertainty_s / (TIMER_SHARE * typical_s))
    return needed if needed <= LARGEST_BATCH else 0


@dataclass(slots=True)
class _Session:
    """What is known of one point so far, on one rank (latencies on rank 0 only)."""

    order: int
    point: Point
    place: Place
    buffers: list[Buffers] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    native: list[Any] = field(default_factory=list)  # the same, bound in compiled code, where loop is native
    backend: Backend | None = None  # whose counter native calls are added to
    seed: int = 0
    visits: int = 0
    batch: int = 1
    overhead_s: float = 0.0
    block_n: int = 6
    delta_ns: int = 0
    each_s: float = 0.0  # wall time of a sample, its start included, in the last block
    iteration: int = 0
    warmup_iterations: int = 0
    steady: bool = False
    elapsed_s: float = 0.0
    latencies: list[Array] = field(default_factory=list)
    t_win: list[Array] = field(default_factory=list)
    skew: list[Array] = field(default_factory=list)
    n_invalid: int = 0
    calls_made: int = 0
    calls_counted: dict[str, int] = field(default_factory=dict)
    check: Check = field(default_factory=Check)
    checked: bool = False
    decision: str = ""
    noises: list[noise_module.Noise] = field(default_factory=list)
    progress: Progress | None = None
    status: str = ""
    reason: str = ""

    def all_latencies(self) -> Array:
        return np.concatenate(self.latencies) if self.latencies else np.empty(0)


class Meter:
    """Measures points on one group. Every rank makes one and calls the same methods in the same order.

    ``keep(point_id, first, starts, ends, valid)`` takes the raw samples on rank 0; ``tell(label, order)`` hears
    which point is being visited. ``policies``: those that points name, by that name; without it the coordinator's own
    picks for all. ``places``: where points of a group run, by the group's name; without it all run on ``coordinator``.
    ``clock_s`` is for tests.
    """

    def __init__(
        self,
        coordinator: GroupCoordinator,
        team: Team,
        settings: Settings,
        *,
        cache_bytes: int,
        keep: Callable[..., None] | None = None,
        tell: Callable[[str, int], None] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        policies: Mapping[str, Policy] | None = None,
        places: Places | None = None,
    ) -> None:
        self._places = places or {}
        self._everywhere = Place(coordinator)
        self._policies = policies or {}
        self._team = team
        self._settings = settings
        self._cache_bytes = cache_bytes
        self._keep = keep
        self._tell = tell
        self._clock_s = clock_s
        self._started_s = clock_s()
        self.clocks = agreement(team)
        # a window needs a core for each rank and one clock for all
        windows = not team.oversubscribed and self.clocks.ok
        self.sync = "barrier" if settings.sync == "window" and not windows else settings.sync
        self._gate = make_gate(self.sync, team)
        self._window = self._gate if isinstance(self._gate, WindowGate | NativeGate) else None
        if settings.skew_rank == team.rank and settings.skew_s:
            self._gate = DelayedGate(self._gate, settings.skew_s)
        self._block = Block(CAPACITY)
        self._noise = noise_module.NoiseMeter()
        self._rng = np.random.default_rng(settings.seed)
        self.timer: TimerFacts = self._calibrate()

    # ---- calibration ------------------------------------------------------------------------------------

    def _timer_of(self, s: _Session) -> TimerFacts:
        return self.native_timer if s.native and self.native_timer is not None else self.timer

    def _empty_ns(self, n: int, batch: int, native: bool = False) -> NDArray[np.int64]:
        """Durations of empty samples of all ranks, in nanoseconds."""
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
        self.native_timer: TimerFacts | None = None
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
                run = run_native_block if native else run_block
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

    # ---- the launch ---------------------------------------------------------------------------------------

    def measure(self, points: Sequence[tuple[int, Point]]) -> Iterator[Row]:
        """Measure (order, point) pairs; yields each row as it is finished, the same number on every rank.

        Rows of ranks other than 0 hold no results. A point that fails costs itself only; PeerLost ends all.
        """
        left = len(points)
        for group in _groups(points):
            sessions = [
                _Session(order, point, self._places.get(point.group, self._everywhere)) for order, point in group
            ]
            while sessions:
                for index in self._rng.permutation(len(sessions)):
                    session = sessions[index]
                    self._guarded(session, left)
                    if session.status:
                        yield self._row(session)
                        left -= 1
                sessions = [s for s in sessions if not s.status]

    def _guarded(self, session: _Session, points_left: int) -> None:
        """Visit a point on all ranks; if it fails on one, the point ends as failed on all, and only it."""
        team = self._team
        started = self._clock_s()
        try:
            self._visit(session, points_left)
            team.barrier()
        except PointFailed as error:
            session.status, session.reason = "failed", str(error)
        except PeerLost:
            raise
        except CommbenchError as error:
            self._give_up(session, str(error))
        except (RuntimeError, ValueError, MemoryError, OSError, TypeError) as error:
            self._give_up(session, f"{type(error).__name__}: {error}".strip().splitlines()[0])
        session.elapsed_s += self._clock_s() - started
        if session.status == "failed":
            try:
                team.recover(RECOVERY_S)
            except PeerLost as error:
                # a rank is held in the collective: only a new launch gets past this point
                raise PeerLost(f"{session.reason} ({error})", error.rank) from error
            session.calls_counted.clear()
        if session.status:
            session.buffers, session.calls = [], []

    def _give_up(self, session: _Session, why: str) -> None:
        self._team.fail(why)
        session.status, session.reason = "failed", f"rank {self._team.rank}: {why}"

    # ---- one visit ------------------------------------------------------------------------------------------

    def _visit(self, s: _Session, points_left: int) -> None:
        if self._tell is not None and self._team.rank == 0:
            self._tell(s.point.label(), s.order)
        time_cap = self._time_cap(points_left)
        if s.visits == 0 and time_cap <= 0:
            s.status, s.reason = "skipped", f"the budget of {self._settings.budget_s:g} s was used up"
            return
        point = s.point
        coordinator = s.place.coordinator
        policy = self._policies.get(point.policy, coordinator.policy)
        forced = None if point.backend == AUTO else point.backend
        with coordinator.under(policy), coordinator.forcing(forced):
            before = self._noise.snapshot()
            counts = coordinator.call_counts()
            if s.visits == 0:
                self._first_visit(s, time_cap)
            else:
                self._return_visit(s)
            if not s.status:
                self._sample(s, time_cap)
            if s.progress is not None and s.progress.done and not s.status:
                self._check(s, exact=False)
                s.status = "ok"
            for name, count in coordinator.call_counts().items():
                s.calls_counted[name] = s.calls_counted.get(name, 0) + count - counts.get(name, 0)
            s.noises.append(noise_module.between(before, self._noise.snapshot()))

    def _time_cap(self, points_left: int) -> float:
        """Seconds of sampling that a point may take; the same on all ranks. 0 when the budget is used up."""
        budget = self._settings.budget_s
        if budget is None:
            return self._settings.max_time_per_point_s
        remaining = budget - (self._clock_s() - self._started_s)
        share = 0.8 * remaining / max(1, points_left)  # the rest goes into buffers and checks
        (nanoseconds,) = self._team.from_first(int(1e9 * min(self._settings.max_time_per_point_s, max(0.0, share))))
        return nanoseconds * 1e-9

    def _first_visit(self, s: _Session, time_cap: float) -> None:
        point = s.point
        copies = copies_for(point, self._cache_bytes)
        device = torch.device(self._settings.device)
        s.seed = (self._settings.seed << 20) + s.order
        s.buffers = [buffers_for(point, s.place, device) for _ in range(copies)]
        coordinator = s.place.coordinator
        s.calls = [b.call(coordinator) for b in s.buffers]
        s.delta_ns = smallest_delta_ns(self._team.size)
        try:
            decision = coordinator.decide(s.buffers[0].signature(coordinator))
        except BackendUnavailable as error:  # the same on all ranks: decisions depend on the call alone
            s.status, s.reason = "skipped", error.reason
            return
        s.decision = json.dumps(decision.to_dict())
        if self._settings.loop == "native" and COLLECTIVES[point.collective].dispatched:
            s.backend = coordinator.backend(decision.picked)
            bound = [b.native_call(s.backend) for b in s.buffers]
            s.native = [] if None in bound else bound
        for extra in s.buffers[1:]:
            extra.refill(s.seed, exact=True)
        self._check(s, exact=True)
        self._warm_up(s, time_cap)

    def _return_visit(self, s: _Session) -> None:
        """The caches hold another point's data by now: a few iterations before samples count."""
        if s.point.placement == "in" and s.point.op:
            for buffers in s.buffers:  # repeated in-place reductions run off to infinity
                buffers.refill(s.seed, exact=True)
        n = 1 if s.block_n <= 2 else 3
        self._take(s, n * len(s.calls) if s.block_n > 50 * len(s.calls) else n, keep=False)

    def _check(self, s: _Session, exact: bool) -> None:
        """One call on fresh inputs, held against the right answer."""
        buffers = s.buffers[0]
        seed = s.seed + (0 if exact else 1 << 40)
        buffers.refill(seed, exact)
        self._team.barrier()
        s.calls[0]()
        s.calls_made += 1
        s.check.add(buffers.check(seed, exact))
        s.checked = s.point.collective != "barrier"

    def _take(self, s: _Session, n: int, keep: bool = True) -> Samples:
        """Take n samples on all ranks and see them over all ranks."""
        block, gate = self._block, self._gate
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
            sync=self.sync,
            batch=s.batch,
            overhead_s=s.overhead_s if s.batch > 1 else self._timer_of(s).overhead_s,
        )
        s.delta_ns = adapted_delta_ns(s.delta_ns, float(1 - samples.valid.mean()), self._team.size)
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

    def _warm_up(self, s: _Session, time_cap: float) -> None:
        """Until the series is steady twice running, or the time for warm-up is used up; then batch and block size."""
        started = self._clock_s()
        seen: list[Array] = []
        agreed, n, iterations = 0, FIRST_WARMUP * len(s.calls), 0
        n = min(n, CAPACITY)
        while True:
            samples = self._take(s, n, keep=False)
            iterations += n
            seen.append(samples.latency)
            elapsed = self._clock_s() - started
            agreed = agreed + 1 if is_steady(np.concatenate(seen)) else 0
            done = agreed >= 2 or (elapsed >= WARMUP_SHARE * time_cap and iterations >= FIRST_WARMUP)
            wanted = min(CAPACITY, max(2, math.ceil(iterations * 0.5)))
            affordable = max(2, int((WARMUP_SHARE * time_cap - elapsed) / s.each_s)) if not done else 2
            action, n, agreed = self._team.from_first(int(done), min(wanted, affordable), agreed)
            if action:
                break
        s.steady = agreed >= 2
        series = np.concatenate(seen)
        typical = float(np.median(series[len(series) // 2 :]))
        (batch,) = self._team.from_first(batch_for(self._timer_of(s).uncertainty_s, typical))
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
        (s.block_n,) = self._team.from_first(max(2, min(CAPACITY, int(VISIT_S / (s.each_s * s.batch)))))

    def _sample(self, s: _Session, time_cap: float) -> None:
        """One visit's block, then rank 0's look at the interval."""
        self._take(s, s.block_n)
        s.visits += 1
        done = next_n = 0
        if self._team.rank == 0:
            rule = StoppingRule(self._settings.target_ci, time_cap)
            s.progress = rule.look(s.all_latencies(), s.visits, s.elapsed_s)
            done = int(s.progress.done)
            # blocks grow with the total, within one page and the time that is left
            wanted = s.progress.next_n - len(s.all_latencies())
            left = max(VISIT_S, time_cap - s.elapsed_s)
            next_n = max(2, min(CAPACITY, wanted, int(left / s.each_s)))
        done, n = self._team.from_first(done, next_n)
        if self._team.rank != 0:
            s.progress = Progress(bool(done), False, None, 0)
        if s.visits >= FEWEST_VISITS:
            s.block_n = n

    # ---- the row -------------------------------------------------------------------------------------------

    def _row(self, s: _Session) -> Row:
        """The finished row (complete on rank 0). Collective."""
        mine = {
            "wrong": s.check.wrong_count,
            "error": s.check.max_abs_error,
            "counted": {name: n for name, n in s.calls_counted.items() if n},
            "expected": s.calls_made if s.place.takes_part else 0,
            "noise": noise_module.to_dict(noise_module.combine(s.noises)) if s.noises else None,
        }
        ranks = [json.loads(text) for text in self._team.gather_texts(json.dumps(mine))]
        counted: dict[str, int] = {}
        for rank in ranks:
            for name, n in rank["counted"].items():
                counted[name] = counted.get(name, 0) + n
        picked = "+".join(sorted(counted))
        wrong = sum(rank["wrong"] for rank in ranks)
        errors = [rank["error"] for rank in ranks]
        status, reasons = s.status, [s.reason] if s.reason else []
        if status == "ok":
            accounted = all(sum(rank["counted"].values()) == rank["expected"] for rank in ranks)
            if not accounted:
                status = "failed"
                reasons.append(
                    f"the backends counted {counted} calls, not {s.calls_made} on each of {len(ranks)} ranks"
                )
            elif wrong:
                status = "wrong"
                reasons.append(f"{wrong} elements are wrong, the largest error is {max(errors):.3g}")
            elif s.point.backend != AUTO and picked != s.point.backend:
                status = "failed"
                reasons.append(f"{s.point.backend} was asked for by name, but {picked or 'nothing'} was taken")
            elif self._team.rank == 0 and not len(s.all_latencies()):
                status = "unsteady"
                reasons.append(
                    f"all {s.n_invalid} time windows were missed: something else keeps the ranks' cores busy"
                )
            elif self._team.rank == 0 and not s.steady and not is_steady(s.all_latencies()):
                # too few or too restless warm-up iterations prove nothing: the samples themselves may
                status = "unsteady"
                reasons.append(
                    f"no steady state within {s.warmup_iterations} warm-up iterations, nor among the samples"
                )
        if not self.clocks.ok:
            reasons.append(self.clocks.verdict())
        if status == "ok" and self._team.rank == 0:
            reasons += remarks(s.all_latencies())
        noises = [noise_module.from_dict(rank["noise"]) for rank in ranks if rank["noise"] is not None]
        values: Row = {
            "order": s.order,
            "backend_picked": picked,
            "provider": "" if not picked or "+" in picked else s.place.coordinator.provider(picked),
            "decision": s.decision,
            "sync": self.sync,
            "loop": "native" if s.native else "python",
            "timing": "batched" if s.batch > 1 else "single",
            "oversubscribed": self._team.oversubscribed,
            "shared_device": False,
            "status": status,
            "reason": "; ".join(reasons),
            "n_invalid": s.n_invalid,
            "iters_per_sample": s.batch,
            "warmup_iterations": s.warmup_iterations,
            "checked": s.checked,
            "wrong_count": wrong if s.checked else None,
            "max_abs_error": _finite(max(errors)) if s.checked else None,
            "noise": json.dumps(noise_module.record(noises, max(1, s.calls_made))) if noises else "",
            "elapsed_s": s.elapsed_s,
        }
        if self._team.rank == 0:
            values.update(self._times(s))
        return {"point": s.point, "values": values}

    def _times(self, s: _Session) -> Row:
        latencies = s.all_latencies()
        if not len(latencies):
            return {"n_samples": 0, "target_reached": False}
        interval = median_interval(latencies)
        synchronised = self.sync == "window" and s.batch == 1
        size, kind, n = s.point.size_bytes, s.point.collective, s.point.world_size
        return {
            "n_samples": len(latencies),
            "n_effective": interval.n_effective,
            "target_reached": interval.relative_half_width <= self._settings.target_ci,
            "latency_median_s": interval.median,
            "latency_ci_low_s": interval.low if interval.exact else None,
            "latency_ci_high_s": interval.high if interval.exact else None,
            "latency_p90_s": quantile(latencies, 0.90),
            "latency_p99_s": quantile(latencies, 0.99),
            "latency_min_s": float(latencies.min()),
            "latency_max_s": float(latencies.max()),
            "t_win_median_s": float(np.median(np.concatenate(s.t_win))) if synchronised else None,
            "skew_median_s": float(np.median(np.concatenate(s.skew))) if synchronised else None,
            "algbw_gb_per_s": algbw_gb_per_s(size, interval.median),
            "busbw_gb_per_s": busbw_gb_per_s(kind, size, interval.median, n),
        }


def _finite(value: float) -> float | None:
    """JSON has no infinity; an error that is not finite is told by wrong_count."""
    return value if math.isfinite(value) else None


def _groups(points: Sequence[tuple[int, Point]]) -> Iterator[list[tuple[int, Point]]]:
    """Points whose visits alternate: a few at a time, so that results keep coming, within a bound of memory."""
    group: list[tuple[int, Point]] = []
    held = 0
    for order, point in points:
        size = 2 * point.size_bytes
        if group and (len(group) == INTERLEAVED or held + size > INTERLEAVED_BYTES):
            yield group
            group, held = [], 0
        group.append((order, point))
        held += size
    if group:
        yield group
