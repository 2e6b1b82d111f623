"""What goes into which plot: panels of comparable points, and lines of points in one panel. No matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from commbench.report.summary import VARIANTS, Summary, records, sort_points, took_text
from commbench.types import AUTO, COLLECTIVES, NO_DTYPE

if TYPE_CHECKING:
    import pandas as pd

DRAWN = ("ok", "unsteady")  # statuses whose figures are drawn, unsteady ones with a mark
CROSSED = ("wrong", "failed", "timeout", "refused")  # marked with a cross where the point would be


@dataclass(frozen=True, slots=True)
class Panel:
    """Points of one collective and dtype that differ only in size, backend, policy and run."""

    collective: str
    title: str
    points: pd.DataFrame

    @property
    def has_sizes(self) -> bool:
        return COLLECTIVES[self.collective].has_data if self.collective in COLLECTIVES else True


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one run that asked alike and took the same backend.

    run is an index into the summaries. forced: the backend was asked for by name. label: for the legend.
    """

    run: int
    backend: str
    forced: bool
    label: str

    def sort_key(self) -> tuple[int, str, bool, str]:
        return (self.run, self.backend, self.forced, self.label)


def combine(summaries: Sequence[Summary]) -> pd.DataFrame:
    """The points of all runs with a column ``run`` (index into ``summaries``) and ``variant`` (what varies)."""
    import pandas as pd

    frames = [s.points.assign(run=i) for i, s in enumerate(summaries) if not s.points.empty]
    if not frames:
        return summaries[0].points.assign(run=0, variant="")
    points = sort_points(pd.concat(frames, ignore_index=True))
    # two latencies of a graph that are different quantities
    chained = (points["mode"] == "graph") & (points["timing"] == "chained")
    points["mode"] = points["mode"].mask(chained, "graph chained")
    varying = varying_in(points)
    texts = [
        " · ".join(_variant_text(v, value) for v in varying[row["collective"]] if (value := row[v]))
        for row in records(points[["collective", *VARIANTS]])
    ]
    return points.assign(variant=texts)


def varying_in(points: pd.DataFrame) -> dict[str, list[str]]:
    """Per collective those of VARIANTS in which its points differ, so that a reader needs to see them."""
    return {
        str(name): [v for v in VARIANTS if group[v].nunique() > 1]
        for name, group in points.groupby("collective", sort=False)
    }


def _variant_text(name: str, value: object) -> str:
    if name == "world_size":
        return f"{value} ranks"
    if name == "placement":
        return f"{value}-place"
    if name == "group":
        return f"group {value}"
    return f"sync {value}" if name == "sync" else str(value)


def panels(points: pd.DataFrame) -> list[Panel]:
    """One panel per collective, dtype and whatever else varies but size, backend, policy and run."""
    found = []
    for (collective, dtype, variant), group in points.groupby(["collective", "dtype", "variant"], sort=False):
        parts = [str(collective)] + ([str(dtype)] if dtype != NO_DTYPE else []) + ([str(variant)] if variant else [])
        found.append(Panel(str(collective), " · ".join(parts), group))
    return found


def run_names(summaries: Sequence[Summary]) -> list[str]:
    """A name per run for legends: its run_id, with the directory where two runs share one."""
    ids = [s.run_id for s in summaries]
    return [s.run_id if ids.count(s.run_id) == 1 else f"{s.run_id} ({s.run.directory})" for s in summaries]


def line_of(row: Mapping[str, Any], names: Sequence[str], several_policies: bool) -> Line:
    """The line that a point belongs to."""
    asked, picked = str(row["backend_requested"]), str(row["backend_picked"])
    forced = asked != AUTO and asked == picked
    how = "forced" if forced else "auto" if asked == AUTO else f"asked for {asked}"
    if several_policies and asked == AUTO:
        how += f", {row['policy']}"
    run = int(row["run"])
    label = f"{took_text(row)} ({how})" + (f" · {names[run]}" if len(names) > 1 else "")
    return Line(run, picked, forced, label)


def lines(panel: pd.DataFrame, names: Sequence[str], several_policies: bool) -> Iterator[tuple[Line, pd.DataFrame]]:
    """Unbroken stretches of points, by size. A line ends where another backend was taken or a point is no success."""
    for _, group in panel.groupby(["run", "backend_requested", "policy"], sort=False):
        ordered = group.sort_values("size_bytes", kind="stable")
        drawn = ordered["status"].isin(DRAWN).to_numpy() & ordered["latency_median_s"].notna().to_numpy()
        rows = records(ordered[["run", "backend_requested", "backend_picked", "policy", "quantised"]])
        own = [line_of(row, names, several_policies) if d else None for d, row in zip(drawn, rows, strict=True)]
        start = 0
        for i in range(1, len(own) + 1):
            if i == len(own) or own[i] != own[start]:
                if (line := own[start]) is not None:
                    yield line, ordered.iloc[start:i]
                start = i


def chosen_sizes(sizes: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of the sizes, evenly spread, the smallest and the largest among them."""
    distinct = sorted(set(sizes))
    if len(distinct) <= most:
        return distinct
    places = np.unique(np.round(np.linspace(0, len(distinct) - 1, most)).astype(int))
    return [distinct[int(i)] for i in places]
