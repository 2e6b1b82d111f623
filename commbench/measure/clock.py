"""The clock of CPU measurements, and what it costs to read.

``perf_counter_ns`` is CLOCK_MONOTONIC on Linux, one clock for all processes of a host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from commbench.statistics import quantile

Clock = Callable[[], int]
now_ns: Clock = time.perf_counter_ns


@dataclass(frozen=True, slots=True)
class TimerFacts:
    """What one loop can and cannot resolve, in seconds.

    resolution: smallest step between two different readings. overhead: median of an empty iteration (two
    readings and an empty call), subtracted from every sample. spread: distance between the quartiles of
    the empty iteration, what is left uncertain in a median after the subtraction.
    """

    resolution_s: float
    overhead_s: float
    spread_s: float

    @property
    def uncertainty_s(self) -> float:
        return max(self.resolution_s, self.spread_s)


def resolution_s(clock: Clock = now_ns, readings: int = 2000) -> float:
    """The smallest positive difference between consecutive readings.

    Raises ValueError if the clock stands still or goes back.
    """
    smallest = 0
    before = clock()
    for _ in range(readings):
        reading = clock()
        if reading < before:
            raise ValueError(f"the clock went back by {before - reading} ns")
        if reading > before and (smallest == 0 or reading - before < smallest):
            smallest = reading - before
        before = reading
    if smallest == 0:
        raise ValueError(f"the clock did not move in {readings} readings")
    return smallest * 1e-9


def timer_facts(empty_ns: np.ndarray, resolution: float) -> TimerFacts:
    """Facts from the durations of empty iterations, in nanoseconds (at least a few hundred)."""
    seconds = np.asarray(empty_ns, dtype=np.float64) * 1e-9
    return TimerFacts(resolution, float(np.median(seconds)), quantile(seconds, 0.75) - quantile(seconds, 0.25))
