"""Spans of a sweep: launch, rank, point, visit, warm-up, sampling, check; one trace over all its processes.

Each process notes its own spans; the ranks learn the trace and their parent from ``TRACEPARENT`` in their environment
(W3C Trace Context). A rank notes the time between blocks only, and writes when a point is finished. The command that
watches puts all together: ``trace.json`` in the run directory, in the Chrome trace event format that Perfetto reads,
and OpenTelemetry spans to an OTLP endpoint where one is given.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from commbench import __version__
from commbench.errors import UsageError
from commbench.measure.observer import BlockSeen, Observer
from commbench.types import Point

TRACE_VARIABLE = "COMMBENCH_TRACE"  # 1: ranks note their spans
PARENT_VARIABLE = "TRACEPARENT"
TRACE_DIR = "trace"
TRACE_JSON = "trace.json"
EXTRA = "pip install 'commbench[otel]'"
_EXPORT_S = 5.0  # that an endpoint may take for one batch, repetitions included
_BATCH = 512
_TRACEPARENT = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")
# what a meter's phases are called in a trace
_PHASES = {"sample": "sampling", "return": "warm-up"}


@dataclass(frozen=True, slots=True)
class Context:
    """A trace and the span in it that is the parent: hexadecimal, 32 and 16 digits ("" for a root's parent)."""

    trace_id: str
    span_id: str = ""

    def header(self) -> str:
        """As ``TRACEPARENT`` holds it, sampled."""
        return f"00-{self.trace_id}-{self.span_id}-01"

    @classmethod
    def read(cls, text: str | None) -> Context | None:
        """From ``TRACEPARENT``; None for what the standard says to ignore."""
        found = _TRACEPARENT.match((text or "").strip().lower())
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
            return None
        if not int(found[2], 16) or not int(found[3], 16):
            return None
        return cls(found[2], found[3])


@dataclass(slots=True)
class Span:
    """One span. Times are nanoseconds since 1970, by the host's clock."""

    name: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int = 0
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class SpanFile:
    """Spans of one process: a line of who it is, then a line for each span that is over."""

    def __init__(self, path: Path, trace_id: str, resource: Mapping[str, Any], whole: Span) -> None:
        self._stream = path.open("a")
        self._first = int.from_bytes(secrets.token_bytes(8)) >> 1
        self._pending = [json.dumps({"trace_id": trace_id, "resource": dict(resource), "whole": whole.to_dict()})]

    def new_id(self) -> str:
        self._first += 1
        return f"{self._first:016x}"

    def add(self, span: Span) -> None:
        self._pending.append(json.dumps(span.to_dict()))

    def flush(self) -> None:
        self._stream.write("\n".join(self._pending) + "\n" if self._pending else "")
        self._stream.flush()
        self._pending.clear()

    def close(self) -> None:
        self.flush()
        self._stream.close()


def _resource(**more: Any) -> dict[str, Any]:
    """Who speaks, in OpenTelemetry's names."""
    return {
        "service.name": "commbench", "service.version": __version__, "host.name": socket.gethostname(),
        "process.pid": os.getpid(), **more,
    }  # fmt: skip


# ---- on a rank ------------------------------------------------------------------------------------------------


class RankTrace(Observer):
    """The spans of one rank in one job of a launch. born_ns: when its process was created."""

    def __init__(self, directory: Path, launch: int, rank: int, parent: Context, born_ns: int) -> None:
        self._file_attributes = {"rank": rank, "launch": launch}
        self._rank = self._new("rank", parent.span_id, born_ns, secrets.token_hex(8))
        resource = _resource(
            **{
                "service.instance.id": f"launch-{launch}.rank-{rank}",
                "commbench.rank": rank,
                "commbench.launch": launch,
            }
        )
        path = directory / TRACE_DIR / f"launch-{launch}.rank-{rank}.jsonl"
        self._file = SpanFile(path, parent.trace_id, resource, self._rank)
        self._stage = self._open("starting", self._rank, born_ns)
        self._points: dict[int, Span] = {}
        self._visit: Span | None = None
        self._phase: Span | None = None

    def _new(self, name: str, parent_id: str, start_ns: int, span_id: str, **attributes: Any) -> Span:
        return Span(name, span_id, parent_id, start_ns, 0, {**self._file_attributes, **attributes})

    def _open(self, name: str, parent: Span, start_ns: int, **attributes: Any) -> Span:
        return self._new(name, parent.span_id, start_ns, self._file.new_id(), **attributes)

    def _end(self, span: Span | None, now_ns: int, error: str = "") -> None:
        if span is not None:
            span.end_ns, span.error = now_ns, error
            self._file.add(span)

    def stage(self, name: str) -> None:
        """Outside of points: the present stage is over, another begins."""
        now = time.time_ns()
        self._end(self._stage, now)
        self._stage = self._open(name, self._rank, now)

    def visit(self, order: int, point: Point, number: int) -> None:
        now = time.time_ns()
        if order not in self._points:
            what = {"point": point.label(), "point_id": point.point_id, "order": order}
            self._points[order] = self._open("point", self._stage, now, **what)
        mine = self._points[order]
        self._visit = self._open("visit", mine, now, number=number, point=mine.attributes["point"], order=order)

    def phase(self, name: str) -> None:
        now = time.time_ns()
        self._end(self._phase, now)
        assert self._visit is not None  # phases are of visits
        told = {"point": self._visit.attributes["point"]}
        self._phase = self._open(_PHASES.get(name, name), self._visit, now, **told)

    def block(self, seen: BlockSeen) -> None:
        if self._phase is not None:
            attributes = self._phase.attributes
            n = seen.ends_ns.shape[1] * seen.iters_per_sample
            attributes["iterations"] = attributes.get("iterations", 0) + n

    def left(self, status: str, reason: str) -> None:
        now = time.time_ns()
        self._end(self._phase, now)
        self._end(self._visit, now)
        assert self._visit is not None
        order = self._visit.attributes["order"]
        self._phase = self._visit = None
        if status:
            point = self._points.pop(order)
            point.attributes["status"] = status
            self._end(point, now, reason if status in ("wrong", "failed", "timeout") else "")
            self._file.flush()

    def close(self, error: str = "") -> None:
        """End what is open, and write."""
        now = time.time_ns()
        for span in (self._phase, self._visit, *self._points.values(), self._stage, self._rank):
            self._end(span, now, error)
        self._file.close()


def rank_trace(directory: Path, launch: int, rank: int, environment: Mapping[str, str]) -> RankTrace | None:
    """The trace of this process, where one is asked for. Raises OSError where the run directory cannot be written."""
    parent = Context.read(environment.get(PARENT_VARIABLE))
    if environment.get(TRACE_VARIABLE) != "1" or parent is None:
        return None
    import psutil

    return RankTrace(directory, launch, rank, parent, int(psutil.Process().create_time() * 1e9))


# ---- in the command that watches ------------------------------------------------------------------------------


@dataclass(slots=True)
class Trace:
    """The trace of a sweep while it runs."""

    directory: Path
    context: Context
    root: Span
    launches: list[Span] = field(default_factory=list)
    taken_bytes: int = 0  # of spans from other hosts

    @property
    def launch_numbers(self) -> set[int]:
        return {int(span.attributes["launch"]) for span in self.launches}

    @contextlib.contextmanager
    def launch(self, index: int, ranks: int) -> Iterator[None]:
        """Around one launch; its ranks become its children."""
        (self.directory / TRACE_DIR).mkdir(exist_ok=True)
        attributes = {"launch": index, "ranks": ranks}
        span = Span("launch", secrets.token_hex(8), self.root.span_id, time.time_ns(), 0, attributes)
        self.launches.append(span)
        told = {TRACE_VARIABLE: "1", PARENT_VARIABLE: Context(self.context.trace_id, span.span_id).header()}
        try:
            with environment(told):
                yield
        except BaseException as error:
            span.error = str(error) or type(error).__name__
            raise
        finally:
            span.end_ns = time.time_ns()

    def processes(self) -> list[tuple[dict[str, Any], list[Span]]]:
        """Every process's resource and spans: the command's own first, then the ranks'."""
        own = [self.root, *self.launches]
        ends = {span.span_id: span.end_ns for span in self.launches}
        found = [(_resource(**{"service.instance.id": "sweep"}), own)]
        for path in sorted((self.directory / TRACE_DIR).glob("launch-*.rank-*.jsonl")):
            found += read_spans(path, self.context.trace_id, ends)
        own += self._around([span for _, spans in found[1:] for span in spans if span.name == "rank"])
        return found

    def _around(self, ranks: Sequence[Span]) -> list[Span]:
        """What a launch takes before its first rank's process is there, and after its last is gone."""
        made = []
        for launch in self.launches:
            mine = [span for span in ranks if span.parent_id == launch.span_id]
            if mine:
                first, last = min(s.start_ns for s in mine), max(s.end_ns for s in mine)
                for name, start, end in (
                    ("launcher starts", launch.start_ns, first),
                    ("launcher ends", last, launch.end_ns),
                ):
                    attributes = {"launch": launch.attributes["launch"]}
                    made.append(Span(name, secrets.token_hex(8), launch.span_id, start, max(start, end), attributes))
        return made


def read_spans(path: Path, trace_id: str, launch_ends: Mapping[str, int]) -> list[tuple[dict[str, Any], list[Span]]]:
    """Resource and spans of each process that wrote to a file for this trace (a run that was resumed has others).

    launch_ends: launch span → its end. The whole span of a process that was killed is closed there, and marked.
    """
    processes: list[tuple[dict[str, Any], list[Span], Span]] = []
    ours = False
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # cut short by a kill
        if "resource" in record:
            ours = record["trace_id"] == trace_id
            if ours:
                processes.append((record["resource"], [], Span(**record["whole"])))
        elif ours:
            processes[-1][1].append(Span(**record))
    for _, spans, whole in processes:
        if all(span.span_id != whole.span_id for span in spans):
            whole.end_ns = launch_ends.get(whole.parent_id) or max((s.end_ns for s in spans), default=whole.start_ns)
            whole.error = "this process was killed"
            spans.append(whole)
    return [(resource, spans) for resource, spans, _ in processes]


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_present: list[Trace] = []  # the trace of the sweep that this process runs


def present_trace() -> Trace | None:
    """The trace of the sweep that this process runs, where it is traced."""
    return _present[-1] if _present else None


def launch_span(index: int, ranks: int) -> contextlib.AbstractContextManager[None]:
    """Around a launch: a span of the sweep that is traced, or nothing."""
    return _present[-1].launch(index, ranks) if _present else contextlib.nullcontext()


@contextlib.contextmanager
def traced(directory: Path, endpoint: str, warn: Callable[[str], None]) -> Iterator[Trace]:
    """Trace the sweep that runs inside into ``directory``, and to an OTLP endpoint ("" for none).

    The trace goes on that of ``TRACEPARENT``, where the environment has one. An endpoint that cannot be reached is
    warned of once. Raises UsageError before anything runs for an endpoint that is none, and without the extra.
    """
    exporter = exporter_to(endpoint) if endpoint else None
    above = Context.read(os.environ.get(PARENT_VARIABLE)) or Context(secrets.token_hex(16))
    root = Span("sweep", secrets.token_hex(8), above.span_id, time.time_ns(), 0, {"run": directory.name})
    trace = Trace(directory, Context(above.trace_id, root.span_id), root)
    _present.append(trace)
    try:
        yield trace
    except BaseException as error:
        root.error = str(error) or type(error).__name__
        raise
    finally:
        _present.remove(trace)
        root.end_ns = time.time_ns()
        if (directory / TRACE_DIR).is_dir():  # else nothing was launched
            processes = trace.processes()
            write_chrome(directory / TRACE_JSON, above.trace_id, processes)
            if exporter is not None:
                problem = export(exporter, above.trace_id, processes)
                if problem:
                    warn(f"the trace could not be sent to {endpoint}: {problem}; it is in {directory / TRACE_JSON}")


# ---- files ----------------------------------------------------------------------------------------------------


def write_chrome(path: Path, trace_id: str, processes: Iterable[tuple[dict[str, Any], list[Span]]]) -> None:
    """Chrome's trace event format: a row for each process; points, which overlap, have tracks of their own."""
    from commbench.store.run import write_json

    events: list[dict[str, Any]] = []
    processes = list(processes)
    several_hosts = len({resource.get("host.name") for resource, _ in processes}) > 1
    for number, (resource, spans) in enumerate(processes):
        label = str(resource["service.instance.id"]) + (f" on {resource.get('host.name')}" if several_hosts else "")
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": label}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
        for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns)):
            told = {**span.attributes, "span_id": span.span_id, "parent_id": span.parent_id}
            if span.error:
                told["error"] = span.error
            event = {"name": span.name, "cat": "commbench", "pid": number, "tid": 0, "ts": span.start_ns / 1e3}
            if span.name == "point":
                name = told["point"]
                begin = {**event, "name": name, "cat": "point", "ph": "b", "id": span.span_id, "args": told}
                events += [begin, {**begin, "ph": "e", "ts": span.end_ns / 1e3, "args": {}}]
            else:
                events.append({**event, "ph": "X", "dur": (span.end_ns - span.start_ns) / 1e3, "args": told})
    write_json(path, {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"trace_id": trace_id}})


def listed(directory: Path) -> list[str]:
    """A trace in a few lines: what each launch waits for its launcher, and what each rank's stages take."""
    events = json.loads((directory / TRACE_JSON).read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]

    def below(parent: dict[str, Any]) -> list[dict[str, Any]]:
        return [e for e in spans if e["args"]["parent_id"] == parent["args"]["span_id"]]

    def told(parts: list[dict[str, Any]]) -> str:
        return ", ".join(f"{e['name']} {e['dur'] / 1e6:.2f} s" for e in parts)

    lines = []
    for launch in (e for e in spans if e["name"] == "launch"):
        around = [e for e in below(launch) if e["name"] != "rank"]
        outside = sum(e["dur"] for e in around)
        lines.append(f"launch {launch['args']['launch']}: {launch['dur'] / 1e6:.2f} s, of it {told(around)}")
        for rank in (e for e in below(launch) if e["name"] == "rank"):
            stages = below(rank)
            visits = sum(e["dur"] for e in spans if e["name"] == "visit" and e["pid"] == rank["pid"])
            share = (outside + sum(e["dur"] for e in stages)) / launch["dur"]
            lines.append(
                f"  rank {rank['args']['rank']}: {told(stages)}; {visits / 1e6:.2f} s in visits of points; "
                f"all adds up to {share:.0%} of the launch"
            )
    return lines


# ---- OTLP -----------------------------------------------------------------------------------------------------


def check_endpoint(endpoint: str) -> str:
    """The address that spans are posted to: the endpoint, with the standard's path where it has none.

    Raises UsageError for what is no http or https address.
    """
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--otlp-endpoint {endpoint}: {error}; write http://localhost:4318") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise UsageError(f"--otlp-endpoint {endpoint} is no http address; write http://localhost:4318")
    return endpoint if parts.path not in ("", "/") else f"{endpoint.rstrip('/')}/v1/traces"


def exporter_to(endpoint: str) -> Any:
    """OpenTelemetry's exporter to an endpoint. Raises UsageError for a bad one, and where the extra is missing."""
    address = check_endpoint(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise UsageError(
            f"--otlp-endpoint needs OpenTelemetry ({error.name} is missing): {EXTRA}; --trace alone writes {TRACE_JSON}"
        ) from error
    return OTLPSpanExporter(endpoint=address, timeout=_EXPORT_S)


def export(exporter: Any, trace_id: str, processes: Iterable[tuple[dict[str, Any], list[Span]]]) -> str:
    """Send all spans; gives what went wrong, "" if nothing. The first batch that fails ends it."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    said = _Said()
    loggers = [logging.getLogger(name) for name in ("opentelemetry", "urllib3")]
    before = [(logger.propagate, logger.handlers[:]) for logger in loggers]
    for logger in loggers:  # the caller warns, once
        logger.propagate, logger.handlers = False, [said]
    try:
        for resource, spans in processes:
            made = _open_telemetry(trace_id, resource, spans)
            for start in range(0, len(made), _BATCH):
                if exporter.export(made[start : start + _BATCH]) is not SpanExportResult.SUCCESS:
                    return said.first or "the endpoint did not take it"
    finally:
        exporter.shutdown()
        for logger, (propagate, handlers) in zip(loggers, before, strict=True):
            logger.propagate, logger.handlers = propagate, handlers
    return ""


class _Said(logging.Handler):
    """Keeps the first warning: of a connection that fails, the system's word for it."""

    first = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.first and record.levelno >= logging.WARNING:
            line = record.getMessage().splitlines()[0]
            found = re.search(r"\[Errno -?\d+\] ([^\"')]+)", line)
            self.first = found[1] if found else line[:300]


def _open_telemetry(trace_id: str, resource: Mapping[str, Any], spans: Iterable[Span]) -> list[Any]:
    """Spans as the SDK's own, with the ids and times that they have already."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(span_id: str) -> SpanContext:
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(1))

    origin = Resource(dict(resource))
    scope = InstrumentationScope("commbench", __version__)
    return [
        ReadableSpan(
            name=span.name,
            context=context(span.span_id),
            parent=context(span.parent_id) if span.parent_id else None,
            resource=origin,
            attributes=span.attributes,
            kind=SpanKind.INTERNAL,
            instrumentation_scope=scope,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
        )
        for span in spans
    ]
