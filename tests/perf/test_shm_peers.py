"""Our all-reduce against gloo and, where they are installed, the MPI libraries: contenders interleaved in one run.

COMMBENCH_PEERS names the folder of the peers (docs/shared-memory.md tells how it is made). The full tables come from
tests/perf/peers/compare.py; this guards the claims with few launches and margins that a busy machine leaves intact.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import pytest

from commbench import native

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import compare

pytestmark = [
    pytest.mark.perf,
    pytest.mark.slow,
    pytest.mark.skipif(bool(native.why_unavailable()), reason=native.why_unavailable()),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]
ROUNDS, BLOCK_NS, BLOCKS = 3, 1e6, 5


def times(field: list[compare.Contender], sizes: list[int]) -> dict[str, dict[int, float]]:
    """The median over interleaved launches, ns by contender and size."""
    rounds: dict[str, list[dict[int, float]]] = {c.name: [] for c in field}
    for _ in range(ROUNDS):
        for contender in field:
            rounds[contender.name].append(compare.measure(contender, BLOCK_NS, BLOCKS, sizes, []))
    return {name: {s: statistics.median(r[s] for r in got) for s in sizes} for name, got in rounds.items()}


def test_shm_is_faster_than_gloo_from_python() -> None:
    field = [compare.Contender(name, compare.ours(mode, 2)) for name, mode in (("shm", "python"), ("gloo", "gloo"))]
    got = times(field, [8, 65536, 1 << 20])
    assert got["gloo"][8] > 20 * got["shm"][8]
    assert got["gloo"][1 << 20] > 1.5 * got["shm"][1 << 20]


def test_a_registered_all_reduce_takes_little_more_than_one_pass_over_the_memory() -> None:
    size = 64 << 20
    got = times(compare.contenders("large", Path(), 2), [size])
    assert got["copy"][size] > 0.8 * got["shm"][size]


@pytest.mark.skipif("COMMBENCH_PEERS" not in os.environ, reason="COMMBENCH_PEERS names no folder of MPI libraries")
@pytest.mark.parametrize("what", ["c", "python"])
def test_shm_is_faster_than_the_best_mpi_library_in_the_geometric_mean(what: str) -> None:
    sizes = [8, 1024, 16384, 262144, 4 << 20]
    field = [c for c in compare.contenders(what, Path(os.environ["COMMBENCH_PEERS"]), 2) if c.name != "gloo"]
    got = times(field, sizes)
    best = {s: min(got[name][s] for name in got if name != "shm") for s in sizes}
    assert statistics.geometric_mean(best[s] / got["shm"][s] for s in sizes) > 1
