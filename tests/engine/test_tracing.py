"""Spans of a sweep: from every process, in one trace, adding up, in a file and at an OTLP receiver."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commbench import Engine
from commbench.errors import UsageError
from commbench.harness.ranks.watch import watching
from commbench.harness.views import otlp, tracing
from commbench.harness.views.look import ENDPOINT_VARIABLE, Look
from commbench.harness.views.profiling import PROFILE_VARIABLE
from commbench.harness.views.spans import TRACE_VARIABLE, Context
from commbench.harness.views.tracing import RankTrace, Trace, traced
from commbench.measure.observer import BlockSeen
from commbench.types import Point
from tests.engine.otlp import attributes, receiving

ROOT = Path(__file__).resolve().parents[2]
POINT = Point("all_reduce", "sum", "float32", 8, 2)
ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def commbench(*words: str, before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    code = f"{before}\nimport sys\nfrom commbench.cli import main\nsys.argv = ['commbench', *sys.argv[1:]]\nmain()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, env=environment, timeout=120
    )


def test_a_sweep_is_one_trace_of_all_its_processes_whose_spans_add_up_and_each_rank_is_profiled(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with receiving() as received:
        done = commbench(
            "sweep", "--trace", "--otlp-endpoint", received.endpoint, "--profile", "--collectives", "all_reduce",
            "--backends", "fake,torch_dist", "--sync", "barrier", "--dtypes", "float32", "--sizes", "8",
            "--max-time-per-point", "50ms", "--out", str(run),
            TRACEPARENT=ABOVE, COMMBENCH_FAKE='{"duration_s": 1e-4}',
        )  # fmt: skip
    assert "warning" not in done.stderr, done.stderr
    assert received.paths
    assert set(received.paths) == {"/v1/traces"}
    spans = {span.span_id: span for _, span in received.spans}
    assert len(spans) == len(received.spans)

    # one trace, which goes on that of the command's own environment
    assert {span.trace_id.hex() for span in spans.values()} == {ABOVE.split("-")[1]}
    (root,) = [span for span in spans.values() if span.parent_span_id not in spans]
    assert (root.name, root.parent_span_id.hex()) == ("sweep", ABOVE.split("-")[2])

    # from every process, with a label per rank
    processes = {resource["service.instance.id"]: resource for resource, _ in received.spans}
    assert set(processes) == {"sweep", "launch-0.rank-0", "launch-0.rank-1"}
    assert len({resource["process.pid"] for resource in processes.values()}) == 3
    by_rank: dict[int, list[Any]] = {0: [], 1: []}
    for resource, span in received.spans:
        if "commbench.rank" in resource:
            assert attributes(span)["rank"] == resource["commbench.rank"]
            by_rank[resource["commbench.rank"]].append(span)
    for mine in by_rank.values():
        count = Counter(span.name for span in mine)
        assert count["point"] == 2
        assert count["check"] == 4  # before and after timing
        assert count["visit"] == count["sampling"] >= 2
        assert count["warm-up"] >= 2

    # children lie within their parents
    for span in spans.values():
        parent = spans.get(span.parent_span_id)
        if parent is not None:
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= parent.end_time_unix_nano

    # and they add up: launcher and stages to the launch, visits to the stage they are in, phases to the visit
    def lasts(spans: list[Any]) -> int:
        return sum(span.end_time_unix_nano - span.start_time_unix_nano for span in spans)

    def below(parent: Any) -> list[Any]:
        return [span for span in spans.values() if span.parent_span_id == parent.span_id]

    (launch,) = below(root)
    assert launch.name == "launch"
    assert lasts([launch]) > 0.98 * lasts([root]) - 1e9
    launcher = [span for span in below(launch) if span.name.startswith("launcher")]
    ranks = [span for span in below(launch) if span.name == "rank"]
    assert len(ranks) == 2
    for rank in ranks:
        assert 0.95 < (lasts(launcher) + lasts(below(rank))) / lasts([launch]) < 1.001
        (points,) = [span for span in below(rank) if span.name == "between points"]
        visits = [visit for point in below(points) for visit in below(point)]
        assert {span.name for span in visits} == {"visit"}
        assert 0.8 < lasts(visits) / lasts([points]) <= 1
        assert 0.8 < sum(lasts(below(visit)) for visit in visits) / lasts(visits) <= 1

    # the file that a viewer opens says the same
    trace = json.loads((run / "trace.json").read_text())
    assert trace["otherData"]["trace_id"] == ABOVE.split("-")[1]
    drawn = {e["args"]["span_id"]: e for e in trace["traceEvents"] if e["ph"] in "Xb"}
    assert set(drawn) == {span.span_id.hex() for span in spans.values()}
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == set(processes)
    assert "rank 1: starting" in done.stdout
    assert f"trace: {run / 'trace.json'}" in done.stdout

    # a profile per rank: the checks and the first block of each point, and the collectives in them
    profiles = sorted((run / "profiles").glob("*.json"))
    assert [path.name for path in profiles] == ["launch-0.rank-0.trace.json", "launch-0.rank-1.trace.json"]
    for path in profiles:
        events = Counter(e["name"] for e in json.loads(path.read_text())["traceEvents"])
        for backend in ("fake", "torch_dist"):
            assert events[f"all_reduce float32 8 B [{backend}]: check"] == 2
            assert events[f"all_reduce float32 8 B [{backend}]: sample"] == 1
        assert events["c10d::allreduce_"] >= 3
    assert "2 Chrome traces" in done.stdout


def test_an_engine_traces_a_measurement_where_it_is_asked_to(engine: Engine, tmp_path: Path) -> None:
    with receiving() as received:
        engine.measure(
            collectives=["barrier"], max_time_per_point="20ms", out=tmp_path / "run", trace=True,
            otlp_endpoint=received.endpoint,
        )  # fmt: skip
    assert {r.get("commbench.rank") for r, _ in received.spans} == {None, 0, 1}
    assert {"sweep", "launch", "rank", "point", "visit", "sampling"} <= {span.name for _, span in received.spans}
    assert (tmp_path / "run" / "trace.json").exists()
    with pytest.raises(UsageError, match="give out=FOLDER"):
        engine.measure(collectives=["barrier"], trace=True)
    engine.measure(collectives=["barrier"], max_time_per_point="20ms", out=tmp_path / "plain")
    assert not (tmp_path / "plain" / "trace").exists()


def test_an_endpoint_that_cannot_be_reached_is_warned_of_once_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(otlp, "_EXPORT_S", 2.0)
    warnings: list[str] = []
    with Look.of(None, True, "http://127.0.0.1:1", {}).at(tmp_path, warnings.append):
        for launch in range(3):
            with tracing.launch_span(launch, 2):
                pass
    (warning,) = warnings
    assert warning.startswith("the trace could not be sent to http://127.0.0.1:1: ")
    assert "refused" in warning
    assert str(tmp_path / "trace.json") in warning
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 2 + 4
    assert capfd.readouterr() == ("", "")


MISSING = "import sys\nsys.modules['opentelemetry'] = None"


def test_without_the_extra_an_endpoint_ends_the_command_and_a_trace_alone_works(tmp_path: Path) -> None:
    done = commbench("sweep", "--otlp-endpoint", "http://localhost:4318", "--dry-run", before=MISSING)
    assert done.returncode == 2
    assert "pip install 'commbench[otel]'" in done.stderr
    assert done.stderr.count("\n") == 1
    done = commbench("sweep", "quick", "--trace", "--dry-run", before=MISSING)
    assert done.returncode == 0, done.stderr


def test_an_endpoint_of_the_environment_without_the_extra_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    warnings: list[str] = []
    look = Look.of(None, True, None, {ENDPOINT_VARIABLE: "http://collector:4318/"})
    assert look.endpoint == "http://collector:4318/v1/traces"
    with look.at(tmp_path, warnings.append):
        pass
    (warning,) = warnings
    assert "pip install 'commbench[otel]'" in warning
    assert ENDPOINT_VARIABLE in warning


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "ftp://localhost", "http://", "http://h:99999", "http://[::1", ""]
)
def test_an_endpoint_that_is_no_address_is_named(endpoint: str) -> None:
    with pytest.raises(UsageError, match="--otlp-endpoint"):
        Look.of(None, False, endpoint, {})


def test_an_address_keeps_its_own_path_and_has_the_standards_otherwise() -> None:
    assert otlp.check_endpoint("http://h:4318") == "http://h:4318/v1/traces"
    assert otlp.check_endpoint("http://h:4318/") == "http://h:4318/v1/traces"
    assert otlp.check_endpoint("https://h/otlp/v1/traces") == "https://h/otlp/v1/traces"


def test_a_traceparent_is_read_as_the_standard_says() -> None:
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    assert Context.read(ABOVE) == Context(trace, span)
    assert Context.read(Context(trace, span).header()) == Context(trace, span)
    assert Context.read(f"cc-{trace}-{span}-01-more") == Context(trace, span)  # of a version to come
    for bad in (None, "", "nonsense", f"ff-{trace}-{span}-01", f"00-{trace}-{span}-01-more", f"00-{'0' * 32}-{span}-01",
                f"00-{trace}-{'0' * 16}-01", f"00-{trace[1:]}-{span}-01"):  # fmt: skip
        assert Context.read(bad) is None


def rank_that_measures(directory: Path, context: Context, *, killed: bool) -> None:
    rank = RankTrace(directory, 0, 1, context, 1)
    rank.stage("between points")
    nothing = np.zeros((2, 5), dtype=np.int64)
    for number, status in ((0, ""), (1, "failed")):
        rank.visit(0, POINT, number)
        rank.phase("sample")
        rank.block(BlockSeen(nothing, nothing, nothing.astype(np.uint8), 3, True, 0))
        rank.left(status, "it broke")
    if killed:
        rank._file._stream.close()
    else:
        rank.close()


def test_a_rank_that_was_killed_has_its_finished_points_and_is_marked(tmp_path: Path) -> None:
    with traced(tmp_path, "", lambda text: None) as trace:
        with trace.launch(0, 2):
            context = Context.read(os.environ["TRACEPARENT"])
            assert context is not None
            rank_that_measures(tmp_path, context, killed=True)
        assert "TRACEPARENT" not in os.environ
        (_, own), (resource, spans) = trace.processes()
    by_name = {span.name: span for span in spans}
    assert resource["commbench.rank"] == 1
    assert by_name["rank"].error == "this process was killed"
    assert by_name["rank"].end_ns == next(s.end_ns for s in own if s.name == "launch")
    assert by_name["point"].error == "it broke"
    assert by_name["point"].attributes["point"] == POINT.label()
    assert by_name["sampling"].attributes["iterations"] == 15


def test_a_run_that_is_resumed_has_the_trace_of_the_last_command(tmp_path: Path) -> None:
    def command() -> Trace:
        with traced(tmp_path, "", lambda text: None) as trace, trace.launch(0, 2):
            context = Context.read(os.environ["TRACEPARENT"])
            assert context is not None
            rank_that_measures(tmp_path, context, killed=False)
        return trace

    first, second = command(), command()
    assert first.context.trace_id != second.context.trace_id
    assert len(second.processes()) == 2
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["trace_id"] == second.context.trace_id


def test_a_trace_that_cannot_be_written_is_warned_of_and_ends_no_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tracing, "write_chrome", full)
    said: list[str] = []
    with traced(tmp_path, "", said.append) as trace, trace.launch(0, 2):
        pass
    (warning,) = said
    assert warning.startswith(f"{tmp_path / 'trace.json'} cannot be written: No space left on device; its spans are in")


def test_nothing_is_noted_where_nobody_asks() -> None:
    assert Look.of(None, False, None, {ENDPOINT_VARIABLE: "http://collector:4318"}) == Look()
    assert tracing.rank_trace(Path("/nonexistent"), 0, 0, {"TRACEPARENT": ABOVE}) is None
    with watching(Path("/nonexistent"), 0, {"RANK": "0", "TRACEPARENT": ABOVE}) as watch:
        assert watch.observers == ()  # nothing in the meter then


def test_a_rank_that_cannot_write_says_so_and_measures_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"RANK": "1", "TRACEPARENT": ABOVE, TRACE_VARIABLE: "1"}
    with watching(Path("/nonexistent"), 0, asked) as watch:
        assert watch.observers == ()
    assert "rank 1 is not traced: " in capsys.readouterr().err
    with watching(Path("/dev/null"), 0, {"RANK": "1", PROFILE_VARIABLE: "cpu"}) as watch:
        assert watch.observers == ()
    assert "rank 1 is not profiled: " in capsys.readouterr().err
