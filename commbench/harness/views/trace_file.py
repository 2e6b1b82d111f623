"""The file of a trace, in the Chrome trace event format that Perfetto reads, and what it says in a few lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from commbench.harness.views.spans import Span

TRACE_JSON = "trace.json"


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
