"""A sweep inside ranks that somebody else has started: torchrun, an MPI library's mpirun, or Slurm's srun.

Every rank runs the same command. Rank 0 writes the results. Nobody watches such a job: a rank that hangs or dies ends
it as its launcher does, and what is finished stays.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commbench.backends.mpi_job import MpiJob, find_job
from commbench.errors import LaunchError, SpecError, StoreError
from commbench.harness.launchers import binding
from commbench.harness.launchers.commands import Nodes, Program, sockets
from commbench.harness.supervision.scratch import scratch_folder
from commbench.store.run import Plan, create, update_manifest

_PORTS = (20_000, 30_000)  # where ranks meet that nobody told a port


@dataclass(frozen=True, slots=True)
class Inside:
    """This process's place in a job. by: what started it. address, port: where all ranks meet."""

    by: str
    job: MpiJob
    address: str
    port: int

    def variables(self) -> dict[str, str]:
        """As torch.distributed reads them."""
        return {**self.job.variables(), "MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}


def find_inside(env: Mapping[str, str], parent: int | None = None) -> Inside:
    """The job that this environment tells of. parent: this process's, by number (tests give one).

    Raises SpecError where it tells of none, or not where the ranks of several hosts meet.
    """
    by, job = _who(env)
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT", "").isdigit():
        return Inside(by, job, env["MASTER_ADDR"], int(env["MASTER_PORT"]))
    address = env.get("MASTER_ADDR", "")
    if job.local_size == job.size:
        # what all ranks of one host share and another job of it does not
        key = f"{by} {os.getppid() if parent is None else parent}"
        return Inside(by, job, address or "127.0.0.1", _port(key))
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    if nodes and "SLURM_JOB_ID" in env:
        key = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', '')}"
        return Inside(by, job, address or first_host(nodes), _port(key))
    raise SpecError(
        f"--launcher external: {by} started {job.size} ranks on several hosts and does not say where they meet; set "
        "MASTER_ADDR to a name of rank 0's host and MASTER_PORT to a free port of it, on every rank (Open MPI: mpirun "
        "-x MASTER_ADDR=… -x MASTER_PORT=…; MPICH and Intel MPI: mpirun -genv MASTER_ADDR … -genv MASTER_PORT …)"
    )


def _who(env: Mapping[str, str]) -> tuple[str, MpiJob]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if all(env.get(name, "").isdigit() for name in names):
        return "torchrun", MpiJob(*(int(env[name]) for name in names))
    found = find_job(env)
    whole = "OMPI_COMM_WORLD_RANK" in env or "MPI_LOCALRANKID" in env
    if found is not None and whole:
        return ("Open MPI" if "OMPI_COMM_WORLD_RANK" in env else "MPICH or Intel MPI"), found
    if env.get("SLURM_PROCID", "").isdigit() and env.get("SLURM_NTASKS", "").isdigit():
        tasks = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""))
        node = int(env.get("SLURM_NODEID") or 0)
        size = int(env["SLURM_NTASKS"])
        here = tasks[node] if node < len(tasks) else size
        return "srun", MpiJob(int(env["SLURM_PROCID"]), size, int(env.get("SLURM_LOCALID") or 0), here)
    if found is not None:
        return "PMI", found
    raise SpecError(
        "--launcher external: this process is no rank: there is neither RANK and WORLD_SIZE (torchrun), nor "
        "OMPI_COMM_WORLD_RANK (Open MPI), PMI_RANK (MPICH, Intel MPI) or SLURM_PROCID (srun); start it with one of "
        "them, such as: torchrun --nproc-per-node 2 -m commbench sweep --launcher external"
    )


def tasks_per_node(text: str) -> list[int]:
    """[2, 2, 2, 1] of Slurm's ``2(x3),1``; [] of what is no such list."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def first_host(nodes: str) -> str:
    """``node07`` of Slurm's ``node[07-09,12],other``."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]*)\])?([^,]*)", nodes.strip())
    if match is None:
        return nodes
    inside = re.split(r"[-,]", match[2])[0] if match[2] else ""
    return f"{match[1]}{inside}{match[3]}"


def _port(key: str) -> int:
    low, high = _PORTS
    return low + zlib.crc32(key.encode()) % (high - low)


def run_inside(inside: Inside, plan: Plan, bind: str, out: Path, manifest: Mapping[str, Any]) -> bool:
    """Be a rank of the job, to its end; gives whether it is rank 0. out, manifest: for that one, which alone writes.

    Raises LaunchError on rank 0 when the job cannot go on, StoreError when the run cannot be written any more, with the
    finished points kept; another rank then ends this process, since its peers may wait for it.
    """
    os.environ.update(inside.variables())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if bind:
        os.environ[binding.VARIABLE] = bind
    os.environ.update(_own_sockets(inside))
    binding.bind_rank(os.environ)
    if inside.job.rank == 0:
        create(out, manifest, plan)
        _rank_zero(inside, out)
        return True
    with scratch_folder("rank") as folder:
        plan.save(folder)
        try:
            _measure(folder)
        except BaseException:  # noqa: BLE001 - whatever ends a rank is told where its launcher collects words
            traceback.print_exc()
            sys.stderr.flush()
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
    return False


def _measure(directory: Path) -> None:
    from commbench.harness.ranks import worker
    from commbench.harness.ranks.watch import watching

    with watching(directory, 0) as watch:
        worker.main(directory, 0, None, watch)


def _own_sockets(inside: Inside) -> dict[str, str]:
    """gloo's interface: loopback on one host; on several the one that leads to where the ranks meet."""
    if inside.job.local_size == inside.job.size:
        return sockets(os.environ, Program())
    from commbench.harness.hosts.sockets import address_towards

    own = address_towards(inside.address, inside.port)
    return sockets(os.environ, Program(nodes=Nodes(2, own_address=own))) if own else {}


def _rank_zero(inside: Inside, out: Path) -> None:
    from commbench.harness.launch import PROGRESS, Launch, Tail
    from commbench.store.samples import to_parquet

    record: dict[str, Any] = {"launch": 0, "launcher": "external", "started_by": inside.by, "started_s": time.time()}
    why = ""
    try:
        _measure(out)
    except Exception as error:  # noqa: BLE001 - as on the other ranks, and rank 0 keeps what is finished
        traceback.print_exc()
        said = str(error).strip().splitlines()
        why = said[0] if said else type(error).__name__
    launch = Launch(out, 0, inside.job.size, {})
    for event in Tail(out / PROGRESS).read():
        launch.note(event)
    record.update({k: v for k, v in launch.ready.items() if k not in ("time_s", "rank_facts")})
    record.update(ended_s=time.time(), canaries=launch.canaries, exit_code=int(bool(why)), deaths=[why] if why else [])
    try:
        update_manifest(out, launches=[record])
        to_parquet(out, 0)
    except OSError as error:
        raise StoreError(f"{out} cannot be written: {error.strerror or error}; finished points are kept") from error
    if why:
        raise LaunchError(f"the job cannot go on: {why}; finished points are kept in {out}")
