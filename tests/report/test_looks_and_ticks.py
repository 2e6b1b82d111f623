from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.registry import BACKENDS
from commbench.report.style import decade_ticks, interval_text, looks, short_rate, short_time, size_ticks


def test_every_registered_backend_has_a_look_of_its_own() -> None:
    found = looks(BACKENDS)
    assert len(set(found.values())) == len(BACKENDS)


def test_a_backend_looks_the_same_whoever_stands_beside_it() -> None:
    assert looks(["shm"])["shm"] == looks(["torch_dist", "shm", "mine"])["shm"]
    assert looks(["mine"])["mine"] == looks(["mine", "shm", "torch_dist"])["mine"]


@given(st.sets(st.text("abcdefgh_", min_size=1, max_size=8), max_size=40))
def test_unknown_backends_are_told_apart_too(names: set[str]) -> None:
    assert len(set(looks(names).values())) == len(names)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1e-9, "1 ns"),
        (1e-6, "1 µs"),
        (2.5e-5, "25 µs"),
        (1e-3, "1 ms"),
        (0.5, "500 ms"),
        (1.5, "1.5 s"),
        (1e-7, "100 ns"),
    ],
)
def test_time_ticks_carry_a_unit_and_no_needless_zeros(seconds: float, text: str) -> None:
    assert short_time(seconds) == text


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (271e-6, 280e-6, "271–280 µs"),
        (9.84e-7, 1.02e-6, "984 ns–1.02 µs"),
        (math.nan, 1e-6, "–"),
        (1e-9, 1e-3, ">1000× wide"),
        (0.0, 1e-3, ">1000× wide"),
    ],
)
def test_intervals_are_short_and_never_absurd(low: float, high: float, text: str) -> None:
    assert interval_text(low, high) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(math.nan, "–"), (0.0, "0"), (123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123"),
     (0.00213, "0.0021"), (0.0001, "1e-4")],
)  # fmt: skip
def test_rates_have_three_digits_at_most(rate: float, text: str) -> None:
    assert short_rate(rate) == text


@given(st.floats(1e-12, 99999.0))
def test_rates_fit_a_narrow_column(rate: float) -> None:
    assert len(short_rate(rate)) <= 6


@given(st.lists(st.integers(1, 1 << 34), min_size=1, max_size=40), st.integers(2, 8))
def test_size_ticks_are_few_and_ordered(sizes: list[int], most: int) -> None:
    ticks = size_ticks(sizes, most)
    assert 1 <= len(ticks) <= most + 1
    assert ticks == sorted(set(ticks))


def test_size_ticks_are_powers_of_two_that_meet_1_kib_and_1_mib() -> None:
    assert size_ticks([8 << i for i in range(24)]) == [32, 1 << 10, 1 << 15, 1 << 20, 1 << 25]
    assert size_ticks([64, 128, 256, 512]) == [64, 128, 256, 512]


def test_few_sizes_are_ticks_themselves() -> None:
    assert size_ticks([96]) == [96]
    assert size_ticks([96, 3000]) == [96, 3000]


def test_a_barrier_has_no_size_ticks() -> None:
    assert size_ticks([0]) == []


@given(st.floats(1e-9, 1e3), st.floats(1.0001, 1e9))
def test_value_ticks_lie_on_the_axis_and_never_crowd_it(low: float, ratio: float) -> None:
    high = low * ratio
    ticks = decade_ticks(low, high)
    assert 1 <= len(ticks) <= 9
    assert all(low * 0.99 <= t <= high * 1.01 for t in ticks)
    assert ticks == sorted(ticks)
