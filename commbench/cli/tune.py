"""``commbench tune``: measured thresholds, written as a policy."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commbench.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from commbench.analysis.incumbent import Incumbent
    from commbench.analysis.tune import Tuning
    from commbench.store.run import Run


@click.command(context_settings={"max_content_width": 100})
@click.argument("runs", metavar="[RUN…]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--policy", help="Today's policy, by name or file. [default: the runs', or commbench]")
@click.option("--out", type=click.Path(path_type=Path), default=Path("policy.toml"), show_default=True,
              help="The policy file to write; the plot goes beside it.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def command(runs: tuple[Path, ...], policy: str | None, out: Path, as_json: bool) -> int:
    """Find which backend is the fastest at which sizes, and write it as a policy.

    RUN: sweeps with points that asked for auto and points that forced backends.

    \b
    commbench tune reports/mine --out policy.toml
    commbench sweep --tp 2 --policy policy.toml
    commbench explain --policy policy.toml
    """
    from commbench.analysis.tune import tune

    if not runs:
        raise UsageError("nothing to tune from: name a run with forced points")
    points, incumbent, name = _read(runs, policy)
    tuning = tune(points, name, kernel_of=incumbent.kernel, edges=incumbent.edges)
    _write(tuning, incumbent, out, [f"commbench tune {shlex.join(sys.argv[2:])}"])
    _show(tuning, out, as_json)
    return 0


def _read(runs: tuple[Path, ...], policy: str | None) -> tuple[pd.DataFrame, Incumbent, str]:
    """The points of all runs, and the policy that they were made with."""
    import pandas as pd

    from commbench.interop.policy_of_run import incumbent_of
    from commbench.store.run import open_run

    opened: list[Run] = [open_run(path) for path in runs]
    incumbent, name = incumbent_of(opened[0].manifest, policy)
    for run in opened[1:]:
        if incumbent_of(run.manifest, policy)[1] != name:
            raise UsageError(f"{run.directory} was made with another policy than {opened[0].directory} ({name})")
    # two runs of one name would otherwise share their launches
    frames = [run.points().assign(run_id=str(path.resolve())) for run, path in zip(opened, runs, strict=True)]
    return pd.concat(frames, ignore_index=True), incumbent, name


def _write(tuning: Tuning, incumbent: Incumbent, out: Path, lines: list[str]) -> None:
    from commbench.errors import StoreError
    from commbench.interop.policy_file import to_toml
    from commbench.policy import load_policy
    from commbench.report.tune import draw_tuning

    text = to_toml(tuning, incumbent.policy, incumbent.platform.device, out.stem, lines)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    except OSError as error:
        raise StoreError(f"--out {out} cannot be written: {error.strerror or error}") from error
    load_policy(str(out.resolve()))  # what was written is a policy, or this says why not
    draw_tuning(tuning, out.parent, out.stem)


def _show(tuning: Tuning, out: Path, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(document(tuning, out), indent=1, allow_nan=False))
        return
    from rich.console import Console

    from commbench.report.tune_text import print_tuning

    print_tuning(tuning, Console())
    plots = f"{out.stem}.png" if len(tuning.cells) == 1 else f"{out.stem}-1.png … {out.stem}-{len(tuning.cells)}.png"
    click.echo(f"\npolicy: {out}   plot: {out.parent / plots}")
    click.echo(f"use it: commbench sweep --tp {tuning.cells[0].cell.world_size} --policy {out}")


def document(tuning: Tuning, out: Path) -> dict[str, Any]:
    """The tuning as plain data: bytes, and gains and regrets as fractions."""
    from dataclasses import asdict

    from commbench.report.tune_text import sentence

    def number(value: float) -> float | None:
        return float(value) if math.isfinite(value) else None

    def regret(value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        return {
            "mean": number(value.mean),
            "worst": number(value.worst),
            "worst_size_bytes": value.worst_size_bytes,
            "per_size": [number(v) for v in value.per_size],
        }

    return {
        "policy": str(out),
        "left_out": dict(tuning.left_out),
        "cells": [
            {
                **asdict(c.cell),
                "sentence": sentence(c),
                "launches": c.curves.launches,
                "sizes_bytes": list(c.curves.sizes),
                "picks": list(c.picks),
                "today": list(c.curves.today),
                "intervals": [
                    {
                        "backend": i.backend,
                        "first_bytes": i.first_bytes,
                        "last_bytes": i.last_bytes,
                        "today": list(i.today),
                        "gain": None if i.gain is None else number(math.expm1(i.gain.mean)),
                        "gain_low": None if i.gain is None else number(math.expm1(i.gain.low)),
                        "gain_high": None if i.gain is None else number(math.expm1(i.gain.high)),
                    }
                    for i in c.intervals
                ],
                "boundaries": [
                    {
                        "size_bytes": b.size_bytes,
                        "left": b.left,
                        "right": b.right,
                        "kept": b.kept,
                        "crossover": None if b.crossover is None else asdict(b.crossover),
                    }
                    for b in c.boundaries
                ],
                "regret_tuned": regret(c.regret_tuned),
                "regret_today": regret(c.regret_today),
                "regret_held_out": regret(c.regret_held_out),
                "noise": number(math.expm1(c.noise)),
                "provable": number(c.provable),
            }
            for c in tuning.cells
        ],
    }
