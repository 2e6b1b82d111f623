"""Statistics of latency samples: plain functions over arrays, no torch and no I/O.

Everything is nonparametric: latencies are skewed and have several modes, so no mean and no normal law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from commbench.units import format_time

CONFIDENCE = 0.95
FEWEST_FOR_INTERVAL = 6  # 1 - 2 * (1/2)**n >= 0.95 first holds at n = 6
NOTABLE = 0.05  # modes and drifts of less are not worth a remark
_FEW_LAGS = 8  # up to here products are quicker than a Fourier transform
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


def n_effective(samples: Array, middle: float | None = None) -> float:
    """What n samples in measured order are worth: n / τ with τ = 1 + 2 Σ ρ_k, on sign(x − median).

    The sum runs to the first non-positive autocorrelation (Geyer's initial positive sequence, simplified).
    Signs, not values: the variance of a median depends on them, and outliers cannot hide the correlation.

    Autocorrelations about the series' own mean come out too small, by about τ/n, and those of lag k also by the factor
    1 − k/n (Marriott & Pope, Biometrika 1954). Short series would thereby look less correlated than they are, so τ is
    found once as it is, and once more from (ρ_k + τ/n) / (1 − k/n); the larger one counts. The result is in [1, n].
    middle: the samples' median, where it is known already.
    """
    n = len(samples)
    if n < 4:
        return float(n)
    signs = np.sign(samples - (np.median(samples) if middle is None else middle))
    variance = float(np.dot(signs, signs)) / n
    if variance == 0.0:
        return float(n)  # all equal: the timer saw no difference at all
    centred = signs - signs.sum() / n
    if not float(centred @ centred) > 0:
        return float(n)
    for lags in (_FEW_LAGS, n - 1):  # most sums are short
        rho = _autocorrelations(centred, min(lags, n - 1))
        tau, ended = _correlation_time(rho)
        half = rho[: n // 2]
        corrected = (half + tau / n) / (1 - np.arange(1, len(half) + 1) / n)
        again, ended_again = _correlation_time(corrected)
        if ended and ended_again:
            break
    return float(n / min(n, max(tau, again)))


def _autocorrelations(centred: Array, lags: int) -> Array:
    """ρ_1 … ρ_lags of a series whose mean is 0: products where they are few, a Fourier transform otherwise."""
    n = len(centred)
    if lags <= _FEW_LAGS:
        return np.array([centred[:-k] @ centred[k:] for k in range(1, lags + 1)]) / (centred @ centred)
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    products = np.fft.irfft(spectrum * np.conj(spectrum), size)
    return np.asarray(products[1 : lags + 1] / products[0], dtype=np.float64)


def _correlation_time(rho: Array) -> tuple[float, bool]:
    """1 + 2 Σ ρ_k up to the first non-positive one, and whether there was one."""
    non_positive = np.flatnonzero(rho <= 0)
    ended = len(non_positive) > 0
    upto = int(non_positive[0]) if ended else len(rho)
    return 1 + 2 * float(rho[:upto].sum()), ended


def median_interval(samples: Array, effective: float | None = None) -> Interval:
    """Median of samples in measured order, with its exact order-statistic interval.

    The ranks are those of n_effective samples, stretched to n. ``effective`` overrides n_effective (pass
    ``len(samples)`` for samples known to be independent, such as launch medians). Raises ValueError when empty.
    """
    n = len(samples)
    if n == 0:
        raise ValueError("no samples: a median needs at least one")
    ordered = np.sort(samples)
    middle = float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    worth = min(float(n), n_effective(samples, middle) if effective is None else effective)
    whole = math.floor(worth)
    rank = _lower_rank(whole)
    if rank == 0:
        return Interval(middle, float(ordered[0]), float(ordered[-1]), n, worth, exact=False)
    stretched = max(1, math.floor(rank * (n + 1) / (whole + 1)))
    return Interval(middle, float(ordered[stretched - 1]), float(ordered[n - stretched]), n, worth, exact=True)


def is_steady(samples: Array) -> bool:
    """Whether warm-up has ended: the medians of the last two quarters agree within their intervals.

    With fewer than 48 samples a quarter's interval would be its range, which one outlier stretches: then the two halves
    are compared. Fewer than four samples are never steady.
    """
    n = len(samples)
    if n < 4:
        return False
    part = n // 4 if n >= 8 * FEWEST_FOR_INTERVAL else n // 2
    last, before = samples[n - part :], samples[n - 2 * part : n - part]
    a, b = median_interval(last, effective=part), median_interval(before, effective=part)
    return a.low <= b.high and b.low <= a.high


@dataclass(frozen=True, slots=True)
class Drift:
    """The medians of the first and the last third of a series that went from one to the other, in its unit."""

    first: float
    last: float


def drift(samples: Array) -> Drift | None:
    """Where the first and the last third have medians whose intervals are apart by more than 5 %; else None.

    An interval of the whole would then describe a mixture that depends on when one stopped. Fewer than 36 samples
    are too few to tell.
    """
    n = len(samples)
    third = n // 3
    if third < 2 * FEWEST_FOR_INTERVAL:
        return None
    first, last = samples[:third], samples[n - third :]
    # the drift itself would look like autocorrelation: it is taken off, as the line through the two medians
    middle, end = float(np.median(first)), float(np.median(last))
    line = middle + (end - middle) * (np.arange(n) - (third - 1) / 2) / (n - third)
    effective = third * n_effective(samples - line) / n
    a, b = median_interval(first, effective), median_interval(last, effective)
    gap = max(a.low - b.high, b.low - a.high)
    return Drift(a.median, b.median) if gap > NOTABLE * min(a.median, b.median) else None


def has_drifted(samples: Array) -> bool:
    """Whether ``drift`` finds one."""
    return drift(samples) is not None


@dataclass(frozen=True, slots=True)
class Modes:
    """Two values around which the samples gather, in their unit, and the fraction of them around the upper one."""

    low: float
    high: float
    share_high: float


def modes(samples: Array) -> Modes | None:
    """The two modes of a series whose median would describe neither; None where the series shows one mode.

    The sorted logarithms are split in two where the variance between the parts is largest (Otsu 1979). A unimodal
    density is nowhere lower between two points than at both of them. So there are two modes where a window halfway
    between the medians of the parts holds at most half the samples of the same window at either median, by more than
    chance (binomial, one in 1000; counts are those of n_effective samples). The medians must be 5 % apart, and each
    part must hold 5 % of the samples. Up to 10 % of the samples that lie far out are set aside for this search only.
    """
    n = len(samples)
    if n < 4 * FEWEST_FOR_INTERVAL or not samples.min() > 0:
        return None
    ordered = np.log(np.sort(samples))
    first, last = 0, n
    fewest = max(FEWEST_FOR_INTERVAL, math.ceil(NOTABLE * n))
    while last - first > 0.9 * n:
        split = first + _best_split(ordered[first:last])
        if split - first >= fewest and last - split >= fewest:
            return _two_modes(ordered, first, split, last, n_effective(samples) / n)
        if split - first < last - split:
            first = split
        else:
            last = split
    return None


def _best_split(ordered: Array) -> int:
    """Where to cut sorted values so that the variance between the two parts is largest: the size of the lower one."""
    n = len(ordered)
    below = np.arange(1, n)
    sums = np.cumsum(ordered - ordered.mean())[:-1]
    return 1 + int(np.argmax(sums**2 / (below * (n - below))))


def _two_modes(ordered: Array, first: int, split: int, last: int, worth: float) -> Modes | None:
    """The medians of ordered[first:split] and ordered[split:last] (logs) as modes, if there is a valley between."""
    low, high = float(np.median(ordered[first:split])), float(np.median(ordered[split:last]))
    if high - low < math.log1p(NOTABLE):
        return None
    width = (high - low) / 3

    def around(centre: float) -> int:
        left, right = np.searchsorted(ordered, (centre - width / 2, centre + width / 2))
        return math.floor(int(right - left) * worth)

    valley, hill = around((low + high) / 2), min(around(low), around(high))
    trials = valley + hill
    if 2 * valley > hill:
        return None
    # from 100 on, a third of the trials or fewer is always further from half of them than 1 in 1000
    if trials < 100 and sum(math.comb(trials, k) for k in range(valley + 1)) / 2**trials > 1e-3:
        return None
    return Modes(math.exp(low), math.exp(high), (last - split) / (last - first))


def remarks(samples: Array) -> list[str]:
    """What a reader of the median must know about latencies in seconds, in measured order: one phrase each.

    One sample only, all equal, two modes, a drift. Empty for a series that a median and its interval describe.
    """
    n = len(samples)
    if n == 1:
        return ["one sample only: nothing is known of its spread"]
    if n and samples.min() == samples.max():
        return [f"all {n} samples are equal: the timer is coarser than their differences"]
    found = []
    if (two := modes(samples)) is not None:
        found.append(
            f"two modes: {1 - two.share_high:.0%} of the samples around {format_time(two.low)}, "
            f"{two.share_high:.0%} around {format_time(two.high)}; the median describes neither"
        )
    if (moved := drift(samples)) is not None:
        found.append(f"drifted from {format_time(moved.first)} (first third) to {format_time(moved.last)} (last third)")
    return found


def quantile(samples: Array, q: float) -> float:
    """The smallest sample that at least a fraction q of the samples do not exceed (no interpolation)."""
    ordered = np.sort(samples)
    return float(ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))])
