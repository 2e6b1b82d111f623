from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.analysis import launches as la
from commbench.store.run import open_run, row_of
from commbench.store.schema import POINT_COLUMNS
from commbench.types import Point
from tests.runs import RunBuilder, grid

POINT = Point("all_reduce", "sum", "float32", 1000, 4)


def frame(*rows: dict[str, object]) -> pd.DataFrame:
    """One row per launch of POINT; what is not given is a launch that went well."""
    usual = {
        "run_id": "r", "backend_picked": "shm", "status": "ok", "reason": "", "latency_median_s": 1e-6,
        "latency_ci_low_s": 0.9e-6, "latency_ci_high_s": 1.2e-6, "latency_p99_s": 2e-6, "latency_min_s": 0.5e-6,
        "latency_max_s": 5e-6, "n_samples": 10, "checked": True, "wrong_count": 0, "target_reached": True,
    }  # fmt: skip
    made = [row_of(POINT, {**usual, "launch": i, "order": 0, **row}) for i, row in enumerate(rows)]
    return pd.DataFrame.from_records(made, columns=list(POINT_COLUMNS)).astype(POINT_COLUMNS)


def merged(*rows: dict[str, object]) -> dict[str, object]:
    result = la.merge_launches(frame(*rows))
    assert len(result) == 1
    return dict(result.iloc[0])


# -- the interval over launches ------------------------------------------------------------------------


def test_five_launches_give_student_t_on_the_logs_of_the_medians() -> None:
    medians = [1.0, 1.1, 1.2, 1.3, 1.4]
    found = la.interval_over_launches(medians)
    logs = [math.log(m) for m in medians]
    mean = sum(logs) / 5
    half = 2.7764451 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 4 / 5)  # t(0.975; 4) from a printed table
    assert found.low == pytest.approx(math.exp(mean - half), rel=1e-6)
    assert found.high == pytest.approx(math.exp(mean + half), rel=1e-6)
    assert (found.median, found.launches, found.method) == (1.2, 5, la.T_ON_LOGS)


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645)])
def test_t_quantiles_are_those_of_the_printed_tables(degrees: int, value: float) -> None:
    assert float(la.t_quantile(0.975, degrees)) == pytest.approx(value, rel=1e-5)


def test_six_launches_give_order_statistics() -> None:
    found = la.interval_over_launches([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])
    assert (found.low, found.median, found.high, found.method) == (1.0, 3.5, 6.0, la.ORDER_STATISTICS)


def test_ten_launches_leave_out_the_extremes() -> None:
    found = la.interval_over_launches(np.arange(1.0, 11.0))
    assert (found.low, found.high) == (2.0, 9.0)  # ranks 2 and 9 of 10 cover the median with 97.9 %


@given(st.lists(st.floats(1e-9, 1e3), min_size=2, max_size=12))
def test_the_estimate_lies_in_its_interval(medians: list[float]) -> None:
    found = la.interval_over_launches(medians)
    assert found.low <= found.median <= found.high


def test_the_t_interval_covers_the_true_median_of_log_normal_launches() -> None:
    random = np.random.default_rng(5)
    hits = 0
    for _ in range(1000):
        found = la.interval_over_launches(np.exp(random.normal(0.0, 0.1, 4)))
        hits += found.low <= 1.0 <= found.high
    assert 930 <= hits <= 970


@pytest.mark.parametrize("medians", [[], [1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_an_interval_over_launches_refuses_what_has_none(medians: list[float]) -> None:
    with pytest.raises(ValueError):
        la.interval_over_launches(medians)


# -- merging -------------------------------------------------------------------------------------------


def test_one_launch_keeps_its_own_interval() -> None:
    point = merged({})
    assert (point["latency_median_s"], point["latency_ci_low_s"], point["latency_ci_high_s"]) == (1e-6, 0.9e-6, 1.2e-6)
    assert point["interval_from"] == la.WITHIN_LAUNCH
    assert point["launch_cv"] is pd.NA


def test_several_launches_use_the_launch_medians_and_ignore_intervals_within() -> None:
    point = merged({"latency_median_s": 1e-6}, {"latency_median_s": 2e-6}, {"latency_median_s": 3e-6})
    expected = la.interval_over_launches([1e-6, 2e-6, 3e-6])
    assert point["latency_median_s"] == pytest.approx(2e-6)
    assert point["latency_ci_low_s"] == pytest.approx(expected.low)
    assert point["latency_ci_high_s"] == pytest.approx(expected.high)
    assert point["launch_cv"] == pytest.approx(np.log([1.0, 2.0, 3.0]).std(ddof=1))
    assert (point["launches"], point["launches_used"]) == (3, 3)


def test_extremes_samples_and_tails_are_merged_each_in_its_way() -> None:
    point = merged(
        {"latency_min_s": 1e-6, "latency_max_s": 9e-6, "latency_p99_s": 2e-6, "n_samples": 10},
        {"latency_min_s": 3e-6, "latency_max_s": 4e-6, "latency_p99_s": 4e-6, "n_samples": 20},
    )
    assert (point["latency_min_s"], point["latency_max_s"], point["n_samples"]) == (1e-6, 9e-6, 30)
    assert point["latency_p99_s"] == pytest.approx(3e-6)


def test_bandwidth_follows_from_the_merged_median() -> None:
    point = merged({"latency_median_s": 1e-6}, {"latency_median_s": 3e-6})
    assert point["algbw_gb_per_s"] == pytest.approx(1000 / 2e-6 / 1e9)
    assert point["busbw_gb_per_s"] == pytest.approx(1000 / 2e-6 / 1e9 * 2 * 3 / 4)


def test_a_point_that_is_wrong_in_one_launch_is_wrong_and_says_in_which() -> None:
    point = merged({}, {"status": "wrong", "reason": "2 elements differ", "wrong_count": 2}, {})
    assert (point["status"], point["wrong_count"]) == ("wrong", 2)
    assert point["reason"] == "launch 1 of 3: 2 elements differ"


def test_a_fault_of_every_launch_is_told_once() -> None:
    fault = {"status": "failed", "reason": "rank 1 died"}
    assert merged(fault, fault)["reason"] == "rank 1 died"
    other = {"status": "failed", "reason": "rank 0 died"}
    assert merged(fault, fault, other)["reason"] == "launch 0, 1 of 3: rank 1 died; launch 2 of 3: rank 0 died"


def test_figures_come_from_the_launches_that_are_ok() -> None:
    point = merged({"latency_median_s": 1e-6}, {"latency_median_s": 9e-6, "status": "unsteady", "reason": "drift"})
    assert (point["status"], point["latency_median_s"], point["launches_used"]) == ("unsteady", 1e-6, 1)


def test_statuses_are_ranked_from_wrong_to_ok() -> None:
    for worse, better in zip(la.SEVERITY, la.SEVERITY[1:], strict=False):
        assert merged({"status": better}, {"status": worse})["status"] == worse


def test_reasons_of_mild_statuses_are_counted_and_their_numbers_ranged() -> None:
    rows = [{"status": "unsteady", "reason": f"not steady after {n} iterations"} for n in (8, 13)]
    assert merged({}, *rows)["reason"] == "in 2 of 3 launches: not steady after 8–13 iterations"
    assert merged(*rows)["reason"] == "not steady after 8–13 iterations"


def test_a_retried_point_counts_with_its_last_result() -> None:
    point = merged({"launch": 0, "status": "failed", "reason": "boom"}, {"launch": 0})
    assert (point["status"], point["reason"], point["launches"]) == ("ok", "", 1)


def test_launches_that_took_different_backends_show_both() -> None:
    assert merged({"backend_picked": "shm"}, {"backend_picked": "torch_dist"})["backend_picked"] == "shm+torch_dist"


def test_a_point_without_any_latency_has_no_figures() -> None:
    nothing = {"status": "failed", "reason": "SIGSEGV", "latency_median_s": None, "latency_ci_low_s": None}
    point = merged(nothing, nothing)
    assert point["latency_median_s"] is pd.NA
    assert (point["launches_used"], point["status"]) == (0, "failed")


def test_no_points_merge_to_none() -> None:
    empty = la.merge_launches(frame())
    assert len(empty) == 0
    assert set(la.EXTRA_COLUMNS) <= set(empty.columns)


def test_merged_points_keep_the_types_of_the_schema(tmp_path: Path) -> None:
    points = open_run(RunBuilder(tmp_path / "r", grid(sizes=[8, 64]), launches=2).build()).points()
    result = la.merge_launches(points)
    assert [str(t) for t in result.dtypes.drop(list(la.EXTRA_COLUMNS))] == [
        str(points[c].dtype) for c in result.columns if c not in la.EXTRA_COLUMNS
    ]
    assert all(json.loads(text)["picked"] for text in result["decision"])


# -- texts that differ in numbers ------------------------------------------------------------------------


def test_texts_that_differ_only_in_numbers_become_one_with_ranges() -> None:
    texts = ["after 3 of 9 s", "no such thing", "after 5.5 of 9 s", "after 1–2 of 9 s"]
    assert la.common_texts(texts) == {"after 1–5.5 of 9 s": [0, 2, 3], "no such thing": [1]}


# -- variation between launches ---------------------------------------------------------------------------


def test_every_launch_of_every_run_counts_in_the_variation() -> None:
    one, two = math.exp(-6), math.exp(-6.2)
    small = Point("all_reduce", "sum", "float32", 8, 4)
    runs = []
    for latency in (one, two):
        made = frame({"latency_median_s": latency})
        other = made.assign(point_id=small.point_id, size_bytes=8, latency_median_s=1e-6)
        runs.append(pd.concat([made.assign(size_bytes=4096), other]))
    below, above = sorted(la.variations(runs), key=lambda v: not v.small)
    assert (below.what, below.median) == ("shm < 1 KiB", pytest.approx(0.0))
    assert (above.what, above.points, above.launches) == ("shm ≥ 1 KiB", 1, 2)
    assert above.median == above.worst == pytest.approx(0.2 / math.sqrt(2))
    assert la.variation_text([above]) == "over 2 launches: shm ≥ 1 KiB 14.1% (worst 14.1%)"


def test_points_of_one_launch_or_without_a_good_result_have_no_variation() -> None:
    assert la.variations([frame({})]) == []
    assert la.variations([frame({}, {"status": "failed"})]) == []
    assert la.variation_text([]) == ""


def test_runs_that_were_measured_otherwise_repeat_nothing() -> None:
    one = {"settings": {"seed": 1, "sync": "barrier", "bucket_bytes": 65536}}
    assert la.repeats([one, {"settings": {**one["settings"], "seed": 2}}])
    assert not la.repeats([one, {"settings": {**one["settings"], "bucket_bytes": 1 << 20}}])
    assert la.repeats([{}, {}])
