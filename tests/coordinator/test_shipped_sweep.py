"""The shipped sweep ``coordinator`` and sweeps over groups, as a user starts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commbench.store.run import open_run
from commbench.sweep import find_sweep, make_spec, read_file

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHORT = ["--target-ci", "50%", "--max-time-per-point", "30ms", "--quiet"]


def sweep(out: Path, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "commbench", "sweep", *arguments, *SHORT, "--out", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "report.html").is_file()
    return open_run(out).rows()


def test_the_coordinator_sweep_measures_every_operation_and_finds_every_result_right(tmp_path: Path) -> None:
    rows = sweep(tmp_path / "run", "sweeps/coordinator.toml", "--tp", "4", "--sizes", "1KiB,64KiB", "--budget", "5m")
    asked = make_spec(read_file(find_sweep("coordinator")), {}).collectives
    assert {row["collective"] for row in rows} == set(asked)
    assert {row["status"] for row in rows} <= {"ok", "unsteady"}
    assert all(row["checked"] for row in rows if row["collective"] != "barrier")
    assert all(row["algbw_gb_per_s"] for row in rows if row["collective"] != "barrier")


def test_groups_are_measured_together_and_alone(tmp_path: Path) -> None:
    rows = sweep(
        tmp_path / "run", "--tp", "2", "--pp", "2", "--group", "world,tp,pp,tp:0,moe_tp", "--sizes", "1KiB", "--dtypes",
        "float32", "--collectives", "all_reduce,all_gatherv_skewed,send_tensor_dict,queue_broadcast",
    )  # fmt: skip
    assert {row["status"] for row in rows} <= {"ok", "unsteady"}
    sizes = {(row["group"], row["world_size"]) for row in rows}
    assert sizes == {("world", 4), ("tp", 2), ("pp", 2), ("tp:0", 2), ("moe_tp", 2)}
    assert len(rows) == 5 * 4
