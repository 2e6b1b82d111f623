"""Measuring points: visits, checks, the look at the interval, and failures that cost one point only.

All ranks run this in step. Whatever depends on time is decided by rank 0 and handed to the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from commbench.coordinator.group import GroupCoordinator
from commbench.errors import BackendUnavailable, CommbenchError, PeerLost
from commbench.measure import noise as noise_module
from commbench.measure.buffers import copies_for
from commbench.measure.device import Device
from commbench.measure.eager_gpu import event_facts
from commbench.measure.gpu_noise import reader as gpu_reader
from commbench.measure.host import VISIT_S, HostTiming, Keep
from commbench.measure.loop import Call
from commbench.measure.numerics import CALLS, examine
from commbench.measure.observer import Observer, Observers
from commbench.measure.on_device import EventTiming, GraphTiming
from commbench.measure.places import Place, Places, buffers_for
from commbench.measure.point_state import PointState
from commbench.measure.rows import Row, row_of
from commbench.measure.settings import Settings
from commbench.measure.stopping import FEWEST_VISITS, Progress, StoppingRule
from commbench.measure.team import PointFailed, Team
from commbench.measure.timing import Timing
from commbench.measure.torch_device import open_device
from commbench.policy import Policy
from commbench.types import AUTO, COLLECTIVES, Point

NUMERIC = "all_reduce"  # the collective whose numbers are looked at
RECOVERY_S = 5.0  # for all ranks to leave a failed point
INTERLEAVED = 8  # points whose visits alternate
INTERLEAVED_BYTES = 512 << 20  # buffers that alternating points may hold per rank


class Meter:
    """Measures points on one group. Every rank makes one and calls the same methods in the same order.

    ``keep(point_id, first, starts, ends, valid)`` takes the raw samples on rank 0; ``tell(label, order)`` hears
    which point is being visited; ``observers`` hear more. ``policies``: those that points name, by that name; without
    it the coordinator's own picks for all. ``places``: where points of a group run, by the group's name; without it
    all run on ``coordinator``. ``device``: how to time on it, for tests; without it, that of the settings (none for the
    CPU). ``clock_s`` is for tests.
    """

    def __init__(
        self,
        coordinator: GroupCoordinator,
        team: Team,
        settings: Settings,
        *,
        cache_bytes: int,
        keep: Keep | None = None,
        tell: Callable[[str, int], None] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        policies: Mapping[str, Policy] | None = None,
        places: Places | None = None,
        observers: Sequence[Observer] = (),
        device: Device | None = None,
    ) -> None:
        self._places = places or {}
        self._everywhere = Place(coordinator)
        self._policies = policies or {}
        self._team = team
        self._settings = settings
        self._cache_bytes = cache_bytes
        self._tell = tell
        self._observer = Observers(observers)
        self._clock_s = clock_s
        self._started_s = clock_s()
        self.clocks = team.compare_clocks()
        # a window needs a core for each rank and one clock for all
        windows = not team.oversubscribed and self.clocks.ok
        self.host = HostTiming(team, settings, windows=windows, keep=keep, observer=self._observer, clock_s=clock_s)
        self._device = device
        if device is None and settings.device != "cpu":
            self._device = open_device(team, coordinator.device)
        self.shared_device = False
        if self._device is not None:
            common: dict[str, Any] = {"keep": keep, "observer": self._observer, "clock_s": clock_s}
            events = event_facts(self._device, team)
            self._eager = EventTiming(self._device, team, settings, events, **common)
            self._graph = GraphTiming(self._device, team, settings, events, **common)
            identities = team.gather_texts(self._device.identity)
            self.shared_device = len(set(identities)) < len(identities)
        gpu = None if self._device is None else gpu_reader(self._device.identity.rpartition(" ")[2])
        self._noise = noise_module.NoiseMeter(gpu=gpu)
        self._rng = np.random.default_rng(settings.seed)
        self._opened: list[torch.Tensor] = []  # must not be freed while their backend lives (Backend.opens_inputs)

    # ---- the launch ---------------------------------------------------------------------------------------

    def measure(self, points: Sequence[tuple[int, Point]]) -> Iterator[Row]:
        """Measure (order, point) pairs; yields each row as it is finished, the same number on every rank.

        Rows of ranks other than 0 hold no results. A point that fails costs itself only; PeerLost ends all.
        """
        left = len(points)
        for group in _groups(points):
            states = [
                PointState(order, point, self._places.get(point.group, self._everywhere)) for order, point in group
            ]
            while states:
                for index in self._rng.permutation(len(states)):
                    state = states[index]
                    self._guarded(state, left)
                    if state.status:
                        yield self._row(state)
                        left -= 1
                states = [s for s in states if not s.status]

    def _row(self, s: PointState) -> Row:
        problem = "" if self.clocks.ok else self.clocks.verdict()
        return row_of(
            s,
            self._team,
            self._timing(s.point),
            target_ci=self._settings.target_ci,
            shared_device=self.shared_device,
            clock_problem=problem,
        )

    def _timing(self, point: Point) -> Timing:
        """Calls that wait on the host for the device (objects, a barrier) are timed there."""
        if self._device is None or not COLLECTIVES[point.collective].dispatched or point.collective == "barrier":
            return self.host
        return self._graph if point.mode == "graph" else self._eager

    def _cannot(self, point: Point) -> str:
        """Why a point cannot be timed here at all, or ""."""
        if point.mode != "graph":
            return ""
        if self._device is None or not self._device.graphs:
            return f"mode graph: {self._settings.device} has no graphs to capture; take --mode eager"
        if self._settings.graph_timing == "isolated" and not self._device.isolated:
            return "mode graph: streams cannot meet on this device, so no call is isolated; take --graph-timing chained"
        return ""

    def _guarded(self, s: PointState, points_left: int) -> None:
        """Visit a point on all ranks; if it fails on one, the point ends as failed on all, and only it."""
        team = self._team
        started = self._clock_s()
        self._observer.visit(s.order, s.point, s.visits)
        try:
            self._visit(s, points_left)
            team.barrier()
        except PointFailed as error:
            s.status, s.reason = "failed", str(error)
        except PeerLost:
            raise
        except CommbenchError as error:
            self._give_up(s, str(error))
        except (RuntimeError, ValueError, MemoryError, OSError, TypeError) as error:
            self._give_up(s, f"{type(error).__name__}: {error}".strip().splitlines()[0])
        s.elapsed_s += self._clock_s() - started
        if s.status == "failed":
            try:
                team.recover(RECOVERY_S)
            except PeerLost as error:
                # a rank is held in the collective: only a new launch gets past this point
                raise PeerLost(f"{s.reason} ({error})", error.rank) from error
            if self._device is not None:
                self._device.rejoin(team.barrier)
            s.calls_counted.clear()
        if s.status:
            s.release()
        self._observer.left(s.status, s.reason)

    def _give_up(self, s: PointState, why: str) -> None:
        self._observer.failed(why)
        self._team.fail(why)
        s.status, s.reason = "failed", f"rank {self._team.rank}: {why}"

    # ---- one visit ------------------------------------------------------------------------------------------

    def _visit(self, s: PointState, points_left: int) -> None:
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
        # calls outside of a capture, too, take what a graph will
        with coordinator.under(policy), coordinator.forcing(forced), coordinator.in_mode(point.mode):
            before = self._noise.snapshot()
            counts = coordinator.call_counts()
            if s.visits == 0:
                self._first_visit(s, time_cap)
            else:
                self._return_visit(s)
            if not s.status:
                self._sample(s, time_cap)
            if s.progress is not None and s.progress.done and not s.status:
                self._last_check(s)
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

    def _first_visit(self, s: PointState, time_cap: float) -> None:
        self._observer.phase("prepare")
        point = s.point
        copies = copies_for(point, self._cache_bytes)
        device = s.place.coordinator.device
        if problem := self._cannot(point):
            s.status, s.reason = "skipped", problem
            return
        s.seed = (self._settings.seed << 20) + s.order
        s.buffers = [buffers_for(point, s.place, device) for _ in range(copies)]
        coordinator = s.place.coordinator
        s.calls = [b.call(coordinator) for b in s.buffers]
        timing = self._timing(point)
        if timing is self.host and self._device is not None:
            s.calls = [settled(call, self._device.synchronize) for call in s.calls]
        try:
            decision = coordinator.decide(s.buffers[0].signature(coordinator))
        except BackendUnavailable as error:  # the same on all ranks: decisions depend on the call alone
            s.status, s.reason = "skipped", error.reason
            return
        s.decision = json.dumps(decision.to_dict())
        if point.collective == NUMERIC:
            backend = coordinator.backend(decision.picked)
            s.quantised = s.buffers[0].quantised = backend.quantised
            if point.mode == "graph" and backend.opens_inputs:
                self._opened += [b.input for b in s.buffers if b.input is not None]
        self._observer.decided(decision.picked)
        timing.prepare(s, decision.picked)
        for extra in s.buffers[1:]:
            extra.refill(s.seed, exact=True)
        self._check(s, exact=True)
        self._observer.phase("warm-up")
        timing.warm_up(s, time_cap)

    def _return_visit(self, s: PointState) -> None:
        """The caches hold another point's data by now: a few iterations before samples count."""
        self._observer.phase("return")
        if s.point.placement == "in" and s.point.op:
            for buffers in s.buffers:  # repeated in-place reductions run off to infinity
                buffers.refill(s.seed, exact=True)
        n = 1 if s.block_n <= 2 else 3
        self._timing(s.point).take(s, n * len(s.calls) if s.block_n > 50 * len(s.calls) else n, keep=False)

    def _check(self, s: PointState, exact: bool) -> None:
        """Calls on fresh inputs, held against the right answer."""
        self._observer.phase("check")
        self._timing(s.point).check(s, s.seed + (0 if exact else 1 << 40), exact)

    def _last_check(self, s: PointState) -> None:
        """After timing: a call on random inputs, and of an all-reduce everything that numerics.py looks at."""
        if s.point.collective != NUMERIC or s.point.mode == "graph":
            self._check(s, exact=False)
        if s.point.collective != NUMERIC:
            return
        self._observer.phase("check")
        team, call = self._team, self._timing(s.point).once(s)
        if s.place.takes_part:
            s.numerics = examine(s.buffers[0], call, team.barrier, s.seed + (1 << 40))
            s.check.add(s.numerics.check)
        else:
            for _ in range(CALLS):
                team.barrier()
                call()
        s.checked = True

    def _sample(self, s: PointState, time_cap: float) -> None:
        """One visit's block, then rank 0's look at the interval."""
        self._observer.phase("sample")
        timing = self._timing(s.point)
        timing.take(s, s.block_n)
        s.visits += 1
        done = next_n = 0
        if self._team.rank == 0:
            rule = StoppingRule(self._settings.target_ci, time_cap)
            s.progress = rule.look(s.all_latencies(), s.visits, s.elapsed_s)
            done = int(s.progress.done)
            # blocks grow with the total, within one page and the time that is left
            wanted = s.progress.next_n - len(s.all_latencies())
            left = max(VISIT_S, time_cap - s.elapsed_s)
            next_n = max(2, min(timing.largest_block, wanted, int(left / s.each_s)))
        done, n = self._team.from_first(done, next_n)
        if self._team.rank != 0:
            s.progress = Progress(bool(done), False, None, 0)
        if s.visits >= FEWEST_VISITS:
            s.block_n = n


def settled(call: Call, settle: Callable[[], None]) -> Call:
    """The call, and then what it queued on the device."""

    def both() -> None:
        call()
        settle()

    return both


def _groups(points: Sequence[tuple[int, Point]]) -> Iterator[list[tuple[int, Point]]]:
    """Points whose visits alternate: a few at a time, so that results keep coming, within a bound of memory. Neighbours
    that differ in backend and policy only stay in one group where they fit."""
    group: list[tuple[int, Point]] = []
    held = 0
    for _, block in groupby(points, key=lambda pair: pair[1].point_key):
        rivals = list(block)
        together = sum(2 * point.size_bytes for _, point in rivals)
        if group and (len(group) + len(rivals) > INTERLEAVED or held + together > INTERLEAVED_BYTES):
            yield group
            group, held = [], 0
        for order, point in rivals:
            size = 2 * point.size_bytes
            if group and (len(group) == INTERLEAVED or held + size > INTERLEAVED_BYTES):
                yield group
                group, held = [], 0
            group.append((order, point))
            held += size
    if group:
        yield group
