"""Which cores a rank is bound to, and that it really is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from commbench.errors import SpecError
from commbench.harness.launchers.binding import VARIABLE, bind_rank, check, cores_for

# two sockets of two cores with two threads each; threads 0-3 are the first of each core
CORE_OF = {0: 0, 4: 0, 1: 1, 5: 1, 2: 2, 6: 2, 3: 3, 7: 3}
NODE_OF = {cpu: (0 if CORE_OF[cpu] < 2 else 1) for cpu in CORE_OF}


def bound(how: str, ranks: int, allowed: list[int] | None = None) -> list[list[int]]:
    cpus = sorted(CORE_OF) if allowed is None else allowed
    return [cores_for(how, rank, ranks, cpus, CORE_OF, NODE_OF) for rank in range(ranks)]


def test_core_gives_each_rank_a_physical_core_with_both_its_threads() -> None:
    assert bound("core", 4) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert bound("core", 2, allowed=[2, 3, 6]) == [[2, 6], [3]]


def test_numa_spreads_neighbouring_ranks_evenly_over_the_nodes() -> None:
    first, second = [0, 1, 4, 5], [2, 3, 6, 7]
    assert bound("numa", 4) == [first, first, second, second]
    assert bound("numa", 2) == [first, second]
    assert bound("numa", 1) == [first]
    assert bound("numa", 3) == [first, first, second]


def test_none_leaves_every_core_and_unknown_threads_count_as_cores() -> None:
    assert bound("none", 2) == [sorted(CORE_OF)] * 2
    assert cores_for("core", 1, 2, [8, 9], {}, {}) == [9]
    assert cores_for("numa", 1, 2, [8, 9], {}, {}) == [8, 9]


def test_more_ranks_than_cores_are_refused_with_both_numbers() -> None:
    with pytest.raises(SpecError, match=r"--bind core: 5 ranks on this host, which may use 4 cores; .* numa or none"):
        bound("core", 5)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system lets no process choose its cores")
def test_a_rank_binds_itself_and_too_many_are_found_before_anything_runs() -> None:
    program = "import os; from commbench.harness.launchers.binding import bind_rank; bind_rank(os.environ); " + (
        "print(sorted(os.sched_getaffinity(0)))"
    )
    here = sorted(os.sched_getaffinity(0))
    env = {**os.environ, VARIABLE: "core", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout)
    assert set(left) <= set(here)
    assert here[0] in left
    bind_rank({})  # nobody asked
    check("none", 10_000)
    check("", 10_000)
    with pytest.raises(SpecError, match="10000 ranks"):
        check("core", 10_000)
