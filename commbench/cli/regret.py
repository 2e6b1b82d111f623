"""``commbench regret``: what today's picks cost against the fastest backend."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from commbench.analysis.regret import RegretReport


@click.command(context_settings={"max_content_width": 100})
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--policy", help="Whose picks, where the run holds several policies. [default: the run's]")
@click.option("--all", "everything", is_flag=True, help="Every point, not only the worst.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def command(run: Path, policy: str | None, everything: bool, as_json: bool) -> int:
    """Hold the coordinator's picks against the fastest correct backend, point by point, worst first.

    The run needs points that asked for auto and points that forced backends. Regret is the time of the pick over
    the time of the fastest backend, minus 1. A dead zone is a range of sizes at which the pick is clearly more
    than 5 % slower, noise considered. Exit code 1 if there is a dead zone.

    \b
    commbench sweep --tp 2 --backends auto,shm_oneshot,shm_twoshot,torch_dist --launches 5 --out reports/mine
    commbench regret reports/mine
    """
    from commbench.analysis.regret import regret
    from commbench.interop.policy_of_run import incumbent_of
    from commbench.store.run import open_run

    opened = open_run(run)
    incumbent, name = incumbent_of(opened.manifest, policy)
    report = regret(opened.points(), name, incumbent.kernel)
    if as_json:
        click.echo(json.dumps(_document(report), indent=1, allow_nan=False))
    else:
        from commbench.report.console import Console
        from commbench.report.tune_text import print_regret

        console = Console()
        console.print(f"{opened.run_id}: picks of policy {name}", style="bold")
        print_regret(report, console, everything=everything or not console.is_terminal)
    return 1 if report.dead_zones else 0


def _document(report: RegretReport) -> dict[str, Any]:
    from dataclasses import asdict

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def record(entry: Any) -> dict[str, Any]:
        values = asdict(entry)
        values.update(values.pop("cell"))
        return {key: number(v) if isinstance(v, float) else v for key, v in values.items()}

    return {
        "mean": report.mean,
        "repeat": number(report.repeat),
        "left_out": dict(report.left_out),
        "points": [record(p) for p in report.points],
        "dead_zones": [record(z) for z in report.dead_zones],
    }
