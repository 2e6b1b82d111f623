"""Statistics of latency samples: plain functions over arrays, no torch and no I/O.

Everything is nonparametric: latencies are skewed and have several modes, so no mean and no normal law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
FEWEST_FOR_INTERVAL = 6  # 1 - 2 * (1/2)**n >= 0.95 first holds at n = 6
_EXACT_UP_TO = 5000  # above, the normal approximation of the binomial is exact to a rank

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A median with its confidence interval, in the unit of the samples.

    n_effective is what the n samples are worth after correction for autocorrelation. low and high are the
    smallest and largest sample where n_effective < 6, and ``exact`` is then false: no 95 % interval exists.
    """

    median: float
    low: float
    high: float
    n: int
    n_effective: float
    exact: bool

    @property
    def relative_half_width(self) -> float:
        """(high − low) / 2 / median; infinite where there is no interval or no positive median."""
        if not self.exact or not self.median > 0:
            return math.inf
        return (self.high - self.low) / 2 / self.median


@lru_cache(maxsize=4096)
def _lower_rank(n: int, confidence: float = CONFIDENCE) -> int:
    """The largest l (1-based) with 1 − 2·P(Bin(n, ½) ≤ l−1) ≥ confidence; 0 where none exists.

    (l, n + 1 − l) is then the smallest symmetric pair of order statistics that covers the median
    (Hahn & Meeker, Statistical Intervals, 5.2; Hoefler & Belli SC15, rule 5).
    """
    if n < FEWEST_FOR_INTERVAL:
        return 0
    tail = (1 - confidence) / 2
    if n > _EXACT_UP_TO:
        from statistics import NormalDist

        z = NormalDist().inv_cdf(1 - tail)
        return max(1, math.floor((n + 1) / 2 - z * math.sqrt(n) / 2))
    log_half_n = n * math.log(0.5)
    log_factorial_n = math.lgamma(n + 1)
    total, rank = 0.0, 0
    for k in range(n):
        total += math.exp(log_factorial_n - math.lgamma(k + 1) - math.lgamma(n - k + 1) + log_half_n)
        if total > tail:
            return rank
        rank = k + 1
    return rank


def n_effective(samples: Array) -> float:
    """What n samples in measured order are worth: n / (1 + 2 Σ ρ_k) on sign(x − median).

    The sum runs to the first non-positive autocorrelation (Geyer's initial positive sequence, simplified).
    Signs, not values: the variance of a median depends on them, and outliers cannot hide the correlation.
    """
    n = len(samples)
    if n < 4:
        return float(n)
    signs = np.sign(samples - np.median(samples))
    variance = float(np.dot(signs, signs)) / n
    if variance == 0.0:
        return float(n)  # all equal: the timer saw no difference at all
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(signs - signs.mean(), size)
    autocovariance = np.fft.irfft(spectrum * np.conj(spectrum), size)[:n] / n
    if autocovariance[0] <= 0:
        return float(n)
    rho = autocovariance[1:] / autocovariance[0]
    non_positive = np.flatnonzero(rho <= 0)
    upto = int(non_positive[0]) if len(non_positive) else len(rho)
    return float(n / (1 + 2 * float(rho[:upto].sum())))


def median_interval(samples: Array, effective: float | None = None) -> Interval:
    """Median of samples in measured order, with its exact order-statistic interval.

    The ranks are those of n_effective samples, stretched to n. ``effective`` overrides n_effective (pass
    ``len(samples)`` for samples known to be independent, such as launch medians). Raises ValueError when empty.
    """
    n = len(samples)
    if n == 0:
        raise ValueError("no samples: a median needs at least one")
    ordered = np.sort(samples)
    middle = float(np.median(ordered))
    worth = min(float(n), n_effective(samples) if effective is None else effective)
    whole = math.floor(worth)
    rank = _lower_rank(whole)
    if rank == 0:
        return Interval(middle, float(ordered[0]), float(ordered[-1]), n, worth, exact=False)
    stretched = max(1, math.floor(rank * (n + 1) / (whole + 1)))
    return Interval(middle, float(ordered[stretched - 1]), float(ordered[n - stretched]), n, worth, exact=True)


def is_steady(samples: Array) -> bool:
    """Whether warm-up has ended: the medians of the last two quarters agree within their intervals.

    With fewer than 24 samples the quarters are too short for an interval: then the two halves must overlap
    in their ranges. Fewer than four samples are never steady.
    """
    n = len(samples)
    if n < 4:
        return False
    part = n // 4 if n >= 4 * FEWEST_FOR_INTERVAL else n // 2
    last, before = samples[n - part :], samples[n - 2 * part : n - part]
    a, b = median_interval(last, effective=part), median_interval(before, effective=part)
    return a.low <= b.high and b.low <= a.high


def has_drifted(samples: Array) -> bool:
    """Whether the first and the last third have medians whose intervals are apart by more than 5 %.

    An interval of the whole would then describe a mixture that depends on when one stopped.
    """
    n = len(samples)
    third = n // 3
    if third < 2 * FEWEST_FOR_INTERVAL:
        return False
    a, b = median_interval(samples[:third]), median_interval(samples[n - third :])
    gap = max(a.low - b.high, b.low - a.high)
    return gap > 0.05 * min(a.median, b.median)


def quantile(samples: Array, q: float) -> float:
    """The smallest sample that at least a fraction q of the samples do not exceed (no interpolation)."""
    ordered = np.sort(samples)
    return float(ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))])
