"""Where to measure next, and whether launches that had no part in a tuning bear it out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from commbench.analysis.segments import (
    UNKNOWN,
    Array,
    Estimate,
    estimate_over_launches,
    octave_weights,
)
from commbench.analysis.tune import (
    CELL_COLUMNS,
    Cell,
    CellTuning,
    Curves,
    HeldOut,
    KernelOf,
    Rules,
    TooLittleData,
    Tuning,
    countable,
    curves_of,
    noise_of,
    regret_of,
    result_of,
    same_name,
)
from commbench.errors import UsageError
from commbench.types import AUTO, DTYPES, Point
from commbench.units import format_size

if TYPE_CHECKING:
    import pandas as pd

STEP_OCTAVES = 1 / 8  # distance of sizes around a crossover
REACH_OCTAVES = 0.5  # how far around it they go
HOPELESS = math.log(2)  # a backend that takes twice the fastest's time at a size is not measured there again
ALIGN = 64  # sizes are multiples of it, so that no kernel sees an odd tail


def point_of(cell: Cell, size_bytes: int, backend: str, policy: str) -> Point:
    """The point of a cell at a size."""
    return Point(
        cell.collective, cell.op, cell.dtype, size_bytes, cell.world_size, cell.layout, cell.group, backend, policy,
        cell.mode, cell.cache, cell.placement,
    )  # fmt: skip


def aligned(size_bytes: float, cell: Cell) -> int:
    """The nearest size that the cell can have: whole elements on every rank, a multiple of ALIGN where that fits."""
    unit = math.lcm(ALIGN, DTYPES[cell.dtype].itemsize * cell.world_size)
    if size_bytes < unit:
        unit = DTYPES[cell.dtype].itemsize * cell.world_size
    return max(unit, round(size_bytes / unit) * unit)


def refinement(tuning: Tuning, policy: str) -> list[Point]:
    """Points at eighths of an octave around every crossover, for the backends that meet there and today's pick.

    They stand REACH_OCTAVES around the bracket of measured sizes, and further where the interval is wider, up to one
    octave. A crossover that was not found at all has nothing to refine.
    """
    points: dict[Point, None] = {}
    for cell in tuning.cells:
        sizes = cell.curves.sizes
        for boundary in cell.boundaries:
            found = boundary.crossover
            if found is None or found.method == UNKNOWN:
                continue
            centre = math.log2(found.size_bytes)
            reach = min(1.0, max(REACH_OCTAVES, found.width_octaves / 2))
            steps = round(reach / STEP_OCTAVES)
            for k in range(-steps, steps + 1):
                size = aligned(2 ** (centre + k * STEP_OCTAVES), cell.cell)
                if sizes[0] <= size <= sizes[-1]:
                    for backend in (AUTO, boundary.left, boundary.right):
                        points[point_of(cell.cell, size, backend, policy)] = None
    return list(points)


def held_out_points(tuning: Tuning, today: str, tuned: str) -> list[Point]:
    """What fresh launches measure: both policies' own picks, and every backend that may be the fastest.

    Sizes: of those tuned at, about one per octave, and the two next to each threshold of either policy.
    """
    points: dict[Point, None] = {}
    for cell in tuning.cells:
        for size in _held_out_sizes(cell):
            for policy in dict.fromkeys((today, tuned) if cell.changed else (today,)):
                points[point_of(cell.cell, size, AUTO, policy)] = None
            for backend in _hopeful(cell, size):
                points[point_of(cell.cell, size, backend, today)] = None
    return list(points)


def _held_out_sizes(cell: CellTuning) -> list[int]:
    sizes = cell.curves.sizes
    chosen = {sizes[0], sizes[-1]}
    last = math.log2(sizes[0])
    for size in sizes:
        if math.log2(size) >= last + 0.99:
            chosen.add(size)
            last = math.log2(size)
    for i in range(1, len(sizes)):
        if cell.picks[i] != cell.picks[i - 1] or cell.curves.today[i] != cell.curves.today[i - 1]:
            chosen |= {sizes[i - 1], sizes[i]}
    # and inside every stretch that changes
    changed = [s for s, pick, own in zip(sizes, cell.picks, cell.curves.today, strict=True) if pick != own and own]
    if changed:
        chosen.add(changed[len(changed) // 2])
    return sorted(chosen)


def _hopeful(cell: CellTuning, size_bytes: int) -> list[str]:
    """The backends within HOPELESS of the fastest at the nearest measured size, and the two policies' picks."""
    place = cell.curves.sizes.index(size_bytes)
    cost = cell.curves.typical()[place]
    near = {b for b, c in zip(cell.curves.backends, cost, strict=True) if c <= float(np.nanmin(cost)) + HOPELESS}
    near |= {cell.picks[place], cell.curves.today[place]} & set(cell.curves.backends)
    return sorted(near)


def confirm(
    tuning: Tuning,
    points: pd.DataFrame,
    today: str,
    tuned: str,
    *,
    kernel_of: KernelOf = same_name,
    tuned_kernel_of: KernelOf = same_name,
    edges: Callable[[Cell], Sequence[int]] = lambda cell: (),
) -> Tuning:
    """The tuning after fresh launches: changes that these do not bear out are taken back, and regrets added.

    points: ``schema.POINT_COLUMNS`` of those launches; today and tuned: the two policies' names in it. A change stays
    if the one-sided 95 % lower bound of its gain over today's pick is above zero in these launches alone.
    """
    own, _ = countable(points[points["policy"] == today], kernel_of)
    other, _ = countable(points[points["policy"] == tuned], tuned_kernel_of) if tuned != today else (own.iloc[:0], {})
    by_cell = _fresh(own, today)
    cells = []
    for cell in tuning.cells:
        fresh = by_cell.get(cell.cell)
        if fresh is None:
            cells.append(_without_word(cell, edges(cell.cell), tuning.rules))
            continue
        final, taken_back = _borne_out(cell, fresh, edges(cell.cell), tuning.rules)
        held_out = _held_out(final, fresh, cell, other, taken_back)
        cells.append(replace(final, held_out=held_out))
    return Tuning(tuple(cells), tuning.left_out, tuning.rules)


def _fresh(own: pd.DataFrame, today: str) -> dict[Cell, Curves]:
    """The curves of the cells that fresh launches tell of; a machine that was too busy may leave none."""
    try:
        return {c.cell: c for c in curves_of(own, today)}
    except (TooLittleData, UsageError):
        return {}


def _without_word(cell: CellTuning, edges: Sequence[int], rules: Rules) -> CellTuning:
    """A cell of which fresh launches tell nothing: what changed is taken back."""
    taken_back: tuple[str, ...] = ()
    if cell.changed:
        pairs = zip(cell.picks, cell.curves.today, strict=True)
        picks = [own if own in cell.curves.backends else pick for pick, own in pairs]
        cell = result_of(cell.curves, picks, edges, rules)
        taken_back = ("every change: fresh launches told too little",)
    return replace(cell, held_out=HeldOut(0, None, None, None, math.nan, taken_back))


def _pick_at(cell: CellTuning, curves: Curves) -> list[str]:
    """The tuned picks at the sizes of other curves that lie inside, each a backend measured there."""
    return [cell.pick(size) for size in curves.sizes]


def _borne_out(
    cell: CellTuning, fresh: Curves, edges: Sequence[int], rules: Rules
) -> tuple[CellTuning, tuple[str, ...]]:
    picks = _pick_at(cell, fresh)
    kept = list(cell.picks)
    taken_back = []
    for interval in cell.intervals:
        if not interval.changed:
            continue
        places = [
            i
            for i, size in enumerate(fresh.sizes)
            if interval.first_bytes <= size <= interval.last_bytes
            and fresh.today[i]
            and fresh.today[i] != picks[i]
            and {picks[i], fresh.today[i]} <= set(fresh.backends)
        ]
        gains = _mean_gain(fresh, places, fresh.today, picks)
        gain = estimate_over_launches(gains, confidence=1 - 2 * rules.error_rate)
        if gain.known and gain.low > 0:
            continue
        shown = f"{math.expm1(gain.mean):+.1%}, at least {math.expm1(gain.low):+.1%}" if gain.known else "nothing"
        took = " and ".join(t for t in interval.today if t != interval.backend)
        taken_back.append(
            f"{interval.backend} instead of {took} within {format_size(interval.first_bytes)} to "
            f"{format_size(interval.last_bytes)}: fresh launches say {shown}"
        )
        for i, size in enumerate(cell.curves.sizes):
            if interval.first_bytes <= size <= interval.last_bytes and cell.curves.today[i] in cell.curves.backends:
                kept[i] = cell.curves.today[i]
    if taken_back:
        cell = result_of(cell.curves, kept, edges, rules)
    return cell, tuple(taken_back)


def _mean_gain(curves: Curves, places: Sequence[int], over: Sequence[str], names: Sequence[str]) -> Array:
    """Per launch, the mean over places (weighted by octaves) of log(T_over / T_names)."""
    if not places:
        return np.empty(0)
    weights = octave_weights(curves.sizes)[list(places)]
    differences = np.array([curves.difference(over[i], names[i])[i] for i in places])
    there = np.isfinite(differences)
    total = np.where(there, differences * weights[:, None], 0.0).sum(axis=0)
    weight = np.where(there, weights[:, None], 0.0).sum(axis=0)
    with np.errstate(invalid="ignore"):
        return np.asarray(total / weight, dtype=np.float64)


def _held_out(
    final: CellTuning, fresh: Curves, written: CellTuning, tuned_frame: pd.DataFrame, taken_back: tuple[str, ...]
) -> HeldOut:
    picks = _pick_at(final, fresh)
    tuned = regret_of(fresh, picks)
    today = regret_of(fresh, fresh.today) if all(t in fresh.backends for t in fresh.today) else None
    gain: Estimate | None = None
    astray: list[tuple[int, str]] = []
    if len(tuned_frame):
        own = tuned_frame[tuned_frame["size_bytes"].isin(fresh.sizes) & (tuned_frame["backend_requested"] == AUTO)]
        own = own[_is_cell(own, fresh.cell)]
        differing: list[tuple[int, dict[str, float]]] = []
        for i, size in enumerate(fresh.sizes):
            rows = own[own["size_bytes"] == size]
            expected = written.pick(size)
            for kernel in sorted(set(rows["kernel"]) - {expected}):
                astray.append((size, str(kernel)))
            if final.pick(size) != fresh.today[i]:
                logs = np.log(rows["latency_median_s"].to_numpy(dtype=np.float64))
                differing.append((i, dict(zip(rows["launch_key"].astype(str), logs.tolist(), strict=True))))
        gain = _policy_gain(fresh, differing, own)
    return HeldOut(fresh.launches, tuned, today, gain, noise_of(fresh), taken_back, tuple(astray))


def _is_cell(frame: pd.DataFrame, cell: Cell) -> pd.Series[bool]:
    mask = frame["collective"] == cell.collective
    for column in CELL_COLUMNS[1:]:
        mask &= frame[column] == getattr(cell, column)
    return mask


def _policy_gain(
    fresh: Curves, differing: Sequence[tuple[int, dict[str, float]]], own: pd.DataFrame
) -> Estimate | None:
    """Mean over the sizes where the policies differ of log(T_auto today / T_auto tuned), paired by launch."""
    if not differing:
        return None
    launches = sorted(set(own["launch_key"]), key=lambda key: (len(key), key))
    weights = octave_weights(fresh.sizes)
    total, weight = np.zeros(len(launches)), np.zeros(len(launches))
    for i, logs in differing:
        for n, key in enumerate(launches):
            place = fresh.launch_keys.index(key) if key in fresh.launch_keys else None
            if place is not None and key in logs and math.isfinite(fresh.auto_logs[i, place]):
                total[n] += weights[i] * (fresh.auto_logs[i, place] - logs[key])
                weight[n] += weights[i]
    with np.errstate(invalid="ignore"):
        return estimate_over_launches(total / weight)
