"""The sizes that ``--sizes boundaries`` measures."""

from __future__ import annotations

from pathlib import Path

import pytest

from commbench.policy import load_policy
from commbench.policy.boundaries import probe_sizes, probes
from tests.policy.helpers import MIB, cpu, h100

COMMBENCH = load_policy("commbench")
CAPPED = """
format = 1
extends = "commbench"
name = "capped"
title = "shared memory up to 4 KiB of one rank's tensor"

[routes.shm]
accepts = [{ gate = "size_at_most", limit = "4KiB" }]
"""


def test_on_cpu_the_boundary_is_the_threshold_of_shared_memory() -> None:
    limit = 64 << 10
    sizes = probe_sizes(COMMBENCH, "all_reduce", "float32", cpu(2))
    assert {limit - 4, limit, limit + 4} <= set(sizes)
    assert sizes == sorted(set(sizes))


def test_a_threshold_is_probed_with_sizes_that_break_16_and_4_bytes_and_with_a_strided_tensor() -> None:
    found = probes(load_policy("sglang-0.5.3"), "all_reduce", "bfloat16", h100(8, "ca_v1"))
    contiguous = {p.size_bytes - 8 * MIB for p in found if p.layout == "contiguous"}
    assert contiguous == {-16, -2, 0, 2, 4, 16}
    assert [p.size_bytes for p in found if p.layout == "strided"] == [8 * MIB]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_every_probe_is_a_whole_number_of_elements(dtype: str) -> None:
    itemsize = {"float32": 4, "float64": 8, "int8": 1}[dtype]
    assert all(size % itemsize == 0 for size in probe_sizes(COMMBENCH, "all_reduce", dtype, cpu(2)))


def test_sizes_are_of_the_total_array_and_divide_among_the_ranks() -> None:
    """all_gather's caller passes one rank's part; reduce_scatter's the whole."""
    for collective in ("all_gather", "reduce_scatter"):
        assert all(size % (4 * 4) == 0 for size in probe_sizes(COMMBENCH, collective, "float32", cpu(4)))
    assert (64 << 10) * 4 in probe_sizes(COMMBENCH, "all_gather", "float32", cpu(4))


def test_a_policy_without_thresholds_gives_no_sizes() -> None:
    assert probe_sizes(load_policy("sglang-0.5.3"), "broadcast", "float32", cpu(2)) == []


def test_a_threshold_of_one_ranks_part_is_probed_at_the_total_of_all_ranks(tmp_path: Path) -> None:
    """gather's and scatter's callers hold one rank's part too: their policy sees that part."""
    path = tmp_path / "capped.toml"
    path.write_text(CAPPED)
    for collective in ("all_gather", "gather", "scatter"):
        assert 4 * 4096 in probe_sizes(load_policy(str(path)), collective, "float32", cpu(4)), collective
