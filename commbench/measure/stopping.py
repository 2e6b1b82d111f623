"""When a point has been measured enough: pure decisions over the latencies so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

from commbench.statistics import FEWEST_FOR_INTERVAL, Array, Interval, is_steady, median_interval

GROWTH = 1.4  # the interval is looked at only when n has grown so much: looking often stops too early
FEWEST_VISITS = 3
# Shorter series cannot tell their own autocorrelation. Without this floor, an AR(1) series of φ = 0.9 and 2 % spread,
# taken in blocks of four, gives intervals that hold the median in 72 of 100 cases; with it in 94 (test_coverage.py).
FEWEST_EFFECTIVE = 50


FIRST_WARMUP = 4  # iterations of the first warm-up block
ENOUGH_WARMUP = 24  # from here on a half has an interval that one outlier does not stretch; fewer only if time is short


@dataclass(slots=True)
class WarmUpRule:
    """Warm-up ends when the series is steady (statistics.is_steady) at two looks running, or ``limit_s`` is used up."""

    limit_s: float
    agreed: int = 0

    @property
    def steady(self) -> bool:
        return self.agreed >= 2

    def look(self, latencies: Array, elapsed_s: float) -> bool:
        """Whether it ends now, after these latencies (all so far) and this time."""
        enough = len(latencies) >= ENOUGH_WARMUP or elapsed_s >= 0.5 * self.limit_s
        self.agreed = self.agreed + 1 if enough and is_steady(latencies) else 0
        return self.steady or (elapsed_s >= self.limit_s and len(latencies) >= FIRST_WARMUP)

    @staticmethod
    def next_n(made: int) -> int:
        """Iterations before the next look: half as many again, so that the slow beginning falls out of the look."""
        return max(2, math.ceil(0.5 * made))


@dataclass(frozen=True, slots=True)
class Progress:
    """One look at a point. done: stop now. target_reached: the interval is as narrow as asked for."""

    done: bool
    target_reached: bool
    interval: Interval | None
    next_n: int  # samples to have in total before the next look


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Stop when half-width / median of the median's interval is at most ``target``, or ``max_time_s`` is used up.

    At least FEWEST_VISITS visits and six samples are taken, unless three times ``max_time_s`` has passed. Before
    ``max_time_s`` a narrow interval ends a point only if it is made of FEWEST_EFFECTIVE effective samples or more.
    """

    target: float
    max_time_s: float

    def look(self, latencies: Array, visits: int, elapsed_s: float) -> Progress:
        n = len(latencies)
        interval = median_interval(latencies) if n else None
        reached = interval is not None and interval.relative_half_width <= self.target
        enough = n >= FEWEST_FOR_INTERVAL and visits >= FEWEST_VISITS
        out_of_time = elapsed_s >= self.max_time_s
        known = interval is not None and interval.n_effective >= FEWEST_EFFECTIVE
        done = (enough and ((reached and known) or out_of_time)) or elapsed_s >= 3 * self.max_time_s
        return Progress(done, reached, interval, max(n + 1, math.ceil(n * GROWTH)))
