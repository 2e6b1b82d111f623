"""Spans as this program's processes note them, and the files that they write them to.

The ranks learn the trace and their parent from ``TRACEPARENT`` in their environment (W3C Trace Context).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commbench import __version__

TRACE_VARIABLE = "COMMBENCH_TRACE"  # 1: ranks note their spans
PARENT_VARIABLE = "TRACEPARENT"
TRACE_DIR = "trace"
_TRACEPARENT = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")


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


def resource(**more: Any) -> dict[str, Any]:
    """Who speaks, in OpenTelemetry's names."""
    return {
        "service.name": "commbench", "service.version": __version__, "host.name": socket.gethostname(),
        "process.pid": os.getpid(), **more,
    }  # fmt: skip


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
