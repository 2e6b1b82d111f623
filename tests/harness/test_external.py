"""Sweeps inside ranks that somebody else has started: what their environments say, and a real one under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commbench.errors import SpecError
from commbench.harness.launchers.external import find_inside, first_host, tasks_per_node

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def test_torchruns_ranks_meet_where_it_says() -> None:
    found = find_inside({**TORCHRUN, "MASTER_ADDR": "node0", "MASTER_PORT": "1234"})
    assert (found.by, found.address, found.port) == ("torchrun", "node0", 1234)
    assert (found.job.rank, found.job.size, found.job.local_rank, found.job.local_size) == (3, 4, 1, 2)
    assert found.variables()["MASTER_PORT"] == "1234"
    assert found.variables()["LOCAL_RANK"] == "1"


def test_mpi_ranks_of_one_host_meet_on_loopback_at_a_port_that_their_launcher_decides() -> None:
    first = find_inside(OPEN_MPI, parent=17)
    assert (first.by, first.address) == ("Open MPI", "127.0.0.1")
    assert first.port == find_inside({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}, parent=17).port
    assert first.port != find_inside(OPEN_MPI, parent=18).port
    assert 20_000 <= first.port < 30_000


def test_mpi_ranks_of_several_hosts_must_be_told_where_they_meet() -> None:
    with pytest.raises(SpecError, match=r"MPICH or Intel MPI started 4 ranks on several hosts .* set MASTER_ADDR"):
        find_inside(HYDRA)
    found = find_inside({**HYDRA, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77"})
    assert (found.job.rank, found.address, found.port) == (2, "10.0.0.1", 77)


def test_srun_names_the_first_host_and_the_job_gives_the_port() -> None:
    found = find_inside(SRUN)
    assert (found.by, found.address) == ("srun", "gpu07")
    assert (found.job.rank, found.job.size, found.job.local_rank, found.job.local_size) == (5, 7, 1, 2)
    assert found.port == find_inside({**SRUN, "SLURM_PROCID": "0"}).port
    assert found.port != find_inside({**SRUN, "SLURM_STEP_ID": "1"}).port
    with_pmi2 = find_inside({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7"})
    assert with_pmi2 == found, "Slurm's PMI tells nothing of hosts, Slurm itself does"
    hydra = find_inside({**SRUN, **HYDRA, "MPI_LOCALNRANKS": "4"}, parent=1)
    assert hydra.job.rank == 2, "mpirun's ranks inside a Slurm job are not srun's"


def test_slurms_lists_are_read() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("8") == [8]
    assert tasks_per_node("many") == []
    assert first_host("node1,node2") == "node1"
    assert first_host("n[3,7]-ib") == "n3-ib"
    assert first_host("gpu[07-09,12],cpu1") == "gpu07"


def test_a_process_that_is_no_rank_is_told_how_to_become_one() -> None:
    with pytest.raises(SpecError, match=r"this process is no rank: .*torchrun --nproc-per-node 2 -m commbench sweep"):
        find_inside({"PATH": "/bin"})


def sweep(*options: str, ranks: int = 2, under: str = "torchrun") -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    start = [sys.executable, *(launcher if under == "torchrun" else ["-m"])]
    command = [*start, "commbench", "sweep", "--launcher", "external", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_what_an_outside_launcher_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    for options, said in (
        (["--launches", "3"], "--launches 3: launches are fresh processes, and torchrun starts these once"),
        (["--tp", "8"], "torchrun started 4 ranks, but tp × pp is 8"),
        (["--nnodes", "2"], "--nnodes 2: torchrun knows the hosts"),
    ):
        done = sweep(*options, under="")
        assert done.returncode == 2
        assert said in done.stderr


@pytest.mark.slow
def test_a_sweep_inside_torchruns_ranks_is_a_run_like_any_other(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = sweep("--collectives", "all_reduce", "--sizes", "8,1KiB", "--dtypes", "float32", "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "points.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert {row["world_size"] for row in rows} == {2}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["outcome"] == "complete"
    (launch,) = manifest["launches"]
    assert (launch["launcher"], launch["started_by"], launch["exit_code"]) == ("external", "torchrun", 0)
    assert launch["clocks"]["ok"]
    assert (out / "points.parquet").exists()
    assert (out / "samples" / "launch-0.parquet").exists()
    assert done.stdout.count("report:") == 1, "rank 0 alone reports"
