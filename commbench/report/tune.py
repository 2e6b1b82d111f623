"""The plot of a tuning: the curves, where they cross, and what today's policy and the tuned one lose by it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from commbench.analysis.segments import BRACKET, UNKNOWN, Array
from commbench.errors import StoreError
from commbench.report.style import BLACK, GREY, PROBLEM, Look, decade_ticks, looks, short_time, size_ticks
from commbench.report.tune_text import ratio, sentence, short_size
from commbench.units import format_size

if TYPE_CHECKING:
    from commbench.analysis.tune import CellTuning, Tuning

WIDTH_IN, HEIGHT_IN = 9.0, 7.2


def draw_tuning(tuning: Tuning, directory: Path, stem: str) -> list[Path]:
    """One PNG and one SVG per cell, named ``stem[-n].png``; gives the PNGs. Raises StoreError if they cannot be
    written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number, cell in enumerate(tuning.cells, 1):
            name = stem if len(tuning.cells) == 1 else f"{stem}-{number}"
            with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
                figure = _figure(cell, plt)
                figure.savefig(directory / f"{name}.png", dpi=150)
                figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
                plt.close(figure)
            written.append(directory / f"{name}.png")
    except OSError as error:
        raise StoreError(f"the plot cannot be written: {directory}: {error.strerror or error}") from error
    return written


def _figure(cell: CellTuning, plt: Any) -> Any:
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(WIDTH_IN, HEIGHT_IN), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    title = "\n".join(textwrap.wrap(sentence(cell), 100))
    figure.suptitle(f"{cell.cell.title}, {cell.curves.launches} launches\n{title}", fontsize=10, x=0.01, ha="left")
    look = looks(cell.curves.backends)
    _curves(cell, top, look)
    _regrets(cell, bottom)
    for axes in (top, bottom):
        _crossovers(cell, axes)
        axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    bottom.set_xscale("log", base=2)
    ticks = size_ticks(cell.curves.sizes, most=8)
    bottom.set_xticks(ticks, [format_size(t) for t in ticks])
    bottom.minorticks_off()
    bottom.set_xlim(cell.curves.sizes[0] / 1.1, cell.curves.sizes[-1] * 1.1)
    bottom.set_xlabel("message size")
    return figure


def _curves(cell: CellTuning, axes: Any, look: dict[str, Look]) -> None:
    sizes = np.array(cell.curves.sizes, dtype=np.float64)
    times = np.exp(cell.curves.typical())
    for k, name in enumerate(cell.curves.backends):
        known = np.isfinite(times[:, k])
        low, high = _spread(cell.curves.logs[k])
        axes.fill_between(sizes[known], low[known], high[known], color=look[name].colour, alpha=0.15, linewidth=0)
        axes.plot(
            sizes[known], times[known, k], color=look[name].colour, marker=look[name].marker, markersize=4,
            linewidth=1.2, label=name,
        )  # fmt: skip
    axes.set_yscale("log")
    ticks = decade_ticks(float(np.nanmin(times)), float(np.nanmax(times)))
    axes.set_yticks(ticks, [short_time(t) for t in ticks])
    axes.minorticks_off()
    axes.set_ylabel("latency, typical launch\n(band: launches' range)")
    axes.legend(loc="upper left", frameon=False)
    _todays_changes(cell, axes)
    # what the tuned policy takes, as a strip along the top
    for interval in cell.intervals:
        axes.axvspan(
            interval.first_bytes,
            interval.last_bytes,
            ymin=0.975,
            ymax=1.0,
            color=look[interval.backend].colour,
            linewidth=0,
        )
    axes.annotate("tuned pick ▸", (0, 0.987), xycoords="axes fraction", ha="right", va="center", fontsize=7, color=GREY,
                  xytext=(-2, 0), textcoords="offset points")  # fmt: skip


def _todays_changes(cell: CellTuning, axes: Any) -> None:
    """A dashed line where today's policy changes its pick, as far as the sizes tell."""
    sizes, today = cell.curves.sizes, cell.curves.today
    kept = {b.size_bytes for b in cell.boundaries if b.kept}
    for i in range(1, len(sizes)):
        if today[i] != today[i - 1] and not any(sizes[i - 1] <= k < sizes[i] for k in kept):
            axes.axvline(sizes[i - 1], color=PROBLEM, linewidth=1.0, linestyle="--", zorder=2)
            axes.annotate(
                f"today: {short_size(sizes[i - 1])}", (sizes[i - 1], 0.03), xycoords=("data", "axes fraction"),
                xytext=(-4, 0), textcoords="offset points", fontsize=8, va="bottom", ha="right", color=PROBLEM,
            )  # fmt: skip


def _spread(logs: Array) -> tuple[Array, Array]:
    """Smallest and largest launch median per size, in seconds; NaN where there is none."""
    some = np.isfinite(logs)
    low = np.where(some, logs, np.inf).min(axis=1)
    high = np.where(some, logs, -np.inf).max(axis=1)
    known = some.any(axis=1)
    return np.where(known, np.exp(np.where(known, low, 0)), np.nan), np.where(
        known, np.exp(np.where(known, high, 0)), np.nan
    )


def _regrets(cell: CellTuning, axes: Any) -> None:
    sizes = np.array(cell.curves.sizes, dtype=np.float64)
    shown = [("tuned policy", cell.regret_tuned, BLACK, "-")]
    if cell.regret_today is not None:
        shown.insert(0, ("today's policy", cell.regret_today, PROBLEM, "--"))
    top, bottom = 1.0, 0.0
    for name, regret, colour, style in shown:
        values = 100 * np.array(regret.per_size)
        label = f"{name}: mean {ratio(regret.mean)}, worst {ratio(regret.worst)}"
        axes.plot(sizes, values, style, color=colour, linewidth=1.4, marker="o", markersize=3, label=label, zorder=3)
        low, high = 100 * np.array(regret.size_low), 100 * np.array(regret.size_high)
        axes.vlines(sizes, low, high, color=colour, linewidth=0.7, alpha=0.5)
        known = values[np.isfinite(values)]
        top, bottom = max([top, *known]), min([bottom, *known])
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_ylim(min(1.1 * bottom, -0.06 * top), 1.5 * top)  # room for the legend
    axes.set_ylabel("slower than the fastest\nbackend at that size, %")
    axes.legend(loc="upper left", frameon=False)


def _crossovers(cell: CellTuning, axes: Any) -> None:
    for boundary in cell.boundaries:
        axes.axvline(boundary.size_bytes, color=BLACK, linewidth=1.0, linestyle=":" if boundary.kept else "-", zorder=2)
        found = boundary.crossover
        if found is not None and found.method != UNKNOWN and not boundary.kept:
            axes.axvspan(found.low_bytes, found.high_bytes, color=GREY, alpha=0.18, linewidth=0, zorder=0)
        if axes.get_subplotspec().rowspan.start == 0:
            text = format_size(boundary.size_bytes)
            if boundary.kept:
                text += "\nas today"
            elif found is not None and found.method != UNKNOWN:
                between = "jump" if found.method == BRACKET else "95 %"
                text += f"\n{between}: {short_size(found.low_bytes)}–{short_size(found.high_bytes)}"
            axes.annotate(
                text, (boundary.size_bytes, 0.03), xycoords=("data", "axes fraction"), xytext=(4, 0),
                textcoords="offset points", fontsize=8, va="bottom",
            )  # fmt: skip
