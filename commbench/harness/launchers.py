"""What starts the ranks: the command of a launch, the environment of its ranks, and what the record says of it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commbench.harness import mpirun as mpi


@dataclass(frozen=True, slots=True)
class Program:
    """What the ranks run: a Python, variables on top of the user's environment (None takes one away), and whether that
    Python has a commbench of its own to use in place of this one. launcher: what starts them, torchrun or mpirun;
    mpirun_options: what the user gives mpirun. module: what each rank runs."""

    python: str = sys.executable
    variables: Mapping[str, str | None] = field(default_factory=dict)
    own_commbench: bool = False
    launcher: str = "torchrun"
    mpirun_options: str = ""
    module: str = "commbench.harness.rank"


def launch_command(directory: Path, launch: int, ranks: int, program: Program | None = None) -> list[str]:
    """The job of one launch. torchrun's rendezvous listens on this host only, at a port of its own.

    Raises SpecError when mpirun is to start it and there is none.
    """
    program = program or Program()
    if program.launcher == "mpirun":
        found = mpi.find_mpirun()
        options = mpi.options_of(found, ranks, _cores(), program.mpirun_options)
        return [found.path, *options, program.python, "-m", program.module, str(directory), str(launch)]
    return [
        program.python,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--local-addr=localhost",
        "--module",
        program.module,
        str(directory),
        str(launch),
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launcher_facts(ranks: int, program: Program) -> dict[str, Any]:
    """Who starts the ranks, and for mpirun which and with what options, for the launch's record."""
    if program.launcher != "mpirun":
        return {"launcher": program.launcher}
    found = mpi.find_mpirun()
    options = mpi.options_of(found, ranks, _cores(), program.mpirun_options)
    return {"launcher": "mpirun", "mpirun": {"kind": found.kind, "version": found.version, "options": options}}


def printable(command: list[str]) -> str:
    return shlex.join(command)


def environment_of(program: Program) -> dict[str, str]:
    """The ranks' environment; where the user set nothing, one thread per rank as torchrun itself would choose."""
    changed = {**os.environ, **program.variables}
    environment = {name: value for name, value in changed.items() if value is not None}
    environment.setdefault("OMP_NUM_THREADS", "1")
    if program.launcher == "mpirun":
        environment.update(mpi.rendezvous(environment))
    if program.own_commbench:
        return environment
    # ranks must find the commbench that started them, also when it was not installed
    root = str(Path(__file__).resolve().parents[2])
    paths = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    environment["PYTHONPATH"] = os.pathsep.join([root, *(p for p in paths if p != root)])
    return environment
