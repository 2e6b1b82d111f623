"""How much slower one side is than the other, for many series at once: estimates, errors and tests.

A series is a row of a matrix, a launch (or a night) a column, and every number the logarithm of a launch median;
NaN where there is none. A difference of logs is the log of a ratio, so 0.01 is 1.0 % slower. Launch medians of one
machine scatter about log-normally, and the t statistics here are for that scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commbench.statistics import CONFIDENCE

Array = NDArray[np.float64]

EXACT_FLIPS = 14  # pairs from which a sign-flip test can reach p = 1e-4 (2^-14 = 6e-5)
MOST_EXACT_FLIPS = 16  # pairs up to which all 2^n flips are tried; above, as many random ones
AT_ONCE = 4_000_000  # pairwise differences held at a time
SHUFFLES, FEWEST_SHUFFLES = 4000, 1000  # of launches between the sides: p values in steps of 1/4001, or of 1/1001


@dataclass(frozen=True, slots=True)
class Effects:
    """Candidate over baseline, per series. All arrays have one number per series; NaN where it cannot be known.

    estimate: mean difference of logs. se: its standard error, on df degrees of freedom. n_base, n_cand: launches (or
    nights) used.
    """

    estimate: Array
    se: Array
    df: Array
    n_base: NDArray[np.int64]
    n_cand: NDArray[np.int64]

    def interval(self, confidence: float = CONFIDENCE) -> tuple[Array, Array]:
        """Low and high end of the two-sided interval of the estimate (Student's t)."""
        half = t_quantile((1 + confidence) / 2, self.df) * self.se
        return self.estimate - half, self.estimate + half

    def p_slower(self, margin: float) -> Array:
        """One-sided p of 'slower by no more than ``margin``' (a difference of logs): small means clearly slower."""
        return _upper_tail(self.estimate - margin, self.se, self.df)

    def p_faster(self, margin: float) -> Array:
        """One-sided p of 'faster by no more than ``margin``'."""
        return _upper_tail(-self.estimate - margin, self.se, self.df)

    def smallest_found(self, margin: float, alpha: float, power: float = 0.8) -> Array:
        """The difference of logs that a test at level ``alpha`` against ``margin`` finds with the given power.

        margin + (t_{1-α} + t_{power}) · se, the usual approximation (Cohen, Statistical Power Analysis, 2.2).
        """
        reach: Array = margin + (t_quantile(1 - alpha, self.df) + t_quantile(power, self.df)) * self.se
        return reach

    def take(self, rows: Any) -> Effects:
        """The same of some series only."""
        return Effects(*(getattr(self, name)[rows] for name in self.__slots__))


def t_quantile(probability: ArrayLike, degrees: ArrayLike) -> Array:
    """Student's t quantile; NaN where ``degrees`` is NaN."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(degrees, probability), dtype=np.float64)


def _upper_tail(excess: Array, se: Array, df: Array) -> Array:
    """P(T ≥ excess/se). Without any scatter the sign alone decides; NaN where nothing is known."""
    from scipy.special import stdtr

    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(se > 0, excess / se, np.where(excess > 0, np.inf, -np.inf))
    p = np.asarray(stdtr(df, -t), dtype=np.float64)
    p = np.where(np.isposinf(t), 0.0, np.where(np.isneginf(t), 1.0, p))
    return np.where(np.isfinite(excess) & np.isfinite(se) & (df > 0), p, np.nan)


def mean_variance(logs: Array) -> tuple[NDArray[np.int64], Array, Array]:
    """Count, mean and sample variance of each row over its numbers. Variance NaN below two of them."""
    there = np.isfinite(logs)
    n = there.sum(axis=1)
    filled = np.where(there, logs, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(n > 0, filled.sum(axis=1) / n, np.nan)
        deviations = np.where(there, logs - mean[:, None], 0.0)
        variance = np.where(n > 1, (deviations**2).sum(axis=1) / (n - 1), np.nan)
    return n.astype(np.int64), mean, variance


def welch(base: Array, cand: Array) -> Effects:
    """Two independent sets of launches: Welch's t with Satterthwaite's degrees of freedom (Welch, Biometrika 1947).

    base: (series, launches), cand: (series, other launches). A series with fewer than two launches on a side has an
    estimate but neither error nor interval.
    """
    nb, mean_b, var_b = mean_variance(base)
    nc, mean_c, var_c = mean_variance(cand)
    with np.errstate(divide="ignore", invalid="ignore"):
        part_b, part_c = var_b / nb, var_c / nc
        total = part_b + part_c
        df = total**2 / (part_b**2 / (nb - 1) + part_c**2 / (nc - 1))
        df = np.where(total == 0, nb + nc - 2.0, df)
    return Effects(mean_c - mean_b, np.sqrt(total), df, nb, nc)


def paired(base: Array, cand: Array) -> Effects:
    """Launches that were made in pairs (column k with column k): t on the differences.

    A pair counts where both launches have a number.
    """
    differences = cand - base
    n, mean, variance = mean_variance(differences)
    with np.errstate(divide="ignore", invalid="ignore"):
        se = np.sqrt(variance / n)
    return Effects(mean, se, np.where(n > 1, n - 1.0, np.nan), n, n)


def against_nights(nights: Array, night_launches: Array, within: Array, cand: Array) -> Effects:
    """One night's launches against earlier nights, with the night-to-night variance in the error.

    nights: (series, nights) means of logs; night_launches: launches behind each of them; within: their variance
    between launches of a night; cand: (series, launches) of the night to judge.

    The unit is the night. With s² the variance of N nights, the candidate's mean has variance s² too if it has as
    many launches; with fewer, the part that launches contribute grows. The error of the difference is then
    √(max(s², τ² + w/n) + s²/N) on N − 1 degrees of freedom, τ² = max(0, s² − mean(w/n_night)).
    """
    n, mean, variance = mean_variance(nights)
    nc, mean_c, var_c = mean_variance(cand)
    there = np.isfinite(nights)
    with np.errstate(divide="ignore", invalid="ignore"):
        known = there & np.isfinite(within) & (night_launches > 0)
        shares = np.where(known, within / np.where(known, night_launches, 1), 0.0)
        share = np.where(known.any(axis=1), shares.sum(axis=1) / known.sum(axis=1), 0.0)
        spread = np.where(known.any(axis=1), np.where(known, within, 0.0).sum(axis=1) / known.sum(axis=1), np.nan)
        spread = np.fmax(spread, var_c)
        own = np.maximum(0.0, variance - share) + np.where(np.isfinite(spread), spread, 0.0) / nc
        se = np.sqrt(np.maximum(variance, own) + variance / n)
    return Effects(mean_c - mean, se, np.where(n > 1, n - 1.0, np.nan), n, nc)


def row_means(values: Array) -> Array:
    """Mean of each row over its numbers; NaN where there is none."""
    return mean_variance(values)[1]


def row_medians(values: Array) -> Array:
    """Median of each row over its numbers; NaN where there is none."""
    ordered = np.sort(values, axis=1)  # NaN goes last
    n = np.isfinite(values).sum(axis=1)
    result = np.full(len(values), np.nan)
    some = np.flatnonzero(n > 0)
    if len(some):
        low, high = (n[some] - 1) // 2, n[some] // 2
        result[some] = (ordered[some, low] + ordered[some, high]) / 2
    return result


def hodges_lehmann(base: Array, cand: Array, *, in_pairs: bool) -> Array:
    """Estimates of the difference of logs that outlying launches do not move (Hodges & Lehmann, 1963), per series.

    Of pairs: the median of the Walsh averages (d_i + d_j)/2, i ≤ j. Else: the median over all pairs of a baseline and
    a candidate launch of their difference.
    """
    if in_pairs:
        differences = cand - base
        i, j = np.triu_indices(differences.shape[1])
        each = max(1, len(i))
    else:
        each = max(1, base.shape[1] * cand.shape[1])
    step = max(1, AT_ONCE // each)
    parts = []
    for k in range(0, len(base), step):
        if in_pairs:
            values = (differences[k : k + step, i] + differences[k : k + step, j]) / 2
        else:
            values = (cand[k : k + step, :, None] - base[k : k + step, None, :]).reshape(-1, each)
        parts.append(row_medians(values))
    return np.concatenate(parts) if parts else np.empty(0)


def holm(p: Array) -> Array:
    """p values adjusted for testing them all: reject at α where the result is ≤ α (Holm, 1979). NaN stays out."""
    adjusted = np.full(len(p), np.nan)
    known = np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known], kind="stable")]
    steps = np.arange(len(order), 0, -1, dtype=np.float64)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * steps)) if len(order) else []
    return adjusted


def benjamini_hochberg(p: Array) -> Array:
    """q values: the false discovery rate at which each would be called (Benjamini & Hochberg, 1995)."""
    adjusted = np.full(len(p), np.nan)
    known = np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known], kind="stable")[::-1]]
    m = len(order)
    if m:
        ranks = np.arange(m, 0, -1, dtype=np.float64)
        adjusted[order] = np.minimum(1.0, np.minimum.accumulate(p[order] * m / ranks))
    return adjusted


def sign_flip_p(differences: Array, margin: float, seed: int = 0) -> float:
    """One-sided sign-flip p of one series of paired differences against ``margin``.

    Exact over all 2^n flips up to MOST_EXACT_FLIPS pairs, else over 2^16 random ones (the observed one included).
    NaN below EXACT_FLIPS pairs: it could not become small.
    """
    values = differences[np.isfinite(differences)] - margin
    n = len(values)
    if n < EXACT_FLIPS:
        return math.nan
    if n <= MOST_EXACT_FLIPS:
        bits = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
        signs = 1.0 - 2.0 * bits
    else:
        rng = np.random.default_rng(seed)
        signs = rng.choice([-1.0, 1.0], size=(1 << MOST_EXACT_FLIPS, n))
        signs[0] = 1.0
    sums = signs @ values
    return float((sums >= values.sum() - 1e-12).mean())


# ---- many series at once -------------------------------------------------------------------------------------------


def prior_variance(variances: Array, df: float) -> tuple[float, float]:
    """(degrees of freedom, variance) of what all series say of one series' variance, before its own is looked at.

    variances: of many series, each on df degrees of freedom. They are taken for draws around true variances that
    themselves scatter as a scaled inverse chi-squared; the moments of their logarithms give its two numbers (Smyth,
    Statistical Applications in Genetics and Molecular Biology 3, 2004, 6.2). Infinite degrees of freedom: they differ
    no more than chance makes them. (0, nan) where fewer than two are above zero.
    """
    from scipy.special import digamma, polygamma

    positive = variances[variances > 0]
    if len(positive) < 2:
        return 0.0, math.nan
    logs = np.log(positive) - float(digamma(df / 2)) + math.log(df / 2)
    excess = float(logs.var(ddof=1)) - float(polygamma(1, df / 2))
    if excess <= 0:
        return math.inf, float(np.exp(logs.mean()))
    half = _inverse_trigamma(excess)
    return 2 * half, float(np.exp(logs.mean() + float(digamma(half)) - math.log(half)))


def _inverse_trigamma(value: float) -> float:
    """x with trigamma(x) = value, by Newton's method on its reciprocal, which is nearly linear (Smyth, 2004)."""
    from scipy.special import polygamma

    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(polygamma(1, x))
        step = trigamma * (1 - trigamma / value) / float(polygamma(2, x))
        x += step
        if abs(step) < 1e-10 * x:
            break
    return x


def changed_p(base: Array, cand: Array, seed: int = 0) -> Array:
    """One-sided p of 'no slower at all' per series, adjusted over all of them: step-down maxT with shuffled launches
    (Westfall & Young, Resampling-Based Multiple Testing, 1993).

    base, cand: (series, launches), NaN where there is none. If nothing changed, launches could have been on either
    side: all series' launches are shuffled together, so whatever is common to the series of a launch stays so, and no
    distribution is assumed. The statistic is a t whose variance is drawn towards that of all series (Smyth, 2004): ten
    launches alone tell a variance so badly that a t on them would find little among hundreds. SHUFFLES random shuffles,
    of more than 500 series fewer, so that thousands take seconds; p is never below 1/(shuffles + 1), nor far below one
    over the number of ways to shuffle.
    """
    series, count = len(base), base.shape[1] + cand.shape[1]
    if not series or base.shape[1] == 0 or cand.shape[1] == 0:
        return np.full(series, np.nan)
    together = np.concatenate([base, cand], axis=1)
    there = np.isfinite(together)
    centred = np.where(there, together - row_means(together)[:, None], 0.0)
    rng = np.random.default_rng(seed)
    shuffles = max(FEWEST_SHUFFLES, min(SHUFFLES, 500 * SHUFFLES // series))
    mine = np.zeros((count, shuffles + 1))  # column: which launches are the candidate's
    mine[base.shape[1] :, 0] = 1.0
    for k in range(1, shuffles + 1):
        mine[rng.permutation(count)[: cand.shape[1]], k] = 1.0
    n = there.sum(axis=1).astype(np.float64)
    total = (centred**2).sum(axis=1)
    first = _split(centred, there, n, mine[:, :1])
    df = np.maximum(n - 2, 0.0)
    usual = float(np.quantile(df, 0.5, method="lower"))  # one that is there, also where two are equally many
    some = df > 0
    within = np.where(some, (total - first[1][:, 0]) / np.where(some, df, 1), 0.0)
    prior_df, prior = prior_variance(within[df == usual], usual) if usual > 0 else (0.0, math.nan)

    def statistic(rows: Any, columns: Array) -> Array:
        difference, between, parts = _split(centred[rows], there[rows], n[rows], columns)
        left = np.maximum(total[rows][:, None] - between, 0.0)
        if math.isinf(prior_df):
            variance = np.full_like(left, prior)
        elif prior_df > 0:
            variance = (prior_df * prior + left) / (prior_df + df[rows][:, None])
        else:
            variance = left / np.maximum(df[rows], 1)[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            t = difference / np.sqrt(variance * parts)
        return np.where(np.isfinite(t), t, np.where(difference > 0, np.inf, -np.inf))

    own = statistic(np.arange(series), mine[:, :1])[:, 0]
    order = np.argsort(own, kind="stable")  # smallest first: a series competes with those below it only
    adjusted = np.empty(series)
    highest = np.full(shuffles + 1, -np.inf)
    step = max(1, AT_ONCE // (shuffles + 1))
    for k in range(0, series, step):
        rows = order[k : k + step]
        running = np.maximum(np.maximum.accumulate(statistic(rows, mine), axis=0), highest)
        adjusted[rows] = (running >= own[rows][:, None] - 1e-12).mean(axis=1)
        highest = running[-1]
    # the largest first: none has a smaller p than one above it
    adjusted[order[::-1]] = np.maximum.accumulate(adjusted[order[::-1]])
    return adjusted


def _split(centred: Array, there: NDArray[np.bool_], n: Array, mine: Array) -> tuple[Array, Array, Array]:
    """Per series and column of ``mine``: candidate's mean minus the others', the sum of squares that the split
    explains, and 1/n_candidate + 1/n_others."""
    counts = there.astype(np.float64) @ mine
    others = n[:, None] - counts
    sums = centred @ mine
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = 1 / counts + 1 / others
        difference = sums / counts + sums / others  # centred: the others' sum is minus this one
        explained = difference**2 / parts
    known = (counts > 0) & (others > 0)
    return np.where(known, difference, 0.0), np.where(known, explained, 0.0), np.where(known, parts, np.inf)
