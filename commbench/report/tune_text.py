"""A tuning in words: the sentence that says what to set and what it gains, and the tables of a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from commbench.analysis.segments import BRACKET, UNKNOWN, Crossover, Estimate
from commbench.report.table import print_whole
from commbench.units import format_size, format_time

if TYPE_CHECKING:
    from rich.console import Console

    from commbench.analysis.regret import PointRegret, RegretReport
    from commbench.analysis.tune import Boundary, CellTuning, HeldOut, Interval, Regret, Tuning
    from commbench.analysis.workload import StepTime, Workload

MOST_REGRETS = 20  # lines of a terminal's table of regrets


def percent(log_ratio: float) -> str:
    """A log-ratio as a signed percentage: ``+12 %``, ``+1.2 %``."""
    return ratio(math.expm1(log_ratio), signed=True)


def ratio(value: float, signed: bool = False) -> str:
    """A fraction as a percentage with two digits that matter; ``–`` where it is not known."""
    if not math.isfinite(value):
        return "–"
    if value >= 1000:
        return "> 1000×"
    if abs(value) >= 10:
        return f"{1 + value:.0f}×"
    digits = 0 if abs(value) >= 0.0995 else 1
    return f"{100 * value:{'+' if signed else ''}.{digits}f} %"


def gain_text(gain: Estimate) -> str:
    """``+12 % (8 % to 16 %)``: how much longer today's pick takes, with its interval."""
    if not gain.known:
        return f"{percent(gain.mean)} (one launch)"
    return f"{percent(gain.mean)} ({percent(gain.low)} to {percent(gain.high)})"


def short_size(size_bytes: float) -> str:
    """About three digits: ``46.3 KiB``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def crossover_text(crossover: Crossover) -> str:
    """``61.2 KiB (54–70 KiB)``."""
    if crossover.method == UNKNOWN:
        return "not found: the curves do not clearly cross"
    if crossover.method == BRACKET:
        return f"between {short_size(crossover.low_bytes)} and {short_size(crossover.high_bytes)}"
    low = ("≤ " if crossover.open_low else "") + short_size(crossover.low_bytes)
    high = ("≥ " if crossover.open_high else "") + short_size(crossover.high_bytes)
    return f"{short_size(crossover.size_bytes)} ({low} to {high})"


def span(interval: Interval) -> str:
    """``1 KiB to 64 KiB``, with ``above`` where a neighbour ends."""
    first = interval.first_bytes
    low = f"above {format_size(first - 1)}" if first % 2 and first > 1 else format_size(first)
    return f"{low} to {format_size(interval.last_bytes)}"


def setting(cell: CellTuning) -> str:
    """What to take, smallest sizes first: ``shm_oneshot up to 64 KiB, then shm_twoshot``."""
    parts = [f"{b.left} up to {format_size(b.size_bytes)}" for b in cell.boundaries]
    last = cell.intervals[-1].backend
    return ", then ".join([*parts, last]) if parts else f"{last} at all sizes measured"


def sentence(cell: CellTuning) -> str:
    """What to set and what it gains, in one sentence."""
    known = [t for t in cell.curves.today if t]
    if not known:
        return f"Take {setting(cell)}; today's policy was not measured."
    if not cell.changed:
        return (
            f"Keep today's policy: nothing is provably faster ({cell.curves.launches} launches would have shown a gain "
            f"of {ratio(cell.provable)} at one size)."
        )
    gains = []
    for interval in cell.intervals:
        if interval.gain is not None:
            took = " and ".join(t for t in interval.today if t != interval.backend)
            longer = ratio(math.expm1(interval.gain.mean))
            gains.append(f"{longer} longer where it took {took} ({changed_span(cell, interval)})")
    return f"Take {setting(cell)}: today's policy takes {'; '.join(gains)}."


def changed_span(cell: CellTuning, interval: Interval) -> str:
    """The measured sizes of an interval at which today's policy takes something else."""
    sizes = [
        size
        for size, pick, today in zip(cell.curves.sizes, cell.picks, cell.curves.today, strict=True)
        if interval.first_bytes <= size <= interval.last_bytes and today and today != pick
    ]
    if not sizes:
        return "–"
    return short_size(sizes[0]) if len(sizes) == 1 else f"{short_size(sizes[0])} to {short_size(sizes[-1])}"


def regret_text(regret: Regret) -> str:
    """``mean 2.5 % (0.3 % to 4.7 %), worst 14 % at 4 KiB (-3.0 % to 33 %)``, with what intervals there are."""
    mean, worst = ratio(regret.mean), f"{ratio(regret.worst)} at {short_size(regret.worst_size_bytes)}"
    if regret.low < regret.high:
        mean += f" ({ratio(regret.low)} to {ratio(regret.high)})"
    place = regret.per_size.index(regret.worst) if regret.worst in regret.per_size else 0
    if regret.size_low and regret.size_low[place] < regret.size_high[place]:
        worst += f" ({ratio(regret.size_low[place])} to {ratio(regret.size_high[place])})"
    return f"mean {mean}, worst {worst}"


def facts(cell: CellTuning) -> Iterator[tuple[str, str]]:
    """(name, value) of what else there is to say of a cell."""
    for boundary in cell.boundaries:
        yield f"{boundary.left} → {boundary.right}", _boundary_text(boundary)
    if cell.regret_today is not None:
        yield "regret of today's policy", regret_text(cell.regret_today)
    yield "regret of the tuned one", regret_text(cell.regret_tuned)
    if cell.held_out is None and cell.regret_held_out is not None:
        yield "regret in launches left out", regret_text(cell.regret_held_out)
    yield (
        "noise",
        (
            f"a ratio of two backends varies by {ratio(math.expm1(cell.noise))} from launch to launch; "
            f"{cell.curves.launches} launches can show a gain of {ratio(cell.provable)} at one size"
        ),
    )
    if cell.held_out is not None:
        yield from _held_out_facts(cell.held_out)


def _held_out_facts(held_out: HeldOut) -> Iterator[tuple[str, str]]:
    fresh = f"{held_out.launches} fresh launches"
    if held_out.today is not None:
        yield f"{fresh}, today's policy", f"regret {regret_text(held_out.today)}"
    if held_out.tuned is not None:
        yield f"{fresh}, tuned", f"regret {regret_text(held_out.tuned)}"
    else:
        yield "fresh launches", "told nothing that counts"
    if held_out.gain is not None:
        yield f"{fresh}, gain", f"{gain_text(held_out.gain)} where the policies differ, as their own calls took it"
    for line in held_out.taken_back:
        yield "taken back", line
    for size, kernel in held_out.astray:
        yield "astray", f"at {format_size(size)} the tuned policy took {kernel}"
    if math.isfinite(held_out.noise):
        yield f"{fresh}, noise", f"a ratio of two backends varies by {ratio(math.expm1(held_out.noise))}"


def _boundary_text(boundary: Boundary) -> str:
    text = f"at {format_size(boundary.size_bytes)}"
    if boundary.kept:
        text += ", as today"
    if boundary.crossover is not None:
        text += f"; measured crossover {crossover_text(boundary.crossover)}"
    return text


def print_tuning(tuning: Tuning, console: Console) -> None:
    """Per cell the sentence, the winner intervals and the facts."""
    for cell in tuning.cells:
        console.print()
        console.print(Text(cell.cell.title, style="bold cyan"))
        console.print(Text(sentence(cell), style="bold"))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for head in ("sizes", "take", "today", "today takes longer by"):
            table.add_column(head)
        for interval in cell.intervals:
            today = ", ".join(interval.today) or "–"
            same = not interval.changed and bool(interval.today)
            gain = "the same" if same else "–" if interval.gain is None else gain_text(interval.gain)
            table.add_row(span(interval), interval.backend, today, gain)
        print_whole(table, console)
        grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        for name, value in facts(cell):
            grid.add_row(name, value)
        print_whole(grid, console)
    print_left_out(dict(tuning.left_out), console)


def print_steps(load: Workload, steps: Sequence[StepTime], console: Console) -> None:
    """Milliseconds per step in collectives, by phase and policy."""
    console.print()
    title = f"{load.name}: {load.dtype} on {load.tp} ranks, time per step in collectives"
    console.print(Text(title, style="bold cyan"))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("phase")
    policies = list(dict.fromkeys(s.policy for s in steps))
    for policy in policies:
        table.add_column({"fastest": "fastest at each size"}.get(policy, policy), justify="right")
    if "today" in policies:
        table.add_column("tuned saves", justify="right")
    for phase in dict.fromkeys(s.phase for s in steps):
        own = {s.policy: s.milliseconds for s in steps if s.phase == phase}
        saved = [f"{own['today'] - own['tuned']:.3g} ms"] if "today" in own else []
        table.add_row(phase, *(f"{own[p]:.3g} ms" for p in policies), *saved)
    print_whole(table, console)


def print_left_out(left_out: dict[str, int], console: Console) -> None:
    if left_out:
        total = sum(left_out.values())
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        console.print(f"{total} measurements do not count: {reasons}.", style="yellow")


def _print_regrets(shown: Sequence[PointRegret], console: Console) -> None:
    """A line per point under a heading for each cell; the cell with the worst point first."""
    heads: list[tuple[str, Any]] = [
        ("regret", "right"), ("95 % interval", "right"), ("size", "right"), ("took", "left"), ("fastest", "left"),
        ("takes", "right"), ("could take", "right"),
    ]  # fmt: skip
    cells: dict[str, list[tuple[list[str], str]]] = {}
    for p in shown:
        interval = "–" if p.kernel == p.fastest else f"{ratio(p.low)} to {ratio(p.high)}"
        row = [
            ratio(p.regret), interval, short_size(p.size_bytes), p.kernel, p.fastest,
            format_time(p.pick_s), format_time(p.fastest_s),
        ]  # fmt: skip
        cells.setdefault(p.cell.title, []).append((row, "bold red" if p.dead else ""))
    rows = [row for own in cells.values() for row, _ in own]
    widths = [max(len(head), *(len(row[i]) for row in rows)) for i, (head, _) in enumerate(heads)]

    def table(with_head: bool) -> Table:
        grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", show_header=with_head)
        for (head, justify), width in zip(heads, widths, strict=True):
            grid.add_column(head, justify=justify, min_width=width, no_wrap=True)
        return grid

    print_whole(table(True), console)
    for title, own in cells.items():
        console.print(Text(title, style="bold cyan"))
        grid = table(False)
        for row, style in own:
            grid.add_row(*row, style=style)
        print_whole(grid, console)


def print_regret(report: RegretReport, console: Console, *, everything: bool = False) -> None:
    """The picks, worst first; sizes in dead zones in bold red."""
    shown = report.points if everything else report.points[:MOST_REGRETS]
    _print_regrets(shown, console)
    if len(shown) < len(report.points):
        console.print(f"{len(shown)} of {len(report.points)} points shown; --all shows the others.", style="dim")
    for zone in report.dead_zones:
        sizes = short_size(zone.first_bytes)
        if zone.last_bytes != zone.first_bytes:
            sizes += f" to {short_size(zone.last_bytes)}"
        console.print(
            f"dead zone: {zone.cell.title}, {sizes}: {zone.picked} is taken, {zone.fastest} is faster, "
            f"up to {ratio(zone.worst)}",
            style="bold red",
        )
    worst = report.worst
    console.print(
        f"mean regret {ratio(report.mean)} over {len(report.points)} points, worst {ratio(worst.regret)} at "
        f"{short_size(worst.size_bytes)} ({worst.cell.title}); {len(report.dead_zones)} dead zones"
    )
    if math.isfinite(report.repeat):
        console.print(
            f"noise: one kernel measured twice in a launch differs by {ratio(math.expm1(report.repeat))} (median)"
        )
    print_left_out(dict(report.left_out), console)
