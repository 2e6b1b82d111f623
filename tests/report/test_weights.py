"""The plot of weight updates: one place for each bucket size, the time and the rate over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from commbench.report import weights as weights_module
from commbench.report import write_report
from commbench.report.summary import summarise
from commbench.report.weights import Synced, draw_synced, synced
from commbench.store.run import open_run
from commbench.types import Point
from tests.report.figures import kept_figures, texts

Build = Callable[..., Path]
MIB = 1 << 20
NAN = float("nan")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    return kept_figures(monkeypatch, weights_module, written=True)


def run_of(build_run: Build, bucket: int, **options: Any) -> Path:
    point = Point("weight_update", "", "bfloat16", 64 * MIB, 2, placement="out")
    settings = {"device": "cpu", "seed": 7, "weight_numels": [16 * MIB, 16 * MIB], "bucket_bytes": bucket}
    manifest = {"settings": settings, "weights": {"architecture": "LlamaForCausalLM", "bucket_bytes": bucket}}
    return build_run([point], name=f"bucket-{bucket}", manifest=manifest, **options)


def test_each_bucket_size_has_its_own_place_in_time_and_rate(
    build_run: Build, figures: list[Figure], tmp_path: Path
) -> None:
    buckets = [MIB, 16 * MIB, 256 * MIB]
    runs = [run_of(build_run, bucket) for bucket in buckets]
    page = write_report(runs, tmp_path / "report")
    (figure,) = figures
    time, rate = figure.axes
    rows = [open_run(run).rows()[0] for run in runs]
    for axes, name in ((time, "latency_median_s"), (rate, "algbw_gb_per_s")):
        line = axes.lines[0]
        assert list(line.get_xdata()) == buckets
        assert list(line.get_ydata()) == [row[name] for row in rows]
        assert axes.get_xlabel() == "bucket size"
        assert axes.get_ylim()[0] == 0
    assert {"1 MiB", "16 MiB", "256 MiB"} <= set(texts(figure))
    assert any(text.startswith("LlamaForCausalLM, 67.11 MB of bfloat16, to 1 rank\n") for text in texts(figure))
    # and nothing draws all sizes at the one message size
    assert sorted(path.name for path in (tmp_path / "report" / "plots").iterdir()) == ["weights.png", "weights.svg"]
    assert "Time to sync" in page.read_text()


def test_the_interval_of_a_rate_is_that_of_the_time_turned_round() -> None:
    one = Synced("m", MIB, "ok", (2.0, 1.0, 4.0), 8.0)
    assert one.rates == (8.0, 4.0, 16.0)


def test_a_bucket_size_without_success_has_a_cross_and_models_a_legend(figures: list[Figure], tmp_path: Path) -> None:
    found = [
        Synced("small", MIB, "ok", (1e-3, 0.9e-3, 1.1e-3), 8.0),
        Synced("large", MIB, "ok", (9e-3, NAN, NAN), 9.0),
        Synced("large", 2 * MIB, "failed", (NAN, NAN, NAN), NAN),
    ]
    draw_synced(found, tmp_path, machines="host: cpu, 1 launch per bucket size", marks="")
    (figure,) = figures
    (legend,) = figure.legends
    assert [t.get_text() for t in legend.get_texts()] == ["small", "large", "no success (see list)"]
    crosses = [list(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert [x for x in crosses if x] == [[2 * MIB]]


def test_a_run_where_nothing_succeeded_is_drawn_all_the_same(figures: list[Figure], tmp_path: Path) -> None:
    draw_synced([Synced("m", MIB, "failed", (NAN, NAN, NAN), NAN)], tmp_path, machines="host", marks="⚠ busy")
    assert "⚠ busy" in texts(figures[0])


def test_other_runs_are_not_taken_for_weight_updates(build_run: Build) -> None:
    plain = build_run([Point("all_reduce", "sum", "float32", 8, 2)])
    assert synced(summarise(open_run(plain))) is None
    message_size = build_run([Point("weight_update", "", "uint8", 64, 2, placement="out")], name="run-b")
    assert synced(summarise(open_run(message_size))) is None
