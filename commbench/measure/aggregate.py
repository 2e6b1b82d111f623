"""What a block of samples says over all ranks, and how the next block is taken: pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commbench.statistics import Array

TIMER_SHARE = 0.05  # largest part of a latency that the timer may leave uncertain
LARGEST_BATCH = 1000
LARGEST_DELTA_NS = 500_000


@dataclass(slots=True)
class Samples:
    """A block seen over all ranks, per sample, in seconds per iteration; ``valid`` tells missed windows."""

    latency: Array
    t_win: Array
    skew: Array
    valid: NDArray[np.bool_]


def aggregate(
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    late: NDArray[np.uint8],
    *,
    synchronising: bool,
    sync: str,
    batch: int,
    overhead_s: float,
) -> Samples:
    """Per sample: t_last = max end − max start, t_win = max end − min start, skew = t_win − t_last.

    The latency is t_last of a synchronising collective and t_win of another; where iterations do not start in a
    window, or are batched, it is the maximum over ranks of local durations. starts, ends, late: (ranks, n) in ns.
    overhead_s (per sample) is taken off every time; a time that it exceeds becomes zero.
    """
    t_win = (ends.max(0) - starts.min(0)) * 1e-9
    t_last = (ends.max(0) - starts.max(0)) * 1e-9
    local = (ends - starts).max(0) * 1e-9
    if sync != "window" or batch > 1:
        latency = local
    else:
        latency = t_last if synchronising else t_win
    return Samples(
        np.maximum(latency - overhead_s, 0.0) / batch,
        np.maximum(t_win - overhead_s, 0.0) / batch,
        t_win - t_last,
        np.asarray(~late.any(0)),
    )


def smallest_delta_ns(ranks: int) -> int:
    """How far ahead a window is announced on a quiet machine: all ranks must have seen it before it opens."""
    return 4_000 + 1_000 * ranks


def adapted_delta_ns(delta_ns: int, missed: float, ranks: int) -> int:
    """The next block's δ: twice as long when more than 10 % of the windows were missed, half when under 1 %."""
    if missed > 0.1:
        return min(2 * delta_ns, LARGEST_DELTA_NS)
    if missed < 0.01:
        return max(delta_ns // 2, smallest_delta_ns(ranks))
    return delta_ns


def batch_for(uncertainty_s: float, typical_s: float) -> int:
    """Iterations per sample so that the timer's uncertainty is at most TIMER_SHARE of it; 0 if that takes too many."""
    if typical_s <= 0:
        return LARGEST_BATCH
    needed = math.ceil(uncertainty_s / (TIMER_SHARE * typical_s))
    return needed if needed <= LARGEST_BATCH else 0
