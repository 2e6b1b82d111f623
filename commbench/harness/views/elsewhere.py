"""Spans of ranks on other hosts: their hosts' commands send them to the one that writes the trace.

Whatever comes from another host is taken as data of this trace only: known fields, a bounded amount, files of this run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from commbench.harness.views.spans import PARENT_VARIABLE, TRACE_DIR, TRACE_VARIABLE, Context, Span
from commbench.harness.views.tracing import present_trace

PIECE_BYTES = 256 << 10  # of one message
MOST_BYTES = 64 << 20  # of one host's ranks in one job, and of all that a trace takes from other hosts
_FILE = re.compile(r"launch-\d+\.rank-(\d+)\.jsonl")
_ID = re.compile(r"[0-9a-f]{16}")
_MOST_RANKS = 1 << 16
_OWN = ("sweep", "launch", "launcher starts", "launcher ends")  # spans that only the command that writes the trace has
# what text from a stranger makes json and int raise, nesting and numbers without bound included
_NO_SPAN = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)


def parent_here(environment: Mapping[str, str]) -> str:
    """What the ranks of other hosts are told of the trace that this command writes, "" where it writes none."""
    return environment.get(PARENT_VARIABLE, "") if environment.get(TRACE_VARIABLE) == "1" else ""


def variables_of(parent: Any) -> dict[str, str]:
    """What the ranks here have in their environment for that; none for what is no trace's parent."""
    context = Context.read(parent) if isinstance(parent, str) else None
    return {} if context is None else {TRACE_VARIABLE: "1", PARENT_VARIABLE: context.header()}


class SpansHere:
    """What the ranks of this host note in one job of a launch, in a folder of this host. variables: the ranks'."""

    def __init__(self, folder: Path, launch: int, variables: Mapping[str, str | None]) -> None:
        self._folder, self._launch = folder / TRACE_DIR, launch
        if variables.get(TRACE_VARIABLE) == "1":
            self._folder.mkdir(exist_ok=True)
        self._before = {path: path.stat().st_size for path in self._files()}

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"launch-{self._launch}.rank-*.jsonl"))

    def pieces(self) -> Iterator[tuple[int, str]]:
        """(rank, whole lines) since this was made; MOST_BYTES in all, the rest is left out."""
        left = MOST_BYTES
        for path in self._files():
            found = _FILE.fullmatch(path.name)
            if found is None:
                continue
            with path.open("rb") as stream:
                stream.seek(self._before.get(path, 0))
                while lines := stream.readlines(PIECE_BYTES):
                    piece = b"".join(line for line in lines if line.endswith(b"\n"))  # a killed rank's last may be cut
                    left -= len(piece)
                    if left < 0:
                        return
                    yield int(found[1]), piece.decode(errors="replace")


def take_spans(launch: Any, rank: Any, text: Any, clock_s: float) -> None:
    """Add spans that another host sent to the present trace. clock_s: what that host's clock is ahead of this one's, to
    which the spans are set. What is no span is left out."""
    trace = present_trace()
    known = isinstance(launch, int) and isinstance(rank, int) and isinstance(text, str)
    if trace is None or not known or not 0 <= rank < _MOST_RANKS or launch not in trace.launch_numbers:
        return
    trace.taken_bytes += len(text)
    if trace.taken_bytes > MOST_BYTES:
        return
    offset_ns = int(clock_s * 1e9)
    own = {"launch": launch, "rank": rank}
    found = (_line(part, trace.context.trace_id, offset_ns, own) for part in text.splitlines())
    lines = [line for line in found if line]
    path = trace.directory / TRACE_DIR / f"launch-{launch}.rank-{rank}.jsonl"
    with path.open("a") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def _line(text: str, trace_id: str, offset_ns: int, own: Mapping[str, int]) -> str:
    """A line of a span file on this host's clock; "" for what is none. own: the launch and the rank that it is of."""
    try:
        record = json.loads(text)
        if "resource" not in record:
            return json.dumps(_moved(record, offset_ns, own), allow_nan=False)
        if record["trace_id"] != trace_id:
            return ""
        resource = _plain(record["resource"]) | {
            "service.instance.id": f"launch-{own['launch']}.rank-{own['rank']}",
            "commbench.clock_offset_s": offset_ns / 1e9,
        }
        whole = _moved(record["whole"], offset_ns, own)
        return json.dumps({"trace_id": trace_id, "resource": resource, "whole": whole}, allow_nan=False)
    except _NO_SPAN:
        return ""


def _moved(record: Mapping[str, Any], offset_ns: int, own: Mapping[str, int]) -> dict[str, Any]:
    """Raises one of _NO_SPAN for what is no span of a rank."""
    span = Span(**record)
    if not _ID.fullmatch(span.span_id) or not _ID.fullmatch(span.parent_id):
        raise ValueError("ids of a span are 16 hexadecimal digits")
    if not isinstance(span.name, str) or not isinstance(span.error, str) or span.name in _OWN:
        raise ValueError("a span of a rank has a name of its own")
    span.attributes = {**_plain(span.attributes), **own}
    if span.name == "point" and not isinstance(span.attributes.get("point"), str):
        raise ValueError("the span of a point says which")
    span.start_ns = int(span.start_ns) - offset_ns
    span.end_ns = int(span.end_ns) - offset_ns if span.end_ns else 0
    return span.to_dict()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError where a value is no text, number or truth."""
    found = {str(name): value for name, value in values.items()}
    if not all(isinstance(value, str | int | float | bool) for value in found.values()):
        raise ValueError("attributes are plain values")
    return found
