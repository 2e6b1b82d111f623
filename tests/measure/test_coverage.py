"""Whether the intervals tell the truth: scripted series under the adaptive stopping rule, 2,000 points each.

The series are AR(1) with φ as given, around a median of 100: x_i = φ x_(i−1) + noise. Each point is sampled as a launch
samples it: three visits of equal blocks, then a look whenever n has grown by two fifths, until the rule says stop.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from commbench.measure.stopping import FEWEST_EFFECTIVE, FEWEST_VISITS, StoppingRule
from commbench.statistics import Array

MEDIAN = 100.0
POINTS = 2000
RULE = StoppingRule(target=0.01, max_time_s=math.inf)


class Series:
    """AR(1) samples, normal around MEDIAN with the given coefficient of variation, made as they are asked for."""

    def __init__(self, rng: np.random.Generator, phi: float, cv: float) -> None:
        self._rng, self._phi, self._cv = rng, phi, cv
        self._last = rng.normal()  # from the stationary distribution
        self._samples: Array = np.empty(0)

    def first(self, n: int) -> Array:
        if n > len(self._samples):
            noise = self._rng.normal(0, math.sqrt(1 - self._phi**2), 2 * n - len(self._samples))
            more, _ = lfilter([1.0], [1.0, -self._phi], noise, zi=[self._phi * self._last])
            self._last = more[-1]
            self._samples = np.concatenate((self._samples, MEDIAN * (1 + self._cv * more)))
        return self._samples[:n]


def covers(series: Series, block: int) -> bool:
    """Whether the interval at which the rule stops holds the median."""
    visits, n = FEWEST_VISITS, FEWEST_VISITS * block
    while not (progress := RULE.look(series.first(n), visits, 0.0)).done:
        visits, n = visits + 1, progress.next_n
    assert progress.target_reached
    assert progress.interval is not None
    return progress.interval.low <= MEDIAN <= progress.interval.high


def coverage(phi: float, cv: float, block: int, points: int = POINTS) -> float:
    rng = np.random.default_rng(20)
    return float(np.mean([covers(Series(rng, phi, cv), block) for _ in range(points)]))


@pytest.mark.parametrize(("phi", "low"), [(0.0, 0.94), (0.3, 0.92), (0.6, 0.92), (0.9, 0.92)])
def test_the_interval_at_which_sampling_stops_covers_the_median_as_often_as_it_says(phi: float, low: float) -> None:
    covered = coverage(phi, cv=0.05, block=20)
    print(f"φ = {phi}: {covered:.4f} of {POINTS} intervals hold the median")
    assert low <= covered <= 0.97


def test_a_series_too_short_to_know_its_autocorrelation_does_not_end_a_point() -> None:
    """At 2 % variation, blocks of four samples soon give a narrow interval of a correlated series, at a wrong place."""
    assert coverage(0.9, cv=0.02, block=4, points=500) >= 0.92


def test_a_narrow_interval_of_few_effective_samples_is_believed_only_when_time_is_up() -> None:
    few = np.tile([1.0, 1.0, 1.001, 1.001], FEWEST_EFFECTIVE // 5) * 1e-6
    rule = StoppingRule(target=0.01, max_time_s=1.0)
    assert not rule.look(few, FEWEST_VISITS, 0.5).done
    late = rule.look(few, FEWEST_VISITS, 1.0)
    assert late.done
    assert late.target_reached
