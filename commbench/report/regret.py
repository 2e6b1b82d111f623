"""The part of the page that holds the picks against the fastest backends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commbench.errors import CommbenchError
from commbench.report.tune_text import ratio, short_size
from commbench.types import AUTO
from commbench.units import format_time

if TYPE_CHECKING:
    from commbench.analysis.regret import RegretReport
    from commbench.report.summary import Summary

MOST_ROWS = 30


def regret_sections(summaries: Sequence[Summary], names: Sequence[str]) -> list[dict[str, Any]]:
    """One section per run and policy that has points of auto and of forced backends at the same sizes.

    Keys: title, verdict, dead_zones (lines), noise, rows (worst first, at most MOST_ROWS, each a list of texts and
    whether the pick is dead there), hidden (rows left out), problem ("" or why regret cannot be told).
    """
    found = []
    for summary, name in zip(summaries, names, strict=True):
        points = summary.per_launch
        if points.empty or not {True, False} <= set(points["backend_requested"] == AUTO):
            continue
        for policy in sorted(set(points.loc[points["backend_requested"] == AUTO, "policy"].astype(str))):
            title = f"{name}, policy {policy}" if len(summaries) > 1 or len(summary.policies) > 1 else ""
            found.append(_section(summary, policy, title))
    return [section for section in found if section is not None]


def _section(summary: Summary, policy: str, title: str) -> dict[str, Any] | None:
    from commbench.analysis.regret import regret
    from commbench.errors import UsageError
    from commbench.interop.policy_of_run import incumbent_of

    try:
        incumbent, name = incumbent_of(summary.manifest, policy)
    except CommbenchError as error:
        return {"title": title, "problem": f"regret cannot be told: {error}"}
    try:
        report = regret(summary.per_launch, name, incumbent.kernel)
    except UsageError:  # no point that counts was measured both ways: there is nothing to show
        return None
    return {"title": title, "problem": "", **_facts(report)}


def _facts(report: RegretReport) -> dict[str, Any]:
    worst = report.worst
    rows = [
        {
            "dead": p.dead,
            "cells": [
                ratio(p.regret),
                "–" if p.kernel == p.fastest else f"{ratio(p.low)} to {ratio(p.high)}",
                short_size(p.size_bytes),
                p.cell.title,
                p.kernel,
                p.fastest,
                format_time(p.pick_s),
                format_time(p.fastest_s),
            ],
        }
        for p in report.points[:MOST_ROWS]
    ]
    noise = ""
    if math.isfinite(report.repeat):
        noise = f"One kernel, measured twice in a launch, differs by {ratio(math.expm1(report.repeat))} (median)."
    return {
        "verdict": f"Mean regret {ratio(report.mean)} over {len(report.points)} points, worst {ratio(worst.regret)} at "
        f"{short_size(worst.size_bytes)} ({worst.cell.title}).",
        "dead_zones": [
            f"{z.cell.title}, {short_size(z.first_bytes)} to {short_size(z.last_bytes)}: {z.picked} is taken, "
            f"{z.fastest} is faster, up to {ratio(z.worst)}"
            for z in report.dead_zones
        ],
        "noise": noise,
        "rows": rows,
        "hidden": len(report.points) - len(rows),
    }
