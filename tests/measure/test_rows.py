"""The row of a point whose samples are scripted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from commbench.measure.point_state import PointState
from commbench.measure.rows import row_of
from commbench.types import Point

POINT = Point("all_reduce", "sum", "float32", 1024, 1, backend="shm")


def values_of(valid: int, missed: int, **changes: Any) -> dict[str, Any]:
    """One rank, one block of samples of about 2 µs."""
    place: Any = SimpleNamespace(takes_part=True, coordinator=SimpleNamespace(provider=lambda name: "scripted"))
    latencies = 2e-6 + 1e-9 * np.random.default_rng(valid).random(valid)
    s = PointState(0, POINT, place, latencies=[latencies], t_win=[latencies], skew=[0 * latencies], n_invalid=missed)
    s.status, s.steady, s.checked = "ok", True, True
    s.calls_made, s.calls_counted = valid + missed, {"shm": valid + missed}
    for name, value in changes.items():
        setattr(s, name, value)
    team: Any = SimpleNamespace(rank=0, oversubscribed=False, gather_texts=lambda text: [text])
    timing: Any = SimpleNamespace(sync="window", label=lambda s: "single", remark=lambda: "")
    return row_of(s, team, timing, target_ci=0.01)["values"]


def test_a_point_is_ok_without_a_word_where_few_windows_were_missed() -> None:
    row = values_of(valid=100, missed=3)
    assert (row["status"], row["reason"], row["n_invalid"]) == ("ok", "", 3)
    assert row["latency_median_s"] == pytest.approx(2e-6, rel=1e-2)


def test_a_point_says_so_where_most_windows_were_missed() -> None:
    row = values_of(valid=14, missed=119)
    assert row["status"] == "ok"
    assert "119 of 133 time windows were missed" in row["reason"]


def test_a_point_without_one_valid_window_is_unsteady() -> None:
    row = values_of(valid=0, missed=20)
    assert row["status"] == "unsteady"
    assert "all 20 time windows were missed" in row["reason"]
    assert "latency_median_s" not in row


def test_calls_that_no_backend_counted_make_a_point_failed() -> None:
    row = values_of(valid=50, missed=0, calls_counted={"shm": 49})
    assert row["status"] == "failed"
    assert "not 50 on each of 1 ranks" in row["reason"]


def test_another_backend_than_the_forced_one_makes_a_point_failed() -> None:
    row = values_of(valid=50, missed=0, calls_counted={"torch_dist": 50})
    assert (row["status"], row["backend_picked"]) == ("failed", "torch_dist")
    assert "shm was asked for by name, but torch_dist was taken" in row["reason"]
