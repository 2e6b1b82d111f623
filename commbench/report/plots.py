"""The plots of a report.

Figures are made without pyplot: no global state, no display, and each is freed when it is written. All
distances of the layout are inches, so that text never meets text whatever the number of panels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from commbench.analysis.iterations import iteration_latencies
from commbench.report.lines import (
    CROSSED,
    DRAWN,
    Line,
    Panel,
    chosen_sizes,
    combine,
    line_of,
    lines,
    panels,
    run_names,
)
from commbench.report.style import PROBLEM, RC, Look, decade_ticks, looks, short_time, size_ticks
from commbench.report.summary import Summary, records
from commbench.report.thresholds import Threshold, thresholds_of
from commbench.types import AUTO, NO_DTYPE
from commbench.units import format_size, format_time

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_PANELS = 12  # of one figure
_DASHES = ("-", "--", "-.", ":")
_STYLE: Any = {
    **RC,
    "axes.titley": 1.03,  # a fixed place: matplotlib would measure every tick label to find one
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot on disk: its file stem, a heading, and the text that stands in for it."""

    name: str
    kind: str
    title: str
    description: str
    png: Path
    svg: Path


@dataclass(frozen=True, slots=True)
class _Context:
    """What every figure of a report shares."""

    summaries: tuple[Summary, ...]
    names: tuple[str, ...]
    points: pd.DataFrame
    looks: dict[str, Look]
    several_policies: bool

    @property
    def subtitle(self) -> str:
        parts = []
        for summary, name in zip(self.summaries, self.names, strict=True):
            facts = [summary.host, f"{summary.ranks_text} on {summary.device}", summary.launches_text]
            parts.append(f"{name}: {', '.join(facts)}")
        return "\n".join(parts)

    @property
    def marks(self) -> str:
        several = len(self.summaries) > 1
        parts = [
            f"{name}: {mark}" if several else mark
            for summary, name in zip(self.summaries, self.names, strict=True)
            for mark in summary.marks
        ]
        return "\n".join(f"⚠ {part}" for part in dict.fromkeys(parts))


def draw(summaries: Sequence[Summary], directory: Path) -> list[Plot]:
    """Write every plot that the runs have data for into ``directory`` (made if need be), as PNG and SVG."""
    points = combine(summaries)
    if points.empty:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    backends = {str(b) for b in points["backend_picked"] if b}
    context = _Context(
        tuple(summaries), tuple(run_names(summaries)), points, looks(backends), points["policy"].nunique() > 1
    )
    plots: list[Plot] = []
    with matplotlib.rc_context(_STYLE):
        context, drawn = _weights(context, directory)
        plots += drawn
        points = context.points
        if points.empty:
            return plots
        groups = _figures(panels(points))
        latencies = _latencies(context, points) if points["status"].isin(DRAWN).any() else None
        for kind, drawer in (("latency", _latency), ("busbw", _busbw)):
            plots += [p for g, own in groups if (p := drawer(context, own, directory, _stem(kind, g))) is not None]
        if latencies is not None and not latencies.empty:
            for group, own in groups:
                plot = _distribution(context, own, latencies, directory, _stem("distribution", group))
                plots += [plot] if plot is not None else []
        plots += _picks(context, directory)
    return plots


def _weights(context: _Context, directory: Path) -> tuple[_Context, list[Plot]]:
    """The plot of runs that are one bucket size of a weight update each, and the context of all others."""
    from commbench.report.weights import draw_synced, synced

    found = {run: one for run, summary in enumerate(context.summaries) if (one := synced(summary)) is not None}
    if not found:
        return context, []
    machines = [
        f"{s.host}: {s.device}, {s.launches_text} per bucket size" for s in (context.summaries[run] for run in found)
    ]
    marks = dict.fromkeys(f"⚠ {mark}" for run in found for mark in context.summaries[run].marks)
    plot = draw_synced(
        list(found.values()), directory, machines="\n".join(dict.fromkeys(machines)), marks="\n".join(marks)
    )
    rest = context.points[~context.points["run"].isin(list(found))]
    return replace(context, points=rest), [plot]


def _stem(kind: str, group: str) -> str:
    return f"{kind}-{group}" if group else kind


def _figures(all_panels: list[Panel]) -> list[tuple[str, list[Panel]]]:
    """Panels by figure: one figure where they fit, else as many as it takes, keeping collectives whole if possible."""
    if len(all_panels) <= MOST_PANELS:
        return [("", all_panels)]
    parts: list[list[Panel]] = [[]]
    for name in dict.fromkeys(p.collective for p in all_panels):
        own = [p for p in all_panels if p.collective == name]
        if len(parts[-1]) + len(own) > MOST_PANELS:
            parts.append([])
        for panel in own:
            if len(parts[-1]) == MOST_PANELS:
                parts.append([])
            parts[-1].append(panel)
    return [(str(k), part) for k, part in enumerate(filter(None, parts), 1)]


# -- frame of a figure ------------------------------------------------------------------------------


class _Sheet:
    """A figure with a heading, a legend and a grid of panels, laid out in inches."""

    def __init__(
        self, context: _Context, title: str, n: int, *, size: tuple[float, float] | None = None, gap: float = 0.62
    ) -> None:
        columns = 1 if n == 1 else 2 if n in (2, 4) else 3
        rows = math.ceil(n / columns)
        width, height = size or {1: (7.2, 3.9), 2: (4.4, 2.9), 3: (3.5, 2.4)}[columns]
        self.columns, self.rows, self.n = columns, rows, n
        self.panel = (width, height)
        self.gap = (0.35, gap)
        self.left, self.right, self.bottom = 0.85, 0.25, gap
        self.title, self.subtitle, self.marks = title, context.subtitle, context.marks
        self.legend: dict[str, Any] = {}
        self.figure = Figure(dpi=120, facecolor="white")
        self.axes: list[Axes] = [self.figure.add_axes((0.0, 0.0, 1.0, 1.0), label=str(i)) for i in range(n)]

    @property
    def width(self) -> float:
        return self.left + self.columns * self.panel[0] + (self.columns - 1) * self.gap[0] + self.right

    def is_left(self, i: int) -> bool:
        return i % self.columns == 0

    def is_bottom(self, i: int) -> bool:
        return i + self.columns >= self.n

    def finish(self, directory: Path, name: str, kind: str, description: str) -> Plot:
        """Place everything and write the files."""
        longest = max((len(text) for text in self.legend), default=0)
        columns = max(1, min(len(self.legend) or 1, int((self.width - 0.4) / (0.075 * longest + 0.55))))
        legend_rows = math.ceil(len(self.legend) / columns)
        subtitle_lines = self.subtitle.count("\n") + 1
        mark_lines = self.marks.count("\n") + 1 if self.marks else 0
        head = 0.40 + 0.18 * subtitle_lines + 0.19 * mark_lines + 0.19 * legend_rows + 0.34
        height = head + self.rows * self.panel[1] + (self.rows - 1) * self.gap[1] + self.bottom
        self.figure.set_size_inches(self.width, height)
        for i, axes in enumerate(self.axes):
            row, column = divmod(i, self.columns)
            x = self.left + column * (self.panel[0] + self.gap[0])
            y = height - head - (row + 1) * self.panel[1] - row * self.gap[1]
            axes.set_position((x / self.width, y / height, self.panel[0] / self.width, self.panel[1] / height))
        y = height - 0.1
        text = self.figure.text
        text(0.15 / self.width, y / height, self.title, fontsize=12, fontweight="bold", va="top")
        y -= 0.29
        text(0.15 / self.width, y / height, self.subtitle, fontsize=8.5, color="#555555", va="top")
        y -= 0.18 * subtitle_lines
        if self.marks:
            text(0.15 / self.width, y / height, self.marks, fontsize=9, color=PROBLEM, fontweight="bold", va="top")
            y -= 0.19 * mark_lines
        if self.legend:
            self.figure.legend(
                self.legend.values(), self.legend.keys(), loc="upper left", ncols=columns, frameon=False, fontsize=8.5,
                bbox_to_anchor=(0.16 / self.width, (y + 0.01) / height), borderaxespad=0.0, columnspacing=1.4,
                labelspacing=0.35, borderpad=0.0, handletextpad=0.5,
            )  # fmt: skip
        png, svg = directory / f"{name}.png", directory / f"{name}.svg"
        self.figure.savefig(png, format="png", pil_kwargs={"compress_level": 4})
        self.figure.savefig(svg, format="svg", metadata={"Date": None})
        return Plot(name, kind, self.title, description, png, svg)


def _heading(title: str, own: Sequence[Panel]) -> str:
    """The title, with what all panels of the figure share."""
    names = list(dict.fromkeys(p.collective for p in own))
    shared = own[0].title if len(own) == 1 else ", ".join(names) if len(names) < 4 else ""
    return f"{title}: {shared}" if shared else title


def _limits(values: Iterable[float], pad: float) -> tuple[float, float] | None:
    finite = [v for v in values if math.isfinite(v) and v > 0]
    return (min(finite) / pad, max(finite) * pad) if finite else None


def _value_limits(frames: Sequence[pd.DataFrame]) -> tuple[float, float]:
    """Limits of a value axis from frames of (value, low, high): all values, and the bands as far as they are near.

    The interval of two launches that disagree spans many decades; an axis that showed it whole would show nothing.
    """
    values = (
        np.concatenate([f.to_numpy(dtype=np.float64, na_value=np.nan) for f in frames]) if frames else np.empty((0, 3))
    )
    inner = _limits(values[:, 0], 1.0) if len(values) else None
    if inner is None:
        return (1e-6, 1e-3)
    low, high = _limits(values.reshape(-1), 1.0) or inner
    return (max(low, inner[0] / 4) / 1.6, min(high, inner[1] * 4) * 1.35)


def _log_axis(axis: Any, ticks: Sequence[float], text: Callable[[float], str]) -> None:
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(float(value))))


def _size_axis(axes: Axes, sizes: Sequence[int], width: float) -> None:
    axes.set_xscale("log", base=2)
    limits = _limits([float(s) for s in sizes], 1.0)
    if limits is not None:
        pad = max(1.25, (limits[1] / limits[0]) ** 0.04)
        axes.set_xlim(limits[0] / pad, limits[1] * pad)
    _log_axis(axes.xaxis, size_ticks(sizes, most=max(2, int(width / 0.62))), lambda v: format_size(round(v)))


def _value_axis(axes: Axes, limits: tuple[float, float], text: Callable[[float], str], labels: bool) -> None:
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    _log_axis(axes.yaxis, decade_ticks(*limits), text)
    axes.tick_params(axis="y", labelleft=labels, length=0 if not labels else 3)


# -- latency and bandwidth against size --------------------------------------------------------------


def _latency(context: _Context, own: list[Panel], directory: Path, name: str) -> Plot | None:
    return _against_size(
        context, own, directory, name, kind="latency", title="Latency against message size", unit="median latency",
        columns=("latency_median_s", "latency_ci_low_s", "latency_ci_high_s"), text=short_time,
    )  # fmt: skip


def _busbw(context: _Context, own: list[Panel], directory: Path, name: str) -> Plot | None:
    own = [
        Panel(p.collective, p.title, _with_bandwidth_interval(p.points))
        for p in own
        if p.has_sizes and p.points["busbw_gb_per_s"].notna().any()
    ]
    if not own:
        return None
    return _against_size(
        context, own, directory, name, kind="busbw", title="Bus bandwidth against message size",
        unit="busbw (GB/s = 1e9 bytes per second)", columns=("busbw_gb_per_s", "busbw_low", "busbw_high"),
        text=lambda v: f"{v:g}",
    )  # fmt: skip


def _with_bandwidth_interval(points: pd.DataFrame) -> pd.DataFrame:
    """busbw is inverse to latency, so its interval is the latency's, turned round."""
    product = points["busbw_gb_per_s"] * points["latency_median_s"]
    return points.assign(
        busbw_low=product / points["latency_ci_high_s"], busbw_high=product / points["latency_ci_low_s"]
    )


def _against_size(
    context: _Context,
    own: list[Panel],
    directory: Path,
    name: str,
    *,
    kind: str,
    title: str,
    unit: str,
    columns: tuple[str, str, str],
    text: Callable[[float], str],
) -> Plot | None:
    if not any(panel.has_sizes for panel in own):
        title = title.partition(" against")[0]
    sheet = _Sheet(context, _heading(title, own), len(own))
    drawn = [p.points[p.points["status"].isin(DRAWN)] for p in own]
    limits = _value_limits([frame[list(columns)] for frame in drawn])
    for i, (axes, panel) in enumerate(zip(sheet.axes, own, strict=True)):
        if len(own) > 1:
            axes.set_title(panel.title, fontsize=9.5, loc="left", fontweight="bold")
        _value_axis(axes, limits, text, sheet.is_left(i))
        if sheet.is_left(i):
            axes.set_ylabel(unit if len(unit) < 22 or sheet.panel[1] > 3 else unit.partition(" (")[0] + " (GB/s)")
        sizes = [int(s) for s in panel.points["size_bytes"]]
        if panel.has_sizes:
            _size_axis(axes, sizes, sheet.panel[0])
            if sheet.is_bottom(i):
                axes.set_xlabel("message size")
            _draw_lines(context, axes, panel, columns, sheet.legend)
        else:
            _draw_sizeless(context, axes, panel, columns, sheet.legend)
        _cross_problems(context, axes, panel, sheet.legend)
    _sort_legend(sheet.legend)
    what = ", ".join(panel.title for panel in own)
    return sheet.finish(directory, name, kind, f"{title} on logarithmic axes, one line per backend, for {what}.")


def _line_style(context: _Context, line: Line) -> dict[str, Any]:
    look = context.looks[line.backend]
    several = len(context.summaries) > 1
    colour = _shade(look.colour, line.run)
    dashes = _DASHES[line.run % len(_DASHES)] if several else "--" if line.forced else "-"
    return {
        "color": colour,
        "marker": look.marker,
        "linestyle": dashes,
        "linewidth": 1.2 if line.forced else 1.8,
        "markersize": 4.5 if not line.forced else 5.5,
        "markerfacecolor": "white" if line.forced else colour,
        "markeredgewidth": 1.1,
    }


def _shade(colour: str, run: int) -> str:
    """The colour itself for the first run, darker and lighter ones for those after it."""
    towards, part = ((0.0, 0.0), (0.0, 0.45), (1.0, 0.4), (0.0, 0.7))[run % 4]
    r, g, b = to_rgb(colour)

    def mix(c: float) -> float:
        return c * (1 - part) + towards * part

    return str(to_hex((mix(r), mix(g), mix(b))))


def _draw_lines(
    context: _Context, axes: Axes, panel: Panel, columns: tuple[str, str, str], legend: dict[str, Any]
) -> None:
    stretches = list(lines(panel.points, context.names, context.several_policies))
    # Forced lines first: auto, which took one of them, stays visible on top.
    for line, points in sorted(stretches, key=lambda s: not s[0].forced):
        style = _line_style(context, line)
        x = points["size_bytes"].to_numpy(dtype=np.float64)
        y, low, high = (points[c].to_numpy(dtype=np.float64, na_value=np.nan) for c in columns)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.22, linewidth=0)
        known = np.pad(np.isfinite(low) & np.isfinite(high), 1)
        alone = known[1:-1] & ~known[:-2] & ~known[2:]  # a band needs two neighbours
        axes.vlines(x[alone], low[alone], high[alone], color=style["color"], alpha=0.6, linewidth=3)
        axes.plot(x, y, **style)
        legend.setdefault(line.label, (0, line.sort_key(), Line2D([], [], **style)))
        unsteady = points["status"].to_numpy() == "unsteady"
        if unsteady.any():
            ring: dict[str, Any] = {
                "marker": "o",
                "color": PROBLEM,
                "markerfacecolor": "none",
                "linestyle": "none",
                "markersize": 11,
            }
            axes.plot(x[unsteady], y[unsteady], **ring)
            legend.setdefault("unsteady: no steady state found", (1, "", Line2D([], [], **ring)))


def _draw_sizeless(
    context: _Context, axes: Axes, panel: Panel, columns: tuple[str, str, str], legend: dict[str, Any]
) -> None:
    """A barrier: one place per backend instead of a size axis."""
    found = list(lines(panel.points, context.names, context.several_policies))
    for x, (line, points) in enumerate(found):
        style: dict[str, Any] = {**_line_style(context, line), "linestyle": "none", "markersize": 7}
        y, low, high = (points[c].to_numpy(dtype=np.float64, na_value=np.nan) for c in columns)
        axes.vlines([x] * len(y), low, high, color=style["color"], alpha=0.6, linewidth=3)
        axes.plot([x] * len(y), y, **style)
        legend.setdefault(line.label, (0, line.sort_key(), Line2D([], [], **_line_style(context, line))))
    axes.set_xlim(-0.8, max(len(found), 1) - 0.2)
    axes.xaxis.set_major_locator(FixedLocator([]))
    axes.set_xlabel("no message")


def _cross_problems(context: _Context, axes: Axes, panel: Panel, legend: dict[str, Any]) -> None:
    """A cross at the foot of the plot for each point that has no figure to show."""
    bad = panel.points[panel.points["status"].isin(CROSSED)]
    if bad.empty:
        return
    style: dict[str, Any] = {
        "marker": "x",
        "color": PROBLEM,
        "linestyle": "none",
        "markersize": 7,
        "markeredgewidth": 2,
    }
    x = bad["size_bytes"].to_numpy(dtype=np.float64) if panel.has_sizes else np.zeros(len(bad))
    # Points at one size are told apart by their height: one row per backend asked for.
    asked = sorted({str(b) for b in panel.points["backend_requested"]})
    y = [0.04 + 0.06 * asked.index(str(b)) for b in bad["backend_requested"]]
    axes.plot(x, y, transform=axes.get_xaxis_transform(), clip_on=False, zorder=5, **style)
    statuses = [s for s in CROSSED if (context.points["status"] == s).any()]
    legend.setdefault(f"no success: {', '.join(statuses)} (see list)", (2, "", Line2D([], [], **style)))


def _sort_legend(legend: dict[str, Any]) -> None:
    """Turn label → (group, key, handle) into label → handle, in the order of group and key."""
    ordered = sorted(legend.items(), key=lambda item: (item[1][0], str(item[1][1])))
    legend.clear()
    legend.update({text: handle for text, (_, _, handle) in ordered})


# -- distributions -----------------------------------------------------------------------------------


def _latencies(context: _Context, points: pd.DataFrame) -> pd.DataFrame:
    """Latency of every valid iteration of the points that distributions show; column ``run`` tells runs apart."""
    import pandas as pd

    wanted: dict[int, set[str]] = {}
    for panel in panels(points):
        shown = _shown(panel)
        for run, point_id in zip(shown["run"], shown["point_id"], strict=True):
            wanted.setdefault(int(run), set()).add(str(point_id))
    frames = []
    for run, ids in wanted.items():
        summary = context.summaries[run]
        frames.append(iteration_latencies(summary.run.samples(ids), summary.per_launch).assign(run=run))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _shown(panel: Panel) -> pd.DataFrame:
    drawn = panel.points[panel.points["status"].isin(DRAWN)]
    sizes = chosen_sizes([int(s) for s in drawn["size_bytes"]], 4)
    return drawn[drawn["size_bytes"].isin(sizes)]


def _distribution(
    context: _Context, own: list[Panel], latencies: pd.DataFrame, directory: Path, name: str
) -> Plot | None:
    """Spread of each point around its own median: on one absolute axis the spread would be a dot."""
    by_point = {
        key: np.sort(g["latency_s"].to_numpy()) for key, g in latencies.groupby(["run", "point_id"], sort=False)
    }
    shown = {p.title: f[[k in by_point for k in _keys(f)]] for p in own for f in [_shown(p)]}
    filled = [p for p in own if not shown[p.title].empty]
    if not filled:
        return None
    title = "Spread of latency over iterations"
    sheet = _Sheet(context, _heading(title, filled), len(filled), gap=0.76)
    relative = [by_point[key] / np.median(by_point[key]) for p in filled for key in _keys(shown[p.title])]
    top = max(1.15, 1.12 * max(_quantile(r, 0.99) for r in relative))
    limits = (min(0.9, 0.95 * min(_quantile(r, 0.01) for r in relative)), top)
    for i, (axes, panel) in enumerate(zip(sheet.axes, filled, strict=True)):
        if len(filled) > 1:
            axes.set_title(panel.title, fontsize=9.5, loc="left", fontweight="bold")
        _value_axis(axes, limits, lambda v: f"{v:.3g}×", sheet.is_left(i))
        if sheet.is_left(i):
            axes.set_ylabel("latency / median of its point")
        single = _draw_violins(context, axes, panel, shown[panel.title], by_point, sheet.legend, top)
        if sheet.is_bottom(i):
            texts = ["message size"] * panel.has_sizes + ["median latency"] * single
            axes.set_xlabel(", ".join(texts))
    black: dict[str, Any] = {"color": "black", "linestyle": "none"}
    for text, marker in (("p90", "_"), ("p99", "+")):
        sheet.legend[text] = (1, text, Line2D([], [], marker=marker, markersize=8, markeredgewidth=1.3, **black))
    if any(r[-1] > top for r in relative):
        handle = Line2D([], [], marker=(3, 0, 0), markersize=5, **{**black, "color": "#555555"})
        sheet.legend["slowest iteration is beyond the axis"] = (2, "", handle)
    _sort_legend(sheet.legend)
    what = ", ".join(panel.title for panel in filled)
    text = f"{title}, every valid iteration of all launches, relative to the median of its point: {what}."
    return sheet.finish(directory, name, "distribution", text)


def _keys(frame: pd.DataFrame) -> list[tuple[int, str]]:
    return [(int(run), str(i)) for run, i in zip(frame["run"], frame["point_id"], strict=True)]


def _quantile(ordered: Any, q: float) -> float:
    return float(np.quantile(ordered, q, method="inverted_cdf"))


def _draw_violins(
    context: _Context,
    axes: Axes,
    panel: Panel,
    frame: pd.DataFrame,
    by_point: dict[Any, Any],
    legend: dict[str, Any],
    top: float,
) -> bool:
    """A violin per point, side by side at each size. True where every size has but one, whose median is then named."""
    at_size: dict[int, list[tuple[Line, tuple[int, str]]]] = {size: [] for size in sorted(set(frame["size_bytes"]))}
    for row, key in zip(records(frame), _keys(frame), strict=True):
        at_size[int(row["size_bytes"])].append((line_of(row, context.names, context.several_policies), key))
    single = all(len(own) == 1 for own in at_size.values())
    centres: dict[Line, list[float]] = {}
    xs, p90s, p99s, beyond, texts = [], [], [], [], []
    for middle, (size, own) in enumerate(at_size.items()):
        width = 0.84 / len(own)
        for place, (line, key) in enumerate(sorted(own, key=lambda entry: entry[0].sort_key())):
            x = middle - 0.42 + (place + 0.5) * width
            ordered = by_point[key] / np.median(by_point[key])
            _violin(axes, x, min(width, 0.5) * 0.46, ordered[ordered <= top], _line_style(context, line)["color"])
            centres.setdefault(line, []).append(x)
            xs.append(x)
            p90s.append(_quantile(ordered, 0.9))
            p99s.append(_quantile(ordered, 0.99))
            beyond += [x] if ordered[-1] > top else []
        text = format_size(size) if panel.has_sizes else "no message"
        texts.append(f"{text}\n{format_time(float(np.median(by_point[own[0][1]])))}" if single else text)
    black: dict[str, Any] = {"color": "black", "linestyle": "none", "markeredgewidth": 1.3}
    axes.plot(xs, p90s, marker="_", markersize=8, **black)
    axes.plot(xs, p99s, marker="+", markersize=7, **black)
    if beyond:
        beyond_mark: dict[str, Any] = {"marker": (3, 0, 0), "color": "#555555", "markersize": 5, "linestyle": "none"}
        axes.plot(beyond, [top] * len(beyond), clip_on=False, **beyond_mark)
    for line, places in centres.items():
        style: dict[str, Any] = {**_line_style(context, line), "linestyle": "none", "markersize": 4.5}
        axes.plot(places, [1.0] * len(places), **style)
        legend.setdefault(line.label, (0, line.sort_key(), Line2D([], [], **style)))
    axes.set_xlim(-0.5, len(texts) - 0.5)
    axes.set_xticks(range(len(texts)), texts)
    axes.grid(axis="x", visible=False)
    return single


def _violin(axes: Axes, x: float, half: float, ordered: Any, colour: str) -> None:
    """A histogram on a log axis, mirrored; the samples themselves where they are too few for one."""
    if len(ordered) < 20 or not ordered[-1] > ordered[0] > 0:
        axes.plot(np.full(len(ordered), x), ordered, "o", color=colour, alpha=0.5, markersize=3, markeredgewidth=0)
        return
    bins = int(min(60, max(8, math.sqrt(len(ordered)) * 2)))
    edges = np.geomspace(ordered[0], ordered[-1], bins + 1)
    edges[0], edges[-1] = ordered[0], ordered[-1]
    counts, _ = np.histogram(ordered, edges)
    # At least a hair where there is a sample, so that a lone outlier shows.
    widths = np.where(counts > 0, np.maximum(counts / counts.max(), 0.03), 0.0) * half
    left, right = x - np.repeat(widths, 2), x + np.repeat(widths, 2)
    axes.fill_betweenx(np.repeat(edges, 2)[1:-1], left, right, color=colour, alpha=0.4, linewidth=0)


# -- the map of picks --------------------------------------------------------------------------------


def _picks(context: _Context, directory: Path) -> list[Plot]:
    """Which backend the policy took, over size and dtype: one panel per run and collective."""
    points = context.points
    auto = points[(points["backend_requested"] == AUTO) & (points["dtype"] != NO_DTYPE)]
    auto = auto[auto["status"] != "skipped"]
    by_panel = auto.groupby(["run", "collective"], sort=False)
    groups = [(key, group) for key, group in by_panel if (group["backend_picked"] != "").any()]
    plots = []
    for part, own in enumerate([groups[i : i + MOST_PANELS] for i in range(0, len(groups), MOST_PANELS)], 1):
        name = "picks" if len(groups) <= MOST_PANELS else f"picks-{part}"
        plots.append(_pick_map(context, own, directory, name))
    return plots


def _pick_rows(group: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows of a map, top first: one per dtype, and per policy and variant where they differ."""
    several = group["policy"].nunique() > 1
    found = []
    for (dtype, variant, policy), rows in group.groupby(["dtype", "variant", "policy"], sort=False):
        text = " · ".join([str(dtype)] + ([str(variant)] if variant else []) + ([str(policy)] if several else []))
        found.append((text, rows.sort_values("size_bytes", kind="stable")))
    return found


def _pick_map(context: _Context, groups: list[Any], directory: Path, name: str) -> Plot:
    rows = [_pick_rows(group) for _, group in groups]
    most = max(len(r) for r in rows)
    longest = max(len(text) for r in rows for text, _ in r)
    limits = [_thresholds(context, key[0], group) for key, group in groups]
    # A row of its own under the map for each threshold's text.
    texts = max((len(found) for found, _ in limits), default=0)
    n = len(groups)
    width = 7.2 if n == 1 else 4.6
    title = "Backend picked, by size and dtype"
    sheet = _Sheet(context, title, n, size=(width, 0.34 * most + 0.17 * min(texts, 8) + 0.25))
    sheet.columns = 1 if n == 1 else 2
    sheet.rows = math.ceil(n / sheet.columns)
    sheet.left = 0.25 + 0.072 * longest
    sheet.gap = (sheet.left, 0.62)
    notes: list[str] = []
    for i, (axes, ((run, collective), group), own, (found, note)) in enumerate(
        zip(sheet.axes, groups, rows, limits, strict=True)
    ):
        several = len(context.names) > 1
        heading = f"{collective} · {context.names[run]}" if several else str(collective)
        axes.set_title(heading, fontsize=9.5, loc="left", fontweight="bold")
        _draw_map(context, axes, own, most + 0.5 * min(texts, 8), sheet.legend)
        _size_axis(axes, [int(s) for s in group["size_bytes"]], width)
        low, high = _cell_edges(group["size_bytes"].astype("int64").unique())
        axes.set_xlim(low[0], high[-1])
        _draw_thresholds(axes, found, len(own), width)
        if sheet.is_bottom(i):
            axes.set_xlabel("message size")
        notes += [note] if note else []
    if notes:
        sheet.subtitle += "\n" + "\n".join(dict.fromkeys(notes))
    _sort_legend(sheet.legend)
    what = ", ".join(str(key[1]) for key, _ in groups)
    return sheet.finish(directory, name, "picks", f"Map of the backend that each automatic call took: {what}.")


def _thresholds(context: _Context, run: int, group: pd.DataFrame) -> tuple[list[Threshold], str]:
    return thresholds_of(context.summaries[run], group)


def _cell_edges(sizes: Any) -> tuple[Any, Any]:
    """Left and right edges of the cells around sizes on a log axis: half way to the neighbours."""
    logs = np.log2(np.sort(np.asarray(sizes, dtype=np.float64)))
    if len(logs) == 1:
        return 2 ** (logs - 0.5), 2 ** (logs + 0.5)
    middle = (logs[1:] + logs[:-1]) / 2
    first, last = logs[0] - (middle[0] - logs[0]), logs[-1] + (logs[-1] - middle[-1])
    return 2 ** np.concatenate([[first], middle]), 2 ** np.concatenate([middle, [last]])


def _draw_map(
    context: _Context, axes: Axes, rows: list[tuple[str, pd.DataFrame]], units: float, legend: dict[str, Any]
) -> None:
    cells: dict[tuple[str, int], list[tuple[float, float, float]]] = {}  # backend ("": no success), row → x0, x1, size
    for y, (_, points) in enumerate(rows):
        left, right = _cell_edges(points["size_bytes"].unique())
        by_size = points.drop_duplicates("size_bytes")[["size_bytes", "backend_picked", "status"]]
        for row, x0, x1 in zip(records(by_size), left, right, strict=True):
            picked = "" if row["status"] in CROSSED else row["backend_picked"]
            cells.setdefault((picked, y), []).append((x0, x1, float(row["size_bytes"])))
    for (picked, y), own in cells.items():
        spans = [(x0, x1 - x0) for x0, x1, _ in own]
        if not picked:
            bad: dict[str, Any] = {"facecolor": "white", "edgecolor": PROBLEM, "hatch": "xxx", "linewidth": 0.8}
            axes.broken_barh(spans, (y - 0.41, 0.82), **bad)
            legend.setdefault("no success (see list)", (2, "", Patch(**bad)))
            continue
        look = context.looks[picked]
        mark: dict[str, Any] = {
            "marker": look.marker,
            "markerfacecolor": "white",
            "markeredgecolor": "black",
            "markersize": 5,
        }
        axes.broken_barh(spans, (y - 0.41, 0.82), facecolor=look.colour, alpha=0.85, edgecolor="white", linewidth=1)
        axes.plot([size for _, _, size in own], [y] * len(own), linestyle="none", **mark)
        handle = Line2D([], [], color=look.colour, linewidth=7, solid_capstyle="butt", **mark)
        legend.setdefault(picked, (0, picked, handle))
    axes.set_ylim(units - 0.5, -0.6)
    axes.yaxis.set_major_locator(FixedLocator(list(range(len(rows)))))
    texts = [text for text, _ in rows]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: texts[int(v)] if 0 <= v < len(texts) else ""))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)


def _draw_thresholds(axes: Axes, found: Sequence[Threshold], rows: int, width: float) -> None:
    """A line through the rows, and its text on a line of its own below them, kept inside the ``width`` inches."""
    low, high = (math.log(limit) for limit in axes.get_xlim())
    dashed: dict[str, Any] = {"color": "black", "linewidth": 1.2, "linestyle": (0, (3, 2)), "zorder": 1.5}
    for place, threshold in enumerate(found[:8]):
        y = rows - 0.27 + 0.5 * place
        axes.plot([threshold.size_bytes] * 2, [-0.5, y - 0.17], **dashed)
        where = (math.log(threshold.size_bytes) - low) / (high - low) * width
        half = 0.0305 * len(threshold.text)  # of its width in inches at this size
        middle = min(max(where, half), width - half) / width
        axes.text(
            math.exp(low + middle * (high - low)),
            y,
            threshold.text,
            ha="center",
            va="center",
            fontsize=7.5,
            color="#222222",
        )
