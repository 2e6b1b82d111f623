"""From measured points to thresholds: winner intervals per collective, dtype, world size, mode and cache.

Forced points say how fast each backend is; points that asked for ``auto`` say what today's policy takes. A change of
today's policy must earn its place: see ``Rules``. docs/tuning.md describes the method.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from commbench.analysis.launches import t_quantile
from commbench.analysis.segments import (
    Array,
    Crossover,
    Estimate,
    crossover,
    estimate_over_launches,
    octave_weights,
    runs,
    segment,
    typical,
)
from commbench.errors import CommbenchError, UsageError
from commbench.statistics import CONFIDENCE
from commbench.types import AUTO, COLLECTIVES
from commbench.units import format_size

if TYPE_CHECKING:
    import pandas as pd

CELL_COLUMNS = ("collective", "op", "dtype", "world_size", "mode", "cache", "layout", "placement", "group")
ROUND_WITHIN_OCTAVES = 1 / 16  # a threshold may move so far from its estimate to become a round number

FEWEST_LAUNCHES = 2  # that must tell of a backend at a size, where there were several


class TooLittleData(CommbenchError):
    """Too few measurements count to say anything. Exit code 3: inconclusive."""

    exit_code = 3


# (collective, dtype, world size, backend, size in bytes of the total array) → the backend that, forced, is that kernel
KernelOf = Callable[[str, str, int, str, int], str]


def same_name(collective: str, dtype: str, world_size: int, backend: str, size_bytes: int) -> str:
    """The KernelOf of backends that have one kernel each."""
    return backend


@dataclass(frozen=True, slots=True)
class Rules:
    """When a change of today's policy is made. All are ratios minus one; intervals are one-sided.

    keep_within: gains up to this are no reason to change (hysteresis). least_gain: what the lower bound of the gain
    must exceed. error_rate: of making any change in a cell where nothing is faster; shared by the changes that are
    looked at (Bonferroni).
    """

    keep_within: float = 0.02
    least_gain: float = 0.01
    error_rate: float = 0.05


@dataclass(frozen=True, slots=True)
class Cell:
    """What one table of winner intervals is for: everything about a point but size, backend and policy."""

    collective: str
    op: str
    dtype: str
    world_size: int
    mode: str = "eager"
    cache: str = "hot"
    layout: str = "contiguous"
    placement: str = "in"
    group: str = "world"

    @property
    def title(self) -> str:
        """In words, with what is unusual only."""
        parts = [self.collective]
        if self.op not in ("", "sum"):
            parts.append(self.op)
        parts += [self.dtype, f"{self.world_size} ranks"]
        parts += [
            v for v, usual in ((self.mode, "eager"), (self.cache, "hot"), (self.layout, "contiguous")) if v != usual
        ]
        if self.placement != COLLECTIVES[self.collective].placements[0]:
            parts.append(f"{self.placement}-place")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Curves:
    """One cell's measurements. logs: (backends, sizes, launches), natural logs of launch medians in seconds, NaN where
    none; sizes: bytes, ascending. today: the kernel that today's policy takes at each size, "" where unknown.
    auto_logs: (sizes, launches), the same calls as today's policy made them. launch_keys: the launches' names."""

    cell: Cell
    sizes: tuple[int, ...]
    backends: tuple[str, ...]
    logs: Array
    today: tuple[str, ...]
    auto_logs: Array
    launch_keys: tuple[str, ...] = ()

    @property
    def launches(self) -> int:
        return int(self.logs.shape[2])

    def typical(self) -> Array:
        """(sizes, backends): the typical log latency over launches."""
        return typical(self.logs).T

    def difference(self, first: str, second: str) -> Array:
        """(sizes, launches): log(T_first / T_second)."""
        difference: Array = self.logs[self.backends.index(first)] - self.logs[self.backends.index(second)]
        return difference

    def restricted(self, launches: NDArray[np.bool_]) -> Curves:
        """The same with some of the launches only."""
        keys = tuple(key for key, there in zip(self.launch_keys, launches, strict=False) if there)
        logs, auto_logs = self.logs[:, :, launches], self.auto_logs[:, launches]
        return Curves(self.cell, self.sizes, self.backends, logs, self.today, auto_logs, keys)


@dataclass(frozen=True, slots=True)
class Interval:
    """Sizes first_bytes … last_bytes for which ``backend`` is taken. today: what today's policy takes there.

    gain: log(T_today / T_backend) over the sizes where they differ, weighted by octaves; None where they never do.
    """

    backend: str
    first_bytes: int
    last_bytes: int
    today: tuple[str, ...]
    gain: Estimate | None

    @property
    def changed(self) -> bool:
        return any(name != self.backend for name in self.today)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Between two intervals: sizes up to size_bytes take ``left``, larger ones ``right``.

    crossover: where the two curves meet, with its interval; None where they were not both measured. kept: today's
    policy changes at this place too, and nothing measured speaks for another.
    """

    size_bytes: int
    left: str
    right: str
    crossover: Crossover | None
    kept: bool


@dataclass(frozen=True, slots=True)
class Regret:
    """Time of the pick over time of the fastest backend, minus 1, per size; mean is weighted by octaves.

    Both times are of one launch, and which backend is the fastest is told by the other launches, so that noise neither
    enters through what slows a whole launch nor makes the fastest look faster than it is. Below zero is noise.

    low, high: 95 % interval of the mean, from launch to launch; size_low, size_high: those at each size. NaN with one
    launch.
    """

    per_size: tuple[float, ...]
    mean: float
    worst: float
    worst_size_bytes: int
    low: float = math.nan
    high: float = math.nan
    size_low: tuple[float, ...] = ()
    size_high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What launches that had no part in the choice say of it.

    launches: how many told anything. tuned, today: regrets of the two policies' picks. gain: over all sizes at which
    the two differ, log(T_today / T_tuned) as their own calls took it; None where they never do. noise: as in
    CellTuning. taken_back: changes that these launches did not bear out, in words; the final picks are without them.
    astray: sizes at which the tuned policy did not take what it should, with what it took.
    """

    launches: int
    tuned: Regret | None
    today: Regret | None
    gain: Estimate | None
    noise: float
    taken_back: tuple[str, ...] = ()
    astray: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class CellTuning:
    """The result for one cell. picks: the backend chosen at each measured size.

    regret_today and regret_tuned: in the very data that the choice was made from. regret_held_out: every launch is
    judged by a choice made without it; None below three launches. noise: the typical standard deviation, between
    launches, of the log-ratio of two backends at one size. provable: the smallest gain at a single size that these
    launches could have shown, by ``Rules``. held_out: fresh launches' word, where there were any.
    """

    curves: Curves
    picks: tuple[str, ...]
    intervals: tuple[Interval, ...]
    boundaries: tuple[Boundary, ...]
    regret_tuned: Regret
    regret_today: Regret | None
    regret_held_out: Regret | None
    noise: float
    provable: float
    held_out: HeldOut | None = None

    @property
    def cell(self) -> Cell:
        return self.curves.cell

    @property
    def changed(self) -> bool:
        return any(i.changed for i in self.intervals)

    def pick(self, size_bytes: int) -> str:
        """The backend chosen for a size inside the measured ones. Raises UsageError outside."""
        check_inside(self.curves, size_bytes)
        for boundary in self.boundaries:
            if size_bytes <= boundary.size_bytes:
                return boundary.left
        return self.intervals[-1].backend


@dataclass(frozen=True, slots=True)
class Tuning:
    """All cells, and the measurements that do not count: reason → how many."""

    cells: tuple[CellTuning, ...]
    left_out: Mapping[str, int]
    rules: Rules


def check_inside(curves: Curves, size_bytes: int) -> None:
    """Raise UsageError unless the size lies between the smallest and the largest that were measured."""
    if not curves.sizes[0] <= size_bytes <= curves.sizes[-1]:
        raise UsageError(
            f"{curves.cell.title}: size {size_bytes} ({format_size(size_bytes)}) lies outside the measured sizes, "
            f"{format_size(curves.sizes[0])} to {format_size(curves.sizes[-1])}; measure it, or leave it out"
        )


# ---- which measurements count ------------------------------------------------------------------------------------


def countable(points: pd.DataFrame, kernel_of: KernelOf = same_name) -> tuple[pd.DataFrame, dict[str, int]]:
    """The measurements that count, with columns ``kernel`` and ``launch_key``; and of the others, reason → how many.

    points: the columns of ``schema.POINT_COLUMNS``, of one run or several. A measurement counts if it is ok, its
    results were compared and right, and all its calls took one backend: the one that was forced, where one was.
    Backends that quantise are no rivals of exact ones, and ranks that share a device say nothing about others.
    """
    frame = points.copy()
    requested, picked = frame["backend_requested"].fillna(""), frame["backend_picked"].fillna("")
    has_data = frame["dtype"] != "none"
    reasons = {
        "wrong results": (frame["wrong_count"].fillna(0) > 0) | (frame["status"] == "wrong"),
        **{status: frame["status"] == status for status in ("failed", "timeout", "refused", "unsteady", "skipped")},
        "results were not compared": has_data & ~frame["checked"].fillna(False).astype(bool),
        "calls took several backends": picked.str.contains("+", regex=False) | (picked == ""),
        "another backend than the forced one was taken": (requested != AUTO) & (requested != picked),
        "ranks shared a device": frame["shared_device"].astype("boolean").fillna(False),
        "quantised results, which are not as exact as the others'": frame["quantised"].fillna("").astype(str) != "",
        "no latency": frame["latency_median_s"].isna() | (frame["latency_median_s"].fillna(0) <= 0),
    }
    left_out: dict[str, int] = {}
    good = np.ones(len(frame), dtype=bool)
    for reason, mask in reasons.items():
        hit = mask.to_numpy(dtype=bool, na_value=False) & good
        if hit.any():
            left_out[reason] = int(hit.sum())
        good &= ~hit
    frame = frame[good].copy()
    facts = frame[["collective", "dtype", "world_size", "backend_picked", "size_bytes"]].itertuples(index=False)
    known: dict[tuple[str, str, int, str, int], str] = {}
    kernels = []
    for c, d, n, b, size in facts:
        key = (str(c), str(d), int(n), str(b), int(size))
        if key not in known:
            known[key] = kernel_of(*key)
        kernels.append(known[key])
    frame["kernel"] = kernels
    frame["launch_key"] = frame["run_id"].fillna("").astype(str) + "/" + frame["launch"].astype(str)
    return frame, left_out


def curves_of(frame: pd.DataFrame, policy: str) -> list[Curves]:
    """One ``Curves`` per cell that has forced points of two backends or more. frame: from ``countable``.

    ``auto`` points of ``policy`` say what today's policy takes; every point, asked for by name or not, counts as a
    measurement of the kernel that it took. Raises UsageError when there is nothing to tune: no forced points, or one
    backend only; TooLittleData where launches did not tell enough of any size.
    """
    forced = frame[frame["backend_requested"] != AUTO]
    if forced.empty:
        raise UsageError(
            "no forced point counts: nothing says how fast each backend is; measure with --backends auto,a,b"
        )
    found = []
    single: dict[str, str] = {}
    sparse: list[str] = []
    for key, group in frame.groupby(list(CELL_COLUMNS), sort=False, dropna=False):
        cell = cell_of(key)
        if cell.dtype == "none":  # a barrier has no size to divide
            continue
        curves = _curves(cell, group, policy)
        if curves is None:
            continue
        if len(curves.backends) < 2:
            single[cell.title] = curves.backends[0]
        elif (told := _well_measured(curves)) is None:
            sparse.append(cell.title)
        else:
            found.append(told)
    if not found and sparse:
        raise TooLittleData(
            f"nothing can be tuned: in {'; '.join(sparse)} no two backends were measured at the same size in "
            f"{FEWEST_LAUNCHES} launches; the machine may have been too busy. Measure again with more time"
        )
    if not found:
        which = "; ".join(f"{title}: only {name}" for title, name in single.items()) or "no cell has a forced point"
        raise UsageError(f"tuning compares backends and needs two or more ({which}); name more with --backends")
    return found


def cell_of(values: Sequence[Any]) -> Cell:
    """The cell with these values of CELL_COLUMNS."""
    collective, op, dtype, world_size, *others = values
    return Cell(str(collective), str(op), str(dtype), int(world_size), *map(str, others))


def _curves(cell: Cell, group: pd.DataFrame, policy: str) -> Curves | None:
    forced = group[group["backend_requested"] != AUTO]
    if forced.empty:
        return None
    auto = group[(group["backend_requested"] == AUTO) & (group["policy"] == policy)]
    # what a policy takes counts as a measurement of that kernel; other sizes than the forced ones cannot be compared
    sizes = sorted({int(s) for s in forced["size_bytes"]})
    launches = sorted(set(group["launch_key"]), key=lambda key: (len(key), key))
    inside = group[group["size_bytes"].isin(sizes)]
    backends = sorted(set(inside["kernel"]))
    place_b = {b: i for i, b in enumerate(backends)}
    place_s = {s: i for i, s in enumerate(sizes)}
    place_l = {k: i for i, k in enumerate(launches)}
    total = np.zeros((len(backends), len(sizes), len(launches)))
    count = np.zeros_like(total)
    _add(total, count, inside, [place_b, place_s, place_l], ["kernel", "size_bytes", "launch_key"])
    with np.errstate(invalid="ignore"):
        logs = np.where(count > 0, total / count, np.nan)
    a_total = np.zeros((len(sizes), len(launches)))
    a_count = np.zeros_like(a_total)
    auto = auto[auto["size_bytes"].isin(sizes)]
    _add(a_total, a_count, auto, [place_s, place_l], ["size_bytes", "launch_key"])
    with np.errstate(invalid="ignore"):
        auto_logs = np.where(a_count > 0, a_total / a_count, np.nan)
    taken: dict[int, Counter[str]] = {}
    for size, kernel in zip(auto["size_bytes"], auto["kernel"], strict=True):
        taken.setdefault(int(size), Counter())[str(kernel)] += 1
    today = tuple(taken[s].most_common(1)[0][0] if s in taken else "" for s in sizes)
    return Curves(cell, tuple(sizes), tuple(backends), logs, today, auto_logs, tuple(launches))


def _well_measured(curves: Curves) -> Curves | None:
    """Without what too few launches tell of: a backend at a size that fewer than FEWEST_LAUNCHES measured (one is
    enough where there was only one), a size that has fewer than two backends left and not today's pick, and a size at
    which today's pick is not known though it is elsewhere. None if no size has two backends."""
    fewest = min(FEWEST_LAUNCHES, curves.launches)
    enough = np.isfinite(curves.logs).sum(axis=2) >= fewest
    logs = np.where(enough[:, :, None], curves.logs, np.nan)
    alone = [t in curves.backends and enough[curves.backends.index(t), i] for i, t in enumerate(curves.today)]
    sizes = (enough.sum(axis=0) >= 2) | np.array(alone)
    if any(curves.today):
        sizes &= np.array([bool(t) for t in curves.today])
    backends = (enough & sizes).any(axis=1)
    if not (enough.sum(axis=0) >= 2)[sizes].any():
        return None
    return Curves(
        curves.cell,
        tuple(s for s, keep in zip(curves.sizes, sizes, strict=True) if keep),
        tuple(b for b, keep in zip(curves.backends, backends, strict=True) if keep),
        logs[backends][:, sizes],
        tuple(t for t, keep in zip(curves.today, sizes, strict=True) if keep),
        curves.auto_logs[sizes],
        curves.launch_keys,
    )


def _add(
    total: Array, count: Array, frame: pd.DataFrame, places: Sequence[Mapping[Any, int]], columns: Sequence[str]
) -> None:
    """Add the logs of the frame's latencies to the cells that its columns name."""
    if frame.empty:
        return
    index = tuple(
        np.array([place[key] for key in frame[column].tolist()], dtype=np.int64)
        for place, column in zip(places, columns, strict=True)
    )
    logs = np.log(frame["latency_median_s"].to_numpy(dtype=np.float64))
    np.add.at(total, index, logs)
    np.add.at(count, index, 1.0)


# ---- the choice -----------------------------------------------------------------------------------------------------


def tune(
    points: pd.DataFrame,
    policy: str = "commbench",
    *,
    kernel_of: KernelOf = same_name,
    edges: Callable[[Cell], Sequence[int]] = lambda cell: (),
    rules: Rules = Rules(),
) -> Tuning:
    """Winner intervals for every cell of the points (``schema.POINT_COLUMNS``, one or several runs).

    policy: the name that today's policy has in the column. edges: the sizes, in bytes of the total array, up to and
    including which today's policy keeps a pick, to keep its thresholds exactly. Raises UsageError as ``curves_of``.
    """
    frame, left_out = countable(points, kernel_of)
    cells = tuple(tune_cell(curves, edges(curves.cell), rules) for curves in curves_of(frame, policy))
    return Tuning(cells, left_out, rules)


def tune_cell(curves: Curves, edges: Sequence[int] = (), rules: Rules = Rules()) -> CellTuning:
    """Choose for one cell; see ``tune``."""
    return result_of(curves, choose(curves, rules), edges, rules)


def result_of(curves: Curves, picks: Sequence[str], edges: Sequence[int], rules: Rules) -> CellTuning:
    """What there is to say of these picks, one per size."""
    noise = noise_of(curves)
    n = curves.launches
    t = float(t_quantile(1 - rules.error_rate, n - 1)) if n > 1 else math.inf
    provable = max(rules.keep_within, math.expm1(math.log1p(rules.least_gain) + t * noise / math.sqrt(n)))
    boundaries = _boundaries(curves, picks, edges)
    return CellTuning(
        curves,
        tuple(picks),
        _intervals(curves, picks, boundaries),
        tuple(boundaries),
        regret_of(curves, picks),
        regret_of(curves, curves.today) if all(t in curves.backends for t in curves.today) else None,
        held_out_regret(curves, rules),
        noise,
        provable,
    )


def choose(curves: Curves, rules: Rules) -> list[str]:
    """The backend for each size: cheapest in few changes, then every change that is not justified taken back."""
    cost = curves.typical()
    weights = octave_weights(curves.sizes)
    n = curves.launches
    t = float(t_quantile((1 + CONFIDENCE) / 2, n - 1)) if n > 1 else math.inf
    # a change must at least be worth what the noise of one size can pretend
    penalty = t * noise_of(curves) / math.sqrt(n) * float(np.median(weights)) if n > 1 else 1e-3
    names = [curves.backends[k] for k in segment(cost, weights, penalty)]
    names = _without_weak_segments(curves, names, weights, rules)
    return _without_weak_changes(curves, names, weights, rules)


def noise_of(curves: Curves) -> float:
    """The typical standard deviation, between launches, of log(T_a/T_b) at one size. NaN with one launch."""
    deviations = []
    for a in range(len(curves.backends)):
        for b in range(a):
            difference = curves.logs[a] - curves.logs[b]
            there = np.isfinite(difference).sum(axis=1) >= 2
            if there.any():
                deviations.append(np.nanstd(difference[there], axis=1, ddof=1))
    return float(np.median(np.concatenate(deviations))) if deviations else math.nan


def _gain(curves: Curves, places: Sequence[int], weights: Array, over: Sequence[str], names: Sequence[str]) -> Array:
    """Per launch, mean over the places, weighted by octaves, of log(T_over / T_names). NaN where a launch has none."""
    total = np.zeros(curves.launches)
    weight = np.zeros(curves.launches)
    for i in places:
        difference = curves.difference(over[i], names[i])[i]
        there = np.isfinite(difference)
        total[there] += weights[i] * difference[there]
        weight[there] += weights[i]
    with np.errstate(invalid="ignore"):
        gain: Array = np.where(weight > 0, total / weight, np.nan)
    return gain


def _lower_bound(gain: Array, error_rate: float) -> float:
    """One-sided lower bound of the mean gain; minus infinity where one launch cannot tell."""
    bound = estimate_over_launches(gain, confidence=1 - 2 * error_rate).low
    return bound if math.isfinite(bound) else -math.inf


def _without_weak_segments(curves: Curves, names: list[str], weights: Array, rules: Rules) -> list[str]:
    """Merge every stretch that is not clearly faster than what its neighbours would take there, weakest first."""
    cost = curves.typical()
    while len(stretches := runs(names)) > 1:
        weakest: tuple[float, int, int, str] | None = None
        for first, last in stretches:
            places = range(first, last + 1)
            neighbours = {names[j] for j in (first - 1, last + 1) if 0 <= j < len(names)}
            prices = {b: sum(weights[i] * cost[i, curves.backends.index(b)] for i in places) for b in neighbours}
            other = min(prices, key=lambda b: prices[b] if math.isfinite(prices[b]) else math.inf)
            if not math.isfinite(prices[other]):
                continue  # the neighbours cannot be used here
            gain = _gain(curves, places, weights, [other] * len(names), names)
            bound = _lower_bound(gain, rules.error_rate / len(stretches))
            if bound <= 0 and (weakest is None or bound < weakest[0]):
                weakest = (bound, first, last, other)
        if weakest is None:
            return names
        _, first, last, other = weakest
        names = [other if first <= i <= last else name for i, name in enumerate(names)]
    return names


def _without_weak_changes(curves: Curves, names: list[str], weights: Array, rules: Rules) -> list[str]:
    """Go back to today's pick wherever the gain over it is small or not proven (hysteresis)."""
    today = curves.today
    changes = [
        (a, b)
        for a, b in runs(list(zip(names, today, strict=True)))
        if today[a] and today[a] in curves.backends and names[a] != today[a]
    ]
    result = list(names)
    for first, last in changes:
        gain = _gain(curves, range(first, last + 1), weights, today, names)
        known = gain[np.isfinite(gain)]
        small = len(known) == 0 or float(typical(known)) <= math.log1p(rules.keep_within)
        bound = _lower_bound(gain, rules.error_rate / max(1, len(changes) * (len(curves.backends) - 1)))
        if small or bound <= math.log1p(rules.least_gain):
            result[first : last + 1] = today[first : last + 1]
    return result


def _boundaries(curves: Curves, picks: Sequence[str], edges: Sequence[int]) -> list[Boundary]:
    sizes = curves.sizes
    found: list[Boundary] = []
    for (_, last), _following in zip(runs(picks), runs(picks)[1:], strict=False):
        left, right = picks[last], picks[last + 1]
        difference = curves.difference(left, right)
        at = crossover(sizes, difference, last) if np.isfinite(difference).any(axis=1).sum() >= 2 else None
        kept = curves.today[last] == left and curves.today[last + 1] == right
        own = [e for e in edges if sizes[last] <= e < sizes[last + 1]]
        if kept and own:
            size = max(own)
        elif kept or at is None:
            size = sizes[last]
        else:
            size = round_size(at.size_bytes)
        floor = found[-1].size_bytes + 1 if found else sizes[0]
        found.append(Boundary(min(max(size, floor), sizes[-1] - 1), left, right, at, kept))
    return found


def round_size(size_bytes: float) -> int:
    """The roundest whole size (fewest binary digits) within ROUND_WITHIN_OCTAVES of a size in bytes."""
    low, high = size_bytes * 2**-ROUND_WITHIN_OCTAVES, size_bytes * 2**ROUND_WITHIN_OCTAVES
    step = 2 ** math.floor(math.log2(high))
    while step > 1:
        first = math.ceil(low / step)
        if first * step <= high:
            candidates = range(first, math.floor(high / step) + 1)
            return int(min((c * step for c in candidates), key=lambda c: abs(math.log2(c / size_bytes))))
        step //= 2
    return max(1, round(size_bytes))


def _intervals(curves: Curves, picks: Sequence[str], boundaries: Sequence[Boundary]) -> tuple[Interval, ...]:
    weights = octave_weights(curves.sizes)
    lasts = [*(b.size_bytes for b in boundaries), curves.sizes[-1]]
    firsts = [curves.sizes[0], *(b.size_bytes + 1 for b in boundaries)]
    found = []
    for (first, last), low, high in zip(runs(picks), firsts, lasts, strict=True):
        differing = [
            i for i in range(first, last + 1) if curves.today[i] in curves.backends and picks[i] != curves.today[i]
        ]
        gain = None
        if differing:
            gain = estimate_over_launches(_gain(curves, differing, weights, curves.today, picks))
        today = tuple(dict.fromkeys(t for t in curves.today[first : last + 1] if t))
        found.append(Interval(picks[first], low, high, today, gain))
    return tuple(found)


# ---- regret ---------------------------------------------------------------------------------------------------------


def regret_of(curves: Curves, picks: Sequence[str]) -> Regret:
    """The regret of picks against the fastest backend at each size, NaN where a pick was not measured."""
    return _regret(curves, [picks] * curves.launches)


def _regret(curves: Curves, picks: Sequence[Sequence[str]]) -> Regret:
    """picks: for each launch, one per size."""
    ratios = np.stack([_over_fastest(curves, own, launch) for launch, own in enumerate(picks)], axis=1)
    per_size = np.expm1(typical(ratios))
    known = np.isfinite(per_size)
    worst = int(np.nanargmax(per_size)) if known.any() else 0
    weights = np.where(np.isfinite(ratios), octave_weights(curves.sizes)[:, None], 0.0)
    with np.errstate(invalid="ignore"):
        per_launch = np.where(weights > 0, ratios * weights, 0.0).sum(axis=0) / weights.sum(axis=0)
    mean = estimate_over_launches(per_launch)
    sizes = [estimate_over_launches(row) for row in ratios]
    return Regret(
        tuple(float(r) for r in per_size),
        math.expm1(mean.mean),
        float(per_size[worst]),
        int(curves.sizes[worst]),
        math.expm1(mean.low),
        math.expm1(mean.high),
        tuple(math.expm1(e.low) for e in sizes),
        tuple(math.expm1(e.high) for e in sizes),
    )


def _over_fastest(curves: Curves, picks: Sequence[str], launch: int) -> Array:
    """(sizes,): log(T_pick / T_fastest) within a launch, the fastest as all other launches tell (of one launch: as it
    tells itself). 0 where that is the pick itself, NaN where the launch or the others do not tell."""
    n, places = curves.launches, np.arange(len(curves.sizes))
    rest = np.arange(n) != launch if n > 1 else np.ones(n, dtype=bool)
    own = np.array([curves.backends.index(p) if p in curves.backends else -1 for p in picks])
    logs = np.where((own >= 0)[:, None], curves.logs[own, places], np.nan)
    # how much longer the pick takes than each rival, within launches: (backends, sizes)
    longer = typical(logs[:, rest] - curves.logs[:, :, rest])
    longer[own, places] = np.nan
    longer = np.nan_to_num(longer, nan=-np.inf)
    fastest, most = longer.argmax(axis=0), longer.max(axis=0)
    ratio = logs[:, launch] - curves.logs[fastest, places, launch]
    told = np.isfinite(most) & np.isfinite(logs[:, launch])
    return np.asarray(np.where(told, np.where(most > 0, ratio, 0.0), np.nan))


def held_out_regret(curves: Curves, rules: Rules) -> Regret | None:
    """Regret of choices made without the launch that they are judged in, over all launches (leave one out). None below
    three launches."""
    n = curves.launches
    if n < 3:
        return None
    chosen: list[Sequence[str]] = [("",) * len(curves.sizes)] * n
    for launch in range(n):
        rest = curves.restricted(np.arange(n) != launch)
        if np.isfinite(rest.logs).any(axis=2).any(axis=0).all():
            chosen[launch] = choose(rest, rules)
    return _regret(curves, chosen)
