"""The verdict on a machine: known answers, the noise floor, what it can support."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from commbench.analysis.calibration import (
    KnownAnswer,
    calibrate,
    detectable_slowdown,
    known_answers,
    launch_cv,
    launches_needed,
)


def launch(reported_s: float = 1.0e-5) -> dict[str, Any]:
    return {
        "timer": {"resolution_s": 1e-7, "overhead_s": 8e-8, "spread_s": 2e-8},
        "start": {"sync": "window", "skew_p50_s": 5e-8, "skew_p99_s": 2e-7, "missed_windows": 0.01},
        "known_answers": [{"loop": "python", "scripted_s": 1e-5, "reported_s": reported_s, "samples": 100}],
    }


def row(point: str, median: float, **changes: Any) -> dict[str, Any]:
    return {"point_id": point, "status": "ok", "latency_median_s": median, "noise": '{"marks": []}', **changes}


@pytest.mark.parametrize(("reported", "good"), [(1.009e-3, True), (1.011e-3, False), (0.989e-3, False)])
def test_a_scripted_duration_must_be_reported_within_one_percent(reported: float, good: bool) -> None:
    assert KnownAnswer("python", 1e-3, reported, allowed_s=1e-5).good is good


def test_the_timers_resolution_is_allowed_where_it_is_coarser_than_one_percent() -> None:
    (answer,) = known_answers([launch(1.009e-5)])
    assert answer.allowed_s == pytest.approx(1e-7)
    assert answer.good
    assert not known_answers([launch(1.02e-5)])[0].good


def test_the_median_launch_speaks_for_a_known_answer() -> None:
    (answer,) = known_answers([launch(1e-5), launch(1e-5), launch(9e-5)])
    assert answer.good


def test_the_launch_variation_is_that_of_the_medians_logarithms() -> None:
    assert launch_cv([1e-6, 1e-6, 1e-6]) == 0
    assert launch_cv([1.0, math.e]) == pytest.approx(math.sqrt(0.5))
    assert math.isnan(launch_cv([1e-6]))


def test_more_launches_find_smaller_slowdowns_and_noise_hides_them() -> None:
    assert detectable_slowdown(0.02, 10) < detectable_slowdown(0.02, 5) < detectable_slowdown(0.05, 5)
    assert math.isnan(detectable_slowdown(0.02, 1))


@pytest.mark.parametrize("launches", [3, 5, 10])
def test_the_stated_slowdown_is_found_four_times_in_five(launches: int) -> None:
    from scipy.special import stdtrit

    rng = np.random.default_rng(launches)
    cv, trials = 0.03, 20_000
    slower = math.log1p(detectable_slowdown(cv, launches))
    base = rng.normal(0, cv, (trials, launches))
    cand = rng.normal(slower, cv, (trials, launches))
    pooled = np.sqrt((base.var(1, ddof=1) + cand.var(1, ddof=1)) / launches)
    t = (cand.mean(1) - base.mean(1)) / pooled
    found = (t > stdtrit(2 * launches - 2, 0.95)).mean()
    assert 0.76 <= found <= 0.84


def test_the_launches_needed_are_the_fewest_that_suffice() -> None:
    needed = launches_needed(0.02, 0.02)
    assert needed is not None
    assert detectable_slowdown(0.02, needed) <= 0.02 < detectable_slowdown(0.02, needed - 1)
    assert launches_needed(2.0, 0.01) is None


def test_a_run_is_judged_by_its_points_and_launches() -> None:
    rows = [row("a", 1e-6), row("a", 1.1e-6), row("b", 2e-6), row("b", 2e-6, noise='{"marks": ["busy"]}')]
    rows.append(row("c", 9.0, status="wrong"))
    result = calibrate(rows, [launch(), launch()])
    assert result.launches == 2
    assert result.cv_worst == pytest.approx(launch_cv([1e-6, 1.1e-6]))
    assert result.cv == pytest.approx(result.cv_worst / 2)
    assert (result.noisy_points, result.points) == (1, 5)
    assert result.to_dict()["known_answers"][0]["good"]


def test_a_run_without_measurements_is_no_calibration() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        calibrate([row("a", 1e-6, status="failed")], [launch()])
    with pytest.raises(ValueError, match="nothing was measured"):
        calibrate([row("a", 1e-6)], [])
