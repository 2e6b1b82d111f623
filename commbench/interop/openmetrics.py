"""A judgement as OpenMetrics text, in base units, for a metrics store to keep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from commbench.analysis.gate import Judgement, Status

if TYPE_CHECKING:
    from commbench.analysis.compare import Comparison


def to_openmetrics(judgement: Judgement, comparison: Comparison) -> str:
    """Latency of every point on both sides, ratio of every family, verdict counts; ends with ``# EOF``."""
    points = comparison.points
    columns = (
        "collective",
        "op",
        "dtype",
        "size_bytes",
        "world_size",
        "layout",
        "mode",
        "cache",
        "placement",
        "policy",
    )
    latency = []
    for row in points.to_dict("records"):
        labels = {c: str(row[c]) for c in columns} | {"backend_requested": str(row["backend_requested"])}
        for side, name in (("base", "baseline"), ("cand", "candidate")):
            value = float(row[f"{side}_s"])
            if math.isfinite(value):
                latency.append(({**labels, "side": name, "backend": str(row[f"{side}_picked"])}, value))
    ratio = [({"family": v.family}, v.ratio) for v in judgement.verdicts if math.isfinite(v.ratio)]
    families = [({"status": s.value}, float(len(judgement.with_status(s)))) for s in Status]
    lines = [
        *_gauge("commbench_latency_seconds", "Geometric mean of the launch medians.", latency, unit="seconds"),
        *_gauge("commbench_gate_ratio", "Candidate over baseline of a family.", ratio, unit="ratio"),
        *_gauge("commbench_gate_families", "Families with this verdict.", families),
        *_gauge("commbench_gate_exit_code", "0 pass, 1 regression, 3 inconclusive.", [({}, judgement.exit_code)]),
        "# EOF",
    ]
    return "\n".join(lines) + "\n"


def _gauge(name: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]], unit: str = "") -> Iterable[str]:
    yield f"# TYPE {name} gauge"
    if unit:
        yield f"# UNIT {name} {unit}"
    yield f"# HELP {name} {text}"
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
