"""Regret: how much longer today's pick takes than the fastest correct backend, point by point."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from commbench.analysis.segments import Array, Estimate, estimate_over_launches, runs, typical
from commbench.analysis.tune import CELL_COLUMNS, Cell, KernelOf, cell_of, countable, same_name
from commbench.errors import UsageError
from commbench.types import AUTO

if TYPE_CHECKING:
    import pandas as pd

DEAD_ZONE = 0.05  # regret that must be exceeded, beyond noise, for a size to stand in a dead zone
ERROR_RATE = 0.05  # of calling any size a dead zone where there is none


@dataclass(frozen=True, slots=True)
class PointRegret:
    """One size of one cell. picked: the backend that the coordinator took, kernel: which kernel that was. fastest:
    the fastest correct forced backend; pick_s, fastest_s: typical latencies in seconds.

    regret: the typical ratio of the two within a launch, minus 1; 0 where they are the same kernel. low, high: its 95 %
    interval, from launch to launch (from the intervals within the launch, if there is one only). dead: it is clearly
    above DEAD_ZONE: its lower bound is, at an error rate of 5 % shared by all points and rivals (Bonferroni).
    """

    cell: Cell
    size_bytes: int
    picked: str
    kernel: str
    fastest: str
    pick_s: float
    fastest_s: float
    regret: float
    low: float
    high: float
    launches: int
    dead: bool


@dataclass(frozen=True, slots=True)
class DeadZone:
    """Neighbouring measured sizes, first to last, at which the pick is clearly slower than ``fastest``."""

    cell: Cell
    first_bytes: int
    last_bytes: int
    picked: str
    fastest: str
    worst: float


@dataclass(frozen=True, slots=True)
class RegretReport:
    """points: worst first. dead_zones: by cell and size. left_out: reason → measurements that do not count.

    repeat: how much two measurements of one kernel at one point differ in the same launch (a pick and the same
    backend forced): median of |log-ratio|; NaN where that never happens. It is the noise to hold regrets against.
    """

    points: tuple[PointRegret, ...]
    dead_zones: tuple[DeadZone, ...]
    left_out: Mapping[str, int]
    repeat: float

    @property
    def mean(self) -> float:
        return float(np.mean([p.regret for p in self.points]))

    @property
    def worst(self) -> PointRegret:
        return self.points[0]


def regret(points: pd.DataFrame, policy: str, kernel_of: KernelOf = same_name) -> RegretReport:
    """The regret of a policy's picks at every point that was measured both with ``auto`` and with forced backends.

    points: ``schema.POINT_COLUMNS``, one run or several. Raises UsageError when there is no such point.
    """
    frame, left_out = countable(points, kernel_of)
    auto = frame[(frame["backend_requested"] == AUTO) & (frame["policy"] == policy)]
    forced = frame[frame["backend_requested"] != AUTO]
    if auto.empty:
        others = sorted(set(frame.loc[frame["backend_requested"] == AUTO, "policy"].astype(str)))
        hint = f"; it has auto points of {', '.join(others)}" if others else "; measure with --backends auto,a,b"
        raise UsageError(f"the run has no auto point of policy {policy!r} that counts{hint}")
    if forced.empty:
        raise UsageError(
            "the run has no forced point that counts, so nothing to hold the picks against; "
            "measure with --backends auto,a,b"
        )
    keys = [*CELL_COLUMNS, "size_bytes"]
    by_point = dict(list(forced.groupby(keys, sort=False, dropna=False)))
    found: list[PointRegret] = []
    repeats: list[Array] = []
    picks = [(key, group) for key, group in auto.groupby(keys, sort=False, dropna=False) if key in by_point]
    for key, group in picks:
        point, repeat = _point(key, group, by_point[key], ERROR_RATE / len(picks))
        found.append(point)
        repeats.append(repeat)
    if not found:
        raise UsageError("no point was measured both with auto and with a forced backend; measure both in one sweep")
    zones = _dead_zones(found)
    same = np.concatenate(repeats) if repeats else np.empty(0)
    found.sort(key=lambda p: (-p.regret, -p.low, p.size_bytes))
    return RegretReport(tuple(found), tuple(zones), left_out, float(np.median(same)) if len(same) else math.nan)


def _by_launch(frame: pd.DataFrame) -> dict[str, float]:
    """launch → log latency, the mean over several measurements."""
    logs: dict[str, list[float]] = {}
    for launch, latency in zip(frame["launch_key"], frame["latency_median_s"], strict=True):
        logs.setdefault(str(launch), []).append(math.log(float(latency)))
    return {launch: float(np.mean(values)) for launch, values in logs.items()}


def _typical(logs: Mapping[str, float]) -> float:
    return float(typical(np.array([list(logs.values())]))[0])


def _point(
    key: tuple[Any, ...], auto: pd.DataFrame, forced: pd.DataFrame, error_rate: float
) -> tuple[PointRegret, Array]:
    cell, size = cell_of(key[:-1]), int(key[-1])
    kernel = str(auto["kernel"].mode()[0])
    logs = {str(name): _by_launch(group) for name, group in forced.groupby("kernel", sort=True)}
    own = _by_launch(auto[auto["kernel"] == kernel])
    repeat = np.array([abs(own[k] - logs[kernel][k]) for k in own if k in logs.get(kernel, {})])
    # the pick and the same kernel forced are two measurements of one thing
    again = logs.get(kernel, {})
    pick = {k: float(np.mean([v[k] for v in (own, again) if k in v])) for k in {**own, **again}}
    # within launches: what slows a whole launch slows both
    ratios = {
        name: np.array([pick[k] - other[k] for k in pick if k in other])
        for name, other in logs.items()
        if name != kernel
    }
    longer = {name: float(typical(own[None])[0]) for name, own in ratios.items() if len(own)}
    fastest = max(longer, key=lambda name: longer[name], default=kernel)
    if longer.get(fastest, 0.0) <= 0:
        fastest = kernel
    pick_s = math.exp(_typical(pick))
    fastest_s = pick_s if fastest == kernel else math.exp(_typical(logs[fastest]))
    estimate = sure = Estimate(0.0, 0.0, 0.0, len(pick))
    if fastest != kernel:
        estimate = estimate_over_launches(ratios[fastest])
        sure = estimate_over_launches(ratios[fastest], confidence=1 - 2 * error_rate / len(longer))
        if not estimate.known:
            estimate = sure = _within(auto, forced[forced["kernel"] == fastest], longer[fastest])
    return (
        PointRegret(
            cell, size, str(auto["backend_picked"].mode()[0]), kernel, fastest, pick_s, fastest_s,
            math.expm1(max(0.0, longer.get(fastest, 0.0))), math.expm1(estimate.low), math.expm1(estimate.high),
            estimate.launches, sure.low > math.log1p(DEAD_ZONE),
        ),
        repeat,
    )  # fmt: skip


def _within(auto: pd.DataFrame, fastest: pd.DataFrame, mean: float) -> Estimate:
    """With one launch: from the ends of the intervals within it. Wide, since both ends are taken at their worst."""

    def ends(frame: pd.DataFrame) -> tuple[float, float]:
        low, high = (
            frame[c].to_numpy(dtype=np.float64, na_value=np.nan) for c in ("latency_ci_low_s", "latency_ci_high_s")
        )
        return float(np.log(low).mean()), float(np.log(high).mean())

    (a_low, a_high), (f_low, f_high) = ends(auto), ends(fastest)
    return Estimate(mean, a_low - f_high, a_high - f_low, 1)


def _dead_zones(points: Sequence[PointRegret]) -> list[DeadZone]:
    zones = []
    for cell in dict.fromkeys(p.cell for p in points):
        own = sorted((p for p in points if p.cell == cell), key=lambda p: p.size_bytes)
        for first, last in runs([(p.kernel, p.fastest) if p.dead else None for p in own]):
            if own[first].dead:
                part = own[first : last + 1]
                zones.append(
                    DeadZone(
                        cell, part[0].size_bytes, part[-1].size_bytes, part[0].kernel, part[0].fastest,
                        max(p.regret for p in part),
                    )
                )  # fmt: skip
    return zones
