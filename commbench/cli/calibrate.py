"""``commbench calibrate``: can this machine support the claims that one wants to make?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from commbench.analysis.calibration import Calibration


@click.command()
@click.option("--tp", type=int, default=2, show_default=True, help="Number of ranks.")
@click.option("--launches", type=click.IntRange(2, 100), default=5, show_default=True, help="Fresh torchrun jobs.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep the run in this folder. [default: not kept]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def command(tp: int, launches: int, out: Path | None, as_json: bool) -> int:
    """Measure the instrument itself: timer, start of iterations, known answers, and the noise floor.

    Exit code 1 when a scripted duration is not reported within 1 % or the timer's resolution.
    """
    from commbench.harness.supervision.scratch import scratch_folder

    with scratch_folder("calibrate") as scratch:
        result = _measure(tp, launches, out if out is not None else scratch / "run")
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    else:
        _show(result, tp)
    return 0 if all(answer.good for answer in result.answers) else 1


def _measure(tp: int, launches: int, directory: Path) -> Calibration:
    from commbench.analysis.calibration import calibrate
    from commbench.errors import LaunchError
    from commbench.harness import run as harness
    from commbench.harness.progress import watcher
    from commbench.store.run import check_writable
    from commbench.sweep import make_spec

    settings = {
        "name": "calibrate",
        "tp": tp,
        "launches": launches,
        "collectives": "all_reduce,all_gather",
        "dtypes": "float32",
        "sizes": "1KiB,16KiB,256KiB" if tp in (2, 4, 8) else "1KiB:256KiB:x16",
        "max_time_per_point": "300ms",
    }
    spec = make_spec(settings, {"tp": "--tp", "launches": "--launches"})
    expansion, how = harness.prepare(spec)
    check_writable(directory)
    with watcher(len(expansion.points) * launches, quiet=False, estimate_s=harness.estimate_s(expansion, spec)) as show:
        run = harness.execute(spec, expansion, how, directory, show, sys.argv)
    try:
        return calibrate(run.rows(), run.manifest["launches"])
    except ValueError as error:
        raise LaunchError(f"the calibration measured nothing: {error}") from error


def _show(result: Calibration, tp: int) -> None:
    from commbench.analysis.calibration import CLAIMS, launches_needed
    from commbench.units import format_time

    click.echo(f"timer       resolution {format_time(result.resolution_s)}, an empty iteration costs "
               f"{format_time(result.overhead_s)} ± {format_time(result.spread_s / 2)} (subtracted)")  # fmt: skip
    click.echo(f"start       {result.sync}: {tp} ranks start {format_time(result.skew_p50_s)} apart (median), "
               f"{format_time(result.skew_p99_s)} (p99); {result.missed_windows:.1%} of windows missed")  # fmt: skip
    for answer in result.answers:
        mark = "ok " if answer.good else "BAD"
        click.echo(
            f"known  {mark}  {answer.loop:<6} loop: {format_time(answer.scripted_s)} by script, reported "
            f"{format_time(answer.reported_s)} ({answer.error_s / answer.scripted_s:+.1%}, "
            f"allowed ±{answer.allowed_s / answer.scripted_s:.1%})"
        )
    if not result.answers:
        click.echo("known  –    not checked: the native module is missing")
    click.echo(f"noise       launch to launch {result.cv:.1%} (worst point {result.cv_worst:.1%}) over "
               f"{result.launches} launches; {result.noisy_points} of {result.points} points disturbed")  # fmt: skip
    click.echo(f"            {result.launches} launches a side find a slowdown of "
               f"{result.detectable(result.launches):.1%} (80 % power, 5 % false alarms)")  # fmt: skip
    click.echo("")
    for claim in CLAIMS:
        needed = launches_needed(result.cv, claim)
        if needed is None:
            verdict = "no: more than 1000 launches a side would be needed"
        elif needed <= result.launches:
            verdict = f"yes, with {needed} launches a side"
        else:
            verdict = f"only with {needed} launches a side"
        click.echo(f"claims at {claim:>3.0%}: {verdict}")
