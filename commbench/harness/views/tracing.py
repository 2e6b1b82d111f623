"""The trace of a sweep: launch, rank, point, visit, warm-up, sampling, check; one over all its processes.

Each process notes its own spans (``spans``). A rank notes the time between blocks only, and writes when a point is
finished. The command that watches puts all together: ``trace.json`` in the run directory (``trace_file``), and
OpenTelemetry spans to an OTLP endpoint where one is given (``otlp``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commbench.harness.views.otlp import export, exporter_to
from commbench.harness.views.spans import (
    PARENT_VARIABLE,
    TRACE_DIR,
    TRACE_VARIABLE,
    Context,
    Span,
    SpanFile,
    read_spans,
    resource,
)
from commbench.harness.views.trace_file import TRACE_JSON, write_chrome
from commbench.measure.observer import BlockSeen, Observer
from commbench.types import Point

# what a meter's phases are called in a trace
_PHASES = {"sample": "sampling", "return": "warm-up"}


# ---- on a rank ------------------------------------------------------------------------------------------------


class RankTrace(Observer):
    """The spans of one rank in one job of a launch. born_ns: when its process was created."""

    def __init__(self, directory: Path, launch: int, rank: int, parent: Context, born_ns: int) -> None:
        self._file_attributes = {"rank": rank, "launch": launch}
        self._rank = self._new("rank", parent.span_id, born_ns, secrets.token_hex(8))
        about = resource(
            **{
                "service.instance.id": f"launch-{launch}.rank-{rank}",
                "commbench.rank": rank,
                "commbench.launch": launch,
            }
        )
        path = directory / TRACE_DIR / f"launch-{launch}.rank-{rank}.jsonl"
        self._file = SpanFile(path, parent.trace_id, about, self._rank)
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
        found = [(resource(**{"service.instance.id": "sweep"}), own)]
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
    warned of once, and so is a file that cannot be written. Raises UsageError before anything runs for an endpoint that
    is none, and without the extra.
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
            where = directory / TRACE_JSON
            try:
                write_chrome(where, above.trace_id, processes)
            except OSError as error:  # what was measured counts all the same
                warn(f"{where} cannot be written: {error.strerror or error}; its spans are in {directory / TRACE_DIR}")
                where = directory / TRACE_DIR
            if exporter is not None:
                problem = export(exporter, above.trace_id, processes)
                if problem:
                    warn(f"the trace could not be sent to {endpoint}: {problem}; it is in {where}")
