"""Canaries in real ranks: the same positive numbers on every rank, quickly."""

from __future__ import annotations

import time
from typing import Any

from tests.ranks import run_ranks, world


def _take(rank: int, size: int) -> Any:
    from commbench.harness.ranks.worker import Objects
    from commbench.measure import canary
    from commbench.measure.team import PageTeam

    group = world()
    team = PageTeam.form(rank, size, Objects(group.cpu_group), oversubscribed=False)
    canary.take(team)  # the first touches pages and starts clocks
    started = time.perf_counter()
    found = canary.take(team)
    seconds = time.perf_counter() - started
    team.close()
    return found, seconds


def test_all_ranks_have_the_same_canaries_and_they_are_plausible() -> None:
    (first, seconds), (second, _) = run_ranks(_take, 2)
    assert first == second
    assert set(first) == {"memcpy_s", "arithmetic_s", "spin_barrier_s"}
    assert 1e-4 < first["memcpy_s"] < 1.0  # 16 MiB at 160 GB/s would be 0.1 ms
    assert 1e-5 < first["arithmetic_s"] < 1.0
    assert 1e-8 < first["spin_barrier_s"] < 0.1
    assert seconds < 20
