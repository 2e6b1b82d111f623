"""Lining two sides up: every point of either has a row, a ratio has an interval, families move together."""

from __future__ import annotations

import numpy as np
import pytest

from commbench.analysis.compare import (
    BOTH,
    IDLE,
    MISSING,
    NEW,
    WITHIN_LAUNCHES,
    band,
    compare,
    percent,
    sides_of,
)
from tests.nights import points_of, side_frame

POINTS = points_of()


def row_of(comparison, point):  # type: ignore[no-untyped-def]
    rows = comparison.points
    return rows[rows["point_id"] == point.point_id].iloc[0]


def test_the_ratio_is_candidate_over_baseline_and_lies_in_its_interval() -> None:
    slow = POINTS[0]
    found = compare(side_frame(POINTS, seed=1), side_frame(POINTS, seed=2, slower=lambda p: 1.5 if p == slow else 1.0))
    row = row_of(found, slow)
    assert row["ratio"] == pytest.approx(1.5, rel=0.03)
    assert row["ratio_low"] < 1.5 < row["ratio_high"]
    assert (found.points["ratio_low"] <= found.points["ratio"]).all()


def test_the_order_of_rows_and_of_launches_does_not_matter() -> None:
    base, cand = side_frame(POINTS, seed=1), side_frame(POINTS, seed=2)
    one = compare(base, cand).points.set_index("point_id")["ratio"].sort_index()
    other = compare(base.sample(frac=1, random_state=3), cand.sample(frac=1, random_state=4))
    assert np.allclose(one, other.points.set_index("point_id")["ratio"].sort_index())


def test_points_of_one_side_only_are_named_missing_or_new() -> None:
    found = compare(side_frame(POINTS[1:], seed=1), side_frame(POINTS[:-1], seed=2))
    assert row_of(found, POINTS[0])["state"] == NEW
    assert row_of(found, POINTS[-1])["state"] == MISSING
    assert len(found.points) == len(POINTS)


def test_a_point_that_failed_in_every_launch_is_missing_and_keeps_its_reason() -> None:
    broken = POINTS[0]

    def failing(point, launch, row):  # type: ignore[no-untyped-def]
        bad = {"status": "failed", "reason": "rank 1: boom", "latency_median_s": None}
        return row | bad if point == broken else row

    row = row_of(compare(side_frame(POINTS), side_frame(POINTS, change=failing)), broken)
    assert (row["state"], row["cand_status"], row["cand_reason"]) == (MISSING, "failed", "rank 1: boom")


def test_a_point_skipped_on_both_sides_is_neither_missing_nor_compared() -> None:
    def skipping(point, launch, row):  # type: ignore[no-untyped-def]
        return row | {"status": "skipped", "latency_median_s": None} if point == POINTS[0] else row

    found = compare(side_frame(POINTS, change=skipping), side_frame(POINTS, change=skipping))
    assert row_of(found, POINTS[0])["state"] == IDLE
    assert (found.points["state"] == BOTH).sum() == len(POINTS) - 1


def test_a_launch_measured_twice_counts_by_its_later_row_in_the_store_and_once_here() -> None:
    base, cand = side_frame(POINTS, launches=3), side_frame(POINTS, launches=3, seed=5)
    assert (compare(base, cand).points["cand_usable"] == 3).all()


def test_a_backend_that_changed_is_named_on_both_sides() -> None:
    cand = side_frame(
        POINTS, change=lambda p, k, row: row | {"backend_picked": "shm_twoshot"} if p == POINTS[0] else row
    )
    row = row_of(compare(side_frame(POINTS), cand), POINTS[0])
    assert (bool(row["pick_changed"]), row["base_picked"], row["cand_picked"]) == (True, "torch_dist", "shm_twoshot")


def test_a_pick_that_changed_in_some_launches_only_counts_as_changed() -> None:
    def half(point, launch, row):  # type: ignore[no-untyped-def]
        return row | {"backend_picked": "shm"} if point == POINTS[0] and launch > 5 else row

    row = row_of(compare(side_frame(POINTS), side_frame(POINTS, change=half)), POINTS[0])
    assert bool(row["pick_changed"])
    assert row["cand_picked"] == "shm+torch_dist"


def test_one_launch_a_side_gives_an_interval_within_the_launch_and_says_so() -> None:
    found = compare(side_frame(POINTS, launches=1, seed=1), side_frame(POINTS, launches=1, seed=2))
    row = row_of(found, POINTS[0])
    assert row["interval_from"] == WITHIN_LAUNCHES
    assert row["ratio_low"] == pytest.approx(row["ratio"] * 0.99 / 1.01)
    assert row["ratio_high"] == pytest.approx(row["ratio"] * 1.01 / 0.99)


def test_launches_made_together_cancel_what_they_share() -> None:
    drift = np.random.default_rng(3).normal(0, 0.2, 10)

    def drifting(point, launch, row):  # type: ignore[no-untyped-def]
        return row | {"latency_median_s": row["latency_median_s"] * float(np.exp(drift[launch]))}

    base, cand = (side_frame(POINTS, cv=0.005, seed=s, change=drifting) for s in (1, 2))
    apart, together = compare(base, cand), compare(base, cand, in_pairs=True)
    assert (together.family_effects.se < apart.family_effects.se / 5).all()


def test_pairs_are_matched_by_launch_number_and_not_by_place() -> None:
    base = side_frame(POINTS, cv=0.0, change=lambda p, k, row: None if k == 0 else row)
    cand = side_frame(POINTS, cv=0.0, change=lambda p, k, row: None if k == 9 else row)
    found = compare(base, cand, in_pairs=True)
    assert (found.point_effects.n_base == 8).all()


def test_a_family_is_a_collective_a_backend_and_a_size_band() -> None:
    families = set(compare(side_frame(POINTS), side_frame(POINTS)).families["family"])
    assert "all_reduce · shm · ≤4 KiB" in families
    assert "all_gather · torch_dist · 4–64 KiB" in families
    assert len(families) == 8


def test_a_family_moves_by_the_mean_of_its_points_whatever_their_levels() -> None:
    own = [p for p in POINTS if p.collective == "all_reduce" and p.backend == "shm" and p.size_bytes <= 4096]
    cand = side_frame(POINTS, cv=0.0, slower=lambda p: 1.3 if p == own[0] else 1.0)
    found = compare(side_frame(POINTS, cv=0.0), cand)
    row = found.families.set_index("family").loc["all_reduce · shm · ≤4 KiB"]
    assert row["ratio"] == pytest.approx(1.3 ** (1 / len(own)))


def test_a_point_that_misses_a_launch_does_not_shift_its_family() -> None:
    cand = side_frame(POINTS, cv=0.0, change=lambda p, k, row: None if p == POINTS[0] and k < 5 else row)
    found = compare(side_frame(POINTS, cv=0.0), cand)
    assert np.allclose(found.families["ratio"], 1.0)


@pytest.mark.parametrize(
    ("size", "name"),
    [(1, "≤4 KiB"), (4096, "≤4 KiB"), (4097, "4–64 KiB"), (65536, "4–64 KiB"), (1 << 20, "64 KiB–1 MiB"),
     (1 << 24, "1–16 MiB"), ((1 << 24) + 1, ">16 MiB")],
)  # fmt: skip
def test_size_bands_hold_their_upper_end(size: int, name: str) -> None:
    assert band(size) == name


def test_two_backends_of_one_run_line_up_by_point_key() -> None:
    frame = side_frame(POINTS, cv=0.0)
    base, cand = sides_of(frame, "backend_requested", "torch_dist", "shm")
    found = compare(base, cand, key="series", in_pairs=True, same_picks=False)
    assert (found.points["state"] == BOTH).all()
    assert len(found.points) == len(POINTS) // 2
    assert (found.points["ratio"] < 1).all()
    assert not found.points["pick_changed"].any()
    assert "all_reduce · torch_dist → shm · ≤4 KiB" in set(found.families["family"])


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.0, "+0.0 %"), (1.032, "+3.2 %"), (0.9, "-10.0 %"), (2.0, "×2"), (0.25, "×0.25")]
)
def test_changes_are_written_as_percent_and_from_a_doubling_on_as_a_factor(ratio: float, text: str) -> None:
    assert percent(ratio) == text
