"""The table at the end of a sweep, legible at 80 columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from commbench.report.lines import chosen_sizes, combine, panels
from commbench.report.style import interval_text, short_rate
from commbench.report.summary import Summary, checked_text, number, records, summarise, took_text
from commbench.store.run import Run
from commbench.types import AUTO, NO_DTYPE
from commbench.units import format_size, format_time

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

LONGEST_WORD = 16  # that a narrow column keeps in one piece: reduce_scatter, [torch_dist]
MOST_ROWS = 60  # on a terminal; a longer table shows some sizes of each group

_COLOURS = {"ok": "green", "skipped": "yellow", "unsteady": "yellow", "refused": "yellow"}
_LEVELS = {"good": "bold green", "note": "bold yellow", "bad": "bold red"}


def print_whole(table: Table, console: Console) -> None:
    """Print a table without cutting anything off: words fold, but what must not wrap (``no_wrap``) stays whole. Where a
    terminal is too narrow for that, lines run over its edge."""
    needed = 0
    for column in table.columns:
        texts = [cell.plain if isinstance(cell, Text) else str(cell) for cell in (column.header, *column.cells)]
        column.overflow = "fold"
        if column.width is not None:
            column.min_width = column.width
        elif column.no_wrap:
            column.min_width = max(column.min_width or 0, *map(len, texts))
        else:
            longest = max((len(word) for text in texts for word in text.split()), default=1)
            column.min_width = min(longest, LONGEST_WORD)
        needed += column.min_width + table.padding[1] + table.padding[3]
    options = console.options.update(width=max(console.width, needed))
    console.print(Segments(console.render(table, options)), crop=False, end="")


def print_summary(run: Run, console: Console) -> None:
    """Print what a run found: facts, one line per point (merged over launches), and every problem with its reason.

    On a terminal a table of more than MOST_ROWS points shows some sizes of each group, among them the smallest and
    the largest, and every point that is not ok or skipped; it says so. Piped, it shows all.
    """
    summary = summarise(run)
    _print_head(summary, console)
    if not summary.points.empty:
        shown = combine([summary])
        if console.is_terminal and len(shown) > MOST_ROWS:
            shown = _thinned(shown)
        _print_table(summary, shown, console)
        if len(shown) < len(summary.points):
            console.print(f"{len(shown)} of {len(summary.points)} points shown; all are in the report.", style="dim")
    _print_problems(summary, console)


def _print_head(summary: Summary, console: Console) -> None:
    facts = f"{summary.host}, {summary.ranks_text} on {summary.device}, {summary.launches_text}"
    console.print(Text.assemble((summary.run_id, "bold"), f": {facts}"))
    for mark in summary.marks:
        console.print(Text(f"⚠ {mark}", style="bold yellow"))


def _thinned(points: pd.DataFrame) -> pd.DataFrame:
    """Some sizes of each collective and dtype, so that the table keeps to MOST_ROWS where it can."""
    import pandas as pd

    groups = panels(points)
    kept = []
    for panel in groups:
        per_size = max(1, math.ceil(len(panel.points) / panel.points["size_bytes"].nunique()))
        sizes = chosen_sizes([int(s) for s in panel.points["size_bytes"]], max(2, MOST_ROWS // len(groups) // per_size))
        bad = ~panel.points["status"].isin(["ok", "skipped"])
        kept.append(panel.points[panel.points["size_bytes"].isin(sizes) | bad])
    return pd.concat(kept, ignore_index=True)


_HEAD = ("size", "asked→took", "median", "95 % interval", "p99", "algbw\nGB/s", "busbw\nGB/s", "check", "status")
_LEFT = frozenset({1, 7, 8})  # columns of words; the others are numbers


def _print_table(summary: Summary, points: pd.DataFrame, console: Console) -> None:
    """A line per point under a heading for each collective and dtype, and whatever else varies."""
    several_policies = len(summary.policies) > 1
    groups = [
        (panel.title.replace(" · ", " "), [_cells(r, several_policies) for r in records(panel.points)])
        for panel in panels(points)
    ]
    cells = [row for _, rows in groups for row in rows]
    widths = [max(max(map(len, head.split("\n"))), *(len(row[i]) for row in cells)) for i, head in enumerate(_HEAD)]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= console.width else 1
    # Only names of backends can be long; they fold where the terminal is too narrow.
    spare = console.width - (sum(widths) - widths[1] + gap * (len(widths) - 1))
    widths[1] = max(8, min(widths[1], spare))

    def table(with_head: bool) -> Table:
        grid = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold", show_header=with_head)
        for i, head in enumerate(_HEAD):
            justify: Any = "left" if i in _LEFT else "right"
            grid.add_column(head, justify=justify, width=widths[i], overflow="fold", no_wrap=i != 1, vertical="top")
        return grid

    print_whole(table(True), console)
    for title, rows in groups:
        console.print(Text(title, style="bold cyan"))
        grid = table(False)
        for row in rows:
            grid.add_row(*row)
        print_whole(grid, console)


def _cells(row: Mapping[str, Any], several_policies: bool) -> list[Text]:
    status = str(row["status"])
    size = format_size(int(row["size_bytes"])) if row["dtype"] != NO_DTYPE else "–"
    asked, took = str(row["backend_requested"]), took_text(row) or "–"
    if several_policies and asked == AUTO:
        asked = f"auto ({row['policy']})"
    median, low, high, p99, algbw, busbw = (
        number(row[name])
        for name in (
            "latency_median_s", "latency_ci_low_s", "latency_ci_high_s", "latency_p99_s", "algbw_gb_per_s",
            "busbw_gb_per_s",
        )
    )  # fmt: skip
    texts = [
        size, took if asked == took else f"{asked}→{took}", format_time(median), interval_text(low, high),
        format_time(p99), short_rate(algbw), short_rate(busbw), checked_text(row).removesuffix(" wrong"),
    ]  # fmt: skip
    return [*map(Text, texts), Text(status, style=_COLOURS.get(status, "bold red"))]


def _print_problems(summary: Summary, console: Console) -> None:
    """Last, so that they stand above the prompt."""
    console.print()
    for problem in summary.problems:
        style = _COLOURS.get(problem.status, "bold red")
        console.print(Text.assemble((problem.status, style), f" {problem.points}"))
        console.print(f"  {escape(problem.said)}", highlight=False)
    if summary.unmeasured:
        console.print(
            Text.assemble(
                ("not measured", "bold red"), f" {len(summary.unmeasured)} of {summary.planned} planned points"
            )
        )
    for line in summary.damaged:
        console.print(Text.assemble(("damaged", "bold red"), f" {line}"))
    if summary.noisy:
        who = "1 point was" if summary.noisy == 1 else f"{summary.noisy} points were"
        console.print(f"{who} measured in noise; the report says what disturbed each.")
    if summary.imprecise:
        who = "1 point" if summary.imprecise == 1 else f"{summary.imprecise} points"
        console.print(f"{who} did not reach the interval asked for in the time given.")
    console.print(Text(summary.verdict, style=_LEVELS[summary.level]))
