"""Canaries: fixed work that depends on the machine and on nothing that is being compared.

Every launch times them at its start and at its end. When they take longer than in another run, the machine is slower
(load, frequency, memory bandwidth), and a slower collective proves nothing about its code.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import numpy as np

from commbench.measure.team import Team

MEMCPY_BYTES = 16 << 20  # beyond most cores' own caches
ARITHMETIC_BYTES = 256 << 10  # hashed in place: no memory traffic beyond the second-level cache
BARRIERS = 50  # of one sample
MOST_SAMPLES = 41
BUDGET_S = 0.25  # for each canary, at most about this


def take(team: Team) -> dict[str, float]:
    """Time the canaries on all ranks at once; the same numbers on every rank, in seconds.

    ``memcpy_s``: a copy of 16 MiB. ``arithmetic_s``: BLAKE2b over 256 KiB. ``spin_barrier_s``: one barrier of the team.
    Each is the median of up to 41 samples on the slowest rank. Called by all ranks, in step.
    """
    source = np.ones(MEMCPY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    block = bytes(ARITHMETIC_BYTES)

    def barriers() -> None:
        for _ in range(BARRIERS):
            team.barrier()

    def copy() -> None:
        np.copyto(target, source)

    def arithmetic() -> None:
        hashlib.blake2b(block).digest()

    return {
        "memcpy_s": _median_s(team, copy),
        "arithmetic_s": _median_s(team, arithmetic),
        "spin_barrier_s": _median_s(team, barriers) / BARRIERS,
    }


def _median_s(team: Team, work: Callable[[], None]) -> float:
    """Median duration of ``work`` on the slowest rank, every sample started together."""
    team.barrier()
    work()  # touches its memory
    started = time.perf_counter()
    work()
    each = max(float(team.gather_numbers(time.perf_counter() - started).max()), 1e-7)
    samples = max(5, min(MOST_SAMPLES, int(BUDGET_S / each)))
    durations = np.empty(samples)
    for i in range(samples):
        team.barrier()
        start = time.perf_counter_ns()
        work()
        durations[i] = time.perf_counter_ns() - start
    return float(team.gather_numbers(float(np.median(durations)) * 1e-9).max())
