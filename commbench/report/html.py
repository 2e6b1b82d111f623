"""The report as one HTML file: everything inside, opens from disk, loads nothing."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commbench.analysis.launches import repeats, variation_text, variations
from commbench.report.lines import DRAWN, combine, panels, run_names, varying_in
from commbench.report.regret import regret_sections
from commbench.report.style import interval_text, short_rate
from commbench.report.summary import (
    VARIANTS,
    Summary,
    checked_text,
    decision_of,
    gather_sizes,
    noise_marks,
    number,
    records,
    took_text,
)
from commbench.types import AUTO, NO_DTYPE
from commbench.units import format_size, format_time

if TYPE_CHECKING:
    import pandas as pd

    from commbench.report.plots import Plot

_NAN = float("nan")

SECTIONS = {  # kind of plot → heading and what one sees in it
    "weights": (
        "Time to sync",
        "Time that a model's weights take from one rank to all others, and the model's size over it, by the size of "
        "the buckets in which the tensors travel. Bars are the 95 % interval of the median.",
    ),
    "latency": (
        "Latency",
        "Median time of one call over message size, on logarithmic axes. The band is the 95 % interval of the median. "
        "A line ends where another backend was taken.",
    ),
    "busbw": (
        "Bandwidth",
        "Bus bandwidth over message size: message size over latency, times a factor that makes collectives comparable "
        "with the speed of a link.",
    ),
    "distribution": (
        "Spread",
        "Every valid iteration of selected sizes, relative to the median of its point. Wide or split shapes mean that "
        "single calls differ a lot; nothing is left out.",
    ),
    "picks": (
        "Backend picked",
        "Which backend calls took when none was asked for (auto). Dashed lines are the thresholds of the policy.",
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell: its text, and the value that it sorts by."""

    text: str
    sort: str | float
    css: str = ""


def render(summaries: Sequence[Summary], plots: Sequence[Plot], path: Path) -> None:
    """Write the page to ``path``, whole or not at all."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("commbench.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    names = run_names(summaries)
    points = combine(summaries)
    head, rows = _table(summaries, names)
    page = environment.get_template("report.html.j2").render(
        title=f"commbench: {', '.join(names)}",
        runs=[_run_facts(s, name) for s, name in zip(summaries, names, strict=True)],
        several=len(summaries) > 1,
        variation=_variation(summaries),
        glance=_glance(points, names),
        figures=_figures(plots, path.parent),
        regrets=regret_sections(summaries, names),
        head=head,
        rows=rows,
    )
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)


def _variation(summaries: Sequence[Summary]) -> str:
    """Of launches of one thing; runs that were measured otherwise are no further launches of it."""
    if not repeats([s.manifest for s in summaries]):
        return ""
    return variation_text(variations([s.per_launch for s in summaries]))


def _figures(plots: Sequence[Plot], directory: Path) -> list[dict[str, Any]]:
    sections = []
    for kind, (heading, about) in SECTIONS.items():
        own = [
            {
                "title": plot.title,
                "alt": plot.description,
                "uri": "data:image/svg+xml;base64," + base64.b64encode(plot.svg.read_bytes()).decode(),
                "png": plot.png.relative_to(directory).as_posix(),
                "svg": plot.svg.relative_to(directory).as_posix(),
            }
            for plot in plots
            if plot.kind == kind
        ]
        if own:
            sections.append({"kind": kind, "heading": heading, "about": about, "plots": own})
    return sections


def _run_facts(summary: Summary, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "directory_word": shlex.quote(str(summary.run.directory)),
        "level": summary.level,
        "verdict": summary.verdict,
        "what": what_was_measured(summary),
        "where": f"{summary.ranks_text} on {summary.device} of {summary.host}",
        "launches": summary.launches_text,
        "started": summary.started,
        "outcome": summary.outcome,
        "policies": ", ".join(summary.policies),
        "marks": summary.marks,
        "problems": [
            {"status": p.status, "count": len(p.labels), "points": p.points, "reason": p.said} for p in summary.problems
        ],
        "unmeasured": gather_sizes(summary.unmeasured),
        "unmeasured_count": len(summary.unmeasured),
        "damaged": summary.damaged,
        "imprecise": summary.imprecise,
        "noisy": summary.noisy,
        "error": str(summary.manifest.get("error") or ""),
        "environment": list(flatten(summary.fingerprint)),
        "command": summary.command,
        "spec": json.dumps(summary.manifest.get("spec"), indent=1, default=str) if "spec" in summary.manifest else "",
    }


def what_was_measured(summary: Summary) -> str:
    """``all_reduce and all_gather of 8 B to 1 MiB in float32``."""
    points = summary.points
    if points.empty:
        return "nothing was measured"
    collectives = list(dict.fromkeys(points["collective"]))
    dtypes = [d for d in dict.fromkeys(points["dtype"]) if d != NO_DTYPE]
    sizes = [int(s) for s in points[points["dtype"] != NO_DTYPE]["size_bytes"]]
    text = _listed(collectives)
    if sizes:
        low, high = min(sizes), max(sizes)
        text += f" of {format_size(low)}" + (f" to {format_size(high)}" if high > low else "")
        text += f" in {_listed(dtypes)}"
    return text


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def flatten(document: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Nested values as (``cpu › model``, text) pairs; what is empty or null is left out."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from flatten(value, (*path, str(key)))
    elif isinstance(document, list) and any(isinstance(item, Mapping | list) for item in document):
        for i, item in enumerate(document):
            yield from flatten(item, (*path, str(i)))
    elif isinstance(document, list):
        if document:
            yield " › ".join(path), _numbers(document)
    elif isinstance(document, int) and path and path[-1].endswith("_bytes") and document >= 1024:
        yield " › ".join(path), f"{document} (about {_rough_size(document)})"
    elif document is not None and document != "":
        yield " › ".join(path), str(document)


def _rough_size(size_bytes: int) -> str:
    unit, scale = next((u, s) for u, s in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)) if size_bytes >= s)
    return f"{size_bytes / scale:.3g} {unit}"


def _numbers(values: list[Any]) -> str:
    """``0–7`` for consecutive whole numbers, else the values with commas."""
    if len(values) > 2 and all(isinstance(v, int) for v in values) and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}–{values[-1]}"
    return ", ".join(str(v) for v in values)


# -- at a glance -------------------------------------------------------------------------------------


def _glance(points: pd.DataFrame, names: Sequence[str]) -> list[dict[str, str]]:
    """Per run, collective and dtype: the latency of the smallest message, the highest bandwidth, what auto took."""
    found = []
    for panel in panels(points) if not points.empty else []:
        rows = [r for r in records(panel.points) if r["status"] in DRAWN and r["latency_median_s"] is not None]
        for run in sorted({r["run"] for r in rows}):
            own = [r for r in rows if r["run"] == run]
            steady = [r for r in own if r["status"] == "ok"] or own
            # the fastest and the best are named among equals: what is quantised only where nothing else is there
            steady = [r for r in steady if not r["quantised"]] or steady
            fast = min(steady, key=lambda r: (r["size_bytes"], r["latency_median_s"]))
            best = max(steady, key=lambda r: number(r["busbw_gb_per_s"]) if r["busbw_gb_per_s"] else 0.0)
            rate = best["busbw_gb_per_s"]
            found.append(
                {
                    "run": names[run],
                    "what": panel.title,
                    "latency": format_time(fast["latency_median_s"]),
                    "latency_at": _at(fast, panel.has_sizes),
                    "busbw": f"{short_rate(rate)} GB/s" if rate else "",
                    "busbw_at": _at(best, panel.has_sizes) if rate else "",
                    "picks": _picks_text([r for r in own if r["backend_requested"] == AUTO], panel.has_sizes),
                }
            )
    return found


def _at(row: Mapping[str, Any], has_size: bool) -> str:
    return f"{format_size(row['size_bytes'])}, {took_text(row)}" if has_size else took_text(row)


def _picks_text(auto: Sequence[Mapping[str, Any]], has_sizes: bool) -> str:
    """``shm 8 B to 32 KiB, torch_dist 128 KiB to 8 MiB``: stretches of one pick over the sizes, per policy."""
    texts = {}
    for policy in dict.fromkeys(r["policy"] for r in auto):
        stretches: list[list[Any]] = []
        for row in sorted((r for r in auto if r["policy"] == policy), key=lambda r: r["size_bytes"]):
            if stretches and stretches[-1][0] == row["backend_picked"]:
                stretches[-1][2] = row["size_bytes"]
            else:
                stretches.append([row["backend_picked"], row["size_bytes"], row["size_bytes"]])
        if not has_sizes or len({s[0] for s in stretches}) == 1:
            texts[policy] = ", ".join(dict.fromkeys(s[0] for s in stretches))
        else:
            texts[policy] = ", ".join(
                f"{pick} {format_size(low)}" + (f" to {format_size(high)}" if high > low else "")
                for pick, low, high in stretches
            )
    return "; ".join(f"{policy}: {text}" if len(texts) > 1 else text for policy, text in texts.items())


# -- the table of points -----------------------------------------------------------------------------


def _table(summaries: Sequence[Summary], names: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    several = len(summaries) > 1
    points = combine(summaries)
    varying = [v for v in VARIANTS if any(v in found for found in varying_in(points).values())]
    launches = any(s.launches > 1 for s in summaries)
    head = (["run"] if several else []) + ["collective", "dtype", "size", *(v.replace("_", " ") for v in varying)]
    head += ["asked", "took", "median", "95 % interval", "p99", "algbw GB/s", "busbw GB/s", "checked", "status"]
    head += ["launches"] if launches else []
    rows = []
    for summary, name in zip(summaries, names, strict=True):
        medians = _launch_medians(summary)
        for row in records(summary.points):
            first = [Cell(name, name)] if several else []
            cells = first + _cells(row, varying)
            if launches:
                cells.append(Cell(f"{row['launches_used']}", float(row["launches_used"]), "number"))
            rows.append({"cells": cells, "status": row["status"], "more": _more(row, medians.get(row["point_id"], []))})
    return head, rows


def _cells(row: Mapping[str, Any], varying: Sequence[str]) -> list[Cell]:
    size = row["size_bytes"]
    sized = row["dtype"] != NO_DTYPE
    cells = [
        Cell(row["collective"], row["collective"]),
        Cell(row["dtype"] if sized else "–", row["dtype"]),
        Cell(format_size(size) if sized else "–", float(size), "number"),
        *(Cell(str(row[v]), float(row[v]) if v == "world_size" else str(row[v])) for v in varying),
        Cell(row["backend_requested"], row["backend_requested"]),
        Cell(took_text(row) or "–", took_text(row)),
    ]
    median, p99 = number(row["latency_median_s"]), number(row["latency_p99_s"])
    low, high = number(row["latency_ci_low_s"]), number(row["latency_ci_high_s"])
    cells += [
        Cell(format_time(median), _sortable(median), "number"),
        Cell(interval_text(low, high), _sortable((high - low) / median if median else _NAN), "number"),
        Cell(format_time(p99), _sortable(p99), "number"),
    ]
    for column in ("algbw_gb_per_s", "busbw_gb_per_s"):
        rate = number(row[column])
        cells.append(Cell(short_rate(rate), _sortable(rate), "number"))
    return [*cells, Cell(checked_text(row), checked_text(row)), Cell(row["status"], row["status"], "status")]


def _launch_medians(summary: Summary) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    if summary.launches < 2:
        return found
    columns = ["point_id", "launch", "latency_median_s", "status"]
    latest = summary.per_launch.drop_duplicates(["point_id", "launch"], keep="last").sort_values("launch")
    for point_id, launch, median, status in latest[columns].itertuples(index=False):
        value = format_time(number(median)) if status == "ok" else f"{status}"
        found.setdefault(str(point_id), []).append(f"launch {launch}: {value}")
    return found


def _more(row: Mapping[str, Any], medians: list[str]) -> dict[str, Any]:
    """What a row tells on demand: the decision with its reasons, and how the point was measured."""
    found = decision_of(row)
    declined = found.get("declined") if found else None
    decision = found and {
        "picked": found.get("picked", ""),
        "reason": found.get("reason", ""),
        "declined": [d for d in declined if isinstance(d, dict)] if isinstance(declined, list) else [],
    }
    facts: list[tuple[str, str]] = []
    if row["reason"]:
        facts.append((f"why {row['status']}", row["reason"]))
    if medians:
        facts.append(("launch medians", "; ".join(medians)))
        spread = number(row["launch_cv"])
        if spread == spread:
            facts.append(
                ("between launches", f"coefficient of variation {spread:.1%}; interval from {row['interval_from']}")
            )
    shortest, longest = number(row["latency_min_s"]), number(row["latency_max_s"])
    if shortest == shortest:
        facts.append(
            (
                "shortest, p90, longest",
                f"{format_time(shortest)}, {format_time(number(row['latency_p90_s']))}, {format_time(longest)}",
            )
        )
    skew, whole = number(row["skew_median_s"]), number(row["t_win_median_s"])
    if skew == skew:
        facts.append(("entry skew (median)", f"{format_time(skew)}; first start to last end {format_time(whole)}"))
    if row["n_samples"]:
        text = f"{row['n_samples']} × {row['iters_per_sample'] or 1} calls"
        if (worth := number(row["n_effective"])) == worth:
            text += f", worth {worth:.0f} independent ones"
        if row["n_invalid"]:
            text += f"; {row['n_invalid']} invalid (start missed)"
        facts.append(("samples", text))
    if row["target_reached"] is False:
        facts.append(("precision", "the interval asked for was not reached in the time given"))
    error = number(row["max_abs_error"])
    if error == error:
        facts.append(("largest error", f"{error:.3g}"))
    facts += _numerics(row)
    enqueue = number(row["enqueue_median_s"])
    if enqueue == enqueue:
        facts.append(("host's time to queue", format_time(enqueue)))
    facts += [
        (name, str(row[name]))
        for name in ("provider", "policy", "mode", "cache", "placement", "sync", "loop", "timing")
        if row[name]
    ]
    if marks := noise_marks(row["noise"]):
        facts.append(("measured in noise", "; ".join(marks)))
    facts.append(("point_id", row["point_id"]))
    return {"decision": decision, "facts": facts}


def _numerics(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was found about the numbers of an all-reduce."""
    relative, ulp = number(row["max_relative_error"]), number(row["max_ulp_error"])
    facts = []
    if relative == relative:
        facts.append(("error", f"{relative:.2g} of the inputs' magnitudes, {ulp:.3g} units in the last place"))
    if row["ranks_agree"] is not None:
        facts.append(("all ranks have the same bits", "yes" if row["ranks_agree"] else "no"))
    if row["repeatable"] is not None:
        facts.append(("the same bits again", "yes" if row["repeatable"] else "no"))
    if row["quantised"]:
        facts.append(("quantised to", str(row["quantised"])))
    return facts


def _sortable(value: float) -> float | str:
    """What the page sorts by; "" marks a missing value, which it puts last."""
    return value if value == value else ""
