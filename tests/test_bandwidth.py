"""The bandwidth formulas, held against nccl-tests' table."""

import pytest

from commbench.bandwidth import algbw_gb_per_s, busbw_gb_per_s
from commbench.types import COLLECTIVES


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("all_to_all", 7 / 8),
     ("gather", 7 / 8), ("scatter", 7 / 8), ("broadcast", 1), ("reduce", 1), ("send_recv", 1)],
)  # fmt: skip
def test_busbw_is_algbw_times_the_ring_factor(collective: str, factor: float) -> None:
    assert algbw_gb_per_s(10**9, 1.0) == 1.0
    assert busbw_gb_per_s(collective, 10**9, 1.0, 8) == pytest.approx(factor)


def test_a_barrier_has_no_bandwidth() -> None:
    assert busbw_gb_per_s("barrier", 0, 1e-6, 8) is None


def test_no_time_gives_no_bandwidth_instead_of_infinity() -> None:
    assert algbw_gb_per_s(8, 0.0) is None
    assert busbw_gb_per_s("all_reduce", 8, float("nan"), 2) is None


def test_every_collective_with_data_has_a_factor() -> None:
    for name, collective in COLLECTIVES.items():
        assert (busbw_gb_per_s(name, 8, 1.0, 2) is not None) == collective.has_data
