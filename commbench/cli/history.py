"""``commbench history``: keep the runs of many nights, look at them, plot them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commbench.cli._click import Commands
from commbench.errors import UsageError

if TYPE_CHECKING:
    from commbench.store.history import Night, Series

DEFAULT = Path("reports/history")

_folder = click.option(
    "--history", "directory", type=click.Path(path_type=Path), default=DEFAULT,
    help="Folder of the history. [default: reports/history]",
)  # fmt: skip


@click.group(cls=Commands, context_settings={"max_content_width": 100})
def command() -> None:
    """Keep the runs of many nights, and see how points developed.

    A history is a folder of Parquet files, one per run. Several jobs may add to it at the same time.
    """


@command.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@_folder
@click.option("--note", default="", help="Words to keep with the run.")
@click.option("--accept", metavar="WHY", help="A new baseline starts with this run: later gates look no further back.")
@click.option("--force", is_flag=True, help="Add a run that is not complete.")
def add(run: Path, directory: Path, note: str, accept: str | None, force: bool) -> int:
    """Add a run directory to the history. Adding it twice changes nothing."""
    from commbench.analysis.canaries import launch_values
    from commbench.cli._sides import read_side
    from commbench.store.history import add_run

    side = read_side(run)
    if side.problems and not force:
        raise UsageError(f"{'; '.join(side.problems)}; a later gate would miss points; --force adds it all the same")
    path, new = add_run(
        directory,
        side.manifest | {"run_id": side.run.run_id},
        side.latencies,
        launch_values(side.manifest.get("launches", [])),
        note=accept or note,
        accepted=accept is not None,
    )
    click.echo(f"{'added' if new else 'already there:'} {path}")
    return 0


@command.command("list")
@_folder
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def list_(directory: Path, as_json: bool) -> int:
    """List the nights, oldest first, with what changed in the environment."""
    from rich.table import Table
    from rich.text import Text

    from commbench.report.console import Console
    from commbench.report.table import print_whole
    from commbench.store.history import open_history

    history = open_history(directory)
    changes = dict(environment_changes(history.nights))
    if as_json:
        nights = [
            {
                **{k: v for k, v in night.facts.items() if k not in ("fingerprint", "spec", "canaries")},
                "environment_change": changes.get(i, ""),
            }
            for i, night in enumerate(history.nights)
        ]
        click.echo(json.dumps({"nights": nights, "skipped": history.skipped}, indent=1, allow_nan=False))
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (("started (UTC)", "left"), ("run", "left"), ("points", "right"), ("launches", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("notes")
    for i, night in enumerate(history.nights):
        notes = []
        if night.facts.get("accepted"):
            notes.append(f"new baseline: {night.facts.get('note')}")
        elif night.facts.get("note"):
            notes.append(str(night.facts["note"]))
        if i in changes:
            notes.append(f"environment: {changes[i]}")
        points, launches = night.facts.get("points"), night.facts.get("launches")
        table.add_row(night.day, night.run_id, str(points or "?"), str(launches or "?"), Text("; ".join(notes)))
    console = Console()
    print_whole(table, console)
    _print_skipped(history.skipped)
    return 0


@command.command()
@click.argument("point", metavar="[POINT]", required=False)
@_folder
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def show(point: str | None, directory: Path, as_json: bool) -> int:
    """Show one point night by night. POINT: its label, words of it, or the start of its point_id.

    Without POINT, the points of the history are listed.
    """
    from rich.table import Table
    from rich.text import Text

    from commbench.analysis.changepoints import change_points
    from commbench.analysis.compare import labels, percent
    from commbench.report.console import Console
    from commbench.report.table import print_whole
    from commbench.store.history import find_points, load_series, open_history
    from commbench.units import format_time

    history = open_history(directory)
    series = load_series(history.nights)
    names = labels(series.points)
    if point is None:
        ids = list(series.points["point_id"])
        if as_json:
            records = [{"point_id": i, "label": n} for i, n in zip(ids, names, strict=True)]
            click.echo(json.dumps(records, indent=1))
        else:
            for i, n in sorted(zip(ids, names, strict=True), key=lambda pair: pair[1]):
                click.echo(f"{i}  {n}")
            _print_skipped([*history.skipped, *series.skipped])
        return 0
    hits = find_points(series.points, names, point)
    if len(hits) > 1:
        shown = ", ".join(names[i] for i in hits[:6]) + (f" and {len(hits) - 6} more" if len(hits) > 6 else "")
        raise UsageError(f"{point!r} names {len(hits)} points: {shown}; give more words or a point_id")
    row = hits[0]
    changes = {c.index: c for c in change_points(series.log_mean[row])}
    environment = dict(environment_changes(series.nights))
    records = _night_records(series, row, changes, environment)
    if as_json:
        document = {"point_id": series.points["point_id"].iloc[row], "label": names[row], "nights": records}
        click.echo(json.dumps(document, indent=1, allow_nan=False))
        return 0
    console = Console()
    console.print(Text.assemble((names[row], "bold"), f"  {series.points['point_id'].iloc[row]}"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, right in (("started (UTC)", False), ("run", False), ("latency", True), ("launches", True)):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("notes")
    for record in records:
        notes = [
            text for text in (record["environment_change"] and f"environment: {record['environment_change']}",) if text
        ]
        if record["change"] is not None:
            notes.insert(0, f"new level {percent(record['change'])} (advisory)")
        latency = "absent" if record["latency_s"] is None else format_time(record["latency_s"])
        table.add_row(record["started"], record["run_id"], latency, str(record["launches"]), Text("; ".join(notes)))
    print_whole(table, console)
    _print_skipped([*history.skipped, *series.skipped])
    return 0


@command.command(short_help="Draw points over nights, with what changed in between.")
@click.argument("point", metavar="[POINT]", required=False)
@_folder
@click.option("--out", type=click.Path(path_type=Path), default=Path("trend.png"), help="File. [default: trend.png]")
def plot(point: str | None, directory: Path, out: Path) -> int:
    """Draw points over nights: environment changes dotted, advisory change points in red (slower) or green.

    Without POINT, the points with the largest changes come first. POINT may name several.
    """
    from commbench.analysis.changepoints import change_points
    from commbench.analysis.compare import labels
    from commbench.report.trend import MOST_PANELS, Trend, draw_trends
    from commbench.store.history import find_points, load_series, open_history

    history = open_history(directory)
    series = load_series(history.nights)
    names = labels(series.points)
    hits = list(range(len(names))) if point is None else find_points(series.points, names, point)
    trends = [
        Trend(
            names[i], series.log_mean[i], series.launches[i], series.log_variance[i], change_points(series.log_mean[i])
        )
        for i in hits
        if (series.launches[i] > 0).any()
    ]
    if not trends:
        raise UsageError(f"history {directory} has no latencies to draw")
    trends.sort(key=lambda t: -max((abs(c.ratio - 1) for c in t.changes), default=0.0))
    subtitle = (
        f"{directory}, {len(series.nights)} nights; dots: geometric mean of the launch medians, 95 % between launches"
    )
    skipped = [*history.skipped, *series.skipped]
    if skipped:
        subtitle += f"; {len(skipped)} files skipped"
    try:
        path = draw_trends(
            trends, [n.started_s for n in series.nights], environment_changes(series.nights), out, subtitle=subtitle
        )
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror or error}") from error
    more = f", {MOST_PANELS} of {len(trends)} points" if len(trends) > MOST_PANELS else ""
    click.echo(f"{path}{more}")
    _print_skipped(skipped)
    return 0


def environment_changes(nights: Sequence[Night]) -> list[tuple[int, str]]:
    """(night, what differs from the night before it). Nights that record no environment are passed over."""
    from commbench.harness.environment.fingerprint import differences

    found = []
    before: dict[str, Any] | None = None
    for i, night in enumerate(nights):
        if not night.fingerprint:
            continue
        if before is not None:
            texts = differences(before, night.fingerprint)
            if texts:
                found.append((i, "; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else "")))
        before = night.fingerprint
    return found


def _night_records(
    series: Series, row: int, changes: dict[int, Any], environment: dict[int, str]
) -> list[dict[str, Any]]:
    import math

    records = []
    for i, night in enumerate(series.nights):
        log_mean, variance = float(series.log_mean[row, i]), float(series.log_variance[row, i])
        known = math.isfinite(log_mean)
        records.append(
            {
                "started": night.day,
                "run_id": night.run_id,
                "latency_s": math.exp(log_mean) if known else None,
                "launches": int(series.launches[row, i]),
                "launch_cv": math.sqrt(variance) if math.isfinite(variance) else None,
                "change": changes[i].ratio if i in changes else None,
                "environment_change": environment.get(i, ""),
            }
        )
    return records


def _print_skipped(skipped: Sequence[str]) -> None:
    if not skipped:
        return
    click.echo(f"skipped {len(skipped)} files:", err=True)
    for text in skipped:
        click.echo(f"  {text}", err=True)
