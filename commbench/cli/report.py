"""``commbench report``: plots and a page from stored runs."""

from __future__ import annotations

from pathlib import Path

import click

from commbench.errors import UsageError


@click.command(context_settings={"max_content_width": 100})
@click.argument("runs", metavar="RUN [RUN…]", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Where to write. [default: into RUN; needed for several]")
@click.option("--as", "tool", help="Print the numbers that another tool defines, as it prints them: nccl-tests, osu, "
              "imb or param. Writes no page.")  # fmt: skip
def command(runs: tuple[Path, ...], out: Path | None, tool: str | None) -> int:
    """Write plots (PNG and SVG) and a self-contained report.html for run directories.

    Several runs are drawn side by side in the same plots. Works also for runs that are still going on or were
    interrupted. Nothing is measured.

    \b
    commbench report reports/20260131-101500-quick-1a2b
    commbench report reports/before reports/after --out /tmp/before-after
    commbench report reports/20260131-101500-quick-1a2b --as imb
    """
    if tool is not None:
        return _as_tool(runs, out, tool)
    from commbench.analysis.launches import repeats, variation_text, variations
    from commbench.report import write_report
    from commbench.report.summary import summarise
    from commbench.store.run import open_run

    page = write_report(runs, out)
    for path in runs:
        click.echo(f"{path}: {summarise(open_run(path)).verdict}")
    opened = [open_run(run) for run in runs]
    variation = variation_text(variations([run.points() for run in opened]))
    if variation and repeats([run.manifest for run in opened]):
        click.echo(f"launch-to-launch coefficient of variation {variation}")
    click.echo(f"report: {page}")
    return 0


def _as_tool(runs: tuple[Path, ...], out: Path | None, tool: str) -> int:
    from commbench.interop.other_tools import as_tool
    from commbench.store.run import open_run

    if out is not None:
        raise UsageError("--as prints a table and writes no page; leave out --out")
    click.echo("\n".join(as_tool(open_run(run), tool) for run in runs), nl=False)
    return 0
