"""Change points in a series of nights: advisory, for what creeps or what a night-by-night gate was too deaf to see.

Binary segmentation on the logs. A segment is split where Student's t between its two parts is largest; the split stands
when its two-sided p, times the number of places it could have stood (Bonferroni), is at most ``alpha``. That bounds the
chance of a false change point per series by ``alpha`` for independent nights; nights that drift together make more.
Both parts share one variance: a part of four nights by itself often looks too quiet, and would be called new too soon.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commbench.analysis.effects import Array

ALPHA = 1e-3  # per series: half a false alarm a night over 500 series, at most
SHORTEST = 4  # nights on each side: one odd night is no new level
SMALLEST = 0.02  # shifts below 2 % are nobody's business


@dataclass(frozen=True, slots=True)
class Change:
    """A new level from night ``index`` on: ``ratio`` is the level after over the level before (of the segments beside
    it), p the corrected significance."""

    index: int
    ratio: float
    p: float


def change_points(
    logs: Array, alpha: float = ALPHA, shortest: int = SHORTEST, smallest: float = SMALLEST
) -> list[Change]:
    """Change points of one series of log latencies, oldest night first; NaN (a night without the point) is left out."""
    places = np.flatnonzero(np.isfinite(logs))
    values = np.asarray(logs[places], dtype=np.float64)
    cuts: list[tuple[int, float]] = []
    _split(values, 0, len(values), alpha, shortest, cuts)
    cuts.sort()
    edges = [0, *(c for c, _ in cuts), len(values)]
    found = []
    for k, (cut, p) in enumerate(cuts):
        ratio = float(np.exp(values[cut : edges[k + 2]].mean() - values[edges[k] : cut].mean()))
        if abs(np.log(ratio)) >= np.log1p(smallest):
            found.append(Change(int(places[cut]), ratio, p))
    return found


def _split(values: Array, start: int, stop: int, alpha: float, shortest: int, cuts: list[tuple[int, float]]) -> None:
    best = strongest_split(values[start:stop], shortest)
    if best is None or best[1] > alpha:
        return
    cut, p = start + best[0], best[1]
    cuts.append((cut, p))
    _split(values, start, cut, alpha, shortest, cuts)
    _split(values, cut, stop, alpha, shortest, cuts)


def strongest_split(values: Array, shortest: int = SHORTEST) -> tuple[int, float] | None:
    """(place, corrected p) of the split with the smallest p; None for a series too short to split."""
    from scipy.special import stdtr

    n = len(values)
    if n < 2 * shortest:
        return None
    centred = values - values.mean()
    sums, squares = np.cumsum(centred), np.cumsum(centred**2)
    left = np.arange(shortest, n - shortest + 1)
    right = n - left
    sum_left, square_left = sums[left - 1], squares[left - 1]
    sum_right, square_right = sums[-1] - sum_left, squares[-1] - square_left
    mean_left, mean_right = sum_left / left, sum_right / right
    within = (square_left - left * mean_left**2) + (square_right - right * mean_right**2)
    tiny = 1e-24 + 1e-12 * float(squares[-1])  # rounding
    error = np.sqrt(np.maximum(within, tiny) / (n - 2) * (1 / left + 1 / right))
    p = 2 * stdtr(n - 2.0, -np.abs(mean_right - mean_left) / error)
    best = int(np.argmin(p))
    return int(left[best]), float(min(1.0, p[best] * len(left)))
