from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from commbench.store import schema
from commbench.store.run import Plan, create, open_run
from commbench.store.samples import SampleLog, read_samples, to_parquet
from commbench.types import Point


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create(tmp_path / "r", {}, Plan((Point("all_reduce", "sum", "float32", 64, 2),), {}))


def fill(run: Path, launch: int = 0, ids: tuple[str, ...] = ("a", "b"), n: int = 3) -> None:
    log = SampleLog(run, launch)
    for k, point_id in enumerate(ids):
        start = np.arange(2 * n, dtype=np.int64).reshape(2, n) + 1000 * k
        log.append(point_id, 5, start, start + 10, np.array([True] * (n - 1) + [False]))
    log.close()


def test_samples_come_back_as_they_were_taken(run: Path) -> None:
    fill(run, ids=("a",))
    found = read_samples(run)
    assert {name: str(kind) for name, kind in found.dtypes.items()} == {
        name: str(kind) for name, kind in found.astype(schema.SAMPLE_COLUMNS).dtypes.items()
    }
    assert found["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    assert found["iteration"].tolist() == [5, 6, 7, 5, 6, 7]
    assert found["start_ns"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["end_ns"].tolist() == [10, 11, 12, 13, 14, 15]
    assert found["valid"].tolist() == [True, True, False] * 2


def test_parquet_holds_the_same_samples_and_replaces_the_log(run: Path) -> None:
    fill(run)
    before = read_samples(run)
    to_parquet(run, 0)
    after = read_samples(run)
    assert [p.name for p in (run / schema.SAMPLES_DIR).iterdir()] == ["launch-0.parquet"]
    assert after.equals(before)


def test_one_point_or_several_can_be_asked_for_in_either_form(run: Path) -> None:
    fill(run, 0, ("a", "b", "c"))
    fill(run, 1, ("a", "b", "c"))
    to_parquet(run, 0)  # launch 1 stays a log
    opened = open_run(run)
    assert set(opened.samples("b")["point_id"]) == {"b"}
    assert set(opened.samples({"a", "c"})["point_id"]) == {"a", "c"}
    assert set(opened.samples("b")["launch"]) == {0, 1}
    assert opened.samples("none of them").empty


def test_a_record_cut_short_is_dropped_and_those_before_it_are_kept(run: Path) -> None:
    fill(run)
    path = run / schema.SAMPLES_DIR / "launch-0.bin"
    for cut in (1, 40, 102, 120):
        whole = path.read_bytes()
        path.write_bytes(whole[:-cut])
        assert set(read_samples(run)["point_id"]) == {"a"}
        path.write_bytes(whole)


@pytest.mark.parametrize("cut", [1, 40, 102, 120])
def test_a_log_opened_again_after_a_crash_stays_readable(run: Path, cut: int) -> None:
    fill(run)
    path = run / schema.SAMPLES_DIR / "launch-0.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    fill(run, ids=("c",))
    found = read_samples(run)
    assert found["point_id"].unique().tolist() == ["a", "c"]
    assert found.loc[found["point_id"] == "c", "start_ns"].tolist() == [0, 1, 2, 3, 4, 5]


def test_visits_of_a_point_add_up(run: Path) -> None:
    fill(run, ids=("a", "b", "a"))
    to_parquet(run, 0)
    assert len(read_samples(run, "a")) == 2 * len(read_samples(run, "b"))


def test_a_run_without_samples_gives_an_empty_frame_of_the_schema(run: Path) -> None:
    found = read_samples(run)
    assert list(found.columns) == list(schema.SAMPLE_COLUMNS)
    assert found.empty


def test_a_launch_without_a_log_is_nothing_to_convert(run: Path) -> None:
    to_parquet(run, 7)
    assert list((run / schema.SAMPLES_DIR).iterdir()) == []


def test_an_empty_log_becomes_an_empty_table(run: Path) -> None:
    SampleLog(run, 0).close()
    to_parquet(run, 0)
    assert read_samples(run).empty


def test_a_point_that_is_begun_again_has_the_samples_of_its_last_time_only(tmp_path: Path) -> None:
    (tmp_path / schema.SAMPLES_DIR).mkdir()
    log = SampleLog(tmp_path, 0)
    for value, first in ((1, 0), (1, 4), (2, 0)):  # a job died after the second block
        times = np.full((2, 4), value, dtype=np.int64)
        log.append("p", first, times, times + 1, np.ones(4, dtype=bool))
    log.append("q", 0, times, times + 1, np.ones(4, dtype=bool))
    log.close()
    for _ in ("open", "closed"):
        seen = read_samples(tmp_path, "p")
        assert len(seen) == 8
        assert set(seen["start_ns"]) == {2}
        assert len(read_samples(tmp_path)) == 16
        to_parquet(tmp_path, 0)


def test_a_run_that_goes_on_keeps_its_earlier_samples_but_for_points_that_are_measured_again(tmp_path: Path) -> None:
    (tmp_path / schema.SAMPLES_DIR).mkdir()
    for value, names in ((1, "abc"), (2, "bd")):
        log = SampleLog(tmp_path, 0)
        for name in names:
            times = np.full((2, 4), value, dtype=np.int64)
            log.append(name, 0, times, times + 1, np.ones(4, dtype=bool))
        log.close()
        if value == 2:
            assert set(read_samples(tmp_path, "b")["start_ns"]) == {2}  # also while it is being measured
        to_parquet(tmp_path, 0)
    seen = read_samples(tmp_path)
    assert len(seen) == 4 * 8
    assert seen.groupby("point_id")["start_ns"].first().to_dict() == {"a": 1, "b": 2, "c": 1, "d": 2}
