from __future__ import annotations

import numpy as np
import pytest

from commbench.analysis.changepoints import change_points


def test_a_step_is_found_where_it_is() -> None:
    logs = np.random.default_rng(1).normal(0, 0.02, 60)
    logs[40:] += np.log(1.10)
    (change,) = change_points(logs)
    assert abs(change.index - 40) <= 1
    assert change.ratio == pytest.approx(1.10, rel=0.02)


def test_nights_without_the_point_are_passed_over_and_indices_stay_those_of_nights() -> None:
    logs = np.random.default_rng(2).normal(0, 0.01, 60)
    logs[40:] += 0.2
    logs[::7] = np.nan
    (change,) = change_points(logs)
    assert 39 <= change.index <= 41


def test_two_steps_are_two_changes() -> None:
    logs = np.random.default_rng(3).normal(0, 0.02, 90)
    logs[30:] += 0.2
    logs[60:] -= 0.15
    first, second = change_points(logs)
    assert (abs(first.index - 30) <= 1, abs(second.index - 60) <= 1) == (True, True)
    assert first.ratio > 1 > second.ratio


def test_one_odd_night_is_no_new_level() -> None:
    logs = np.random.default_rng(4).normal(0, 0.02, 40)
    logs[20] += 1.0
    assert change_points(logs) == []


@pytest.mark.parametrize("nights", [0, 1, 7])
def test_a_short_series_has_none(nights: int) -> None:
    assert change_points(np.zeros(nights)) == []


def test_a_series_without_scatter_and_without_step_has_none() -> None:
    assert change_points(np.full(30, -11.0)) == []


def test_a_shift_that_nobody_minds_is_not_reported() -> None:
    logs = np.random.default_rng(5).normal(0, 0.0005, 60)
    logs[30:] += 0.01
    assert change_points(logs) == []


def test_quiet_series_give_few_false_alarms() -> None:
    """At most one in 500 series of 90 nights; the rule's bound is half of that."""
    rng = np.random.default_rng(6)
    assert sum(bool(change_points(rng.normal(0, 0.05, 90))) for _ in range(500)) <= 1


def test_two_standard_deviations_are_found_within_ten_nights() -> None:
    rng = np.random.default_rng(7)
    found = 0
    for _ in range(50):
        logs = rng.normal(0, 0.05, 100)
        logs[90:] += 0.10
        found += any(85 <= c.index <= 95 for c in change_points(logs))
    assert found >= 40
