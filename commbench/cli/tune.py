"""``commbench tune``: measured thresholds, written as a policy."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commbench.errors import UsageError
from commbench.types import AUTO

if TYPE_CHECKING:
    import pandas as pd

    from commbench.analysis.incumbent import Incumbent
    from commbench.analysis.tune import Tuning
    from commbench.analysis.workload import StepTime, Workload
    from commbench.store.run import Run
    from commbench.types import Point


LAUNCHING = ("backends", "collectives", "dtypes", "sizes", "mode", "cache", "device", "launches", "budget", "seed")


@click.command(context_settings={"max_content_width": 100})
@click.argument("runs", metavar="[RUN…]", nargs=-1, type=click.Path(path_type=Path))
@click.option("--tp", type=int, help="Measure now, with so many ranks, instead of reading runs.")
@click.option("--backends", help="Backends to force, comma-separated. [default: every kernel that the policy may take]")
@click.option("--collectives", help="Comma-separated. [default: all_reduce]")
@click.option("--dtypes", help="Comma-separated. [default: float32]")
@click.option("--sizes", help="As for sweep. [default: half octaves from 1 KiB to 4 MiB]")
@click.option("--mode", help="eager, graph. [default: eager]")
@click.option("--cache", help="hot, cold. [default: hot]")
@click.option("--device", help="auto (cuda or cpu), cpu, cuda, xpu, hpu, npu. [default: auto]")
@click.option("--launches", type=int, help="Launches of each phase: grid, refinement, confirmation. [default: 5]")
@click.option("--budget", help="Longest time for everything. [default: 4m30s]")
@click.option("--seed", type=int, help="Seed of the random order and of the data. [default: 0]")
@click.option("--keep", type=click.Path(path_type=Path), help="Folder of the runs. [default: reports/<time>-tune-…]")
@click.option("--policy", help="Today's policy, by name or file. [default: the runs', or commbench]")
@click.option("--workload", type=click.Path(path_type=Path),
              help="A TOML file that says how often a model sends which message; see docs/tuning.md.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=Path("policy.toml"), show_default=True,
              help="The policy file to write; the plot goes beside it.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def command(
    runs: tuple[Path, ...], tp: int | None, keep: Path | None, policy: str | None, workload: Path | None, out: Path,
    as_json: bool, quiet: bool, **flags: Any,
) -> int:  # fmt: skip
    """Find which backend is the fastest at which sizes, and write it as a policy.

    With --tp it measures: a grid of sizes, more sizes where backends meet, and fresh launches that confirm the
    choice. With RUN it reads sweeps that have points of auto and of forced backends. A change of today's policy must
    gain more than 2 % and provably more than 1 %; where nothing does, the policy stays as it is.

    \b
    commbench tune --tp 2 --out policy.toml
    commbench tune reports/mine --out policy.toml
    commbench sweep --tp 2 --policy policy.toml
    """
    load = None
    if workload is not None:
        from commbench.interop.workload_file import read_workload

        load = read_workload(workload)
    if tp is None:
        named = [f"--{name}" for name in LAUNCHING if flags[name] is not None] + (["--keep"] if keep else [])
        if not runs:
            raise UsageError("nothing to tune from: name a run with forced points, or measure now with --tp N")
        if named:
            raise UsageError(f"{', '.join(named)} says how to measure; it needs --tp N")
        tuning, incumbent = _from_runs(runs, policy)
    else:
        if runs:
            raise UsageError("--tp N measures now; leave out the runs, or leave out --tp")
        tuning, incumbent = _measured(tp, policy or "commbench", keep, flags, quiet or as_json)
    from commbench.analysis.workload import steps_under

    steps = steps_under(tuning, load) if load is not None else []  # refuses before anything is written
    _write(tuning, incumbent, out, [f"commbench tune {shlex.join(sys.argv[2:])}"])
    _show(tuning, load, steps, out, as_json)
    return 0


def _from_runs(runs: tuple[Path, ...], policy: str | None) -> tuple[Tuning, Incumbent]:
    from commbench.analysis.tune import tune

    points, incumbent, name = _read(runs, policy)
    return tune(points, name, kernel_of=incumbent.kernel, edges=incumbent.edges), incumbent


def _measured(tp: int, policy: str, keep: Path | None, flags: dict[str, Any], quiet: bool) -> tuple[Tuning, Incumbent]:
    """Launch, choose, refine, confirm."""
    from commbench.analysis.confirm import confirm, held_out_points, refinement
    from commbench.analysis.incumbent import Incumbent
    from commbench.analysis.tune import tune
    from commbench.cli._click import named
    from commbench.harness import run as harness
    from commbench.harness.progress import watcher
    from commbench.harness.supervision.scratch import scratch_folder
    from commbench.harness.tuning import COARSE, CONFIRM, REFINE, Effort, adaptive, half_octaves, kernels_of
    from commbench.interop.policy_file import to_toml
    from commbench.interop.policy_of_run import incumbent_of
    from commbench.policy import load_policy
    from commbench.sweep import make_spec
    from commbench.types import Platform
    from commbench.units import parse_duration

    settings: dict[str, Any] = {
        "name": "tune",
        "tp": tp,
        "policy": policy,
        "collectives": "all_reduce",
        "dtypes": "float32",
        "sizes": ",".join(map(str, half_octaves(1 << 10, 4 << 20))),
        "launches": 5,
        "max_time_per_point": 0.5,
    }
    budget = named("--budget", parse_duration, flags["budget"]) if flags["budget"] is not None else 270.0
    settings |= {k: v for k, v in flags.items() if v is not None and k not in ("budget", "backends")}
    source = {key: f"--{key.replace('_', '-')}" for key in settings}
    spec = make_spec(settings, source)
    device = harness.resolve_device(spec)
    platform = Platform(device=device, world_size=tp)
    forced = flags["backends"] or ",".join(kernels_of(policy, platform, spec.collectives[0]))
    backends = [b for b in dict.fromkeys(part.strip() for part in forced.split(",")) if b and b != AUTO]
    if len(backends) < 2:
        raise UsageError(f"--backends {forced}: tuning compares backends and needs two or more")
    spec = make_spec({**settings, "backends": [AUTO, *backends]}, {**source, "backends": "--backends"})
    expansion, how = harness.prepare(spec)
    directory = keep if keep is not None else Path("reports") / harness.new_run_id("tune")

    def choose(done: Sequence[Run]) -> Tuning:
        incumbent, _ = incumbent_of(done[0].manifest, policy)
        return tune(_points(done), policy, kernel_of=incumbent.kernel, edges=incumbent.edges)

    kept = harness.interruptible_in(directory, (COARSE, REFINE, CONFIRM), "a policy")
    with kept, scratch_folder("tune") as scratch, ExitStack() as watching:
        tuned = str(scratch / "tuned.toml")

        def candidates(done: Sequence[Run]) -> Sequence[Point]:
            tuning = choose(done)
            base = load_policy(policy)
            Path(tuned).write_text(to_toml(tuning, base, device, "tuned"))
            return held_out_points(tuning, policy, tuned)

        def announce(phase: str, count: int, seconds: float) -> Callable[[Mapping[str, Any]], None]:
            watching.close()
            if not quiet:
                click.echo(f"{phase}:", err=True)
            return watching.enter_context(watcher(count, quiet=quiet, estimate_s=seconds))

        done = adaptive(
            spec, expansion, how, directory, Effort(spec.launches, spec.launches, budget),
            refinement=lambda runs: refinement(choose(runs), policy), held_out=candidates, announce=announce,
            argv=sys.argv,
        )  # fmt: skip
        watching.close()
        incumbent, _ = incumbent_of(done[0].manifest, policy)
        confirming = [run for run in done if run.directory.name == CONFIRM]
        tuning = choose([run for run in done if run not in confirming])
        if confirming:
            tuning = confirm(
                tuning, _points(confirming), policy, tuned, kernel_of=incumbent.kernel,
                tuned_kernel_of=Incumbent(load_policy(tuned), incumbent.platform).kernel, edges=incumbent.edges,
            )  # fmt: skip
    if not quiet:
        click.echo(f"runs: {directory}", err=True)
    return tuning, incumbent


def _points(runs: Sequence[Run]) -> pd.DataFrame:
    """The points of several runs; launches of two runs of one name stay apart."""
    import pandas as pd

    return pd.concat([run.points().assign(run_id=str(run.directory.resolve())) for run in runs], ignore_index=True)


def _read(runs: tuple[Path, ...], policy: str | None) -> tuple[pd.DataFrame, Incumbent, str]:
    """The points of all runs, and the policy that they were made with."""
    from commbench.interop.policy_of_run import incumbent_of
    from commbench.store.run import open_run

    opened: list[Run] = [open_run(path) for path in runs]
    incumbent, name = incumbent_of(opened[0].manifest, policy)
    for run in opened[1:]:
        if incumbent_of(run.manifest, policy)[1] != name:
            raise UsageError(f"{run.directory} was made with another policy than {opened[0].directory} ({name})")
    return _points(opened), incumbent, name


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


def _show(tuning: Tuning, load: Workload | None, steps: list[StepTime], out: Path, as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        steps_document = {"workload": [asdict(s) for s in steps]} if load is not None else {}
        click.echo(json.dumps({**document(tuning, out), **steps_document}, indent=1, allow_nan=False))
        return
    from commbench.report.console import Console
    from commbench.report.tune_text import print_steps, print_tuning

    console = Console()
    print_tuning(tuning, console)
    if load is not None:
        print_steps(load, steps, console)
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
            "mean_low": number(value.low),
            "mean_high": number(value.high),
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
                "held_out": None
                if c.held_out is None
                else {
                    "launches": c.held_out.launches,
                    "regret_tuned": regret(c.held_out.tuned),
                    "regret_today": regret(c.held_out.today),
                    "gain": None if c.held_out.gain is None else number(math.expm1(c.held_out.gain.mean)),
                    "gain_low": None if c.held_out.gain is None else number(math.expm1(c.held_out.gain.low)),
                    "noise": number(math.expm1(c.held_out.noise)),
                    "taken_back": list(c.held_out.taken_back),
                    "astray": [list(a) for a in c.held_out.astray],
                },
                "noise": number(math.expm1(c.noise)),
                "provable": number(c.provable),
            }
            for c in tuning.cells
        ],
    }
