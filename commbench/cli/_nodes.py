"""The options of a sweep on several hosts, and this command's part in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from commbench.cli._click import named
from commbench.errors import CommbenchError, LaunchError, SpecError

if TYPE_CHECKING:
    from commbench.harness.hosts.nodes import Head
    from commbench.harness.hosts.preflight import Finding
    from commbench.harness.launchers.commands import Program
    from commbench.harness.launchers.external import Inside
    from commbench.harness.views.look import Look
    from commbench.measure.settings import Settings
    from commbench.store.run import Plan
    from commbench.sweep import Expansion, SweepSpec

Command = TypeVar("Command", bound=Callable[..., Any])
# What launchers say of a node's number, where the user does not.
_RANK_VARIABLES = ("SLURM_NODEID", "GROUP_RANK", "NODE_RANK")


def where_options(command: Command) -> Command:
    """``--nnodes`` and where the hosts meet."""
    for option in reversed(
        (
            click.option("--nnodes", type=int, help="Hosts, each with a command of its own. [default: 1]"),
            click.option("--node-rank", type=int, help="This host's number; number 0 writes the results. "
                         "[default: SLURM_NODEID, GROUP_RANK or NODE_RANK]"),
            click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where all meet: an address of host 0. "
                         "[default: MASTER_ADDR and MASTER_PORT]"),
            click.option("--join-timeout", metavar="TIME", help="For all hosts to come; a lost one has 30 s at most "
                         "to come back. [default: 5m]"),
        )
    ):  # fmt: skip
        command = option(command)
    return command


def options(command: Command) -> Command:
    """The same, and how ranks are spread and bound. ``take`` removes all but nnodes and bind from the flags."""
    for option in reversed(
        (
            where_options,
            click.option("--nproc-per-node", type=int, help="Ranks of each host. [default: all ranks / hosts]"),
            click.option("--bind", help="Bind each rank to a core, a numa node, or none. [default: what the launcher "
                         "does: torchrun nothing, mpirun a core each]"),
        )
    ):  # fmt: skip
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Place:
    """What the flags say of this host. rank None, endpoint "": not said."""

    rank: int | None
    endpoint: str
    ranks_here: int | None
    join_s: float

    def fit(self, flags: dict[str, Any], known: Mapping[str, Any]) -> None:
        """Ranks in all from hosts and ranks per host, where nobody says how they are grouped. Raises SpecError."""
        if self.ranks_here is not None and self.ranks_here < 1:
            raise SpecError(f"--nproc-per-node {self.ranks_here}: a host has at least 1 rank")
        if self.ranks_here is not None and flags.get("tp") is None and "tp" not in known:
            flags["tp"] = (flags.get("nnodes") or 1) * self.ranks_here // max(1, flags.get("pp") or 1)

    def check(self, spec: SweepSpec) -> None:
        """Raise SpecError where the flags do not fit the spec or each other."""
        if spec.nnodes == 1:
            for flag, value in (("--node-rank", self.rank), ("--rdzv-endpoint", self.endpoint or None)):
                if value is not None:
                    raise SpecError(f"{flag} {value}: it is for several hosts; add --nnodes N")
        if self.ranks_here is not None and self.ranks_here * spec.nnodes != spec.ranks:
            raise SpecError(
                f"--nproc-per-node {self.ranks_here} on {spec.nnodes} {'host' if spec.nnodes == 1 else 'hosts'} makes "
                f"{self.ranks_here * spec.nnodes} ranks, but tp × pp is {spec.ranks}"
            )

    def among(self, count: int) -> tuple[int, str, int]:
        """(this host's number, host and port where all meet). Raises SpecError where one is not said or impossible."""
        from commbench.harness.hosts.sockets import parse_endpoint

        rank = self.rank
        if rank is None:
            said = next((os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name, "").isdigit()), None)
            if said is None:
                raise SpecError(f"--nnodes {count}: say which host this is with --node-rank 0 to {count - 1}")
            rank = int(said)
        if not 0 <= rank < count:
            raise SpecError(f"--node-rank {rank} is not between 0 and {count - 1}")
        endpoint = self.endpoint
        if not endpoint and os.environ.get("MASTER_ADDR"):
            endpoint = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '29400')}"
        if not endpoint:
            raise SpecError(f"--nnodes {count}: say where the hosts meet with --rdzv-endpoint HOST:PORT of host 0")
        return rank, *parse_endpoint(endpoint)


def take(flags: dict[str, Any]) -> Place:
    """This host's part of the flags, which are removed from them. Raises SpecError."""
    from commbench.units import parse_duration

    join = flags.pop("join_timeout")
    from commbench.harness.hosts.nodes import JOIN_S

    return Place(
        flags.pop("node_rank"),
        flags.pop("rdzv_endpoint") or "",
        flags.pop("nproc_per_node", None),
        JOIN_S if join is None else named("--join-timeout", parse_duration, join),
    )


def digest(plan: Plan, launches: int) -> str:
    """What hosts compare to know that they were given the same sweep. How long they wait for each other may differ: a
    run goes on with the plan that it began with, and with timeouts of its own."""
    settings = {key: value for key, value in plan.settings.items() if key != "patience_s"}
    text = json.dumps([[p.to_dict() for p in plan.points], settings, launches], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def leading(place: Place, spec: SweepSpec, plan: Plan) -> Iterator[Head | None]:
    """Inside, the other hosts are there and fit (None where there are none); at the end they are told the outcome."""
    if spec.nnodes == 1:
        yield None
        return
    from commbench.harness.hosts.nodes import Head, lead
    from commbench.harness.hosts.preflight import facts_here

    _, host, port = place.among(spec.nnodes)
    head = Head(host, port, spec.nnodes, facts_here(0, digest(plan, spec.launches)), _say)
    with lead(head, place.join_s):
        yield head


def follow(place: Place, spec: SweepSpec, plan: Plan, out: Path | None) -> int:
    """Be a host other than number 0; gives node 0's exit code. out: where the ranks' logs stay, none if None."""
    from commbench.harness.hosts.follower import part_of
    from commbench.harness.hosts.nodes import follow as follow_node
    from commbench.harness.hosts.preflight import facts_here
    from commbench.harness.run import limits_of, program_of
    from commbench.harness.supervision.supervisor import interruptible

    rank, host, port = place.among(spec.nnodes)
    facts = facts_here(rank, digest(plan, spec.launches))
    with interruptible(), part_of(plan, spec.ranks, limits_of(spec), out) as run_part:
        code, text = follow_node(host, port, facts, spec.nnodes, program_of(spec), run_part, _say, place.join_s)
    click.echo(f"node 0 has ended{f': {text}' if text else ''}", err=True)
    return code


def preflight(place: Place, count: int) -> tuple[int, list[Finding]]:
    """Compare the hosts and time the links between them, with a command on each. Gives the exit code, 1 where they
    cannot run one sweep, and on host 0 what was found."""
    from commbench.harness.hosts.nodes import Head
    from commbench.harness.hosts.nodes import follow as follow_node
    from commbench.harness.hosts.preflight import PROBLEM, facts_here, judge
    from commbench.harness.launchers.commands import Program

    if count == 1:
        return 0, judge([facts_here(0)], [])
    rank, host, port = place.among(count)
    if rank:
        code, text = follow_node(host, port, facts_here(rank), count, Program(), _nothing_to_run, _say, place.join_s)
        click.echo(f"node 0 has ended{f': {text}' if text else ''}", err=True)
        return code, []
    head = Head(host, port, count, facts_here(0), _say)
    code, text = 1, "it could not look at the nodes"
    head.open()
    try:
        head.gather(place.join_s)
        findings = head.examine()
        code, text = int(any(f.severity == PROBLEM for f in findings)), "; ".join(f.text for f in findings)
    except LaunchError as error:
        text = str(error)
        raise
    finally:
        head.finish(code, text)
    return code, findings


def _nothing_to_run(launch: int, program: Program) -> str:
    return "this command only looks at the nodes; start `commbench sweep` on every host"


def inside(flags: dict[str, Any], known: Mapping[str, Any]) -> Inside | None:
    """The job that this process is a rank of, where the launcher is ``external``; its ranks are then all in one group
    unless somebody says otherwise. Raises SpecError where it is no rank."""
    if (flags.get("launcher") or known.get("launcher")) != "external":
        return None
    from commbench.harness.launchers.external import find_inside

    found = find_inside(os.environ)
    if flags.get("tp") is None and "tp" not in known:
        flags["tp"] = found.job.size // max(1, flags.get("pp") or 1)
    return found


def check_inside(spec: SweepSpec, inside: Inside | None, look: Look) -> None:
    """Raise SpecError where a spec cannot be measured, or looked at, inside this job."""
    if inside is None:
        return
    if spec.ranks != inside.job.size:
        raise SpecError(
            f"--launcher external: {inside.by} started {inside.job.size} ranks, but tp × pp is {spec.ranks}"
        )
    if spec.launches != 1:
        raise SpecError(
            f"--launches {spec.launches}: launches are fresh processes, and {inside.by} starts these once; leave "
            "--launches away and start the whole command again for another run"
        )
    if spec.nnodes != 1:
        raise SpecError(f"--nnodes {spec.nnodes}: {inside.by} knows the hosts; leave it away with --launcher external")
    if look.profile or look.trace:
        raise SpecError(
            f"{'--profile' if look.profile else '--trace'}: nobody watches ranks that {inside.by} started, and puts "
            "together what they note; leave it away, or take --launcher torchrun or mpirun"
        )


def run_inside(
    inside: Inside, spec: SweepSpec, expansion: Expansion, settings: Settings, out: Path
) -> CommbenchError | None:
    """Be a rank of the job to its end. Rank 0 writes the run; gives why the job could not go on, where it could not."""
    from commbench.harness.launchers import external
    from commbench.harness.run import close_run, new_manifest
    from commbench.store.run import Plan, check_writable

    plan = Plan(expansion.points, settings.to_dict())
    if inside.job.rank:
        external.run_inside(inside, plan, spec.bind, out, {})
        return None
    check_writable(out)
    failed: CommbenchError | None = None
    try:
        external.run_inside(inside, plan, spec.bind, out, new_manifest(spec, expansion, settings, out))
    except LaunchError as error:
        failed = error
    close_run(out, "complete" if failed is None else "failed")
    return failed


def _say(text: str) -> None:
    click.echo(text, err=True)
