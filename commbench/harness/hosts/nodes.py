"""Several hosts, each with a command of its own: they join that of node 0, start ranks when it says so, end with it.

Node 0 listens at the rendezvous' address. The others connect and then speak lines of JSON, a few fixed messages: start
this launch, end it, measure a link. What a message can make a host do is run the points that its own command was given.
Nobody proves who he is: whoever reaches the port can pose as a node, as with torch's own rendezvous (docs/security.md).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from commbench.errors import LaunchError, SpecError
from commbench.harness.hosts import preflight
from commbench.harness.hosts.preflight import Finding, LinkFacts, NodeFacts
from commbench.harness.hosts.sockets import free_port, listen_on
from commbench.harness.launchers.commands import Nodes, Program
from commbench.harness.supervision.stacks import RankState
from commbench.harness.views import elsewhere

BEAT_S = 1.0
LOST_S = 6.0  # without a sign of life
REJOIN_S = 30.0  # for a node that was lost to come back, unless nodes have less to come at first
JOIN_S = 300.0  # for all nodes to come, where the user names no time
LOOKED_S = 10.0  # for a node to say what its ranks do when the job hangs
ENDED_S = 20.0  # for a node to say that its ranks are gone
_LINE_BYTES = 1 << 20
_POLL_S = 0.1

Say = Callable[[str], None]
Message = dict[str, Any]


class Connection:
    """Lines of JSON to and from one other command, with a sign of life each second. ``lost``: why it is of no use any
    more, "" while it is."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._sending = threading.Lock()
        self._messages: queue.Queue[Message] = queue.Queue()
        self._heard = time.monotonic()
        self._closed = ""
        self.address = str(link.getsockname()[0])
        self.peer = str(link.getpeername()[0])
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()

    @property
    def lost(self) -> str:
        silent = time.monotonic() - self._heard
        return self._closed or (f"no sign of life for {silent:.0f} s" if silent > LOST_S else "")

    def send(self, **message: Any) -> None:
        """A message for a connection that is lost goes nowhere: ``lost`` tells."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._link.sendall(data)
        except OSError as error:
            self._closed = self._closed or (error.strerror or str(error))

    def receive(self, timeout_s: float) -> Message | None:
        """The next message; None when none came in time, or none can come any more."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                return self._messages.get(timeout=min(left, _POLL_S))
            if self._closed:
                return self.waiting()
        return None

    def waiting(self) -> Message | None:
        """The next message that is there already."""
        with contextlib.suppress(queue.Empty):
            return self._messages.get_nowait()
        return None

    def put_back(self, message: Message) -> None:
        """For whoever asks next."""
        self._messages.put(message)

    def close(self) -> None:
        self._closed = self._closed or "closed"
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()

    def _read(self) -> None:
        pending = b""
        while not self._closed:
            try:
                data = self._link.recv(1 << 16)
            except OSError as error:
                self._closed = self._closed or (error.strerror or str(error))
                return
            if not data:
                self._closed = self._closed or "its command has ended"
                return
            self._heard = time.monotonic()
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                try:
                    message = json.loads(line)
                except (RecursionError, ValueError):
                    message = None
                if not isinstance(message, dict):
                    self._closed = "it does not speak this protocol"
                    return
                if "beat" not in message:
                    self._messages.put(message)
            if len(pending) > _LINE_BYTES:
                self._closed = "it does not speak this protocol"
                return

    def _beat(self) -> None:
        while not self._closed:
            self.send(beat=1)
            time.sleep(BEAT_S)


_LAUNCHER_ENDED = re.compile(r"\b(torchrun|mpirun) was (killed|ended from outside) by SIG")


def launcher_ended(why: str) -> bool:
    """Whether a job's reason is that its launcher was ended, here or on another host: no point is to blame for that."""
    return _LAUNCHER_ENDED.search(why) is not None


def nearest_cause(here: str, others: Sequence[str]) -> str:
    """Of the reasons that several hosts give for one end, the one nearest to the cause: what was killed, then an
    error of its own or a command that has ended, and last what a rank says when it has lost the others. ``here`` counts
    first among equals."""
    consequence = re.compile(
        r"onnection (closed|reset|refused)|roken pipe|did not come or are gone|no sign of life"
        r"|asked to end|was lost, and is back|[Tt]imed out|[Tt]imeout",
    )

    def distance(text: str) -> int:
        if "was killed by" in text or "stopped first" in text or launcher_ended(text):
            return 0
        return 2 if not text or consequence.search(text) else 1

    return min([here, *others], key=distance)


@dataclass(slots=True)
class _Member:
    """A node other than 0, as node 0 sees it. token: its own random word, by which it is known when it comes back."""

    facts: NodeFacts
    connection: Connection
    token: str
    running: bool = False
    reason: str = ""  # why its part of the present job failed
    states: list[RankState] | None = None  # what its ranks do, since it was asked

    @property
    def name(self) -> str:
        return self.facts.name


@dataclass(slots=True)
class Head:
    """Node 0's hold of the others. It is OtherHosts for the job that runs here.

    Raises SpecError where the endpoint is no address of this host or its port is taken.
    """

    host: str
    port: int
    count: int
    facts: NodeFacts
    say: Say
    findings: list[Finding] = field(default_factory=list)
    links: list[LinkFacts] = field(default_factory=list)
    _members: dict[int, _Member] = field(default_factory=dict)
    _listener: socket.socket | None = None
    _accepting: threading.Thread | None = None
    _change: threading.Lock = field(default_factory=threading.Lock)
    _jobs: int = 0
    _join_s: float = JOIN_S

    def open(self) -> None:
        """Listen."""
        try:
            self._listener = listen_on(self.host, self.port)
        except OSError as error:
            raise SpecError(f"--rdzv-endpoint {self.host}:{self.port}: {error.strerror or error}") from error
        if self._listener is None:
            raise SpecError(
                f"--rdzv-endpoint {self.host}:{self.port}: {self.host} is no address of this host, which is node 0; "
                "name one that the other nodes reach"
            )
        self._accepting = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._accepting.start()

    @property
    def address(self) -> str:
        return str(self._listener.getsockname()[0]) if self._listener is not None else ""

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                link, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(link,), daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        """Take a newcomer in, or tell it why not."""
        try:
            connection = Connection(link)
        except OSError:  # it has gone already
            link.close()
            return
        hello = connection.receive(10.0)
        try:
            if hello is None:
                raise ValueError("it said nothing")
            facts = NodeFacts.from_dict(hello["facts"])
            facts = replace(facts, clock_s=float(hello["time_s"]) - time.time())
            if not math.isfinite(facts.clock_s):
                raise ValueError(f"its time of day is {hello['time_s']}")
            if int(hello["count"]) != self.count:
                raise ValueError(f"it was started with --nnodes {hello['count']}, node 0 with --nnodes {self.count}")
            if not 0 < facts.node < self.count:
                raise ValueError(f"--node-rank {facts.node} is not between 1 and {self.count - 1}")
            token = str(hello.get("token") or "")
            with self._change:
                before = self._members.get(facts.node)
                if before is not None and before.token != token:
                    raise ValueError(f"there is a node of --node-rank {facts.node} already, on {before.facts.host}")
                if before is None and hello.get("again"):
                    raise ValueError("it is of another run")
                connection.send(do="welcome")
                # the job that ran when it was lost cannot go on, also where this side has not noticed yet
                why = "" if before is None else before.reason or "was lost, and is back" * before.running
                self._members[facts.node] = _Member(facts, connection, token, reason=why)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            connection.send(do="refuse", why=str(error))
            time.sleep(0.2)  # for the words to arrive before the end does
            connection.close()
            return
        self.say(f"{facts.name} {'is back' if before is not None else 'joined'}, from {connection.peer}")
        if before is not None:
            before.connection.close()

    def gather(self, within_s: float) -> None:
        """Wait for all nodes. Raises LaunchError that names those who did not come."""
        self._join_s = within_s
        deadline = time.monotonic() + within_s
        while self._missing():
            if time.monotonic() > deadline:
                raise LaunchError(self._who_is_missing(within_s))
            time.sleep(_POLL_S)

    def _missing(self) -> list[int]:
        with self._change:
            return [n for n in range(1, self.count) if n not in self._members or self._members[n].connection.lost]

    def _who_is_missing(self, within_s: float) -> str:
        missing = self._missing()
        with self._change:
            here = [self.facts.name, *(m.name for n, m in sorted(self._members.items()) if n not in missing)]
            gone = [m.name if (m := self._members.get(n)) is not None else f"node {n}" for n in missing]
            known = any(n in self._members for n in missing)
        return (
            f"{', '.join(gone)} did not {'come back' if known else 'come'} within {within_s:.0f} s; "
            f"{', '.join(here)} {'is' if len(here) == 1 else 'are'} here. Every node runs the same command with its "
            f"own --node-rank and --rdzv-endpoint {self.host}:{self.port}, which it must be able to reach"
        )

    # ---- preflight --------------------------------------------------------------------------------------

    def examine(self) -> list[Finding]:
        """Compare the nodes and time the links between them. Raises SpecError where they cannot run one sweep."""
        everybody = [self.facts, *(self._members[n].facts for n in sorted(self._members))]
        self.links = [self._time(a, b) for a, b in preflight.pairs(self.count)]
        self.findings = preflight.judge(everybody, self.links)
        return self.findings

    def _time(self, a: int, b: int) -> LinkFacts:
        """The link from node a, which asks, to node b."""
        served = self._members[b].connection  # pairs name the smaller number first
        served.send(do="serve")
        place = self._answer(b, "serving")
        if place is None:
            return LinkFacts(a, b, error=f"node {b} did not answer")
        address, port = str(place["address"]), int(place["port"])
        if a == 0:
            return preflight.probe(a, b, address, port)
        self._members[a].connection.send(do="probe", a=a, b=b, address=address, port=port)
        answer = self._answer(a, "probed")
        return LinkFacts(**answer["link"]) if answer is not None else LinkFacts(a, b, error=f"node {a} did not answer")

    def _answer(self, node: int, kind: str) -> Message | None:
        deadline = time.monotonic() + 2 * preflight.PROBE_S
        while (left := deadline - time.monotonic()) > 0 and not self._members[node].connection.lost:
            message = self._members[node].connection.receive(min(left, 0.5))
            if message is not None and message.get("done") == kind:
                return message
        return None

    def record(self) -> dict[str, Any]:
        nodes = [self.facts, *(self._members[n].facts for n in sorted(self._members))]
        return {
            "nodes": [n.to_dict() for n in nodes],
            "preflight": {
                "links": [asdict(x) for x in self.links],
                "findings": [asdict(f) for f in self.findings],
            },
        }

    # ---- OtherHosts ---------------------------------------------------------------------------

    @property
    def nodes(self) -> Nodes:
        return Nodes(self.count, 0, self.address, 0, self.address)

    def begin(self, launch: int) -> Nodes:
        """Raises LaunchError where a node that was lost does not come back."""
        within_s = min(REJOIN_S, self._join_s)
        deadline = time.monotonic() + within_s
        if self._missing():
            self.say(f"waiting up to {within_s:.0f} s for lost nodes to come back")
        while self._missing():
            if time.monotonic() > deadline:
                raise LaunchError(self._who_is_missing(within_s))
            time.sleep(_POLL_S)
        self._jobs += 1
        port = free_port(self.address)
        for member in self._members.values():
            member.running, member.reason = True, ""
            member.connection.send(
                do="start", job=self._jobs, launch=launch, address=self.address, port=port,
                trace=elsewhere.parent_here(os.environ),
            )  # fmt: skip
        return Nodes(self.count, 0, self.address, port, self.address)

    def trouble(self) -> str:
        self._hear()
        for _, member in sorted(self._members.items()):
            if member.running and member.connection.lost:
                return f"{member.name} was lost: {member.connection.lost}"
            if member.reason:
                return f"{member.name}: {member.reason}"
        return ""

    def _hear(self) -> None:
        for member in self._members.values():
            while (message := member.connection.waiting()) is not None:
                if message.get("job") != self._jobs:
                    continue
                if message.get("done") == "ended":
                    member.running = False
                    member.reason = str(message.get("why") or "")
                elif message.get("done") == "looked":
                    member.states = _states(message, member.name)
                elif message.get("done") == "spans":
                    elsewhere.take_spans(
                        message.get("launch"), message.get("rank"), message.get("lines"), member.facts.clock_s
                    )

    def look(self) -> None:
        for member in self._members.values():
            member.states = None
            member.connection.send(do="look", job=self._jobs)

    def looked(self) -> list[RankState]:
        deadline = time.monotonic() + LOOKED_S
        while time.monotonic() < deadline and any(
            m.states is None and m.running and not m.connection.lost for m in self._members.values()
        ):
            self._hear()
            time.sleep(0.02)
        return [state for _, member in sorted(self._members.items()) for state in member.states or []]

    def answer(self, look: Callable[[], list[RankState]]) -> None:
        pass  # node 0 asks

    def tell_spans(self, launch: int, pieces: Iterable[tuple[int, str]]) -> None:
        pass  # node 0 writes the trace

    def end(self, failed: bool) -> str:
        for member in self._members.values():
            member.connection.send(do="end", job=self._jobs, failed=failed)
        deadline = time.monotonic() + ENDED_S
        while time.monotonic() < deadline and any(m.running and not m.connection.lost for m in self._members.values()):
            self._hear()
            time.sleep(0.02)
        if not failed:
            return ""
        told = [f"{m.name}: {m.reason}" for _, m in sorted(self._members.items()) if m.reason]
        told += [
            f"{m.name} was lost: {m.connection.lost}" for _, m in sorted(self._members.items()) if m.connection.lost
        ]
        return nearest_cause("", told) if told else ""

    def finish(self, code: int, text: str) -> None:
        """Tell the others how the sweep ended, and let go of them."""
        with self._change:  # one may be joining
            members = list(self._members.values())
        for member in members:
            member.connection.send(do="finish", code=code, text=text)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and any(not m.connection.lost for m in members):
            time.sleep(0.02)
        for member in members:
            member.connection.close()
        if self._listener is not None and self._accepting is not None:
            # closing alone would leave the other thread in accept, and the port open
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._accepting.join(5.0)
            self._listener.close()


@contextlib.contextmanager
def lead(head: Head, join_s: float) -> Iterator[Head]:
    """Gather the nodes and examine them; inside, the sweep runs. At the end the others are told: of an exception, what
    it says. Raises LaunchError or SpecError before anything runs where the nodes do not come or do not fit."""
    head.open()
    try:
        head.say(f"node 0 on {head.facts.host} waits at {head.host}:{head.port} for {head.count - 1} more")
        head.gather(join_s)
        for finding in head.examine():
            head.say(f"preflight: {finding.text}")
        preflight.check(head.findings)
        yield head
    except BaseException as error:
        head.finish(getattr(error, "exit_code", 130 if isinstance(error, KeyboardInterrupt) else 1), _words(error))
        raise
    head.finish(0, "")  # where no other outcome was told before


def _words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# ---- the other nodes ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Part:
    """This host's part of one job: OtherHosts for the ranks that run here."""

    connection: Connection
    nodes: Nodes
    job: int
    asked: bool = False
    wanted: bool = False  # what the ranks here do

    def record(self) -> dict[str, Any]:
        return {}

    def begin(self, launch: int) -> Nodes:
        return self.nodes

    def trouble(self) -> str:
        if self.connection.lost:
            return f"node 0 was lost: {self.connection.lost}"
        message = self.connection.waiting()
        if message is not None and message.get("do") == "look" and message.get("job") == self.job:
            self.wanted = True
        if message is not None and message.get("do") == "end" and message.get("job") == self.job:
            self.asked = bool(message.get("failed"))
            return "node 0 asked to end the job" if self.asked else ""
        if message is not None and message.get("do") == "finish":
            self.connection.put_back(message)  # for the loop that started this job
            self.asked = True
            return "node 0 has ended"
        if message is not None and message.get("do") == "start":  # it has waited for this job's end long enough
            self.connection.put_back(message)
            self.asked = True
            return "node 0 has begun another job"
        return ""

    def look(self) -> None:
        pass  # node 0 asks

    def looked(self) -> list[RankState]:
        return []

    def answer(self, look: Callable[[], list[RankState]]) -> None:
        if self.wanted:
            self.wanted = False
            self.connection.send(done="looked", job=self.job, states=[state.to_dict() for state in look()])

    def tell_spans(self, launch: int, pieces: Iterable[tuple[int, str]]) -> None:
        for rank, lines in pieces:
            self.connection.send(done="spans", job=self.job, launch=launch, rank=rank, lines=lines)

    def end(self, failed: bool) -> str:
        return f"node 0 was lost: {self.connection.lost}" if failed and self.connection.lost else ""


def _states(message: Message, host: str) -> list[RankState]:
    """The states in a message; none where it holds something else."""
    try:
        return [RankState.from_dict(record, host) for record in message["states"]]
    except (KeyError, TypeError, ValueError):
        return []


RunPart = Callable[[int, Program], str]  # (launch, program) → why it failed, "" if it did not


def follow(
    host: str,
    port: int,
    facts: NodeFacts,
    count: int,
    program: Program,
    run_part: RunPart,
    say: Say,
    join_s: float = JOIN_S,
) -> tuple[int, str]:
    """Be a node other than 0: join, do what node 0 says, and give its exit code and words at the end.

    Raises LaunchError where node 0 cannot be reached in time or is lost for good, SpecError where it refuses this node.
    """
    token = secrets.token_hex(16)
    connection = _join(host, port, facts, count, token, join_s, again=False)
    say(f"{facts.name} of {count} joined {host}:{port}; node 0 writes the results")
    try:
        while True:
            message = connection.receive(_POLL_S)
            if message is None and connection.lost:
                within_s = min(REJOIN_S, join_s)
                say(f"node 0 was lost ({connection.lost}); trying to come back for {within_s:.0f} s")
                connection.close()
                connection = _join(host, port, facts, count, token, within_s, again=True)
                say("back")
            if message is None:
                continue
            match message.get("do"):
                case "serve":
                    _serve(connection)
                case "probe":
                    address, at = str(message["address"]), int(message["port"])
                    link = preflight.probe(int(message["a"]), int(message["b"]), address, at)
                    connection.send(done="probed", link=asdict(link))
                case "start":
                    _run(connection, message, count, facts.node, program, run_part, say)
                case "finish":
                    return int(message["code"]), str(message["text"])
    finally:
        connection.close()


def _join(
    host: str, port: int, facts: NodeFacts, count: int, token: str, within_s: float, *, again: bool
) -> Connection:
    deadline = time.monotonic() + within_s
    why = ""
    while True:
        try:
            connection = Connection(socket.create_connection((host, port), timeout=min(5.0, within_s)))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            connection.send(facts=facts.to_dict(), count=count, time_s=time.time(), token=token, again=again)
            answer = connection.receive(10.0)
            if answer is not None and answer.get("do") == "welcome":
                return connection
            connection.close()
            if answer is not None and answer.get("do") == "refuse":
                raise SpecError(f"node 0 at {host}:{port} refuses {facts.name}: {answer.get('why')}")
            why = connection.lost or "it said nothing"
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{facts.name} could not {'come back to' if again else 'join'} node 0 at {host}:{port} within "
                f"{within_s:.0f} s: {why}"
                + ("" if again else ". Start node 0's command there, with --node-rank 0 and the same --rdzv-endpoint")
            )
        time.sleep(0.3)


def _serve(connection: Connection) -> None:
    listener = listen_on(connection.address, 0)
    if listener is None:
        return  # node 0 hears nothing and says so
    threading.Thread(target=preflight.serve, args=(listener,), daemon=True).start()
    connection.send(done="serving", address=connection.address, port=int(listener.getsockname()[1]))


def _run(
    connection: Connection,
    message: Mapping[str, Any],
    count: int,
    node: int,
    program: Program,
    run_part: RunPart,
    say: Say,
) -> None:
    launch, job = int(message["launch"]), int(message["job"])
    nodes = Nodes(count, node, str(message["address"]), int(message["port"]), connection.address)
    part = _Part(connection, nodes, job)
    say(f"launch {launch}: starting ranks")
    variables = {**program.variables, **elsewhere.variables_of(message.get("trace"))}
    why = run_part(launch, replace(program, nodes=nodes, others=part, variables=variables))
    if why and not part.asked:
        say(f"launch {launch}: {why}")
    connection.send(done="ended", job=job, why="" if part.asked and "stopped first" not in why else why)
