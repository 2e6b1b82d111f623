"""Before ranks start on several hosts: are the hosts alike, do they reach each other, and is one slower than the rest?

Facts and pairwise times are gathered over plain TCP, without the library under test; ``judge`` is a pure function.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from commbench import __version__
from commbench.errors import SpecError
from commbench.units import format_time

PROBLEM, WARNING, OK = "problem", "warning", "ok"
MUST_AGREE = ("commbench", "torch")  # a difference stops the sweep
SHOULD_AGREE = ("python", "numpy", "kernel")
SLOW_LATENCY = 3.0  # times the typical node's
SLOW_BANDWIDTH = 0.5  # of the typical node's
LEAST_LATENCY_S = 20e-6  # differences below this are no node's fault
CLOCK_S = 2.0  # of the day, between two nodes
ALL_PAIRS = 16  # nodes up to which every pair is tried; beyond, each node's links to node 0 and to its neighbour
ROUNDS = 60
BULK_BYTES = 16 << 20
PROBE_S = 20.0  # for one pair


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One host. versions: name → version. devices: names of its GPUs. plan: a digest of what it would measure.
    clock_s: how far its time of day is ahead of node 0's."""

    node: int
    host: str
    versions: Mapping[str, str]
    devices: tuple[str, ...] = ()
    cores: int = 0
    plan: str = ""
    clock_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"versions": dict(self.versions), "devices": list(self.devices)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> NodeFacts:
        """Raises KeyError, TypeError or ValueError where the record is none."""
        return cls(
            int(record["node"]),
            str(record["host"]),
            {str(k): str(v) for k, v in record["versions"].items()},
            tuple(str(d) for d in record["devices"]),
            int(record["cores"]),
            str(record["plan"]),
            float(record["clock_s"]),
        )

    @property
    def name(self) -> str:
        return f"node {self.node} ({self.host})"


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """One pair of nodes. latency_s: half the median round trip of one byte. bytes_per_s: of one TCP stream. error: why
    there are no numbers, "" if there are."""

    a: int
    b: int
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """severity: problem (do not start), warning, ok. nodes: those it is about."""

    severity: str
    text: str
    nodes: tuple[int, ...] = ()


# ---- judging ------------------------------------------------------------------------------------------------


def judge(nodes: Sequence[NodeFacts], links: Sequence[LinkFacts]) -> list[Finding]:
    """What is wrong with these hosts, and which one is the odd one out; if nothing is, one line that says so."""
    by = {n.node: n for n in nodes}
    found = [
        *_plans(nodes),
        *_versions(nodes),
        *_devices(nodes),
        *_clocks(nodes),
        *_reach(by, links),
        *_speed(by, links),
    ]
    if found:
        return found
    good = [x for x in links if not x.error]
    if len(nodes) == 1:
        versions = ", ".join(f"{k} {v}" for k, v in nodes[0].versions.items() if v)
        devices = f"{len(nodes[0].devices)} GPUs" if nodes[0].devices else "no GPU"
        return [Finding(OK, f"one node ({nodes[0].host}): {versions}, {nodes[0].cores} cores, {devices}")]
    text = f"{len(nodes)} nodes have the same versions and devices"
    if good:
        slowest = max(x.latency_s for x in good)
        text += (
            f" and reach each other: {format_time(min(x.latency_s for x in good))} to {format_time(slowest)} one way, "
            f"{_rate(min(x.bytes_per_s for x in good))} at least"
        )
    return [Finding(OK, text)]


def _odd(values: Mapping[int, str]) -> tuple[str, list[int]] | None:
    """(what more than half of the nodes have, the nodes that have something else); None where there is no such half."""
    value, count = Counter(values.values()).most_common(1)[0]
    return (value, [n for n, v in values.items() if v != value]) if 2 * count > len(values) else None


def _differing(
    nodes: Sequence[NodeFacts], what: str, values: Mapping[int, str], severity: str, remedy: str
) -> Finding | None:
    if len(set(values.values())) < 2:
        return None
    names = {n.node: n.name for n in nodes}
    odd = _odd(values)
    if odd is None:
        text = f"{what} differs: " + ", ".join(f"{names[n]} has {v or 'none'}" for n, v in values.items())
        return Finding(severity, f"{text}; {remedy}", tuple(values))
    usual, others = odd
    said = ", ".join(f"{names[n]} has {what} {values[n] or 'none'}" for n in others)
    return Finding(severity, f"{said}, the others have {usual or 'none'}; {remedy}", tuple(others))


def _versions(nodes: Sequence[NodeFacts]) -> list[Finding]:
    found = []
    for name in (*MUST_AGREE, *SHOULD_AGREE):
        severity = PROBLEM if name in MUST_AGREE else WARNING
        values = {n.node: n.versions.get(name, "") for n in nodes}
        found.append(_differing(nodes, name, values, severity, "install the same on every node"))
    return [f for f in found if f is not None]


def _plans(nodes: Sequence[NodeFacts]) -> list[Finding]:
    odd = _odd({n.node: n.plan for n in nodes})
    wrong = [n for n in nodes if n.plan != nodes[0].plan] if odd is None else [n for n in nodes if n.node in odd[1]]
    if not wrong:
        return []
    text = (
        f"{_names(wrong)} would measure other points than the rest: give every node's command the same flags and files"
    )
    return [Finding(PROBLEM, text, tuple(n.node for n in wrong))]


def _devices(nodes: Sequence[NodeFacts]) -> list[Finding]:
    counts = _differing(
        nodes, "GPUs:", {n.node: str(len(n.devices)) for n in nodes}, PROBLEM, "every node must show as many"
    )
    if counts is not None:
        return [counts]
    kinds = {n.node: ", ".join(sorted(set(n.devices))) for n in nodes}
    different = _differing(nodes, "GPU", kinds, WARNING, "the slower kind decides every result")
    return [] if different is None else [different]


def _clocks(nodes: Sequence[NodeFacts]) -> list[Finding]:
    middle = statistics.median_low([n.clock_s for n in nodes])
    off = [n for n in nodes if abs(n.clock_s - middle) > CLOCK_S]
    return [
        Finding(
            WARNING,
            f"{n.name}'s time of day is {format_time(abs(n.clock_s - middle))} "
            f"{'ahead of' if n.clock_s > middle else 'behind'} the others': dates in its logs do not line up "
            "(latencies do not depend on it)",
            (n.node,),
        )
        for n in off
    ]


def _reach(by: Mapping[int, NodeFacts], links: Sequence[LinkFacts]) -> list[Finding]:
    broken = [x for x in links if x.error]
    if not broken:
        return []
    for n in by:
        own = [x for x in links if n in (x.a, x.b)]
        if len(by) > 2 and len(own) > 1 and all(x.error for x in own) and len(own) < len(links):
            rest = _reach({m: f for m, f in by.items() if m != n}, [x for x in links if n not in (x.a, x.b)])
            text = f"{by[n].name} cannot be reached by any other node ({own[0].error})"
            return [Finding(PROBLEM, text, (n,)), *rest]
    return [
        Finding(PROBLEM, f"{by[x.a].name} and {by[x.b].name} do not reach each other: {x.error}", (x.a, x.b))
        for x in broken
    ]


def _speed(by: Mapping[int, NodeFacts], links: Sequence[LinkFacts]) -> list[Finding]:
    """A node is slow where even its best link is, against the best links of the others."""
    good = [x for x in links if not x.error]
    nodes = [n for n in by if any(n in (x.a, x.b) for x in good)]
    if len(nodes) < 3:
        return []  # of two, nobody is the odd one
    own = {n: [x for x in good if n in (x.a, x.b)] for n in nodes}
    latency = {n: min(x.latency_s for x in own[n]) for n in nodes}
    bandwidth = {n: max(x.bytes_per_s for x in own[n]) for n in nodes}
    usual_s, usual_rate = statistics.median(latency.values()), statistics.median(bandwidth.values())
    limit_s = max(SLOW_LATENCY * usual_s, usual_s + LEAST_LATENCY_S)
    found = []
    for n in nodes:
        said = []
        if latency[n] > limit_s:
            said.append(f"{format_time(latency[n])} one way at best, where {format_time(usual_s)} is usual")
        if bandwidth[n] < SLOW_BANDWIDTH * usual_rate:
            said.append(f"{_rate(bandwidth[n])} at best, where {_rate(usual_rate)} is usual")
        if said:
            found.append(Finding(WARNING, f"{by[n].name} is slow: {'; '.join(said)}", (n,)))
    slow = {n for f in found for n in f.nodes}
    for x in good:
        if x.a in slow or x.b in slow or x.latency_s <= max(SLOW_LATENCY * usual_s, usual_s + LEAST_LATENCY_S):
            continue
        text = f"between {by[x.a].name} and {by[x.b].name} a byte takes {format_time(x.latency_s)}"
        found.append(Finding(WARNING, f"{text}, where {format_time(usual_s)} is usual", (x.a, x.b)))
    return found


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _names(nodes: Sequence[NodeFacts]) -> str:
    return ", ".join(n.name for n in nodes)


# ---- looking ------------------------------------------------------------------------------------------------


def facts_here(node: int, plan: str = "") -> NodeFacts:
    """This host. No library is loaded for it."""
    from commbench.harness.environment.fingerprint import accelerator_names

    versions = {"commbench": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for package in ("torch", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return NodeFacts(node, socket.gethostname(), versions, tuple(accelerator_names()), cores, plan)


def pairs(count: int) -> list[tuple[int, int]]:
    """The links that are tried among so many nodes."""
    if count <= ALL_PAIRS:
        return [(a, b) for a in range(count) for b in range(a + 1, count)]
    near = {(min(n, (n + 1) % count), max(n, (n + 1) % count)) for n in range(count)}
    return sorted(near | {(0, n) for n in range(1, count)})


def serve(listener: socket.socket) -> None:
    """The answering side of one ``probe``: echoes single bytes, then swallows the bulk and confirms it. Gives up
    quietly when nobody comes: the asking side tells why."""
    listener.settimeout(PROBE_S)
    try:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUNDS):
                connection.sendall(_exactly(connection, 1))
            _exactly(connection, BULK_BYTES)
            connection.sendall(b"!")
    except OSError:
        return
    finally:
        listener.close()


def probe(a: int, b: int, address: str, port: int) -> LinkFacts:
    """The asking side: times between node ``a``, which this is, and node ``b``, which serves at that address."""
    try:
        with socket.create_connection((address, port), timeout=PROBE_S / 2) as connection:
            connection.settimeout(PROBE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                connection.sendall(b".")
                _exactly(connection, 1)
                times.append(time.perf_counter() - start)
            block = bytes(1 << 20)
            start = time.perf_counter()
            for _ in range(BULK_BYTES // len(block)):
                connection.sendall(block)
            _exactly(connection, 1)
            lasted = time.perf_counter() - start
    except OSError as error:
        return LinkFacts(a, b, error=f"{address}:{port}: {error.strerror or error}")
    return LinkFacts(a, b, statistics.median(times) / 2, BULK_BYTES / lasted)


def _exactly(connection: socket.socket, count: int) -> bytes:
    """The next ``count`` bytes; only the last of them are given where there are many. Raises OSError at the end."""
    left, data = count, b""
    while left:
        data = connection.recv(min(left, 1 << 20))
        if not data:
            raise OSError("the other end has closed")
        left -= len(data)
    return data


def check(findings: Sequence[Finding]) -> None:
    """Raise SpecError with every problem among the findings."""
    problems = [f.text for f in findings if f.severity == PROBLEM]
    if problems:
        raise SpecError("the nodes cannot run one sweep: " + "; ".join(problems))
