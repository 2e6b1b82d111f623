from __future__ import annotations

import pandas as pd
import pytest

from commbench.analysis.iterations import iteration_latencies
from commbench.store.schema import SAMPLE_COLUMNS


def samples(*rows: tuple[int, int, int, int, bool]) -> pd.DataFrame:
    """Rows (rank, iteration, start, end, valid) of one point in launch 0, in nanoseconds."""
    records = [(0, "p", rank, i, start, end, valid) for rank, i, start, end, valid in rows]
    return pd.DataFrame.from_records(records, columns=list(SAMPLE_COLUMNS)[:-1]).assign(block=0).astype(SAMPLE_COLUMNS)


def points(**changes: object) -> pd.DataFrame:
    row = {
        "point_id": "p", "launch": 0, "collective": "all_reduce", "sync": "window", "timing": "single",
        "iters_per_sample": 1, **changes,
    }  # fmt: skip
    kinds = {"launch": "Int64", "iters_per_sample": "Int64"} | dict.fromkeys(
        ("point_id", "collective", "sync", "timing"), "string"
    )
    return pd.DataFrame([row]).astype(kinds)


# rank 0 starts at 0 and ends at 100; rank 1 starts 30 later and ends at 110
SKEWED = samples((0, 0, 0, 100, True), (1, 0, 30, 110, True))


def latency_ns(frame: pd.DataFrame, of: pd.DataFrame) -> list[float]:
    return [pytest.approx(v * 1e9) for v in iteration_latencies(frame, of)["latency_s"]]


def test_a_synchronising_collective_counts_from_the_last_start_to_the_last_end() -> None:
    assert latency_ns(SKEWED, points()) == [80]


def test_another_collective_counts_from_the_first_start() -> None:
    assert latency_ns(SKEWED, points(collective="broadcast")) == [110]


@pytest.mark.parametrize("sync", ["barrier", "none"])
def test_without_a_window_the_longest_rank_counts(sync: str) -> None:
    assert latency_ns(SKEWED, points(sync=sync)) == [100]


def test_a_batch_is_divided_by_its_calls() -> None:
    assert latency_ns(SKEWED, points(timing="batched", iters_per_sample=10)) == [10]


def test_an_iteration_that_one_rank_calls_invalid_is_left_out() -> None:
    frame = samples((0, 0, 0, 100, True), (1, 0, 30, 110, False), (0, 1, 500, 540, True), (1, 1, 500, 550, True))
    found = iteration_latencies(frame, points())
    assert found["iteration"].tolist() == [1]


def test_samples_of_points_that_were_not_asked_for_are_left_out() -> None:
    assert iteration_latencies(SKEWED, points(point_id="other")).empty
