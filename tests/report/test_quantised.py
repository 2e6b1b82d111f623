"""Backends that quantise: marked wherever they are shown, and no rival of exact ones."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from commbench.analysis.compare import align, compare
from commbench.analysis.regret import regret
from commbench.analysis.tune import countable
from commbench.errors import UsageError
from commbench.report.html import render
from commbench.report.lines import combine, line_of, panels
from commbench.report.summary import records, summarise
from commbench.report.table import print_summary
from commbench.store.latencies import how_of, read_latencies
from commbench.store.run import open_run
from tests.runs import grid
from tests.scripted import frame, rows

Build = Callable[..., Path]
KIB = 1 << 10


@pytest.fixture
def quantised_run(build_run: Build) -> Path:
    """torch_dist stands for a backend that quantises."""
    points = grid(sizes=[64, 4 * KIB], backends=("shm", "torch_dist"))
    path = build_run(points)
    lines = (path / "points.jsonl").read_text()
    changed = [
        line.replace('"quantised": null', '"quantised": "int8"') if '"backend_picked": "torch_dist"' in line else line
        for line in lines.splitlines()
    ]
    assert changed != lines.splitlines()
    (path / "points.jsonl").write_text("\n".join(changed) + "\n")
    (path / "points.parquet").unlink()
    return path


def test_the_table_marks_them_and_says_what_the_mark_means(quantised_run: Path) -> None:
    stream = io.StringIO()
    print_summary(open_run(quantised_run), Console(file=stream, width=160))
    text = stream.getvalue()
    assert "torch_dist≈int8" in text
    assert "⚠ quantised (≈): torch_dist to int8; not as exact as the others, so no rival of theirs" in text
    assert "shm≈" not in text


def test_legends_of_plots_mark_them(quantised_run: Path) -> None:
    summary = summarise(open_run(quantised_run))
    (panel,) = panels(combine([summary]))
    labels = {line_of(row, ["run"], False).label for row in records(panel.points)}
    assert labels == {"shm (forced)", "torch_dist≈int8 (forced)"}


def test_the_page_marks_them_and_names_the_best_among_exact_ones(quantised_run: Path, tmp_path: Path) -> None:
    summary = summarise(open_run(quantised_run))
    render([summary], [], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "torch_dist≈int8" in text
    assert "quantised to" in text
    assert "4 KiB, torch_dist≈int8" not in text  # at a glance


def scripted(quantised: bool) -> pd.DataFrame:
    """``rough`` is twice as fast as ``exact``, which auto takes."""
    found = frame(rows({"exact": lambda s: 2e-5, "rough": lambda s: 1e-5}, lambda size: "exact", cv=0.0))
    if quantised:
        found["quantised"] = found["backend_picked"].map({"exact": "", "rough": "int4"}).astype("string")
    return found


def test_a_pick_has_no_regret_for_a_faster_backend_that_quantises() -> None:
    assert {p.fastest for p in regret(scripted(False), "commbench").points} == {"rough"}
    found = regret(scripted(True), "commbench")
    assert {p.fastest for p in found.points} == {"exact"}
    assert found.left_out["quantised results, which are not as exact as the others'"] > 0


def test_tuning_leaves_them_and_shared_devices_out_with_the_reason() -> None:
    kept, left_out = countable(scripted(True))
    assert set(kept["kernel"]) == {"exact"}
    assert list(left_out) == ["quantised results, which are not as exact as the others'"]
    kept, left_out = countable(scripted(False).assign(shared_device=True))
    assert kept.empty
    assert list(left_out) == ["ranks shared a device"]


def test_a_comparison_of_shared_with_own_devices_is_refused() -> None:
    own = scripted(False).assign(shared_device=False)
    shared = scripted(False).assign(shared_device=True)
    assert math.isclose(float(compare(own, own).points["ratio"].iloc[0]), 1.0)
    with pytest.raises(UsageError, match=r"the ranks of the candidate shared a device.*never compared"):
        align(own, shared)
    with pytest.raises(UsageError, match="the ranks of the baseline shared a device"):
        align(shared, own)
    align(shared, shared)


def test_quantised_and_exact_launches_of_a_point_were_measured_under_other_conditions() -> None:
    found = compare(scripted(False), scripted(True))
    odd = found.points[found.points["base_how"] != found.points["cand_how"]]
    assert set(odd["cand_how"].str.strip()) == {"quantised to int4"}
    assert set(odd["backend_requested"]) == {"rough"}


def test_runs_written_before_the_columns_are_read_with_nothing_in_them(build_run: Build) -> None:
    import pyarrow.parquet as pq

    path = build_run(grid())
    table = pq.read_table(path / "points.parquet")
    pq.write_table(table.drop_columns(["quantised", "ranks_agree", "enqueue_median_s"]), path / "points.parquet")
    found = read_latencies(open_run(path))
    assert found["quantised"].isna().all()
    assert set(how_of(found)) == {"window single"}
