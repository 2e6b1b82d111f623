"""Intervals, autocorrelation, steadiness: held against exact values and simulation."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.statistics import (
    _lower_rank,
    drift,
    has_drifted,
    is_steady,
    median_interval,
    modes,
    n_effective,
    quantile,
    remarks,
)


def binomial_tail(n: int, upto: int) -> float:
    return sum(math.comb(n, k) for k in range(upto + 1)) / 2**n


@pytest.mark.parametrize("n", [6, 7, 10, 25, 99, 100, 1000])
def test_the_rank_is_the_largest_that_still_covers_95_percent(n: int) -> None:
    rank = _lower_rank(n)
    assert 1 - 2 * binomial_tail(n, rank - 1) >= 0.95
    assert 1 - 2 * binomial_tail(n, rank) < 0.95


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_fewer_than_six_samples_have_no_interval(n: int) -> None:
    interval = median_interval(np.arange(n, dtype=float), effective=n)
    assert not interval.exact
    assert interval.relative_half_width == math.inf


def test_six_samples_have_the_whole_range_as_interval() -> None:
    interval = median_interval(np.array([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]), effective=6)
    assert (interval.low, interval.median, interval.high) == (1.0, 3.5, 6.0)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median_interval(np.empty(0))


def test_the_normal_approximation_joins_the_exact_ranks() -> None:
    assert abs(_lower_rank(5001) - _lower_rank(5000)) <= 1


@settings(deadline=None)
@given(st.lists(st.floats(1e-7, 1e-2), min_size=6, max_size=200))
def test_the_interval_holds_the_median_and_lies_within_the_samples(values: list[float]) -> None:
    samples = np.array(values)
    interval = median_interval(samples)
    assert samples.min() <= interval.low <= interval.median <= interval.high <= samples.max()


def test_equal_samples_have_an_interval_of_no_width() -> None:
    interval = median_interval(np.full(50, 2e-6))
    assert interval.relative_half_width == 0


def test_independent_samples_keep_their_number() -> None:
    samples = np.random.default_rng(1).normal(10, 1, 2000)
    assert n_effective(samples) == pytest.approx(2000, rel=0.15)


def ar1(rng: np.random.Generator, n: int, phi: float) -> np.ndarray:
    noise = rng.normal(0, 1, n)
    series = np.empty(n)
    series[0] = noise[0] / math.sqrt(1 - phi**2)
    for i in range(1, n):
        series[i] = phi * series[i - 1] + noise[i]
    return series


@pytest.mark.parametrize(("phi", "low", "high"), [(0.0, 0.94, 0.985), (0.3, 0.92, 0.985), (0.6, 0.92, 0.985)])
def test_the_interval_covers_the_median_of_autocorrelated_series(phi: float, low: float, high: float) -> None:
    rng = np.random.default_rng(7)
    covered = 0
    trials = 600
    for _ in range(trials):
        interval = median_interval(100 + ar1(rng, 300, phi))
        covered += interval.low <= 100 <= interval.high
    assert low <= covered / trials <= high


def test_a_level_series_is_steady_and_a_falling_one_is_not() -> None:
    rng = np.random.default_rng(3)
    level = 10 + rng.normal(0, 0.1, 80)
    assert is_steady(level)
    assert not is_steady(level + np.linspace(20, 0, 80))


def test_three_samples_are_never_steady() -> None:
    assert not is_steady(np.array([1.0, 1.0, 1.0]))


def test_few_samples_are_steady_when_their_halves_overlap() -> None:
    assert is_steady(np.array([1.0, 1.2, 1.1, 1.0]))
    assert not is_steady(np.array([5.0, 4.8, 1.1, 1.0]))


@pytest.mark.parametrize("n", [24, 32, 45, 60, 100])
def test_a_falling_series_is_not_steady_though_one_late_sample_is_an_outlier(n: int) -> None:
    rng = np.random.default_rng(n)
    falling = 6.0 - 0.01 * np.arange(n) + rng.normal(0, 0.005, n)
    falling[-3] = 8.0
    assert not is_steady(falling)


def test_a_slow_drift_is_seen() -> None:
    rng = np.random.default_rng(5)
    level = 10 + rng.normal(0, 0.1, 300)
    assert not has_drifted(level)
    assert has_drifted(level * np.linspace(1, 1.3, 300))


def test_a_drift_is_told_by_the_medians_of_its_ends() -> None:
    rng = np.random.default_rng(6)
    found = drift(1e-5 * (1 + 0.02 * rng.normal(size=300)) * np.linspace(1, 1.3, 300))
    assert found is not None
    assert found.first == pytest.approx(1.05e-5, rel=0.01)
    assert found.last == pytest.approx(1.25e-5, rel=0.01)


def test_a_step_in_the_middle_of_a_series_is_a_drift() -> None:
    rng = np.random.default_rng(8)
    assert has_drifted((10 + rng.normal(0, 0.2, 300)) * np.repeat([1.0, 1.2], 150))


@pytest.mark.parametrize("phi", [0.0, 0.6, 0.9])
def test_a_correlated_series_that_wanders_about_one_level_has_rarely_drifted(phi: float) -> None:
    rng = np.random.default_rng(9)
    found = sum(has_drifted(100 + 10 * math.sqrt(1 - phi**2) * ar1(rng, 300, phi)) for _ in range(200))
    assert found <= 4


def two_levels(rng: np.random.Generator, n: int, share_high: float, gap: float, outliers: float = 0.0) -> np.ndarray:
    """10 µs and (1 + gap) times that, at random, each with 2 % of noise; outliers are thirty times as long."""
    samples = 1e-5 * (1 + gap * (rng.uniform(size=n) < share_high)) * (1 + 0.02 * rng.normal(size=n))
    samples[rng.uniform(size=n) < outliers] *= 30
    return samples


@pytest.mark.parametrize(("share", "outliers"), [(0.5, 0.0), (0.3, 0.0), (0.1, 0.0), (0.5, 0.03)])
def test_two_modes_are_found_with_their_values_and_shares(share: float, outliers: float) -> None:
    found = modes(two_levels(np.random.default_rng(11), 400, share, 0.2, outliers))
    assert found is not None
    assert found.low == pytest.approx(1.0e-5, rel=0.01)
    assert found.high == pytest.approx(1.2e-5, rel=0.01)
    assert found.share_high == pytest.approx(share, abs=0.05)


UNIMODAL = {
    "normal": lambda rng: 10 + rng.normal(size=400),
    "lognormal": lambda rng: np.exp(0.5 * rng.normal(size=400)),
    "exponential": lambda rng: 1 + rng.exponential(size=400),
    "uniform": lambda rng: 1 + rng.uniform(size=400),
    "with outliers": lambda rng: two_levels(rng, 400, 0.0, 0.0, outliers=0.02),
    "correlated": lambda rng: 100 + 4 * ar1(rng, 400, 0.9),
}


@pytest.mark.parametrize("kind", UNIMODAL)
def test_one_mode_is_not_taken_for_two_however_skewed(kind: str) -> None:
    rng = np.random.default_rng(12)
    assert sum(modes(UNIMODAL[kind](rng)) is not None for _ in range(200)) <= 4


def test_modes_less_than_five_percent_apart_are_not_worth_a_remark() -> None:
    levels = np.tile([1.0e-5, 1.04e-5], 100) * (1 + 1e-4 * np.random.default_rng(1).normal(size=200))
    assert modes(levels) is None
    assert modes(levels[:20]) is None


@settings(deadline=None)
@given(st.lists(st.floats(1e-7, 1e-2), min_size=1, max_size=120))
def test_any_positive_series_can_be_asked_for_its_modes_and_its_drift(values: list[float]) -> None:
    samples = np.array(values)
    found = modes(samples)
    assert found is None or samples.min() * 0.999 <= found.low < found.high <= samples.max() * 1.001
    assert isinstance(has_drifted(samples), bool)


def test_what_a_median_hides_is_said_in_words() -> None:
    rng = np.random.default_rng(13)
    assert remarks(np.array([1e-6])) == ["one sample only: nothing is known of its spread"]
    assert remarks(np.full(20, 1e-6)) == ["all 20 samples are equal: the timer is coarser than their differences"]
    assert remarks(1e-5 * (1 + 0.02 * rng.normal(size=300))) == []
    assert remarks(np.empty(0)) == []
    (two,) = remarks(two_levels(rng, 400, 0.5, 0.3))
    assert re.fullmatch(
        r"two modes: \d\d% of the samples around (9\.9\d|10\.0) µs, \d\d% around 1[23]\.\d µs; "
        "the median describes neither",
        two,
    )
    (moved,) = remarks(1e-5 * (1 + 0.02 * rng.normal(size=300)) * np.linspace(1, 1.3, 300))
    assert re.fullmatch(r"drifted from 10\.\d µs \(first third\) to 12\.\d µs \(last third\)", moved)


def test_a_quantile_is_a_sample_not_an_interpolation() -> None:
    samples = np.array([1.0, 2.0, 3.0, 4.0])
    assert (quantile(samples, 0.5), quantile(samples, 0.99), quantile(samples, 0.0)) == (2.0, 4.0, 1.0)
