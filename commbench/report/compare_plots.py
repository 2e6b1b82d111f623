"""Plots of a comparison: ratio with interval per family, and per point over the message size."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from commbench.analysis.compare import BOTH, Comparison, percent
from commbench.report.compare import sorted_families
from commbench.report.style import GREEN, GREY, PROBLEM, RC, looks, size_ticks
from commbench.types import NO_DTYPE
from commbench.units import format_size

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_FAMILIES = 40
MOST_PANELS = 12
CHARACTERS_PER_INCH = 14.5  # of the subtitle's letters
MOST_LINES = 3  # of the subtitle
LARGEST_SHOWN = 8.0  # times: intervals are cut there, so that one wild point does not flatten the others
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True, slots=True)
class _Scale:
    """A log axis of ratios: its limits and ticks, written as changes in per cent or as factors."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> _Scale:
        known = [min(max(v, 1 / LARGEST_SHOWN), LARGEST_SHOWN) for v in values if math.isfinite(v) and v > 0]
        low, high = min([1.0, *known]), max([1.0, *known])
        pad = max(0.08 * math.log(high / low), 0.002)
        low, high = low * math.exp(-pad), high * math.exp(pad)
        if high / low > 2.5:
            factors = [1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0] if high / low > 4 else [0.5, 0.7, 1.0, 1.4, 2.0, 2.8]
            ticks = [f for f in factors if low <= f <= high]
        else:
            step = next((s for s in _STEPS if (high - low) / s <= 7), 0.5)
            first, last = math.ceil((low - 1) / step), math.floor((high - 1) / step)
            ticks = [1 + k * step for k in range(first, last + 1)]
        return cls(low, high, tuple(ticks))

    def apply(self, axis: Any, limits: Any) -> None:
        limits(self.low, self.high)
        axis.set_major_locator(FixedLocator(list(self.ticks)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda v, _: ratio_label(v, wide=self.high / self.low > 2.5)))


def ratio_label(ratio: float, *, wide: bool) -> str:
    """A tick: ``+5 %``, ``same``, or ``×2`` on a wide axis."""
    if abs(ratio - 1) < 1e-9:
        return "same"
    return f"×{ratio:.3g}" if wide else f"{(ratio - 1) * 100:+.3g} %"


def draw_comparison(
    comparison: Comparison, directory: Path, *, names: tuple[str, str], forced: Sequence[str] = ()
) -> list[Path]:
    """Write families.png/.svg and points.png/.svg into ``directory`` (made if need be); gives the PNGs.

    Nothing is drawn when nothing could be compared. Raises OSError when the folder cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    subtitle = f"candidate: {names[1]}; baseline: {names[0]}; 95 % intervals {comparison.unit}"
    if forced:
        subtitle += f"\n⚠ forced: {'; '.join(forced)[:150]}"
    with matplotlib.rc_context(RC):
        figures = {"families": _families(comparison, subtitle), "points": _points(comparison, subtitle)}
        written = []
        for name, figure in figures.items():
            if figure is not None:
                written.append(save(figure, directory, name))
    return written


def save(figure: Figure, directory: Path, name: str) -> Path:
    """Write a figure as PNG and SVG; gives the PNG's path."""
    png = directory / f"{name}.png"
    figure.savefig(png, dpi=150)
    figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
    return png


def _colour(low: float, high: float) -> str:
    if low > 1:
        return PROBLEM
    return GREEN if high < 1 else GREY


def _families(comparison: Comparison, subtitle: str) -> Figure | None:
    table = sorted_families(comparison)
    table = table[np.isfinite(table["ratio"].to_numpy(dtype=np.float64))]
    if table.empty:
        return None
    left_out = max(0, len(table) - MOST_FAMILIES)
    rows = table[:MOST_FAMILIES].to_dict("records")
    longest = max(len(str(r["family"])) for r in rows)
    left, right, top, bottom = 0.3 + 0.075 * longest, 1.75, 0.95, 0.55
    width, height = left + 4.2 + right, top + bottom + 0.24 * len(rows) + 0.1
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((left / width, bottom / height, 4.2 / width, (height - top - bottom) / height))
    scale = _Scale.of(v for r in rows for v in (r["ratio"], r["ratio_low"], r["ratio_high"]))
    axes.set_xscale("log")
    for place, row in enumerate(rows):
        _interval(axes, row, place, scale)
        text = f"{percent(row['ratio'])} ({percent(row['ratio_low'])} to {percent(row['ratio_high'])})"
        axes.annotate(
            text.replace(" % to", " to"), (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=7.5
        )
    axes.axvline(1.0, color="#444444", linewidth=0.9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [str(r["family"]) for r in rows])
    axes.grid(False, axis="y")
    axes.set_xlabel("latency, candidate over baseline (right: slower)")
    scale.apply(axes.xaxis, axes.set_xlim)
    title = "Change per family, worst first"
    if left_out:
        title += f" (the worst {len(rows)} of {len(table)})"
    _titles(figure, title, subtitle, height)
    return figure


def _interval(axes: Axes, row: dict[str, Any], place: float, scale: _Scale) -> None:
    low, high, ratio = row["ratio_low"], row["ratio_high"], row["ratio"]
    colour = _colour(low, high)
    if math.isfinite(low) and math.isfinite(high):
        axes.plot([max(low, scale.low), min(high, scale.high)], [place, place], color=colour, linewidth=1.6)
    axes.plot([min(max(ratio, scale.low), scale.high)], [place], "o", color=colour, markersize=4.5)


def _titles(figure: Figure, title: str, subtitle: str, height: float) -> None:
    figure.text(0.12 / figure.get_figwidth(), 1 - 0.12 / height, title, va="top", fontsize=11, fontweight="bold")
    width = int(figure.get_figwidth() * CHARACTERS_PER_INCH)
    lines = [line for text in subtitle.split("\n") for line in textwrap.wrap(text, width)]
    shown = "\n".join([*lines[: MOST_LINES - 1], *([" …"] if len(lines) > MOST_LINES else lines[MOST_LINES - 1 :])])
    figure.text(0.12 / figure.get_figwidth(), 1 - 0.36 / height, shown, va="top", fontsize=7.5, color="#555555")


def _points(comparison: Comparison, subtitle: str) -> Figure | None:
    points = comparison.points
    points = points[(points["state"] == BOTH) & (points["dtype"] != NO_DTYPE)]
    if points.empty:
        return None
    groups = list(points.groupby(["collective", "dtype"], sort=True))
    shown = groups[:MOST_PANELS]
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    panel_width, panel_height = 3.3, 2.3
    left, top, bottom, gap_x, gap_y = 0.75, 1.0, 0.9, 0.3, 0.75
    width = left + columns * panel_width + (columns - 1) * gap_x + 0.25
    width = max(width, 5.5)
    height = top + rows * panel_height + (rows - 1) * gap_y + bottom
    figure = Figure(figsize=(width, height))
    kept = [frame for _, frame in shown]
    scale = _Scale.of(
        _central([frame[c].to_numpy(dtype=np.float64) for frame in kept for c in ("ratio", "ratio_low", "ratio_high")])
    )
    styles = looks({str(b) for frame in kept for b in frame["base_picked"]})
    for index, ((collective, dtype), frame) in enumerate(shown):
        row, column = divmod(index, columns)
        x = left + column * (panel_width + gap_x)
        y = height - top - row * (panel_height + gap_y) - panel_height
        axes = figure.add_axes((x / width, y / height, panel_width / width, panel_height / height))
        _panel(axes, frame, scale, styles)
        axes.set_title(f"{collective} {dtype}", loc="left", fontsize=9)
        if column:
            axes.set_yticklabels([])
        if index + columns >= len(shown):
            axes.set_xlabel("message size")
    figure.text(0.16 / width, (bottom + (height - top - bottom) / 2) / height, "latency, candidate over baseline",
                rotation=90, va="center", ha="center")  # fmt: skip
    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, linestyle="", markersize=5, label=name or "none")
        for name, look in styles.items()
    ]
    if len(handles) <= 12:
        figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(left / width, 0.02), ncols=6, frameon=False,
                      fontsize=8)  # fmt: skip
    title = "Change per point" + (
        f" (the first {len(shown)} of {len(groups)} groups)" if len(groups) > len(shown) else ""
    )
    _titles(figure, title, subtitle, height)
    return figure


def _central(arrays: list[Any]) -> list[float]:
    """The values that the axis must hold: all but the outermost hundredth at each end, of many."""
    values = np.concatenate(arrays)
    values = values[np.isfinite(values) & (values > 0)]
    if len(values) < 200:
        return [float(v) for v in values]
    return [float(v) for v in np.quantile(values, [0.005, 0.995])]


def _panel(axes: Axes, frame: pd.DataFrame, scale: _Scale, styles: dict[str, Any]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axhline(1.0, color="#444444", linewidth=0.9)
    for backend, own in frame.groupby("base_picked", sort=True):
        look = styles[str(backend)]
        size = own["size_bytes"].to_numpy(dtype=np.float64)
        ratio, low, high = (
            np.clip(own[c].to_numpy(dtype=np.float64), scale.low, scale.high)
            for c in ("ratio", "ratio_low", "ratio_high")
        )
        axes.vlines(size, low, high, color=look.colour, linewidth=1.0, alpha=0.5)
        axes.plot(size, ratio, look.marker, color=look.colour, markersize=4, linestyle="", alpha=0.9)
    scale.apply(axes.yaxis, axes.set_ylim)
    ticks = size_ticks(frame["size_bytes"], most=5)
    axes.xaxis.set_major_locator(FixedLocator([float(t) for t in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: format_size(round(v))))
