"""What starts the ranks: the command of a launch, the environment of its ranks, and what the record says of it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import commbench
from commbench.harness.environment.kernel_packages import defaults_for
from commbench.harness.hosts.sockets import interface_of
from commbench.harness.launchers import binding
from commbench.harness.launchers import mpirun as mpi

if TYPE_CHECKING:
    from commbench.harness.supervision.stacks import RankState

OWN_AGENT = "commbench.harness.launchers.agent"
LAUNCHER_JOINS_S = 60  # for the torchruns of all hosts to find each other


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts of a launch. count: how many, each with a command of its own. rank: this one's number; that of number 0
    writes the results. address, port: where the ranks of all meet. own_address: this host's, as the others see it."""

    count: int = 1
    rank: int = 0
    address: str = ""
    port: int = 0
    own_address: str = ""


class OtherHosts(Protocol):
    """The commands of the other hosts, as the one that watches the ranks here sees them."""

    @property
    def nodes(self) -> Nodes:
        """This host's place among them, as far as it is known before a job begins."""
        ...

    def record(self) -> dict[str, Any]:
        """What the manifest says of the hosts."""
        ...

    def begin(self, launch: int) -> Nodes:
        """A job of this launch begins: the others start their ranks too. Gives where all meet."""
        ...

    def trouble(self) -> str:
        """Why the job cannot go on for a reason that is not on this host; "" if it can."""
        ...

    def look(self) -> None:
        """The job hangs: the others are to say what their ranks do."""
        ...

    def looked(self) -> list[RankState]:
        """What they said, as far as it comes in time."""
        ...

    def answer(self, look: Callable[[], list[RankState]]) -> None:
        """Say what the ranks here do, where another host has asked."""
        ...

    def tell_spans(self, launch: int, pieces: Iterable[tuple[int, str]]) -> None:
        """What the ranks here noted, (rank, lines), for the command that writes the trace."""
        ...

    def end(self, failed: bool) -> str:
        """The job here is over: the others end theirs. failed: it did not end well; then the reason of another host is
        given where one is nearer to the cause, else ""."""
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """What the ranks run: a Python, variables on top of the user's environment (None takes one away), and whether that
    Python has a commbench of its own to use in place of this one. launcher: what starts them, torchrun or mpirun;
    mpirun_options: what the user gives mpirun. bind: core, numa or none, "" for what the launcher does by itself.
    module: what each rank runs; agent: what runs torchrun, "" for torch's own. watched: the ranks tell where they are
    in a way that this commbench reads. nodes: the hosts; others: their commands, where there are several."""

    python: str = sys.executable
    variables: Mapping[str, str | None] = field(default_factory=dict)
    own_commbench: bool = False
    launcher: str = "torchrun"
    mpirun_options: str = ""
    module: str = "commbench.harness.ranks.rank"
    agent: str = ""
    watched: bool = True
    bind: str = ""
    nodes: Nodes = Nodes()
    others: OtherHosts | None = field(default=None, compare=False)


def launch_command(directory: Path, launch: int, ranks: int, program: Program | None = None) -> list[str]:
    """The job of one launch, of ``ranks`` ranks on all hosts together; of several hosts, this one's part.

    On one host torchrun's rendezvous listens on loopback only, at a port of its own. Where the user's own launcher runs
    this command in each rank, there is no other. Raises SpecError when mpirun is to start it and there is none.
    """
    program = program or Program()
    if program.launcher == "external":
        return list(sys.argv)
    if program.launcher == "mpirun":
        found = mpi.find_mpirun()
        options = mpi.options_of(found, ranks, _cores(), program.mpirun_options, program.bind)
        return [found.path, *options, program.python, "-m", program.module, str(directory), str(launch)]
    nodes = program.nodes
    # another commbench may be too old to have an agent of its own
    agent = program.agent or ("torch.distributed.run" if program.own_commbench else OWN_AGENT)
    if nodes.count == 1:
        where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    else:
        where = [
            f"--node-rank={nodes.rank}",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={nodes.address}:{nodes.port}",
            f"--rdzv-conf=timeout={LAUNCHER_JOINS_S}",
            f"--local-addr={nodes.own_address}",
        ]
    return [
        program.python,
        "-m",
        agent,
        f"--nnodes={nodes.count}",
        f"--nproc-per-node={ranks // nodes.count}",
        *where,
        "--module",
        program.module,
        str(directory),
        str(launch),
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launcher_facts(ranks: int, program: Program) -> dict[str, Any]:
    """Who starts the ranks and how they are bound, and for mpirun which and with what options, for the launch's
    record. What each rank was bound to in the end, the ranks tell themselves."""
    facts: dict[str, Any] = {"launcher": program.launcher, "bind": program.bind or "as the launcher does"}
    if program.launcher == "mpirun":
        found = mpi.find_mpirun()
        options = mpi.options_of(found, ranks, _cores(), program.mpirun_options, program.bind)
        facts["mpirun"] = {"kind": found.kind, "version": found.version, "options": options}
    elif program.nodes.count > 1:
        facts["nodes"] = {"count": program.nodes.count, "ranks_per_node": ranks // program.nodes.count}
    return facts


def printable(command: list[str]) -> str:
    return shlex.join(command)


def environment_of(program: Program) -> dict[str, str]:
    """The ranks' environment; where the user set nothing, one thread per rank as torchrun itself would choose, and
    sockets on the interface that the ranks need: loopback on one host."""
    changed = {**os.environ, **program.variables}
    environment = {name: value for name, value in changed.items() if value is not None}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.update(defaults_for(environment))
    if program.launcher == "mpirun":
        environment.update(mpi.rendezvous(environment))
    elif program.bind:
        environment[binding.VARIABLE] = program.bind
    environment.update(sockets(environment, program))
    # `python -m` looks in the working directory first: a checkout of another commbench there must not be taken
    environment["PYTHONSAFEPATH"] = "1"
    root = str(Path(commbench.__file__).resolve().parents[1])
    paths = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p != root]
    # ranks must find the commbench that started them, also when it was not installed; or their own, and not that one
    environment["PYTHONPATH"] = os.pathsep.join(paths if program.own_commbench else [root, *paths])
    if not environment["PYTHONPATH"]:
        del environment["PYTHONPATH"]
    return environment


def sockets(environment: Mapping[str, str], program: Program) -> dict[str, str]:
    """Where gloo and NCCL's bootstrap open sockets, unless the user says so.

    torch's gloo takes the address that the host's name stands for: one that others may reach, or on a host whose name
    is not known loopback, which no other host can.
    """
    if program.launcher == "mpirun" and environment["MASTER_ADDR"] not in ("127.0.0.1", "localhost", "::1"):
        return {}
    address = program.nodes.own_address if program.nodes.count > 1 else "127.0.0.1"
    name = interface_of(address)
    if name is None:
        return {}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if program.nodes.count == 1 else ("GLOO_SOCKET_IFNAME",)
    return {variable: name for variable in names if variable not in environment}
