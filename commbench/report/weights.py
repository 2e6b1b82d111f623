"""The plot of weight updates: time to sync a model's weights, and the rate, by the size of the buckets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from commbench.report.lines import CROSSED, DRAWN
from commbench.report.plots import Plot
from commbench.report.style import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PROBLEM,
    PURPLE,
    VERMILLION,
    Look,
    short_time,
    size_ticks,
)
from commbench.report.summary import Summary, number, records
from commbench.units import decimal_size, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLLECTIVE = "weight_update"
_PANEL, _LEFT, _GAP = (3.7, 2.9), 0.85, 0.85  # inches
_MOST_NAMED = 5  # bucket sizes on an axis
_CROSS: Any = {"color": PROBLEM, "marker": "x", "linestyle": "none", "markersize": 7, "markeredgewidth": 2}
_LOOKS = (
    Look(BLUE, "o"),
    Look(VERMILLION, "s"),
    Look(GREEN, "^"),
    Look(PURPLE, "v"),
    Look(ORANGE, "D"),
    Look(BLACK, "X"),
)


Ends = tuple[float, float, float]  # a median, and the lower and upper end of its interval


@dataclass(frozen=True, slots=True)
class Synced:
    """One run's time to sync, in seconds, and the rate in GB/s (1e9 bytes); NaN where there is none."""

    model: str
    bucket_bytes: int
    status: str
    seconds: Ends
    gb_per_s: float

    @property
    def rates(self) -> Ends:
        """The rate is inverse to the time, so its interval is the time's, turned round."""
        middle, low, high = self.seconds
        return self.gb_per_s, self.gb_per_s * middle / high, self.gb_per_s * middle / low


def synced(summary: Summary) -> Synced | None:
    """What a run of ``commbench weights`` or ``Engine.measure_weights`` found; None for any other run."""
    bucket = summary.settings.get("bucket_bytes")
    if not summary.settings.get("weight_numels") or not isinstance(bucket, int) or bucket < 1:
        return None
    rows = records(summary.points[summary.points["collective"] == COLLECTIVE])
    if len(rows) != 1:
        return None
    (row,) = rows
    median, low, high = (number(row[f"latency_{name}_s"]) for name in ("median", "ci_low", "ci_high"))
    rate = number(row["algbw_gb_per_s"])
    return Synced(_model(summary, row), bucket, str(row["status"]), (median, low, high), rate)


def _model(summary: Summary, row: dict[str, Any]) -> str:
    """``LlamaForCausalLM, 16.06 GB of bfloat16, to 3 ranks``."""
    about = summary.manifest.get("weights")
    name = str(about.get("architecture") or "") if isinstance(about, dict) else ""
    others = int(row["world_size"]) - 1
    size = decimal_size(int(row["size_bytes"]))
    return f"{name or 'a model'}, {size} of {row['dtype']}, to {others} rank{'s' if others != 1 else ''}"


def draw_synced(found: Sequence[Synced], directory: Path, *, machines: str, marks: str) -> Plot:
    """Write the figure: to the left the time to sync, to the right the rate, one line per model.

    machines: lines on where it was measured. marks: lines on what a reader must know first. Distances are inches.
    """
    models = list(dict.fromkeys(one.model for one in found))
    looks = dict(zip(models, itertools.cycle(_LOOKS), strict=False))
    title = "Time to sync a model's weights, by bucket size"
    told = "\n".join([*models, machines] if len(models) == 1 else [machines])
    legend = _legend(found, looks)
    lines = told.count("\n") + 1
    mark_lines = marks.count("\n") + 1 if marks else 0
    head = 0.72 + 0.18 * lines + 0.19 * mark_lines + 0.19 * len(legend)
    width, height = _LEFT + 2 * _PANEL[0] + _GAP + 0.25, head + _PANEL[1] + 0.62
    figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
    y = height - 0.1
    blocks: list[tuple[str, int, float, dict[str, Any]]] = [
        (title, 1, 0.29, {"fontsize": 12, "fontweight": "bold"}),
        (told, lines, 0.18, {"fontsize": 8.5, "color": "#555555"}),
        (marks, mark_lines, 0.19, {"fontsize": 9, "color": PROBLEM, "fontweight": "bold"}),
    ]
    for block, count, step, style in blocks:
        figure.text(0.15 / width, y / height, block, va="top", **style)
        y -= step * count
    if legend:
        figure.legend(
            list(legend.values()), list(legend), loc="upper left", ncols=1, frameon=False, fontsize=8.5,
            bbox_to_anchor=(0.16 / width, (y + 0.01) / height), borderaxespad=0.0, borderpad=0.0, labelspacing=0.35,
        )  # fmt: skip
    for i, (unit, text, values) in enumerate(
        (
            ("time to sync", short_time, [one.seconds for one in found]),
            ("rate: model size / time, GB/s", lambda rate: f"{rate:g}", [one.rates for one in found]),
        )
    ):
        x = _LEFT + i * (_PANEL[0] + _GAP)
        axes = figure.add_axes((x / width, 0.62 / height, _PANEL[0] / width, _PANEL[1] / height))
        axes.set_title(unit, fontsize=9.5, loc="left", fontweight="bold")
        _scale(axes, [one.bucket_bytes for one in found], values, text)
        for model, look in looks.items():
            _draw_line(axes, [(one, v) for one, v in zip(found, values, strict=True) if one.model == model], look)
    png, svg = directory / "weights.png", directory / "weights.svg"
    figure.savefig(png, format="png", pil_kwargs={"compress_level": 4})
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return Plot("weights", "weights", title, f"{title}, and the rate: {'; '.join(models)}.", png, svg)


def _legend(found: Sequence[Synced], looks: dict[str, Look]) -> dict[str, Any]:
    """Models where there are several (else the heading names it), and what a cross means where there is one."""
    legend: dict[str, Any] = {}
    if len(looks) > 1:
        legend = {model: Line2D([], [], **_style(look)) for model, look in looks.items()}
    if any(one.status in CROSSED for one in found):
        legend["no success (see list)"] = Line2D([], [], **_CROSS)
    return legend


def _style(look: Look) -> dict[str, Any]:
    return {"color": look.colour, "marker": look.marker, "linewidth": 1.8, "markersize": 4.5}


def _scale(axes: Axes, sizes: Sequence[int], values: Sequence[Ends], text: Callable[[float], str]) -> None:
    """A logarithmic axis of sizes, each named where there is room; an axis of values from 0, so that heights compare:
    what bucket sizes change is a matter of per cent or of a few times, not of decades."""
    axes.set_xscale("log", base=2)
    low, high = min(sizes), max(sizes)
    pad = max(1.25, (high / low) ** 0.05)
    axes.set_xlim(low / pad, high * pad)
    axes.xaxis.set_major_locator(FixedLocator([float(s) for s in _named(sizes)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_size(round(value))))
    axes.set_xlabel("bucket size")
    finite = [v for ends in values for v in ends if math.isfinite(v)]
    middle = [ends[0] for ends in values if math.isfinite(ends[0])]
    # the interval of two launches that disagree may be far beyond all values
    axes.set_ylim(0.0, 1.12 * min(max(finite), 2 * max(middle)) if middle else 1.0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(float(value))))


def _named(sizes: Sequence[int]) -> list[int]:
    """The sizes themselves while they are few, else powers of two."""
    distinct = sorted(set(sizes))
    return distinct if len(distinct) <= _MOST_NAMED else size_ticks(distinct, most=_MOST_NAMED)


def _draw_line(axes: Axes, own: Sequence[tuple[Synced, Ends]], look: Look) -> None:
    """The line of one model with its intervals; a cross where a bucket size had no success."""
    good = sorted((one.bucket_bytes, ends) for one, ends in own if one.status in DRAWN and math.isfinite(ends[0]))
    axes.plot([size for size, _ in good], [ends[0] for _, ends in good], **_style(look))
    bars = [(size, low, high) for size, (_, low, high) in good if math.isfinite(low) and math.isfinite(high)]
    if bars:
        x, lows, highs = zip(*bars, strict=True)
        axes.vlines(x, lows, highs, color=look.colour, linewidth=3, alpha=0.5)
    bad = [one.bucket_bytes for one, _ in own if one.status in CROSSED]
    axes.plot(bad, [0.05] * len(bad), transform=axes.get_xaxis_transform(), clip_on=False, **_CROSS)
