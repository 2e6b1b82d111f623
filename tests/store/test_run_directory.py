from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from commbench.errors import StoreError
from commbench.store import schema
from commbench.store.run import (
    Plan,
    PointLog,
    check_writable,
    create,
    finish,
    open_run,
    row_of,
    update_manifest,
    write_json,
)
from commbench.types import Point

POINT = Point("all_reduce", "sum", "float32", 1024, 2)
PLAN = Plan((POINT,), {"seed": 3})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create(tmp_path / "reports" / "r1", {"run_id": "r1", "outcome": "running"}, PLAN)


def row(**values: object) -> dict[str, object]:
    return row_of(POINT, {"run_id": "r1", "launch": 0, "status": "ok", **values})


def test_a_new_run_holds_its_manifest_its_plan_and_no_points(run: Path) -> None:
    opened = open_run(run)
    assert opened.manifest["schema_version"] == schema.SCHEMA_VERSION
    assert (opened.run_id, opened.rows()) == ("r1", [])
    assert Plan.load(run) == PLAN


def test_each_point_is_on_disk_as_soon_as_it_is_appended(run: Path) -> None:
    log = PointLog(run)
    log.append(row(latency_median_s=1e-6))
    assert [r["latency_median_s"] for r in open_run(run).rows()] == [1e-6]
    log.close()


def test_a_torn_last_line_is_skipped_named_and_does_not_swallow_the_next_point(run: Path) -> None:
    log = PointLog(run)
    log.append(row(order=0))
    log.close()
    with (run / schema.POINTS_JSONL).open("a") as stream:
        stream.write('{"run_id": "r1", "lau')
    log = PointLog(run)
    log.append(row(order=1, launch=1))
    log.close()
    opened = open_run(run)
    assert [r["order"] for r in opened.rows()] == [0, 1]
    assert opened.problems == ["points.jsonl line 2 is not readable and was skipped"]


def test_lines_that_are_no_records_are_named(run: Path) -> None:
    (run / schema.POINTS_JSONL).write_text(f"[1, 2]\n\n{json.dumps(row())}\n")
    opened = open_run(run)
    assert len(opened.rows()) == 1
    assert opened.problems == ["points.jsonl line 1 is no record and was skipped"]


def test_points_have_exactly_the_columns_and_types_of_the_schema(run: Path) -> None:
    log = PointLog(run)
    log.append(row(latency_median_s=1e-6, n_samples=4, checked=True))
    log.append(row(launch=1, status="failed", reason="boom"))
    log.close()
    points = open_run(run).points()
    assert {name: str(points[name].dtype) for name in points.columns} == schema.POINT_COLUMNS
    assert points["latency_median_s"].isna().tolist() == [False, True]


def test_columns_that_later_versions_add_are_ignored_by_points(run: Path) -> None:
    (run / schema.POINTS_JSONL).write_text(json.dumps({**row(), "colour": "blue"}) + "\n")
    assert "colour" not in open_run(run).points().columns


def test_a_finished_run_has_the_same_points_in_parquet(run: Path) -> None:
    import pandas as pd

    log = PointLog(run)
    log.append(row(latency_median_s=2e-6))
    log.close()
    finish(run)
    stored = pd.read_parquet(run / schema.POINTS_PARQUET)
    assert stored["latency_median_s"].tolist() == [2e-6]
    assert list(stored.columns) == list(schema.POINT_COLUMNS)


def test_the_manifest_changes_as_a_whole(run: Path) -> None:
    update_manifest(run, outcome="complete", launches=[1])
    manifest = open_run(run).manifest
    assert (manifest["outcome"], manifest["launches"], manifest["run_id"]) == ("complete", [1], "r1")


def test_a_json_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ValueError):
        write_json(path, loop)
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_an_unknown_column_is_refused(run: Path) -> None:
    with pytest.raises(StoreError, match="colour"):
        row(colour="blue")


def test_a_folder_with_something_in_it_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    for refuse in (lambda: create(tmp_path, {}, PLAN), lambda: check_writable(tmp_path)):
        with pytest.raises(StoreError, match="not empty"):
            refuse()
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    for target in (path, path / "below"):
        with pytest.raises(StoreError, match="is a file"):
            check_writable(target)
    with pytest.raises(StoreError, match="is a file"):
        create(path, {}, PLAN)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreError, match="not writable"):
            check_writable(tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)


def test_what_is_no_run_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        open_run(tmp_path / "absent")
    with pytest.raises(StoreError, match=r"has no manifest\.json"):
        open_run(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3"])
def test_a_manifest_that_cannot_be_read_is_refused(run: Path, text: str) -> None:
    (run / schema.MANIFEST).write_text(text)
    with pytest.raises(StoreError, match=rf"{schema.MANIFEST} is (not a readable manifest|no manifest of a run)"):
        open_run(run)


def test_a_run_of_a_newer_schema_is_refused_with_both_versions(run: Path) -> None:
    update_manifest(run, schema_version=schema.SCHEMA_VERSION + 1)
    with pytest.raises(StoreError, match=f"{schema.SCHEMA_VERSION + 1}, newer than the {schema.SCHEMA_VERSION}"):
        open_run(run)
