"""A history of nights: nothing lost, nothing half-written, nothing wrong used, everything skipped named."""

from __future__ import annotations

import multiprocessing as mp
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commbench.errors import StoreError, UsageError
from commbench.store import history as store
from commbench.store.history import (
    HISTORY_SCHEMA,
    add_run,
    baseline_nights,
    find_points,
    load_series,
    open_history,
)
from tests.nights import DAY_S, START_S, points_of, side_frame

POINTS = points_of(sizes=(64, 4096))
NOW_S = START_S + 1000 * DAY_S


def manifest(run_id: str, day: int, **more: Any) -> dict[str, Any]:
    return {"run_id": run_id, "started_s": START_S + day * DAY_S, "outcome": "complete", "spec": {}, **more}


@pytest.fixture
def add(tmp_path: Path) -> Callable[..., Path]:
    def add(day: int, run_id: str = "", **options: Any) -> Path:
        facts = {k: options.pop(k) for k in ("note", "accepted") if k in options}
        latencies = side_frame(POINTS, launches=3, seed=abs(day), **options)
        name = run_id or f"night{day:03d}"
        return add_run(tmp_path / "history", manifest(name, day), latencies, {"memcpy_s": {0: -6.0}}, **facts)[0]

    return add


def folder(tmp_path: Path) -> Path:
    return tmp_path / "history"


def test_nights_come_back_by_time_with_what_was_measured(tmp_path: Path, add: Callable[..., Path]) -> None:
    for day in (2, 0, 1):
        add(day)
    history = open_history(folder(tmp_path), now_s=NOW_S)
    assert [n.run_id for n in history.nights] == ["night000", "night001", "night002"]
    series = load_series(history.nights)
    frame = side_frame(POINTS, launches=3, seed=1)
    row = list(series.points["point_id"]).index(POINTS[3].point_id)
    own = np.log(frame[frame["point_id"] == POINTS[3].point_id]["latency_median_s"].to_numpy())
    assert series.log_mean[row, 1] == pytest.approx(own.mean())
    assert series.log_variance[row, 1] == pytest.approx(own.var(ddof=1))
    assert series.launches[row, 1] == 3
    assert history.nights[0].facts["canaries"] == {"memcpy_s": {0: -6.0}}


def test_adding_a_run_twice_changes_nothing(tmp_path: Path, add: Callable[..., Path]) -> None:
    first = add(0)
    before = first.read_bytes()
    _, new = add_run(folder(tmp_path), manifest("night000", 0), side_frame(POINTS, launches=3, seed=0), {})
    assert not new
    assert first.read_bytes() == before


def test_another_run_of_the_same_name_is_refused(tmp_path: Path, add: Callable[..., Path]) -> None:
    add(0)
    with pytest.raises(StoreError, match="another run of the same run_id"):
        add(0, slower=lambda p: 2.0)


def test_a_run_without_points_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no points"):
        add_run(folder(tmp_path), manifest("empty", 0), side_frame(POINTS, launches=0), {})


@pytest.mark.parametrize("run_id", ["", "../escape", "a/b", ".hidden", "x" * 300])
def test_a_run_id_that_is_no_file_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(StoreError, match="no file name"):
        add_run(folder(tmp_path), manifest(run_id, 0), side_frame(POINTS, launches=1), {})


def _add_many(path: Path, worker: int, count: int) -> None:
    frame = side_frame(POINTS, launches=2, seed=worker)
    for k in range(count):
        add_run(path, manifest(f"job{worker}-{k}", worker * 100 + k), frame.assign(
            latency_median_s=frame["latency_median_s"] * (1 + k / 1000)), {})  # fmt: skip


def test_jobs_at_the_same_time_lose_no_run_and_a_reader_sees_whole_files_only(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    jobs = [context.Process(target=_add_many, args=(folder(tmp_path), w, 12)) for w in range(2)]
    folder(tmp_path).mkdir()
    for job in jobs:
        job.start()
    while any(job.is_alive() for job in jobs):
        assert open_history(folder(tmp_path), now_s=NOW_S).skipped == []
    for job in jobs:
        job.join()
    history = open_history(folder(tmp_path), now_s=NOW_S)
    assert len(history.nights) == 24
    assert history.skipped == []
    assert not list(folder(tmp_path).glob(".*"))


def test_damaged_files_are_skipped_and_named(tmp_path: Path, add: Callable[..., Path]) -> None:
    whole, cut, junk = add(0), add(1), folder(tmp_path) / "junk.parquet"
    cut.write_bytes(cut.read_bytes()[:-20])
    junk.write_text("not parquet")
    (folder(tmp_path) / "empty.parquet").touch()
    history = open_history(folder(tmp_path), now_s=NOW_S)
    assert [n.path for n in history.nights] == [whole]
    assert len(history.skipped) == 3
    assert any("night001.parquet" in text for text in history.skipped)


def test_a_file_that_breaks_after_it_was_opened_is_skipped_and_named(tmp_path: Path, add: Callable[..., Path]) -> None:
    add(0)
    path = add(1)
    nights = open_history(folder(tmp_path), now_s=NOW_S).nights
    data = bytearray(path.read_bytes())
    footer = int.from_bytes(data[-8:-4], "little") + 8
    data[4:-footer] = b"\xff" * (len(data) - footer - 4)  # the footer stays good
    path.write_bytes(bytes(data))
    series = load_series(nights)
    assert len(series.nights) == 1
    assert "night001.parquet" in series.skipped[0]


def test_a_copy_under_another_name_is_skipped_as_a_duplicate(tmp_path: Path, add: Callable[..., Path]) -> None:
    path = add(0)
    shutil.copy(path, path.with_name("copy.parquet"))
    history = open_history(folder(tmp_path), now_s=NOW_S)
    assert len(history.nights) == 1
    assert "the same run as" in history.skipped[0]


def test_two_nights_that_gave_the_same_medians_are_two_nights(tmp_path: Path) -> None:
    latencies = side_frame(POINTS, launches=1, seed=1)
    for day in (0, 1):
        add_run(tmp_path / "history", manifest(f"night{day}", day), latencies, {})
    history = open_history(folder(tmp_path), now_s=NOW_S)
    assert [n.run_id for n in history.nights] == ["night0", "night1"]
    assert not history.skipped


@pytest.mark.parametrize("day", [5000, -20_000])
def test_nights_of_an_impossible_time_are_skipped_and_named(tmp_path: Path, add: Callable[..., Path], day: int) -> None:
    add(0)
    add(day, "strange")
    history = open_history(folder(tmp_path), now_s=NOW_S)
    assert [n.run_id for n in history.nights] == ["night000"]
    assert "which its clock cannot have known" in history.skipped[0]


def test_a_night_of_a_newer_schema_is_skipped_and_named(
    tmp_path: Path, add: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    add(0)
    monkeypatch.setattr(store, "HISTORY_SCHEMA", HISTORY_SCHEMA + 1)
    add(1)
    monkeypatch.setattr(store, "HISTORY_SCHEMA", HISTORY_SCHEMA)
    history = open_history(folder(tmp_path), now_s=NOW_S)
    assert [n.run_id for n in history.nights] == ["night000"]
    assert "update commbench" in history.skipped[0]


def test_a_runs_own_points_file_is_read_as_version_one(tmp_path: Path, add: Callable[..., Path]) -> None:
    import pandas as pd

    from commbench.store.schema import POINT_COLUMNS

    add(0)
    frame = side_frame(POINTS, launches=3, seed=1)
    rows = pd.DataFrame({c: frame.get(c) for c in POINT_COLUMNS}).astype(POINT_COLUMNS)
    rows["run_id"] = "20260701-030000-quick-ab12"
    rows.to_parquet(folder(tmp_path) / "old.parquet", index=False)
    history = open_history(folder(tmp_path), now_s=NOW_S)
    assert [n.version for n in history.nights] == [2, 1]
    assert history.nights[1].day == "2026-07-01 03:00"
    series = load_series(history.nights)
    row = list(series.points["point_id"]).index(POINTS[0].point_id)
    own = np.log(frame[frame["point_id"] == POINTS[0].point_id]["latency_median_s"].to_numpy())
    assert series.log_mean[row, 1] == pytest.approx(own.mean())


def test_a_night_without_a_point_is_a_hole(tmp_path: Path, add: Callable[..., Path]) -> None:
    add(0)
    add(1, change=lambda p, k, row: None if p == POINTS[0] else row)
    series = load_series(open_history(folder(tmp_path), now_s=NOW_S).nights)
    row = list(series.points["point_id"]).index(POINTS[0].point_id)
    assert np.isfinite(series.log_mean[row]).tolist() == [True, False]


def test_points_that_no_night_has_are_left_out_and_rows_stay_matched(tmp_path: Path, add: Callable[..., Path]) -> None:
    add(0)
    wanted = [POINTS[2].point_id, "0" * 16, POINTS[0].point_id]
    series = load_series(open_history(folder(tmp_path), now_s=NOW_S).nights, wanted)
    assert sorted(series.points["point_id"]) == sorted([POINTS[2].point_id, POINTS[0].point_id])
    assert len(series.log_mean) == 2
    whole = load_series(open_history(folder(tmp_path), now_s=NOW_S).nights)
    for i, point_id in enumerate(series.points["point_id"]):
        j = list(whole.points["point_id"]).index(point_id)
        assert series.log_mean[i, 0] == whole.log_mean[j, 0]


def test_a_baseline_is_made_of_earlier_nights_only(tmp_path: Path, add: Callable[..., Path]) -> None:
    for day in range(6):
        add(day)
    history = open_history(folder(tmp_path), now_s=NOW_S)
    nights, notes = baseline_nights(history, START_S + 4 * DAY_S, "night003", most=2)
    assert [n.run_id for n in nights] == ["night001", "night002"]
    assert "2 nights start after the candidate" in notes[0]


def test_an_accepted_night_starts_a_new_baseline(tmp_path: Path, add: Callable[..., Path]) -> None:
    for day in range(6):
        add(day, **({"accepted": True, "note": "new driver"} if day == 3 else {}))
    nights, notes = baseline_nights(open_history(folder(tmp_path), now_s=NOW_S), NOW_S, "x", most=30)
    assert [n.run_id for n in nights] == ["night003", "night004", "night005"]
    assert "new driver" in notes[0]


def test_a_folder_that_is_not_there_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="history add"):
        open_history(tmp_path / "nowhere")


def test_a_point_is_found_by_its_id_its_label_or_words_of_it() -> None:
    import pandas as pd

    points = pd.DataFrame({"point_id": ["abcd1234", "abff0000"]})
    labels = ["all_reduce float32 64 KiB [shm]", "all_reduce float32 64 KiB [shm_twoshot]"]
    assert find_points(points, labels, "abcd") == [0]
    assert find_points(points, labels, labels[1]) == [1]
    assert find_points(points, labels, "64 kib twoshot") == [1]
    assert find_points(points, labels, "all_reduce") == [0, 1]
    with pytest.raises(UsageError, match="no point 'broadcast'"):
        find_points(points, labels, "broadcast")
