"""Spans of ranks on other hosts: sent by their hosts' commands, set to this host's clock, and nothing else taken."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from commbench.harness.hosts.nodes import Head, follow, lead
from commbench.harness.hosts.preflight import facts_here
from commbench.harness.hosts.sockets import free_port
from commbench.harness.launchers.commands import Program
from commbench.harness.views import elsewhere
from commbench.harness.views.elsewhere import SpansHere, parent_here, take_spans, variables_of
from commbench.harness.views.spans import Context
from commbench.harness.views.trace_file import listed
from commbench.harness.views.tracing import Trace, rank_trace, traced
from commbench.types import Point

ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
POINT = Point("all_reduce", "sum", "float32", 8, 2)


def noted(folder: Path, rank: int, variables: dict[str, str]) -> None:
    """What a rank of another host notes in a launch."""
    trace = rank_trace(folder, 0, rank, variables)
    assert trace is not None
    trace.stage("between points")
    trace.visit(0, POINT, 0)
    trace.phase("sample")
    trace.left("ok", "")
    trace.close()


def spans_in(folder: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] in "Xb"]


def test_ranks_of_another_host_are_told_of_the_trace_and_their_spans_come_into_it(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    told: list[bool] = []

    def part(launch: int, program: Program) -> str:
        variables = {name: value for name, value in program.variables.items() if value is not None}
        told.append("TRACEPARENT" in variables)
        spans = SpansHere(there, launch, variables)
        if told[-1]:
            noted(there, 1, variables)
        assert program.others is not None
        program.others.tell_spans(launch, spans.pieces())
        return ""

    port = free_port("127.0.0.1")
    node = threading.Thread(
        target=follow, args=("127.0.0.1", port, facts_here(1), 2, Program(), part, lambda text: None, 10.0)
    )
    node.start()
    with lead(Head("127.0.0.1", port, 2, facts_here(0), lambda text: None), 10.0) as head:
        with traced(here, "", lambda text: None) as trace, trace.launch(0, 2):
            head.begin(0)
            head.end(failed=False)
        before = (here / "trace.json").read_text()
        head.begin(0)  # without a trace nothing is asked for
        head.end(failed=False)
        assert (here / "trace.json").read_text() == before
    node.join()
    assert told == [True, False]
    names = [event["name"] for event in spans_in(here)]
    assert {"rank", "between points", POINT.label(), "visit", "sampling"} <= set(names)
    (launch,) = [event for event in spans_in(here) if event["name"] == "launch"]
    (rank,) = [event for event in spans_in(here) if event["name"] == "rank"]
    assert rank["args"]["parent_id"] == launch["args"]["span_id"]
    assert rank["args"]["rank"] == 1


@pytest.fixture
def trace(tmp_path: Path) -> Any:
    with traced(tmp_path, "", lambda text: None) as trace, trace.launch(0, 2):
        yield trace


def lines_of(trace: Trace, tmp_path: Path) -> str:
    folder = tmp_path / "there"
    folder.mkdir()
    variables = {"COMMBENCH_TRACE": "1", "TRACEPARENT": Context(trace.context.trace_id, "1" * 16).header()}
    spans = SpansHere(folder, 0, variables)
    noted(folder, 1, variables)
    ((rank, text),) = spans.pieces()
    assert rank == 1
    return text


def test_spans_are_set_to_the_clock_of_the_host_that_writes_the_trace(trace: Trace, tmp_path: Path) -> None:
    text = lines_of(trace, tmp_path)
    take_spans(0, 1, text, clock_s=3600.0)
    _, (resource, spans) = trace.processes()
    assert resource["commbench.clock_offset_s"] == 3600.0
    sent = {
        json.loads(line)["span_id"]: json.loads(line) for line in text.splitlines() if "span_id" in json.loads(line)
    }
    assert len(spans) == len(sent) == 6
    for span in spans:
        assert span.start_ns == sent[span.span_id]["start_ns"] - 3600 * 10**9
        assert span.end_ns == sent[span.span_id]["end_ns"] - 3600 * 10**9


def test_what_is_no_span_of_this_trace_is_left_out(trace: Trace, tmp_path: Path) -> None:
    head, first, *_ = lines_of(trace, tmp_path).splitlines()
    good = json.loads(first)
    for launch, rank in (("../0", 1), (0, "../1"), (0, -1), (7, 1), (None, None)):
        take_spans(launch, rank, first, 0.0)
    assert list((tmp_path / "trace").iterdir()) == []
    take_spans(0, 1, head, 0.0)
    for bad in (
        "no json", "[]", "{}", json.dumps({**good, "span_id": "../../x"}), json.dumps({**good, "more": 1}),
        json.dumps({**good, "name": ["x"]}), json.dumps({**good, "start_ns": "soon"}),
        json.dumps({**good, "attributes": {"x": {}}}), json.dumps({**good, "attributes": 3}),
        json.dumps({**json.loads(head), "trace_id": "0" * 32}), json.dumps({**json.loads(head), "resource": {"x": []}}),
        json.dumps({**good, "start_ns": float("inf")}), json.dumps({**good, "attributes": {"x": float("nan")}}),
        "[" * 100_000, json.dumps({**good, "name": "launch"}), json.dumps({**good, "name": "point", "attributes": {}}),
    ):  # fmt: skip
        take_spans(0, 1, bad, 0.0)
    take_spans(0, 1, first, 0.0)
    (path,) = (tmp_path / "trace").iterdir()
    assert [json.loads(line).get("span_id") for line in path.read_text().splitlines()] == [None, good["span_id"]]


def test_spans_that_do_not_say_whose_they_are_do_not_keep_a_trace_from_being_written(tmp_path: Path) -> None:
    with traced(tmp_path, "", lambda text: None) as trace, trace.launch(0, 2):
        head, *spans = (json.loads(line) for line in lines_of(trace, tmp_path).splitlines())
        head["resource"] = {}
        for span in spans:
            if span["name"] == "rank":
                span |= {"attributes": {}, "parent_id": trace.launches[0].span_id}
        take_spans(0, 1, "\n".join(json.dumps(record) for record in (head, *spans)), 0.0)
    (rank,) = [event for event in spans_in(tmp_path) if event["name"] == "rank"]
    assert (rank["args"]["launch"], rank["args"]["rank"]) == (0, 1)
    assert any("rank 1" in line for line in listed(tmp_path))


def test_what_one_host_may_send_and_a_trace_may_take_is_bounded(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = lines_of(trace, tmp_path)
    folder = tmp_path / "there"
    monkeypatch.setattr(elsewhere, "PIECE_BYTES", 1)
    monkeypatch.setattr(elsewhere, "MOST_BYTES", len(text) // 2)
    pieces = [piece for _, piece in SpansHere(tmp_path / "none", 0, {}).pieces()]
    assert pieces == []
    spans = SpansHere(folder, 1, {})  # of another launch: nothing is there
    assert list(spans.pieces()) == []
    whole = SpansHere(folder, 0, {})
    whole._before.clear()
    sent = "".join(piece for _, piece in whole.pieces())
    assert 0 < len(sent) <= len(text) // 2
    assert text.startswith(sent)
    for _ in range(3):
        take_spans(0, 1, sent, 0.0)
    (path,) = (tmp_path / "trace").iterdir()
    assert path.stat().st_size < len(text)


def test_only_a_trace_that_is_written_here_is_told_to_others() -> None:
    assert parent_here({"TRACEPARENT": ABOVE}) == ""  # somebody else's
    assert parent_here({"TRACEPARENT": ABOVE, "COMMBENCH_TRACE": "1"}) == ABOVE
    assert variables_of(ABOVE) == {"TRACEPARENT": ABOVE, "COMMBENCH_TRACE": "1"}
    for bad in ("", None, 3, "LD_PRELOAD=x", ABOVE[:-4]):
        assert variables_of(bad) == {}
