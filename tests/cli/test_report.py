from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import RunBuilder, grid

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return RunBuilder(tmp_path / "run-a", grid(sizes=[64])).build()


def test_report_writes_into_the_run_and_names_the_page(commbench: Run, run_dir: Path) -> None:
    code, out, err = commbench("report", str(run_dir))
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"{run_dir}: 1 point: ok", f"report: {run_dir / 'report.html'}"]
    assert (run_dir / "report.html").is_file()
    assert (run_dir / "plots" / "latency.png").is_file()


def test_report_of_several_runs_goes_to_out(commbench: Run, run_dir: Path, tmp_path: Path) -> None:
    other = RunBuilder(tmp_path / "run-b", grid(sizes=[64])).build()
    code, out, _ = commbench("report", str(run_dir), str(other), "--out", str(tmp_path / "both"))
    assert code == 0
    assert f"report: {tmp_path / 'both' / 'report.html'}" in out


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_bad_input_gives_one_clear_line_and_exit_code_2(commbench: Run, run_dir: Path, tmp_path: Path) -> None:
    refused(commbench("report"), "RUN")
    refused(commbench("report", str(tmp_path / "absent")), "absent", "does not exist")
    refused(commbench("report", str(tmp_path)), str(tmp_path), "manifest.json")
    refused(commbench("report", str(run_dir), str(run_dir)), "--out")
    (tmp_path / "file").write_text("mine")
    refused(commbench("report", str(run_dir), "--out", str(tmp_path / "file")), "is a file")
    refused(commbench("report", str(run_dir), "--out", str(tmp_path)), "--out", "file")
    assert not (run_dir / "report.html").exists()


def test_a_run_of_a_newer_schema_is_refused(commbench: Run, run_dir: Path) -> None:
    manifest = json.loads((run_dir / "manifest.json").read_text())
    (run_dir / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 999}))
    refused(commbench("report", str(run_dir)), "999", "update commbench")
