"""The commands of several hosts and what they say to each other: real sockets on loopback, no ranks."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from commbench.errors import LaunchError, SpecError
from commbench.harness.hosts import nodes as nodes_module
from commbench.harness.hosts.nodes import Connection, Head, follow, launcher_ended, lead, nearest_cause
from commbench.harness.hosts.preflight import NodeFacts, facts_here
from commbench.harness.hosts.sockets import free_port
from commbench.harness.launchers.commands import Program
from commbench.harness.supervision.heartbeat import FATAL, VISITING, Pulse
from commbench.harness.supervision.stacks import RankState, first_stopped

PULSE = Pulse(1, 4711, 1, 5, VISITING, "sample", 3, 7, False, "torch_dist", "", FATAL, 0)


def facts(node: int) -> NodeFacts:
    return facts_here(node, "plan")


class Node(threading.Thread):
    """A host other than 0 in a thread. outcome: (code, words) or what it raised; ran: launches that it was to run."""

    def __init__(self, port: int, node: int, count: int, why: str = "", until_told: bool = False) -> None:
        super().__init__(daemon=True)
        self.port, self.node, self.count, self.why, self.until_told = port, node, count, why, until_told
        self.ran: list[tuple[int, int, int]] = []
        self.outcome: Any = None
        self.start()

    def part(self, launch: int, program: Program) -> str:
        self.ran.append((launch, program.nodes.rank, program.nodes.port))
        assert program.others is not None
        deadline = time.monotonic() + 20
        while self.until_told and not (told := program.others.trouble()) and time.monotonic() < deadline:
            program.others.answer(lambda: [RankState(PULSE, "T", python="x" * 9999, kernel="wchan: do_signal_stop")])
            time.sleep(0.01)
        return told if self.until_told else self.why

    def run(self) -> None:
        try:
            self.outcome = follow(
                "127.0.0.1", self.port, facts(self.node), self.count, Program(), self.part, lambda text: None, 10.0
            )
        except (LaunchError, SpecError) as error:
            self.outcome = error


@pytest.fixture
def port() -> int:
    return free_port("127.0.0.1")


@pytest.fixture
def said() -> list[str]:
    return []


def head_of(port: int, count: int, said: list[str]) -> Head:
    return Head("127.0.0.1", port, count, facts(0), said.append)


@contextlib.contextmanager
def two_hosts(port: int, said: list[str], until_told: bool = False) -> Iterator[tuple[Head, Node]]:
    """Node 0, which has gathered node 1 and ends it well after the block."""
    head = head_of(port, 2, said)
    head.open()
    other = Node(port, 1, 2, until_told=until_told)
    try:
        head.gather(10.0)
        yield head, other
    finally:
        head.finish(0, "")
    other.join(10)
    assert other.outcome == (0, "")


def wait(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_hosts_join_are_examined_run_their_part_and_end_with_node_0(port: int, said: list[str]) -> None:
    others = [Node(port, 2, 3), Node(port, 1, 3)]
    with lead(head_of(port, 3, said), 20.0) as head:
        assert [n["node"] for n in head.record()["nodes"]] == [0, 1, 2]
        assert [(x["a"], x["b"], x["error"]) for x in head.record()["preflight"]["links"]] == [
            (0, 1, ""),
            (0, 2, ""),
            (1, 2, ""),
        ]
        places = [head.begin(0), head.begin(1)]
        for place in places:
            assert (place.count, place.rank, place.address) == (3, 0, "127.0.0.1")
        wait(lambda: all(len(o.ran) == 2 for o in others))
        assert head.trouble() == ""
        assert head.end(failed=False) == ""
        head.finish(3, "well")
    for other in others:
        other.join(10)
        assert other.outcome == (3, "well")
        assert other.ran == [(launch, other.node, place.port) for launch, place in enumerate(places)]
    # on a busy machine a link may be slow
    assert any(re.match(r"preflight: (3 nodes have the same versions|.* is slow|between )", text) for text in said)


def test_why_a_part_failed_is_told_with_the_hosts_name(port: int, said: list[str]) -> None:
    other = Node(port, 1, 2, why="rank 1 was killed by SIGKILL")
    with lead(head_of(port, 2, said), 20.0) as head:
        head.begin(0)
        wait(lambda: head.trouble())
        expected = f"node 1 ({socket.gethostname()}): rank 1 was killed by SIGKILL"
        assert head.trouble() == expected
        assert head.end(failed=True) == expected
    other.join(10)
    assert other.outcome == (0, "")


def test_a_part_ends_when_node_0_says_so_and_that_is_no_reason(port: int, said: list[str]) -> None:
    other = Node(port, 1, 2, until_told=True)
    with lead(head_of(port, 2, said), 20.0) as head:
        head.begin(0)
        wait(lambda: other.ran)
        started = time.monotonic()
        assert head.end(failed=True) == ""
        assert time.monotonic() - started < 5
    other.join(10)


def test_node_0_asks_what_the_ranks_of_a_job_that_hangs_do_and_judges_all_of_them(port: int, said: list[str]) -> None:
    with two_hosts(port, said, until_told=True) as (head, other):
        head.begin(0)
        wait(lambda: other.ran)
        for _ in range(2):  # each time anew
            head.look()
            (seen,) = head.looked()
            assert (seen.pulse, seen.state, seen.host) == (PULSE, "T", facts(1).name)
            assert (seen.python, seen.kernel) == ("x" * 4000, "wchan: do_signal_stop")
        assert first_stopped([RankState(replace(PULSE, rank=0), "S"), seen]) == (1, "it is stopped (SIGSTOP)")
        assert head.trouble() == ""
        assert head.end(failed=True) == ""


def test_states_that_no_rank_can_have_are_left_out() -> None:
    state = RankState(PULSE, "T", host="node 1").to_dict()
    assert nodes_module._states({"states": [state]}, "node 1") == [RankState(PULSE, "T", host="node 1")]
    for strange in ({"stage": 99}, {"stage": "1"}, {"steps": "5"}, {"order": [3]}, {"iteration": "7"}):
        record = {**state, "pulse": {**state["pulse"], **strange}}
        assert nodes_module._states({"states": [record]}, "node 1") == []


def test_a_host_that_says_nothing_of_its_ranks_is_not_waited_for_once_it_is_lost(port: int, said: list[str]) -> None:
    with two_hosts(port, said, until_told=True) as (head, other):
        head.begin(0)
        wait(lambda: other.ran)
        head._members[1].connection.close()
        head.look()
        assert head.looked() == []
        wait(lambda: any("is back" in text for text in said))


def test_what_ends_node_0_is_told_to_those_who_wait(port: int, said: list[str]) -> None:
    other = Node(port, 1, 3)
    too_few = pytest.raises(LaunchError, match=r"node 2 did not come within 2 s; node 0 .* node 1 .* are here")
    with too_few, lead(head_of(port, 3, said), 2.0):
        pytest.fail("two of three are not enough")
    other.join(10)
    code, words = other.outcome
    assert code == 1
    assert "node 2 did not come" in words


def test_nodes_that_do_not_belong_are_refused_with_the_reason(port: int, said: list[str]) -> None:
    with two_hosts(port, said):
        for node, count, why in (
            (1, 2, "--node-rank 1 already"),
            (5, 2, "is not between 1 and 1"),
            (1, 4, "--nnodes 4"),
        ):
            other = Node(port, node, count)
            other.join(10)
            assert isinstance(other.outcome, SpecError)
            assert why in str(other.outcome)


def test_what_is_no_node_at_all_is_sent_away_and_harms_nobody(port: int, said: list[str]) -> None:
    head = head_of(port, 2, said)
    head.open()
    try:
        for words in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x80\x04\x95pickle",
            b'{"facts": []}\n',
            b'{"facts": {"node": 1}}\n',
            b"[" * 100_000,
            json.dumps({"facts": facts(1).to_dict(), "count": 2, "time_s": float("inf"), "token": "x"}).encode(),
            json.dumps({"facts": facts(1).to_dict(), "count": float("inf"), "time_s": 0.0, "token": "x"}).encode(),
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
                link.settimeout(10)
                link.sendall(words if words.endswith(b"\n") else words + b"\n")
                while link.recv(4096):
                    pass
        other = Node(port, 1, 2)
        head.gather(10.0)
    finally:
        head.finish(0, "")
    other.join(10)
    assert other.outcome == (0, "")


def test_a_host_that_was_lost_comes_back_with_its_token_only(port: int, said: list[str]) -> None:
    with two_hosts(port, said) as (head, other):
        head._members[1].connection.close()  # as a switch would
        assert head._missing() == [1]
        place = head.begin(0)
        wait(lambda: other.ran)
        assert other.ran == [(0, 1, place.port)]
        assert any("is back" in text for text in said)
        assert "waiting up to 10 s for lost nodes to come back" in said, "no longer than they had to come"


def test_a_host_that_comes_back_before_its_loss_was_noticed_ends_the_job(port: int, said: list[str]) -> None:
    with two_hosts(port, said) as (head, other):
        head.begin(0)
        wait(lambda: other.ran)
        member = head._members[1]
        member.connection.close()
        wait(lambda: head._members[1] is not member)
        assert head.trouble() == f"{facts(1).name}: was lost, and is back"
        head.begin(0)
        assert head.trouble() == ""


def test_the_next_jobs_start_ends_a_part_that_goes_on_and_is_not_lost(port: int, said: list[str]) -> None:
    with two_hosts(port, said, until_told=True) as (head, other):
        head.begin(0)
        wait(lambda: other.ran)
        head.begin(1)
        wait(lambda: len(other.ran) == 2)
        assert [launch for launch, *_ in other.ran] == [0, 1]
        assert head.end(failed=True) == ""


def test_a_host_that_stays_lost_ends_the_launch_with_its_name(
    port: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "REJOIN_S", 0.5)
    head = head_of(port, 2, said)
    head.open()
    link = Connection(socket.create_connection(("127.0.0.1", port)))
    link.send(facts=facts(1).to_dict(), count=2, time_s=time.time(), token="mine")
    head.gather(10.0)
    link.close()
    try:
        wait(lambda: head._missing())
        with pytest.raises(LaunchError, match=r"node 1 \(.*\) did not come back within 0 s"):
            head.begin(0)
    finally:
        head.finish(1, "")


def test_node_0_that_is_not_there_is_named_with_what_to_do(port: int) -> None:
    with pytest.raises(LaunchError, match=r"could not join node 0 at 127\.0\.0\.1:\d+ within 0 s: .*--node-rank 0"):
        follow("127.0.0.1", port, facts(1), 2, Program(), lambda launch, program: "", print, 0.2)


def test_an_endpoint_of_another_machine_or_a_taken_port_is_refused_at_once(port: int, said: list[str]) -> None:
    with pytest.raises(SpecError, match=r"203\.0\.113\.7 is no address of this host, which is node 0"):
        Head("203.0.113.7", port, 2, facts(0), said.append).open()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(SpecError, match="in use"):
        head_of(port, 2, said).open()


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = Connection(socket.create_connection(server.getsockname()))
        far = Connection(server.accept()[0])
    yield near, far
    near.close()
    far.close()


def test_silence_is_noticed_and_so_is_a_closed_end(
    pair: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    near.send(do="x", n=1)
    assert far.receive(5.0) == {"do": "x", "n": 1}
    assert far.receive(0.01) is None
    assert far.waiting() is None
    assert near.lost == far.lost == ""
    monkeypatch.setattr(nodes_module, "LOST_S", -1.0)
    assert near.lost.startswith("no sign of life for ")
    far.close()
    wait(lambda: near.lost == "its command has ended")


def test_lines_that_are_no_records_end_the_connection(pair: tuple[Connection, Connection]) -> None:
    near, far = pair
    near._link.sendall(json.dumps([1]).encode() + b"\n")
    wait(lambda: far.lost == "it does not speak this protocol")


def test_the_cause_is_a_killed_rank_before_an_error_before_a_lost_connection() -> None:
    killed = "node 1 (b): rank 2 was killed by SIGKILL"
    error = "node 2 (c): rank 4: ValueError: no"
    lost = "rank 0: [gloo] Connection closed by peer [10.0.0.2]:123"
    assert nearest_cause(lost, [error, killed]) == killed
    assert nearest_cause(lost, [error]) == error
    assert nearest_cause(lost, ["node 1 (b) was lost: no sign of life for 6 s"]) == lost
    ended = "node 1 (b): torchrun was ended from outside by SIGTERM"
    assert nearest_cause(lost, [error, ended]) == ended
    assert nearest_cause(lost, ["node 1 (b) was lost: its command has ended"]) != lost
    silent = "node 1 (b) was lost: no sign of life for 6 s"
    assert nearest_cause(silent, ["node 1 (b): was lost, and is back"]) == silent
    assert nearest_cause("rank 0: ValueError: mine", [error]) == "rank 0: ValueError: mine"


@pytest.mark.parametrize(
    ("why", "ended"),
    [
        ("torchrun was killed by SIGKILL", True),
        ("node 1 (b): torchrun was ended from outside by SIGTERM", True),
        ("rank 1 was killed by SIGTERM", False),
        ("rank 0: ValueError: no", False),
    ],
)
def test_no_point_is_to_blame_for_a_launcher_that_was_ended_on_any_host(why: str, ended: bool) -> None:
    assert launcher_ended(why) == ended
