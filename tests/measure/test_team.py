"""The shared page with real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commbench.errors import PeerLost
from commbench.measure.clock import now_ns
from commbench.measure.gate import WindowGate
from commbench.measure.team import PageTeam, PointFailed
from tests.ranks import run_ranks, world


def team_of(rank: int, size: int) -> PageTeam:
    from commbench.harness.ranks.worker import Objects

    return PageTeam.form(rank, size, Objects(world().cpu_group), oversubscribed=size > (os.cpu_count() or 1))


def exchange(rank: int, size: int) -> dict[str, Any]:
    team = team_of(rank, size)
    found: dict[str, Any] = {}
    found["from_first"] = team.from_first(*((7, -8) if rank == 0 else (0, 0)))
    starts = np.arange(5, dtype=np.int64) + 100 * rank
    shared = team.share(starts, starts + 1, np.full(5, rank, dtype=np.uint8))
    found["share"] = [a.tolist() for a in shared]
    found["numbers"] = team.gather_numbers(rank + 0.5, -1.0).tolist()
    found["texts"] = team.gather_texts(f"rank {rank} ✓")
    found["left"] = [str(p) for p in Path("/dev/shm").glob("commbench-*")] if rank == 0 else []
    for _ in range(2000):
        team.barrier()
    team.close()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hand_over_numbers_texts_and_samples(size: int) -> None:
    ranks = run_ranks(exchange, size)
    for found in ranks:
        assert found["from_first"] == (7, -8)
        assert found["share"][0] == [[100 * r + i for i in range(5)] for r in range(size)]
        assert found["share"][2] == [[r] * 5 for r in range(size)]
        assert found["numbers"] == [[r + 0.5, -1.0] for r in range(size)]
        assert found["texts"] == [f"rank {r} ✓" for r in range(size)]


def fail_and_go_on(rank: int, size: int) -> list[str]:
    team = team_of(rank, size)
    said = []
    for attempt in range(3):
        try:
            if rank == 1:
                team.fail(f"attempt {attempt} went wrong")
            else:
                for _ in range(attempt):  # barriers that the failed rank never reaches
                    team.barrier()
                team.barrier()
        except PointFailed as error:
            said.append(str(error))
        team.recover(timeout_s=10)
        team.barrier()
    team.close()
    return said


def test_a_rank_that_fails_is_heard_by_the_others_and_all_go_on_together() -> None:
    ranks = run_ranks(fail_and_go_on, 2)
    assert ranks[0] == [f"rank 1: attempt {k} went wrong" for k in range(3)]
    assert ranks[1] == []


def lose_a_peer(rank: int, size: int) -> str:
    team = team_of(rank, size)
    team.barrier()
    if rank == 1:
        time.sleep(0.5)
        return "left"
    victim = team._pids[1]
    os.kill(victim, signal.SIGSTOP)
    try:
        team.barrier(timeout_s=1.0)
    except PeerLost as error:
        return str(error)
    finally:
        os.kill(victim, signal.SIGCONT)
    return "met"


def test_a_rank_that_never_comes_is_named_within_the_timeout() -> None:
    assert run_ranks(lose_a_peer, 2)[0] == "rank 1 did not come within 1 s"


def windows(rank: int, size: int) -> list[tuple[int, int]]:
    team = team_of(rank, size)
    gate = WindowGate(team, delta_ns=200_000)
    taken = [(gate(), now_ns()) for _ in range(200)]
    team.close()
    return taken


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="windows need a core for each rank")
def test_ranks_leave_a_window_together_and_know_when_they_missed_it() -> None:
    first, second = run_ranks(windows, 2)
    on_time = [abs(a[1] - b[1]) for a, b in zip(first, second, strict=True) if not a[0] and not b[0]]
    assert len(on_time) > 20
    # a window is 200 µs ahead: without it, starts would lie as far apart as the machine's noise
    assert np.median(on_time) < 50_000
