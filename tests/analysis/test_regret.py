"""Regret of the coordinator's picks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from commbench.analysis.regret import RegretReport, regret
from commbench.errors import UsageError
from commbench.types import AUTO
from tests.scripted import Curve, frame, one_shot_and_two_shot, rows

KIB = 1 << 10


def report(curves: dict[str, Curve], today: Callable[[int], str], **how: object) -> RegretReport:
    return regret(frame(rows(curves, today, **how)), "commbench")  # type: ignore[arg-type]


def one_shot_up_to(threshold: int) -> Callable[[int], str]:
    return lambda size: "shm_oneshot" if size <= threshold else "shm_twoshot"


def test_regret_is_the_pick_over_the_fastest_minus_one() -> None:
    found = report({"fast": lambda s: 1e-5, "slow": lambda s: 1.5e-5}, lambda size: "slow", cv=0.0)
    assert [p.regret for p in found.points] == pytest.approx([0.5] * len(found.points))
    assert {p.fastest for p in found.points} == {"fast"}


def test_points_come_worst_first() -> None:
    found = report(one_shot_and_two_shot(64 * KIB), one_shot_up_to(4 * KIB))
    assert [p.regret for p in found.points] == sorted((p.regret for p in found.points), reverse=True)


def test_a_pick_that_is_the_fastest_kernel_has_no_regret_whatever_the_noise() -> None:
    found = report({"fast": lambda s: 1e-5, "slow": lambda s: 3e-5}, lambda size: "fast", cv=0.2)
    assert found.mean == 0
    assert found.dead_zones == ()


def test_neighbouring_sizes_where_the_pick_is_clearly_slower_are_one_dead_zone() -> None:
    found = report(one_shot_and_two_shot(64 * KIB), one_shot_up_to(4 * KIB), cv=0.01)
    (zone,) = found.dead_zones
    assert (zone.picked, zone.fastest) == ("shm_twoshot", "shm_oneshot")
    assert 4 * KIB < zone.first_bytes < zone.last_bytes < 64 * KIB
    assert zone.worst == found.worst.regret


def test_a_slower_pick_that_noise_may_explain_is_no_dead_zone() -> None:
    found = report({"fast": lambda s: 1e-5, "slow": lambda s: 1.2e-5}, lambda size: "slow", cv=0.5)
    assert found.dead_zones == ()
    assert found.repeat > 0.2


def test_the_noise_is_how_much_one_kernel_measured_twice_differs() -> None:
    found = report({"fast": lambda s: 1e-5, "slow": lambda s: 2e-5}, lambda size: "fast", cv=0.05, launches=20)
    # the difference of two normals has √2 times their spread; the median of |x| is 0.6745 of it
    assert found.repeat == pytest.approx(0.6745 * math.sqrt(2) * 0.05, rel=0.1)


def test_the_interval_comes_from_the_ratios_within_each_launch() -> None:
    # launches differ by a common factor of 30 %, which a ratio within a launch does not see
    found = report({"fast": lambda s: 1e-5, "slow": lambda s: 1.5e-5}, lambda size: "slow", cv=0.01)
    worst = found.worst
    assert worst.low < worst.regret < worst.high
    assert worst.high - worst.low < 0.15


def test_the_fastest_pick_has_no_regret_in_launches_that_differ_by_a_factor_of_two() -> None:
    """The quicker backend is missing in some of the fast launches, so that its typical latency is the larger one."""
    found = rows({"fast": lambda s: 1e-5, "slow": lambda s: 1.05e-5}, lambda size: "fast", cv=0.005)
    kept = []
    for row in found:
        row["latency_median_s"] *= 2.0 if row["launch"] >= 3 else 1.0
        if row["launch"] >= 2 or row["backend_requested"] == "slow":
            kept.append(row)
    assert regret(frame(kept), "commbench").worst.regret == 0
    other = [row | {"backend_picked": "slow"} if row["backend_requested"] == AUTO else row for row in kept]
    for row in other:
        row["latency_median_s"] *= 1.05 if row["backend_requested"] == AUTO else 1.0
    assert regret(frame(other), "commbench").mean == pytest.approx(0.05, abs=0.01)


def test_with_one_launch_the_interval_is_that_of_the_samples() -> None:
    found = report({"fast": lambda s: 1e-5, "slow": lambda s: 1.5e-5}, lambda size: "slow", cv=0.0, launches=1)
    # each latency is known to ±2 %
    assert found.worst.low == pytest.approx(1.5 * 0.98 / 1.02 - 1)
    assert found.worst.high == pytest.approx(1.5 * 1.02 / 0.98 - 1)
    assert found.worst.dead


def test_a_wrong_backend_is_never_the_fastest() -> None:
    found = rows({"wrong": lambda s: 1e-6, "slow": lambda s: 1e-5}, lambda size: "slow")
    for row in found:
        if row["backend_requested"] == "wrong":
            row |= {"status": "wrong", "wrong_count": 1}
    assert regret(frame(found), "commbench").worst.regret == 0


def test_a_run_without_auto_points_is_refused() -> None:
    found = [r for r in rows(one_shot_and_two_shot(1e5), one_shot_up_to(1)) if r["backend_requested"] != AUTO]
    with pytest.raises(UsageError, match="no auto point"):
        regret(frame(found), "commbench")


def test_a_run_without_forced_points_is_refused() -> None:
    found = [r for r in rows(one_shot_and_two_shot(1e5), one_shot_up_to(1)) if r["backend_requested"] == AUTO]
    with pytest.raises(UsageError, match="no forced point"):
        regret(frame(found), "commbench")


def test_another_policy_than_the_runs_is_named_with_those_it_has() -> None:
    with pytest.raises(UsageError, match="auto points of commbench"):
        regret(frame(rows(one_shot_and_two_shot(1e5), one_shot_up_to(1))), "sglang-0.5.3")


def test_points_that_share_no_size_are_refused() -> None:
    found = rows(one_shot_and_two_shot(1e5), one_shot_up_to(1))
    found = [r for r in found if (r["backend_requested"] == AUTO) == (r["size_bytes"] > 64 * KIB)]
    with pytest.raises(UsageError, match="both with auto and with a forced backend"):
        regret(frame(found), "commbench")
