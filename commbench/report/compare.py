"""Comparisons and verdicts on a terminal, and as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from commbench.analysis.compare import BOTH, MISSING, NEW, WITHIN_LAUNCHES, Comparison, counts_of, percent
from commbench.analysis.gate import Judgement, Status
from commbench.report.table import print_whole
from commbench.units import format_time

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from commbench.analysis.workload import StepChange, Workload

STATUS_STYLE = {
    Status.PASS: "bold green",
    Status.REGRESSION: "bold red",
    Status.INCONCLUSIVE: "bold yellow",
}


def interval(ratio: float, low: float, high: float) -> str:
    """``+3.2 % (+1.1 to +5.3 %)``: never a percentage without its interval."""
    if not math.isfinite(ratio):
        return "–"
    if not (math.isfinite(low) and math.isfinite(high)):
        return "no interval"
    span = f"{percent(low)} to {percent(high)}"
    return f"{percent(ratio)} ({span.replace(' % to', ' to')})"


def sorted_points(comparison: Comparison) -> pd.DataFrame:
    """All points, worst first: changed picks, missing points, those whose whole interval is slower, the others."""
    points = comparison.points
    rank = points["state"].map({MISSING: 0, NEW: 1, BOTH: 3}).fillna(4)
    rank = rank.where(~(points["ratio_low"] > 1), 2).where(~points["pick_changed"], -1)
    return points.assign(_rank=rank).sort_values(
        ["_rank", "ratio", "label"], ascending=[True, False, True], kind="stable"
    ).drop(columns="_rank")  # fmt: skip


def sorted_families(comparison: Comparison) -> pd.DataFrame:
    """Families that have something to compare or lack something: surely slower ones, then by ratio."""
    families = comparison.families
    families = families[(families["compared"] > 0) | (families["missing"] > 0) | (families["new"] > 0)]
    return families.assign(_slow=families["ratio_low"] > 1).sort_values(
        ["_slow", "ratio", "family"], ascending=[False, False, True], kind="stable"
    ).drop(columns="_slow")  # fmt: skip


def print_comparison(
    comparison: Comparison,
    console: Console,
    *,
    names: tuple[str, str],
    notes: Sequence[str] = (),
    forced: Sequence[str] = (),
    rows: int | None = 20,
) -> None:
    """Families, then the worst ``rows`` points (None: all), then changed picks and missing points."""
    counts = counts_of(comparison)
    head = Text.assemble(("candidate: ", "dim"), (names[1], "bold"), ("; baseline: ", "dim"), (names[0], "bold"))
    console.print(head)
    if forced:
        console.print(Text(f"⚠ forced: {'; '.join(forced)}", style="bold yellow"))
    said = [f"{counts['compared']} points compared, ratios with 95 % intervals {comparison.unit}"]
    said += [f"{counts[k]} {text}" for k, text in _COUNTED.items() if counts[k]]
    console.print(", ".join(said))
    if counts["compared"]:
        _print_families(comparison, console)
        _print_points(comparison, console, rows)
    _print_lists(comparison, console, rows)
    for note in notes:
        console.print(Text(f"note: {note}", style="dim"))


_COUNTED = {
    "picks_changed": "with another backend",
    "missing": "missing in the candidate",
    "new": "missing in the baseline",
    "not_measured": "not timed on either side",
}


def print_step_changes(load: Workload, steps: Sequence[StepChange], console: Console) -> None:
    """Milliseconds per step in collectives on both sides, by phase, and the ratio with its interval."""
    title = f"{load.name}: {load.dtype} on {load.tp} ranks, time per step in collectives"
    console.print()
    console.print(Text(title, style="bold cyan"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("phase")
    for name in ("baseline", "candidate", "difference", "candidate / baseline (95 %)"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps:
        ratio = Text(interval(step.ratio, step.ratio_low, step.ratio_high))
        ratio.stylize(_ratio_style(step.ratio_low, step.ratio_high))
        times = (step.base_ms, step.cand_ms, step.cand_ms - step.base_ms)
        table.add_row(step.phase, *(f"{t:.3g} ms" for t in times), ratio)
    print_whole(table, console)
    few = min(min(step.base_launches, step.cand_launches) for step in steps)
    used = f"{steps[0].base_launches} and {steps[0].cand_launches} launches"
    why = "; two launches on each side would give an interval" if few < 2 else ""
    console.print(Text(f"from {used}{why}", style="dim"))


def _ratio_style(low: float, high: float) -> str:
    if low > 1:
        return "red"
    return "green" if high < 1 else ""


def _print_families(comparison: Comparison, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("family")
    table.add_column("points", justify="right")
    table.add_column("candidate / baseline (95 %)", justify="right", no_wrap=True)
    for row in _records(sorted_families(comparison)):
        compared, points = row["compared"], row["points"]
        count = f"{compared}" if compared == points else f"{compared} of {points}"
        table.add_row(row["family"], count, _ratio_text(row))
    console.print()
    print_whole(table, console)


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]


def _ratio_text(row: dict[str, Any], mark: str = "") -> Text:
    text = interval(row["ratio"], row["ratio_low"], row["ratio_high"]) + mark
    return Text(text, style=_ratio_style(row["ratio_low"], row["ratio_high"]))


def _print_points(comparison: Comparison, console: Console, rows: int | None) -> None:
    points = sorted_points(comparison)
    points = points[points["state"] == BOTH]
    shown = points if rows is None else points[:rows]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("point, worst first")
    table.add_column("baseline", justify="right", no_wrap=True)
    table.add_column("candidate", justify="right", no_wrap=True)
    table.add_column("change (95 %)", justify="right", no_wrap=True)
    for row in _records(shown):
        change = _ratio_text(row, " *" if row["interval_from"] == WITHIN_LAUNCHES else "")
        times = [format_time(row[f"{side}_s"]) for side in ("base", "cand")]
        table.add_row(Text(_with_pick(row)), *times, change)
    console.print()
    print_whole(table, console)
    if len(shown) < len(points):
        console.print(f"the worst {len(shown)} of {len(points)} points; --all shows every one", style="dim")
    if (shown["interval_from"] == WITHIN_LAUNCHES).any():
        console.print("* one launch: what differs from launch to launch is not in this interval", style="dim")


def _with_pick(row: dict[str, Any]) -> str:
    """The label, with what was taken where that is not what was asked for: ``… [auto→shm]``; both where it changed."""
    label, base, cand = str(row["label"]), str(row["base_picked"]), str(row["cand_picked"])
    if not label.endswith("]"):
        return label
    asked = label.rpartition("[")[2].rstrip("]")
    if row["pick_changed"]:
        return f"{label[:-1]}: {base}→{cand}]"
    return label if asked == cand else f"{label[:-1]}→{cand}]"


def _print_lists(comparison: Comparison, console: Console, rows: int | None) -> None:
    points = comparison.points
    most = len(points) if rows is None else rows
    changed = points[points["pick_changed"]]
    lines = [
        *(
            f"took another backend: {r['label']}: {r['base_picked']} → {r['cand_picked']}"
            for r in _records(changed[:most])
        ),
        *_otherwise(points, most),
        *_absent(points, MISSING, "cand", "missing in the candidate", most),
        *_absent(points, NEW, "base", "missing in the baseline", most),
    ]
    if lines:
        console.print()
    for line in lines:
        console.print(Text(line, style="yellow"))


def _otherwise(points: pd.DataFrame, most: int) -> list[str]:
    """Points that were measured under other conditions on the two sides: their ratio is no change of the code."""
    both = _records(points[points["state"] == BOTH])
    odd = [r for r in both if not set(str(r["base_how"]).split("+")) & set(str(r["cand_how"]).split("+"))]
    return [f"measured otherwise: {r['label']}: {r['base_how']} → {r['cand_how']}" for r in odd[:most]]


def _absent(points: pd.DataFrame, state: str, side: str, text: str, most: int) -> list[str]:
    some = points[points["state"] == state]
    lines = []
    for row in _records(some[:most]):
        status, reason = row[f"{side}_status"], row[f"{side}_reason"]
        why = f" ({status}{': ' + reason if reason else ''})" if status and status not in ("ok", "unsteady") else ""
        lines.append(f"{text}: {row['label']}{why}")
    if len(some) > most:
        lines.append(f"… and {len(some) - most} more {text}")
    return lines


def comparison_dict(
    comparison: Comparison, *, names: tuple[str, str], notes: Sequence[str] = (), forced: Sequence[str] = ()
) -> dict[str, Any]:
    """The comparison for JSON; numbers that are not known are None."""
    columns = [
        "point_id", "label", "family", "state", "base_picked", "cand_picked", "pick_changed", "base_s",
        "cand_s", "base_usable", "cand_usable", "base_status", "cand_status", "ratio", "ratio_low", "ratio_high",
        "interval_from",
    ]  # fmt: skip
    return {
        "baseline": names[0],
        "candidate": names[1],
        "interval": comparison.unit,
        "counts": dict(counts_of(comparison)),
        "forced": list(forced),
        "notes": list(notes),
        "families": [plain(r) for r in sorted_families(comparison).to_dict("records")],
        "points": [plain(r) for r in sorted_points(comparison)[columns].to_dict("records")],
    }


def plain(record: dict[Any, Any]) -> dict[str, Any]:
    """A record for JSON: plain numbers, None for what is not finite."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        item = value.item() if hasattr(value, "item") else value
        found[str(key)] = None if isinstance(item, float) and not math.isfinite(item) else item
    return found


# ---- the gate -------------------------------------------------------------------------------------------------------


def print_judgement(judgement: Judgement, console: Console, *, names: tuple[str, str], verbose: bool = False) -> None:
    """The verdict, the families with their reasons (green ones counted only, unless verbose), canaries and notes."""
    style = STATUS_STYLE[judgement.status]
    console.print(Text.assemble((judgement.status.value.upper(), style), f": {judgement.reason}"))
    rule = judgement.rule
    console.print(
        Text(
            f"candidate: {names[1]}; baseline: {names[0]}; {judgement.method}; margin {rule.margin:.1%}, "
            f"alpha {rule.alpha:g}",
            style="dim",
        )
    )
    if judgement.forced:
        console.print(Text(f"⚠ forced: {'; '.join(judgement.forced)}", style="bold yellow"))
    shown = [v for v in judgement.verdicts if verbose or v.status != Status.PASS or v.faster]
    if shown and all(v.reason == judgement.reason for v in shown):
        console.print(Text(f"{len(shown)} families inconclusive for this reason", style="yellow"))
    elif shown:
        for verdict in shown:
            console.print()
            style = STATUS_STYLE[verdict.status]
            console.print(Text.assemble((verdict.status.value, style), " ", (verdict.family, "bold")))
            console.print(Padding(Text(verdict.reason), (0, 0, 0, 2), expand=False))
        console.print()
    quiet = len(judgement.verdicts) - len(shown)
    if quiet:
        console.print(Text(f"{quiet} {'family' if quiet == 1 else 'families'} not slower", style="green"))
    if judgement.canaries:
        parts = [f"{c.name} {interval(c.ratio, c.low, c.high)}" for c in judgement.canaries]
        console.print(Text("canaries: " + ", ".join(parts), style="dim"))
    for note in judgement.notes:
        console.print(Text(f"note: {note}", style="dim"))
