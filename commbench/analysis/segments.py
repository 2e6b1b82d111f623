"""Winner intervals: which backend is the fastest in which range of sizes, and how sure the places between are.

A curve is a matrix (sizes, launches) of natural logarithms of launch-median latencies, NaN where there is none. A
difference of logs is the log of a ratio. Distances between sizes are octaves (log2), because that is how thresholds
are judged: 0.1 octave is 7 %.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commbench.analysis.launches import t_quantile
from commbench.statistics import CONFIDENCE

Array = NDArray[np.float64]

WINDOW_OCTAVES = 1.25  # half-width of the window of the local fit around a crossover
FEWEST_IN_WINDOW = 4  # sizes that a local fit wants; the window grows until it has them
ROOT_REACH_OCTAVES = 16  # a crossover further from where it is looked for is none
GRID_PER_OCTAVE = 128  # steps in which the interval of a crossover is searched

LOCAL_FIT = "local fit"
BRACKET = "between two sizes"
UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over launches, with its two-sided 95 % interval (Student's t), in logs. launches: how many counted."""

    mean: float
    low: float
    high: float
    launches: int

    @property
    def known(self) -> bool:
        return math.isfinite(self.low)


@dataclass(frozen=True, slots=True)
class Crossover:
    """The size, in bytes, from which the second of two curves is the lower, with its 95 % interval.

    open_low, open_high: the interval reaches the end of what was measured. method: LOCAL_FIT; BRACKET where the
    curves jump: then nothing is known but the two measured sizes around it, which are the interval; UNKNOWN where the
    curves do not clearly cross at all: then the interval is all that was measured.
    """

    size_bytes: float
    low_bytes: float
    high_bytes: float
    method: str
    open_low: bool = False
    open_high: bool = False

    @property
    def width_octaves(self) -> float:
        return math.log2(self.high_bytes / self.low_bytes)


def octave_weights(sizes: ArrayLike) -> Array:
    """The octaves that each size stands for: half the way to either neighbour. Dense regions do not count twice.

    sizes: (S,), ascending, in bytes. A single size stands for one octave.
    """
    x = np.log2(np.asarray(sizes, dtype=np.float64))
    if len(x) == 1:
        return np.ones(1)
    gaps = np.diff(x)
    weights = np.zeros(len(x))
    weights[:-1] += gaps / 2
    weights[1:] += gaps / 2
    return weights


def estimate_over_launches(values: ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Mean of one number per launch with Student's t interval; without one (NaN ends) below two launches."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    n = len(numbers)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(numbers.mean())
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    half = float(t_quantile((1 + confidence) / 2, n - 1)) * float(numbers.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def typical(logs: Array) -> Array:
    """The pseudo-median over launches (the last axis): the median of the means of all pairs of launches, each launch
    with itself too (Hodges & Lehmann, 1963). Nearly as precise as the mean, and an outlying launch does not move it.

    NaN where no launch has a number.
    """
    i, j = np.triu_indices(logs.shape[-1])
    if np.isfinite(logs).all():
        return np.asarray(np.median((logs[..., i] + logs[..., j]) / 2, axis=-1), dtype=np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows of nothing but NaN
        return np.asarray(np.nanmedian((logs[..., i] + logs[..., j]) / 2, axis=-1), dtype=np.float64)


def segment(cost: Array, weights: Array, penalty: float) -> list[int]:
    """The assignment of one candidate per size that costs least, by dynamic programming (Bellman).

    cost: (sizes, candidates), in logs, infinite or NaN where a candidate cannot be used; weights: (sizes,) octaves;
    penalty: of every change from one size to the next, in log·octaves. Ties keep the candidate of the smaller size.
    Raises ValueError when some size has no candidate at all.
    """
    price = np.where(np.isfinite(cost), cost, np.inf)
    if not np.isfinite(price).any(axis=1).all():
        raise ValueError("a size has no candidate")
    price = (price - price.min(axis=1, keepdims=True)) * weights[:, None]
    count = price.shape[1]
    total = price[0]
    came_from = np.zeros(price.shape, dtype=np.int64)
    for i in range(1, len(price)):
        best = int(np.argmin(total))
        change = total[best] + penalty < total
        came_from[i] = np.where(change, best, np.arange(count))
        total = np.where(change, total[best] + penalty, total) + price[i]
    path = [int(np.argmin(total))]
    for i in range(len(price) - 1, 0, -1):
        path.append(int(came_from[i, path[-1]]))
    return path[::-1]


def runs(keys: Sequence[object]) -> list[tuple[int, int]]:
    """(first, last) of every stretch of equal neighbours."""
    starts = [0, *(i for i in range(1, len(keys)) if keys[i] != keys[i - 1])]
    return [(a, b - 1) for a, b in zip(starts, [*starts[1:], len(keys)], strict=True)]


def crossover(sizes: ArrayLike, difference: Array, before: int) -> Crossover:
    """Where a difference of two curves goes from below zero to above, near the gap after ``sizes[before]``.

    sizes: (S,) ascending bytes. difference: (S, launches), log(T_first / T_second): negative where the first wins.

    In every launch a straight line is fitted to the difference over log2(size), weighted with the tricube of the
    distance (Cleveland, 1979); lines vary from launch to launch independently, whatever is common to the sizes within
    one. The estimate is where the typical line is zero. The interval holds every x at which the mean line is not
    significantly different from zero, |mean| ≤ t·se (Fieller's inversion): it covers the truth with exactly the stated
    probability if the lines are normal, also at five launches.
    """
    x = np.log2(np.asarray(sizes, dtype=np.float64))
    lower, upper = x[before], x[before + 1]
    middle = 2.0 ** ((lower + upper) / 2)
    bracket = Crossover(middle, float(2**lower), float(2**upper), BRACKET)
    centre = (lower + upper) / 2
    lines = _lines(x, difference, centre)
    if lines is not None:  # look again from where it seems to be
        root = _root(lines, centre)
        if root is not None and x[0] <= root <= x[-1]:
            again = _lines(x, difference, min(max(root, lower - 1), upper + 1))
            lines = again if again is not None else lines
    root = None if lines is None else _root(lines, centre)
    at_lower, at_upper = (estimate_over_launches(difference[i]) for i in (before, before + 1))
    clear = at_lower.high < 0 and at_upper.low > 0
    if lines is None or root is None or not x[0] <= root <= x[-1]:
        # a line that never crosses zero tells nothing; neither do two sizes that do not clearly differ in sign
        return bracket if clear else Crossover(float(middle), float(2 ** x[0]), float(2 ** x[-1]), UNKNOWN, True, True)
    if clear and (not lower <= root <= upper or _jumps(x, difference, lines, before)):
        return bracket
    low, high = _not_different_from_zero(lines, root, x[0], x[-1])
    open_low, open_high = bool(low <= x[0]), bool(high >= x[-1])
    return Crossover(float(2**root), float(2**low), float(2**high), LOCAL_FIT, open_low, open_high)


@dataclass(frozen=True, slots=True)
class _Lines:
    """Per launch value at ``centre`` and slope per octave; weight: the sizes behind it, relative to the others."""

    centre: float
    value: Array
    slope: Array
    weight: Array

    def at(self, x: ArrayLike) -> Array:
        """(launches, positions)"""
        return self.value[:, None] + self.slope[:, None] * (
            np.atleast_1d(np.asarray(x, dtype=np.float64)) - self.centre
        )

    def mean_and_error(self, x: ArrayLike) -> tuple[Array, Array]:
        values = self.at(x)
        n, weight = len(values), self.weight[:, None]
        mean = (weight * values).sum(axis=0) / weight.sum()
        if n < 2:
            return mean, np.full_like(mean, np.inf)
        variance = (weight * (values - mean) ** 2).sum(axis=0) / (n - 1)
        return mean, np.sqrt(variance / weight.sum())


def _lines(x: Array, difference: Array, centre: float) -> _Lines | None:
    """A weighted straight line through each launch's differences near ``centre``; None if no launch has two sizes."""
    distance = np.abs(x - centre)
    there = np.isfinite(difference)
    usable = np.sort(distance[there.any(axis=1)])
    if len(usable) < 2:
        return None
    reach = max(WINDOW_OCTAVES, 1.05 * usable[min(FEWEST_IN_WINDOW, len(usable)) - 1])
    tricube = np.where(distance < reach, (1 - np.minimum(distance / reach, 1.0) ** 3) ** 3, 0.0)
    weights = np.where(there, tricube[:, None], 0.0)
    y = np.where(there, difference, 0.0)
    u = (x - centre)[:, None]
    s0, s1, s2 = weights.sum(axis=0), (weights * u).sum(axis=0), (weights * u * u).sum(axis=0)
    t0, t1 = (weights * y).sum(axis=0), (weights * u * y).sum(axis=0)
    spread = s0 * s2 - s1 * s1
    fitted = ((weights > 0).sum(axis=0) >= 2) & (spread > 1e-9)
    if not fitted.any():
        return None
    s0, s1, s2, t0, t1, spread = (a[fitted] for a in (s0, s1, s2, t0, t1, spread))
    return _Lines(centre, (s2 * t0 - s1 * t1) / spread, (s0 * t1 - s1 * t0) / spread, s0)


def _root(lines: _Lines, near: float) -> float | None:
    """Where the typical line is zero; None if it does not rise. (Typical value and slope do not give it: the typical
    line is made of straight pieces. It is searched for on two grids, the second inside one step of the first.)"""
    if float(typical(lines.slope)) <= 0:
        return None
    low, high = near - ROOT_REACH_OCTAVES, near + ROOT_REACH_OCTAVES
    for _ in range(2):
        grid = np.linspace(low, high, 65)
        line = typical(lines.at(grid).T)
        above = np.flatnonzero(line >= 0)
        if line[0] > 0 or len(above) == 0:
            return None
        place = max(1, int(above[0]))
        low, high = float(grid[place - 1]), float(grid[place])
        below_value, above_value = float(line[place - 1]), float(line[place])
    if above_value == below_value:
        return low
    return low - below_value * (high - low) / (above_value - below_value)


def _jumps(x: Array, difference: Array, lines: _Lines, before: int) -> bool:
    """Whether the measured differences on both sides of the gap are further from zero than the line, clearly."""
    residuals = [
        estimate_over_launches(side * (_finite(difference[i]) - float(typical(lines.at(x[i])[:, 0]))))
        for i, side in ((before, -1.0), (before + 1, 1.0))
    ]
    return all(r.low > 0 for r in residuals)


def _finite(values: Array) -> Array:
    return values[np.isfinite(values)]


def _not_different_from_zero(lines: _Lines, root: float, first: float, last: float) -> tuple[float, float]:
    """The stretch around the root in which the mean line's t interval holds zero, inside [first, last]."""
    n = len(lines.value)
    if n < 2:
        return first, last
    t = float(t_quantile((1 + CONFIDENCE) / 2, n - 1))
    grid = np.linspace(first, last, max(2, math.ceil((last - first) * GRID_PER_OCTAVE)) + 1)
    mean, error = lines.mean_and_error(grid)
    excess = np.abs(mean) - t * error  # above zero: different from zero
    place = int(np.argmin(np.abs(grid - root)))
    if excess[place] > 0:  # an interval finer than the grid, or a mean line that outliers pull from the typical one
        nearest = np.flatnonzero(excess <= 0)
        other = float(grid[nearest[np.argmin(np.abs(nearest - place))]]) if len(nearest) else float(grid[place])
        return min(root, other), max(root, other)
    outside = np.flatnonzero(excess > 0)
    below, above = outside[outside < place], outside[outside > place]
    low = _zero(grid, excess, int(below[-1]), int(below[-1]) + 1) if len(below) else first
    high = _zero(grid, excess, int(above[0]), int(above[0]) - 1) if len(above) else last
    return min(low, root), max(high, root)


def _zero(grid: Array, excess: Array, outside: int, inside: int) -> float:
    """Between two neighbours on the grid, where the excess is zero (linear interpolation)."""
    part = excess[outside] / (excess[outside] - excess[inside]) if excess[outside] != excess[inside] else 0.0
    return float(grid[outside] + part * (grid[inside] - grid[outside]))
