"""Trends over nights: a panel per point, with environment changes and advisory change points marked."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.dates
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from commbench.analysis.changepoints import Change
from commbench.analysis.compare import percent
from commbench.analysis.effects import Array, t_quantile
from commbench.report.compare_plots import save
from commbench.report.style import BLUE, ORANGE, PROBLEM, RC, decade_ticks, short_time

MOST_PANELS = 12
_dates: Any = matplotlib.dates  # its types are incomplete


@dataclass(frozen=True, slots=True)
class Trend:
    """One point over nights: logs of seconds, launches behind each, variance between them; NaN where it is absent."""

    label: str
    log_mean: Array
    launches: Array
    log_variance: Array
    changes: Sequence[Change]


def draw_trends(
    trends: Sequence[Trend],
    started_s: Sequence[float],
    environment: Sequence[tuple[int, str]],
    path: Path,
    *,
    subtitle: str,
) -> Path:
    """Write one figure (PNG and SVG, named after ``path``) with a panel per point, at most MOST_PANELS.

    started_s: of each night. environment: (night, what changed since the night before). Raises ValueError without any
    trend, OSError when the files cannot be written.
    """
    if not trends:
        raise ValueError("no trend to draw")
    shown = trends[:MOST_PANELS]
    days = _dates.date2num([datetime.datetime.fromtimestamp(s, datetime.UTC) for s in started_s])
    width, panel, gap, top = 8.4, 1.7, 0.55, 1.0
    notes = _environment_lines(environment, started_s)
    bottom = 0.75 + 0.15 * len(notes)
    height = top + len(shown) * panel + (len(shown) - 1) * gap + bottom
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height))
        for i, trend in enumerate(shown):
            y = height - top - i * (panel + gap) - panel
            axes = figure.add_axes((0.95 / width, y / height, (width - 1.2) / width, panel / height))
            _panel(axes, trend, days, environment)
        title = "Latency over nights" + (
            f" (the first {len(shown)} of {len(trends)})" if len(trends) > len(shown) else ""
        )
        figure.text(0.12 / width, 1 - 0.12 / height, title, va="top", fontsize=11, fontweight="bold")
        figure.text(0.12 / width, 1 - 0.38 / height, subtitle, va="top", fontsize=7.5, color="#555555")
        for k, line in enumerate(notes):
            figure.text(0.95 / width, (bottom - 0.5 - 0.15 * k) / height, line, va="top", fontsize=7, color="#8a5a00")
        path.parent.mkdir(parents=True, exist_ok=True)
        return save(figure, path.parent, path.name.removesuffix(".png"))


def _letter(index: int) -> str:
    return chr(ord("a") + index % 26)


def _environment_lines(environment: Sequence[tuple[int, str]], started_s: Sequence[float]) -> list[str]:
    lines = [
        f"{_letter(k)}  {datetime.datetime.fromtimestamp(started_s[night], datetime.UTC):%Y-%m-%d}: {text[:110]}"
        for k, (night, text) in enumerate(environment)
    ]
    return [*lines[:8], f"… and {len(lines) - 8} more environment changes"] if len(lines) > 9 else lines


def _panel(axes: Any, trend: Trend, days: Any, environment: Sequence[tuple[int, str]]) -> None:
    seconds = np.exp(trend.log_mean)
    known = np.isfinite(seconds)
    n = trend.launches
    with np.errstate(invalid="ignore", divide="ignore"):
        half = t_quantile(0.975, np.where(n > 1, n - 1, np.nan)) * np.sqrt(trend.log_variance / n)
    low, high = np.exp(trend.log_mean - half), np.exp(trend.log_mean + half)
    axes.set_yscale("log")
    whiskers = known & np.isfinite(low)
    # an interval of two launches can be a hundred times wider than all nights together
    floor, ceiling = seconds[known].min() / 2, seconds[known].max() * 2
    axes.vlines(days[whiskers], np.maximum(low[whiskers], floor), np.minimum(high[whiskers], ceiling), color=BLUE,
                linewidth=0.9, alpha=0.35)  # fmt: skip
    axes.plot(days[known], seconds[known], "o", color=BLUE, markersize=3)
    _levels(axes, trend, days)
    for k, (night, _) in enumerate(environment):
        axes.axvline(days[night], color=ORANGE, linewidth=1, linestyle=":")
        axes.annotate(chr(ord("a") + k % 26), (days[night], 1.0), xycoords=("data", "axes fraction"), fontsize=7,
                      color="#8a5a00", ha="center", va="bottom")  # fmt: skip
    axes.set_title(trend.label, loc="left", fontsize=9, pad=10)
    bottom, top = axes.get_ylim()
    ticks = decade_ticks(bottom, top)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: short_time(v)))
    locator = _dates.AutoDateLocator(minticks=3, maxticks=8)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(_dates.ConciseDateFormatter(locator))
    if len(days) == 1:
        axes.set_xlim(days[0] - 1, days[0] + 1)


def _levels(axes: Any, trend: Trend, days: Any) -> None:
    """The level of each stretch between change points, and what each change was."""
    edges = [0, *(c.index for c in trend.changes), len(days)]
    for start, stop in itertools.pairwise(edges):
        part = trend.log_mean[start:stop]
        if np.isfinite(part).any():
            level = math.exp(float(np.nanmean(part)))
            axes.plot([days[start], days[stop - 1]], [level, level], color="#444444", linewidth=0.9)
    for change in trend.changes:
        colour = PROBLEM if change.ratio > 1 else "#009E73"
        axes.axvline(days[change.index], color=colour, linewidth=1)
        axes.annotate(f" {percent(change.ratio)}", (days[change.index], 0.97), xycoords=("data", "axes fraction"),
                      fontsize=7.5, color=colour, va="top")  # fmt: skip
