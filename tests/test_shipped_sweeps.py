"""The sweep files that come with commbench: they are valid, and measure what they say."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from commbench.sweep import Expansion, SweepSpec, expand, make_spec, read_file

SWEEPS = Path(__file__).resolve().parent.parent / "sweeps"
NAMES = ("coordinator", "decode", "nightly", "quick", "thresholds")
GIB = 1 << 30


def load(name: str) -> SweepSpec:
    return make_spec(read_file(SWEEPS / f"{name}.toml"), {})


def points(name: str) -> Expansion:
    return expand(load(name), memory_bytes=16 * GIB)


def test_these_and_no_others_are_shipped() -> None:
    assert sorted(path.stem for path in SWEEPS.glob("*.toml")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_sweep_is_valid_named_after_its_file_and_explained(name: str) -> None:
    spec = load(name)
    assert spec.name == name
    assert spec.description
    assert points(name).points
    comments = [line for line in (SWEEPS / f"{name}.toml").read_text().splitlines() if line.startswith("#")]
    assert len(comments) >= 8


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_sweep_works_with_any_number_of_ranks(name: str, ranks: int) -> None:
    spec = load(name).changed(tp=ranks)
    assert expand(spec, memory_bytes=16 * GIB).points


def test_quick_fits_into_about_a_minute() -> None:
    spec = load("quick")
    longest_s = len(points("quick").points) * spec.launches * spec.max_time_per_point
    assert longest_s <= 60


def test_nightly_fits_into_its_hour_and_repeats_in_fresh_launches() -> None:
    spec = load("nightly")
    assert spec.launches == 5
    assert spec.budget == 3600
    assert len(points("nightly").points) * spec.launches * spec.max_time_per_point <= spec.budget


def test_decode_holds_every_message_of_decoding_in_bfloat16_once() -> None:
    wanted = {
        hidden * tokens * 2
        for hidden in (4096, 5120, 7168, 8192, 16384)
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    }
    written = [int(size) for size in load("decode").sizes.split(",")]
    assert sorted(written) == sorted(wanted)
    assert {(p.collective, p.dtype) for p in points("decode").points} == {("all_reduce", "bfloat16")}


def test_thresholds_steps_by_at_most_half_an_octave_in_sizes_that_every_kernel_takes() -> None:
    sizes = sorted({p.size_bytes for p in points("thresholds").points})
    assert (sizes[0], sizes[-1]) == (1 << 10, 16 << 20)
    assert max(b / a for a, b in itertools.pairwise(sizes)) <= 1.5
    assert all(size % 16 == 0 for size in sizes)


def test_thresholds_forces_every_all_reduce_backend_beside_the_policys_pick() -> None:
    assert {p.backend for p in points("thresholds").points} == {"auto", "shm_oneshot", "shm_twoshot", "torch_dist"}
