"""The gate's verdicts: red when, and only when, something got slower; green only if all was there and quiet."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from commbench.analysis.canaries import compare_canaries, compare_canary_nights, launch_values
from commbench.analysis.compare import Nights, compare, compare_with_nights
from commbench.analysis.gate import Judgement, Rule, Status, Suspects, judge, screen, smallest_found
from commbench.types import Point
from tests.nights import base_latency_s, points_of, side_frame

POINTS = points_of()
FAMILY = "all_reduce · shm · ≤4 KiB"
RULE = Rule()


def in_family(point: Point) -> bool:
    return point.collective == "all_reduce" and point.backend == "shm" and point.size_bytes <= 4096


def stored(base: Any, cand: Any, rule: Rule = RULE, **more: Any) -> Judgement:
    return judge(compare(base, cand), rule, **more)


def by_family(judgement: Judgement) -> dict[str, Any]:
    return {v.family: v for v in judgement.verdicts}


def test_two_runs_of_the_same_speed_are_green() -> None:
    judgement = stored(side_frame(POINTS, seed=1), side_frame(POINTS, seed=2))
    assert judgement.status == Status.PASS
    assert judgement.exit_code == 0
    assert all(v.status == Status.PASS for v in judgement.verdicts)


def test_a_slower_family_is_red_and_no_other() -> None:
    judgement = stored(
        side_frame(POINTS, seed=1), side_frame(POINTS, seed=2, slower=lambda p: 1.1 if in_family(p) else 1.0)
    )
    assert judgement.exit_code == 1
    assert [v.family for v in judgement.with_status(Status.REGRESSION)] == [FAMILY]
    verdict = by_family(judgement)[FAMILY]
    assert verdict.low < 1.1 < verdict.high
    assert "slower: +" in verdict.reason
    assert "margin 1.0%" in verdict.reason


def test_one_slow_point_turns_its_family_red_and_is_named() -> None:
    slow = next(p for p in POINTS if in_family(p) and p.size_bytes == 512)
    judgement = stored(
        side_frame(POINTS, seed=1), side_frame(POINTS, seed=2, slower=lambda p: 1.15 if p == slow else 1.0)
    )
    (red,) = judgement.with_status(Status.REGRESSION)
    assert red.family == FAMILY
    assert [p.label for p in red.slow_points] == ["all_reduce float32 512 B [shm]"]


def test_a_faster_candidate_is_green_and_told() -> None:
    judgement = stored(side_frame(POINTS, seed=1), side_frame(POINTS, seed=2, slower=lambda p: 0.7))
    assert judgement.status == Status.PASS
    assert all(v.faster for v in judgement.verdicts)
    assert "faster" in judgement.reason


def test_a_slowdown_within_the_margin_is_let_be() -> None:
    quiet = {"cv": 0.0005}
    base, cand = side_frame(POINTS, seed=1, **quiet), side_frame(POINTS, seed=2, slower=lambda p: 1.008, **quiet)
    assert stored(base, cand).status == Status.PASS
    assert stored(base, cand, Rule(margin=0.005)).status == Status.REGRESSION


def test_points_that_changed_by_less_than_the_margin_are_let_be() -> None:
    """0.8 % slower, surely so: single points of different families, against a margin of 1 %."""
    quiet = {"cv": 0.0005}
    slow = [p for p in POINTS if p.size_bytes == 512]
    base = side_frame(POINTS, seed=1, **quiet)
    found = {}
    for percent in (0.8, 2.0):
        factor = 1 + percent / 100
        cand = side_frame(POINTS, seed=2, slower=lambda p, f=factor: f if p in slow else 1.0, **quiet)
        found[percent] = [len(v.slow_points) for v in stored(base, cand).verdicts]
    assert sum(found[0.8]) == 0
    assert sum(found[2.0]) == len(slow)


def test_too_few_launches_are_inconclusive_however_slow() -> None:
    judgement = stored(side_frame(POINTS, launches=7), side_frame(POINTS, launches=7, slower=lambda p: 3.0))
    assert judgement.exit_code == 3
    assert "8 needed" in judgement.verdicts[0].reason


def test_an_empty_candidate_is_inconclusive_and_names_what_is_missing() -> None:
    judgement = stored(side_frame(POINTS), side_frame(POINTS, launches=0))
    assert judgement.exit_code == 3
    assert len(judgement.with_status(Status.INCONCLUSIVE)) == len(judgement.verdicts) == 8
    assert "3 of 3 points missing in the candidate" in by_family(judgement)[FAMILY].reason


def test_two_empty_runs_are_inconclusive() -> None:
    judgement = stored(side_frame(POINTS, launches=0), side_frame(POINTS, launches=0))
    assert judgement.exit_code == 3
    assert "nothing could be compared" in judgement.reason


def test_a_point_that_vanished_makes_its_family_inconclusive_and_no_other() -> None:
    gone = next(p for p in POINTS if in_family(p))
    judgement = stored(side_frame(POINTS, seed=1), side_frame([p for p in POINTS if p != gone], seed=2))
    assert judgement.exit_code == 3
    assert [v.family for v in judgement.with_status(Status.INCONCLUSIVE)] == [FAMILY]


def test_renamed_points_are_missing_on_one_side_and_on_the_other() -> None:
    from dataclasses import replace

    renamed = [replace(p, policy="other") if in_family(p) else p for p in POINTS]
    judgement = stored(side_frame(POINTS, seed=1), side_frame(renamed, seed=2))
    assert judgement.exit_code == 3
    reason = by_family(judgement)[FAMILY].reason
    assert "missing in the candidate" in reason
    assert "missing in the baseline" in reason


def test_a_new_point_is_not_green() -> None:
    assert stored(side_frame(POINTS[1:], seed=1), side_frame(POINTS, seed=2)).exit_code == 3


def test_another_backend_is_inconclusive_even_if_it_is_as_fast() -> None:
    cand = side_frame(POINTS, seed=2, change=lambda p, k, r: r | {"backend_picked": "shm2"} if in_family(p) else r)
    judgement = stored(side_frame(POINTS, seed=1), cand)
    assert judgement.exit_code == 3
    verdict = by_family(judgement)[FAMILY]
    assert "the backend taken changed" in verdict.reason
    assert len(verdict.picks_changed) == 3


def test_another_backend_that_is_slower_is_red() -> None:
    cand = side_frame(
        POINTS, seed=2, slower=lambda p: 2.0 if in_family(p) else 1.0,
        change=lambda p, k, r: r | {"backend_picked": "shm2"} if in_family(p) else r,
    )  # fmt: skip
    verdict = by_family(stored(side_frame(POINTS, seed=1), cand))[FAMILY]
    assert verdict.status == Status.REGRESSION
    assert "the backend taken changed" in verdict.reason


@pytest.mark.parametrize("status", ["wrong", "failed", "timeout"])
def test_a_candidate_that_broke_in_one_launch_is_not_green(status: str) -> None:
    def breaking(point: Point, launch: int, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"status": status, "latency_median_s": None} if in_family(point) and launch == 0 else row

    judgement = stored(side_frame(POINTS, seed=1), side_frame(POINTS, seed=2, change=breaking))
    assert judgement.exit_code == 3
    assert f"3 of 3 points are {status} in the candidate" in by_family(judgement)[FAMILY].reason


def test_points_that_are_unsteady_in_most_launches_are_not_green() -> None:
    cand = side_frame(POINTS, seed=2, change=lambda p, k, r: r | {"status": "unsteady"} if k < 6 else r)
    assert stored(side_frame(POINTS, seed=1), cand).exit_code == 3


def test_noise_that_would_hide_a_slowdown_is_inconclusive() -> None:
    judgement = stored(side_frame(POINTS, cv=0.4, seed=1), side_frame(POINTS, cv=0.4, seed=2))
    assert judgement.exit_code == 3
    assert "noise hides slowdowns below" in judgement.verdicts[0].reason


def test_another_way_of_timing_is_inconclusive() -> None:
    cand = side_frame(POINTS, seed=2, change=lambda p, k, r: r | {"timing": "batched"})
    judgement = stored(side_frame(POINTS, seed=1), cand)
    assert judgement.exit_code == 3
    assert "window single → window batched" in judgement.verdicts[0].reason


def test_points_that_cannot_be_timed_on_either_side_are_noted_and_stop_nothing() -> None:
    def refusing(point: Point, launch: int, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"status": "refused", "latency_median_s": None} if point == POINTS[0] else row

    judgement = stored(side_frame(POINTS, seed=1, change=refusing), side_frame(POINTS, seed=2, change=refusing))
    assert judgement.status == Status.PASS
    assert any("cannot be timed on either side" in note for note in judgement.notes)


def test_a_run_that_is_not_complete_is_not_green_but_can_be_red() -> None:
    problems = ["run-b is interrupted, not complete"]
    assert stored(side_frame(POINTS, seed=1), side_frame(POINTS, seed=2), problems=problems).exit_code == 3
    slow = side_frame(POINTS, seed=2, slower=lambda p: 1.3)
    assert stored(side_frame(POINTS, seed=1), slow, problems=problems).exit_code == 1


# ---- canaries -------------------------------------------------------------------------------------------------------


def canary(factor: float, seed: int, launches: int = 10, cv: float = 0.01) -> dict[str, dict[int, float]]:
    random = np.random.default_rng(seed)
    return {"memcpy_s": {k: math.log(2e-3 * factor * random.lognormal(0, cv)) for k in range(launches)}}


@pytest.mark.parametrize("factor", [1.2, 0.85])
def test_a_canary_that_moved_up_or_down_makes_the_night_inconclusive(factor: float) -> None:
    moved = compare_canaries(canary(1, 1), canary(factor, 2), RULE.log_margin)
    judgement = stored(side_frame(POINTS, seed=1), side_frame(POINTS, seed=2, slower=lambda p: 1.5), canaries=moved)
    assert judgement.exit_code == 3
    assert "canary memcpy_s" in judgement.reason
    assert all(v.status == Status.INCONCLUSIVE for v in judgement.verdicts)


def test_canaries_that_stood_still_stop_nothing() -> None:
    still = compare_canaries(canary(1, 1), canary(1, 2), RULE.log_margin)
    assert not still[0].moved
    slow = side_frame(POINTS, seed=2, slower=lambda p: 1.5)
    assert stored(side_frame(POINTS, seed=1), slow, canaries=still).exit_code == 1


def test_a_canary_against_nights_moves_by_the_scatter_between_nights() -> None:
    nights = [canary(float(np.random.default_rng(s).lognormal(0, 0.1)), s) for s in range(20)]
    (usual,) = compare_canary_nights(nights, canary(1.1, 50), RULE.log_margin)
    (strange,) = compare_canary_nights(nights, canary(2.0, 51), RULE.log_margin)
    assert (usual.moved, strange.moved) == (False, True)


def test_a_launch_counts_with_the_mean_of_its_start_and_end() -> None:
    records = [
        {"launch": 0, "canaries": {"start": {"memcpy_s": 1e-3}, "end": {"memcpy_s": 4e-3}}},
        {"launch": 1, "canaries": {"start": {"memcpy_s": float("nan")}}},
        {"launch": 2},
    ]
    assert launch_values(records) == {"memcpy_s": {0: pytest.approx(math.log(2e-3))}}


# ---- A/B ------------------------------------------------------------------------------------------------------------


def ab(slower_first: float, slower_again: float | None, seed: int = 1) -> tuple[Suspects, Judgement]:
    def side(factor: float, salt: int) -> Any:
        return side_frame(POINTS, seed=seed * 100 + salt, slower=lambda p: factor if in_family(p) else 1.0)

    rule = Rule(fewest=5)
    first = compare(side(1.0, 1), side(slower_first, 2), in_pairs=True)
    suspects = screen(first, rule)
    second = None
    if suspects and slower_again is not None:
        kept = [p for p in POINTS if p.point_id in suspects.relaunch]
        base = side_frame(kept, seed=seed * 100 + 3)
        cand = side_frame(kept, seed=seed * 100 + 4, slower=lambda p: slower_again if in_family(p) else 1.0)
        second = compare(base, cand, in_pairs=True)
    return suspects, judge(first, rule, confirmation=(suspects, second))


def test_a_suspect_is_red_once_fresh_launches_confirm_it() -> None:
    suspects, judgement = ab(1.1, 1.1)
    assert FAMILY in suspects.families
    assert [v.family for v in judgement.with_status(Status.REGRESSION)] == [FAMILY]


def test_a_suspect_that_fresh_launches_do_not_confirm_is_green_and_told() -> None:
    _, judgement = ab(1.1, 1.0)
    assert judgement.status == Status.PASS
    assert "not confirmed on fresh launches" in by_family(judgement)[FAMILY].reason


def test_a_suspect_that_could_not_be_launched_again_is_inconclusive() -> None:
    suspects, _ = ab(1.1, None)
    rule = Rule(fewest=5)
    slow = side_frame(POINTS, seed=102, slower=lambda p: 1.1 if in_family(p) else 1.0)
    first = compare(side_frame(POINTS, seed=101), slow, in_pairs=True)
    kept = [p for p in POINTS if p.point_id in suspects.relaunch]
    second = compare(side_frame(kept, launches=2), side_frame(kept, launches=2), in_pairs=True)
    judgement = judge(first, rule, confirmation=(suspects, second))
    assert judgement.exit_code == 3
    assert "that were to confirm it gave too little" in by_family(judgement)[FAMILY].reason


def test_a_quiet_screen_needs_no_second_look() -> None:
    rule = Rule(fewest=5)
    first = compare(side_frame(POINTS, seed=1), side_frame(POINTS, seed=2, slower=lambda p: 0.99), in_pairs=True)
    suspects = screen(first, rule)
    assert not suspects
    assert judge(first, rule, confirmation=(suspects, None)).status == Status.PASS


def test_a_single_suspect_point_is_judged_again_by_itself() -> None:
    slow = next(p for p in POINTS if in_family(p) and p.size_bytes == 64)
    rule = Rule(fewest=5)

    def side(seed: int, factor: float, points: list[Point]) -> Any:
        return side_frame(points, seed=seed, cv=0.05, slower=lambda p: factor if p == slow else 1.0)

    first = compare(side(1, 1.0, POINTS), side(2, 1.18, POINTS), in_pairs=True)
    suspects = screen(first, rule)
    assert slow.point_id in suspects.points
    kept = [p for p in POINTS if p.point_id in suspects.relaunch]
    second = compare(side(3, 1.0, kept), side(4, 1.18, kept), in_pairs=True)
    assert FAMILY in {
        v.family for v in judge(first, rule, confirmation=(suspects, second)).with_status(Status.REGRESSION)
    }


# ---- nights ---------------------------------------------------------------------------------------------------------


def nights(count: int, night_cv: float = 0.01, launches: int = 4) -> Nights:
    random = np.random.default_rng(7)
    known = side_frame(POINTS, launches=1)
    base = np.log([base_latency_s(p) for p in POINTS])
    draws = base[:, None, None] + random.normal(0, night_cv, (len(POINTS), count, 1))
    draws = draws + random.normal(0, 0.02, (len(POINTS), count, launches))
    points = known.assign(picked=known["backend_picked"], how="window single")
    shape = (len(POINTS), count)
    return Nights(points, draws.mean(axis=2), np.full(shape, float(launches)), draws.var(axis=2, ddof=1))


def test_a_usual_night_is_green_and_a_slow_one_red() -> None:
    usual = judge(compare_with_nights(nights(20), side_frame(POINTS, seed=2)), RULE)
    assert usual.status == Status.PASS
    assert usual.method == "nights of the history"
    slow = side_frame(POINTS, seed=2, slower=lambda p: 1.2 if in_family(p) else 1.0)
    judgement = judge(compare_with_nights(nights(20), slow), RULE)
    assert [v.family for v in judgement.with_status(Status.REGRESSION)] == [FAMILY]


def test_a_history_of_few_nights_is_inconclusive() -> None:
    judgement = judge(compare_with_nights(nights(7), side_frame(POINTS, seed=2)), RULE)
    assert judgement.exit_code == 3
    assert "7 nights in the baseline" in judgement.verdicts[0].reason


def test_nights_that_scatter_much_make_the_gate_deaf_and_not_red() -> None:
    loud = nights(20, night_cv=0.2)
    judgement = judge(compare_with_nights(loud, side_frame(POINTS, seed=2, slower=lambda p: 1.15)), RULE)
    assert judgement.exit_code == 3


def test_a_candidate_without_a_point_of_the_history_is_not_green() -> None:
    judgement = judge(compare_with_nights(nights(20), side_frame(POINTS[1:], seed=2)), RULE)
    assert judgement.exit_code == 3


# ---- the whole ------------------------------------------------------------------------------------------------------


def test_verdicts_come_worst_first() -> None:
    gone = next(p for p in POINTS if p.collective == "all_gather")
    cand = side_frame([p for p in POINTS if p != gone], seed=2, slower=lambda p: 1.3 if in_family(p) else 1.0)
    order = [v.status for v in stored(side_frame(POINTS, seed=1), cand).verdicts]
    assert order == sorted(order, key=[Status.REGRESSION, Status.INCONCLUSIVE, Status.PASS].index)


def test_more_launches_find_smaller_slowdowns() -> None:
    found = [smallest_found(0.02, n, 0.001, 0.01) for n in (5, 10, 20)]
    assert found == sorted(found, reverse=True)
    assert found[-1] > 0.01
