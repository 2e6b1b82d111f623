"""Sizes and times as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.errors import SpecError
from commbench.units import format_size, format_time, parse_duration, parse_percent, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), (8, 8), ("1KiB", 1024), ("1K", 1024), ("10MB", 10_000_000), ("1.5GiB", 3 << 29), (" 64 kib ", 65536)],
)
def test_sizes_are_binary_with_i_or_alone_and_decimal_with_b(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "8QB", "1.3", "-8", -8, "0.1KiB", "1e3"])
def test_what_is_no_whole_number_of_bytes_is_refused_with_its_value(text: str | int) -> None:
    with pytest.raises(SpecError, match=r"size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "0." + "1" * 400, "99999999999GiB", 1 << 63])
def test_a_size_that_no_memory_has_is_refused_in_a_short_line(text: str | int) -> None:
    with pytest.raises(SpecError, match="than any") as refused:
        parse_size(text)
    assert len(str(refused.value)) < 120


def test_a_size_above_what_a_float_holds_exactly_is_exact() -> None:
    assert parse_size("9007199254740993") == 2**53 + 1


@given(st.integers(min_value=0, max_value=1 << 45))
def test_a_formatted_size_reads_back_as_the_same_size(size: int) -> None:
    assert parse_size(format_size(size).replace(" ", "")) == size


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("2m", 120.0), ("1.5s", 1.5), (3, 3.0), ("10us", 1e-5)])
def test_durations_have_units_and_are_seconds_without(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


def test_a_microsecond_may_be_written_with_either_mu() -> None:
    assert parse_duration("3µs") == parse_duration("3μs") == pytest.approx(3e-6)


@pytest.mark.parametrize("text", ["", "0", "-1s", "5 parsecs", "inf", "9" * 400, 10**400, "99999999h", float("nan")])
def test_a_duration_must_be_positive_and_known(text: str | float) -> None:
    with pytest.raises(SpecError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize("text", [0, -1, float("nan"), pytest.param(-(10**400), id="huge"), float("-inf")])
def test_a_duration_that_is_not_above_zero_is_told_so_and_not_that_it_is_too_long(text: float) -> None:
    with pytest.raises(SpecError, match="more than zero"):
        parse_duration(text)


def test_percentages_are_fractions_with_or_without_the_sign() -> None:
    assert parse_percent("1%") == parse_percent("0.01") == 0.01


@pytest.mark.parametrize("text", ["0", "100%", "-1%", "many"])
def test_a_target_interval_lies_between_0_and_100_percent(text: str) -> None:
    with pytest.raises(SpecError, match=r"%"):
        parse_percent(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.12e-7, "412 ns"), (1.234e-6, "1.23 µs"), (45.6e-3, "45.6 ms"), (2.0, "2.00 s"), (float("nan"), "–")],
)
def test_times_are_shown_with_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
