"""Which host is the odd one out, judged on numbers made up; and the probe over a real socket."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from commbench.errors import SpecError
from commbench.harness.hosts.preflight import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    LinkFacts,
    NodeFacts,
    check,
    facts_here,
    judge,
    pairs,
    probe,
    serve,
)
from commbench.harness.hosts.sockets import listen_on

VERSIONS = {"commbench": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "numpy": "2.4.6", "kernel": "6.8"}


def nodes(count: int) -> list[NodeFacts]:
    return [NodeFacts(n, f"host{n}", VERSIONS, ("H200",) * 8, 64, "d1ce") for n in range(count)]


def links(count: int, slow: int | None = None) -> list[LinkFacts]:
    return [
        LinkFacts(a, b, 200e-6 if slow in (a, b) else 15e-6, 1e9 if slow in (a, b) else 10e9) for a, b in pairs(count)
    ]


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_hosts_that_are_alike_and_near_each_other_are_good() -> None:
    found = only(judge(nodes(4), links(4)))
    assert found.severity == OK
    assert found.text == (
        "4 nodes have the same versions and devices and reach each other: 15.0 µs to 15.0 µs one way, 10 GB/s at least"
    )
    check([found])


def test_the_one_with_another_torch_is_named_and_stops_the_sweep() -> None:
    odd = nodes(3)
    odd[2] = replace(odd[2], versions={**VERSIONS, "torch": "2.6.0"})
    found = only(judge(odd, links(3)))
    assert (found.severity, found.nodes) == (PROBLEM, (2,))
    assert found.text == ("node 2 (host2) has torch 2.6.0, the others have 2.13.0; install the same on every node")
    with pytest.raises(SpecError, match=r"the nodes cannot run one sweep: node 2 \(host2\) has torch 2\.6\.0"):
        check([found])


def test_of_two_that_differ_nobody_is_the_odd_one() -> None:
    odd = nodes(2)
    odd[1] = replace(odd[1], versions={**VERSIONS, "commbench": ""})
    found = only(judge(odd, links(2)))
    assert found.nodes == (0, 1)
    assert found.text.startswith("commbench differs: node 0 (host0) has 0.1.0, node 1 (host1) has none; ")


def test_another_python_or_kernel_is_a_warning_only() -> None:
    odd = nodes(3)
    odd[1] = replace(odd[1], versions={**VERSIONS, "python": "3.12.1", "kernel": "6.1"})
    found = judge(odd, links(3))
    assert [(f.severity, f.nodes) for f in found] == [(WARNING, (1,)), (WARNING, (1,))]
    check(found)


def test_a_node_with_other_flags_would_measure_other_points() -> None:
    odd = nodes(3)
    odd[1] = replace(odd[1], plan="beef")
    found = only(judge(odd, links(3)))
    assert (found.severity, found.nodes) == (PROBLEM, (1,))
    assert "give every node's command the same flags" in found.text


def test_missing_and_different_gpus_are_named() -> None:
    odd = nodes(3)
    odd[0] = replace(odd[0], devices=("H200",) * 7)
    found = only(judge(odd, links(3)))
    assert found.severity == PROBLEM
    assert found.text.startswith("node 0 (host0) has GPUs: 7, the others have 8")
    odd[0] = replace(odd[0], devices=("H100",) * 8)
    found = only(judge(odd, links(3)))
    assert found.severity == WARNING
    assert found.text.startswith("node 0 (host0) has GPU H100, the others have H200")


def test_a_wrong_time_of_day_is_told_in_its_direction() -> None:
    odd = nodes(3)
    odd[2] = replace(odd[2], clock_s=-30.0)
    found = only(judge(odd, links(3)))
    assert (found.severity, found.nodes) == (WARNING, (2,))
    assert "node 2 (host2)'s time of day is 30.0 s behind the others'" in found.text


def test_a_node_that_nobody_reaches_is_told_once_and_a_broken_pair_by_both_names() -> None:
    broken = [replace(x, error="timed out") if 3 in (x.a, x.b) else x for x in links(4)]
    found = only(judge(nodes(4), broken))
    assert (found.severity, found.nodes) == (PROBLEM, (3,))
    assert found.text == "node 3 (host3) cannot be reached by any other node (timed out)"
    broken = [replace(x, error="refused") if (x.a, x.b) == (0, 2) else x for x in links(4)]
    found = only(judge(nodes(4), broken))
    assert found.text == "node 0 (host0) and node 2 (host2) do not reach each other: refused"


def test_the_slow_node_is_the_one_whose_best_link_is_slow() -> None:
    found = only(judge(nodes(4), links(4, slow=1)))
    assert (found.severity, found.nodes) == (WARNING, (1,))
    assert found.text == (
        "node 1 (host1) is slow: 200 µs one way at best, where 15.0 µs is usual; 1 GB/s at best, where 10 GB/s is usual"
    )


def test_one_slow_link_between_two_good_nodes_is_named_as_a_link() -> None:
    one = [replace(x, latency_s=300e-6) if (x.a, x.b) == (1, 2) else x for x in links(4)]
    found = only(judge(nodes(4), one))
    assert found.nodes == (1, 2)
    assert "between node 1 (host1) and node 2 (host2) a byte takes 300 µs" in found.text


def test_small_differences_and_two_nodes_name_nobody() -> None:
    near = [replace(x, latency_s=2e-6 if 0 in (x.a, x.b) else 15e-6) for x in links(3)]
    assert only(judge(nodes(3), near)).severity == OK
    assert only(judge(nodes(2), links(2, slow=1))).severity == OK


def test_of_many_nodes_not_every_pair_is_tried_but_every_node() -> None:
    assert len(pairs(16)) == 120
    many = pairs(200)
    assert len(many) < 400
    assert {n for pair in many for n in pair} == set(range(200))
    assert all(a < b for a, b in many)


def test_facts_survive_the_wire_and_name_the_versions() -> None:
    facts = facts_here(3, "cafe")
    assert NodeFacts.from_dict(facts.to_dict()) == facts
    assert facts.versions["commbench"]
    assert facts.versions["torch"]
    with pytest.raises(KeyError):
        NodeFacts.from_dict({"node": 1})


def test_a_link_is_timed_over_a_real_socket_and_a_closed_port_says_so() -> None:
    listener = listen_on("127.0.0.1", 0)
    assert listener is not None
    port = listener.getsockname()[1]
    answering = threading.Thread(target=serve, args=(listener,))
    answering.start()
    found = probe(0, 1, "127.0.0.1", port)
    answering.join(30)
    assert not found.error
    assert 0 < found.latency_s < 1.0
    assert found.bytes_per_s > 1e6
    closed = probe(0, 1, "127.0.0.1", port)
    assert f"127.0.0.1:{port}: " in closed.error
