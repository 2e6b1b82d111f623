"""Asking for a backend that cannot work here: exit code 2 with its reason, or skipped points beside those that can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commbench.errors import SpecError
from commbench.harness.run import prepare
from commbench.sweep import make_spec

REPOSITORY = Path(__file__).resolve().parents[2]


def sweep(folder: Path, backends: str) -> tuple[int, str, list[dict[str, Any]]]:
    """(exit code, what it says, the points) of a sweep of one size on two ranks."""
    command = [
        sys.executable, "-m", "commbench", "sweep", "--tp", "2", "--device", "cpu", "--collectives", "all_reduce",
        "--dtypes", "float32", "--sizes", "1KiB", "--max-time-per-point", "0.05s", "--backends", backends,
        "--out", str(folder / "run"), "--quiet",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "500"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    points = [json.loads(line) for line in (folder / "run" / "points.jsonl").read_text().splitlines()]
    return done.returncode, done.stderr + done.stdout, points


@pytest.mark.slow
def test_a_backend_alone_that_cannot_work_ends_in_exit_code_2_with_reason_and_remedy(tmp_path: Path) -> None:
    code, said, points = sweep(tmp_path, "symm_mem")
    assert code == 2
    assert "every point was skipped" in said
    assert "it is for an NVIDIA GPU, the group is on cpu" in said
    assert "run it on a machine with an NVIDIA GPU" in said
    assert [p["status"] for p in points] == ["skipped"]


@pytest.mark.slow
def test_in_a_list_its_points_are_skipped_with_the_same_words_and_the_others_are_measured(tmp_path: Path) -> None:
    code, _, points = sweep(tmp_path, "shm,pynccl")
    assert code == 0
    by_backend = {p["backend_requested"]: p for p in points}
    assert by_backend["shm"]["status"] != "skipped"
    assert by_backend["pynccl"]["status"] == "skipped"
    assert "the group is on cpu" in by_backend["pynccl"]["reason"]
    assert "run it on a machine with" in by_backend["pynccl"]["reason"]


def test_the_provider_of_custom_all_reduce_goes_from_the_specification_to_the_ranks_settings() -> None:
    _, settings = prepare(make_spec({"ca_provider": "vllm", "device": "cpu", "sizes": "8"}, {}))
    assert settings.ca_provider == "vllm"
    with pytest.raises(SpecError, match=r"--ca-provider: 'mine' is no provider .* sgl_kernel, vllm, flashinfer"):
        make_spec({"ca_provider": "mine"}, {"ca_provider": "--ca-provider"})
