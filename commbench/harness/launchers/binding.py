"""Which cores a rank may run on: ``--bind core|numa|none`` where the launcher itself binds nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from commbench.errors import SpecError
from commbench.harness.environment.fingerprint import parse_cpu_list

VARIABLE = "COMMBENCH_BIND"  # what was asked for, to the ranks


def cores_for(
    how: str,
    local_rank: int,
    local_size: int,
    allowed: Sequence[int],
    core_of: Mapping[int, int],
    node_of: Mapping[int, int],
) -> list[int]:
    """The hardware threads, of those allowed, that a rank is bound to.

    core: one physical core for each rank, with all its threads, in the system's order. numa: a NUMA node, where ranks
    that follow each other share one as evenly as their number allows. none: all. core_of and node_of: hardware thread →
    core, node; a thread that they lack is a core of its own on node 0. Raises SpecError where ranks outnumber cores.
    """
    if how == "none":
        return list(allowed)
    groups: dict[int, list[int]] = {}
    for cpu in allowed:
        groups.setdefault(core_of.get(cpu, cpu) if how == "core" else node_of.get(cpu, 0), []).append(cpu)
    places = list(groups.values())
    if how == "numa":
        return places[local_rank * len(places) // local_size] if local_size > len(places) else places[local_rank]
    if local_size > len(places):
        raise SpecError(
            f"--bind core: {local_size} ranks on this host, which may use {len(places)} cores; take fewer ranks, or "
            "--bind numa or none"
        )
    return places[local_rank]


def check(how: str, ranks_here: int) -> None:
    """Raise SpecError where this host cannot bind so many ranks in this way."""
    if how in ("", "none"):
        return
    if not hasattr(os, "sched_setaffinity"):
        raise SpecError(f"--bind {how}: this system lets no process choose its cores; take --bind none")
    cores_for(how, 0, ranks_here, sorted(os.sched_getaffinity(0)), *_topology())


def bind_rank(environment: Mapping[str, str]) -> None:
    """Bind this process as the environment asks. Raises SpecError as ``cores_for`` does."""
    how = environment.get(VARIABLE, "")
    if how in ("", "none") or not hasattr(os, "sched_setaffinity"):
        return
    local_rank, local_size = int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores_for(how, local_rank, local_size, allowed, *_topology()))


def _topology() -> tuple[dict[int, int], dict[int, int]]:
    """(hardware thread → first thread of its core, hardware thread → NUMA node), as sysfs tells."""
    core_of: dict[int, int] = {}
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list"):
        siblings = parse_cpu_list(path.read_text())
        core_of[int(path.parts[-3][3:])] = min(siblings)
    node_of: dict[int, int] = {}
    for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"):
        for cpu in parse_cpu_list(path.read_text()):
            node_of[cpu] = int(path.parts[-2][4:])
    return core_of, node_of
