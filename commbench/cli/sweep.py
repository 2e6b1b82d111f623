"""``commbench sweep``: measure, show, report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commbench.cli import _nodes
from commbench.cli._click import bare, grouped
from commbench.errors import CommbenchError, Interrupted, LaunchError
from commbench.sweep import SweepSpec, find_sweep, make_spec, read_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from commbench.harness.launch import Event
    from commbench.harness.views.look import Look
    from commbench.store.run import Run

_FLAGS = {
    "tp": "--tp",
    "pp": "--pp",
    "ep": "--ep",
    "group": "--group",
    "device": "--device",
    "collectives": "--collectives",
    "dtypes": "--dtypes",
    "ops": "--ops",
    "sizes": "--sizes",
    "layout": "--layout",
    "placement": "--placement",
    "cache": "--cache",
    "mode": "--mode",
    "backends": "--backends",
    "policy": "--policy",
    "launches": "--launches",
    "target_ci": "--target-ci",
    "max_time_per_point": "--max-time-per-point",
    "budget": "--budget",
    "seed": "--seed",
    "sync": "--sync",
    "loop": "--loop",
    "graph_timing": "--graph-timing",
    "share_device": "--share-device",
    "launcher": "--launcher",
    "mpirun_options": "--mpirun-options",
    "nnodes": "--nnodes",
    "bind": "--bind",
    "skew": "--skew",
    "ca_provider": "--ca-provider",
    "point_timeout": "--point-timeout",
    "launch_timeout": "--launch-timeout",
}


_GROUPS = {
    "What to measure": (
        "--collectives", "--dtypes", "--ops", "--sizes", "--layout", "--placement", "--cache", "--mode", "--backends",
        "--policy", "--group",
    ),
    "Ranks": (
        "--tp", "--pp", "--ep", "--device", "--share-device", "--launcher", "--mpirun-options", "--bind",
        "--ca-provider",
    ),
    "Several hosts": ("--nnodes", "--node-rank", "--rdzv-endpoint", "--nproc-per-node", "--join-timeout"),
    "How to measure": (
        "--launches", "--target-ci", "--max-time-per-point", "--budget", "--seed", "--sync", "--loop",
        "--graph-timing", "--skew",
    ),
    "When something hangs or ends early": ("--point-timeout", "--launch-timeout", "--resume", "--retry", "--force"),
    "Traces and profiles": ("--profile", "--trace", "--otlp-endpoint"),
    "Output": ("--out", "--dry-run", "--json", "--quiet"),
}  # fmt: skip


@click.command(cls=bare("--profile", "auto", grouped(_GROUPS)), context_settings={"max_content_width": 100})
@click.argument("spec_file", metavar="[SPEC]", required=False)
@click.option("--tp", type=int, help="Ranks of a tensor parallel group. More ranks than cores work on CPU, and are "
              "marked. [default: 2]")  # fmt: skip
@click.option("--pp", type=int, help="Pipeline stages; the sweep takes tp × pp ranks. [default: 1]")
@click.option("--ep", type=int, help="Expert parallelism inside a tensor parallel group. [default: 1]")
@click.option("--group", help="Comma-separated groups to measure: world, tp, pp, moe_ep, moe_tp (all of a kind at "
              "once), tp:0 … (the first alone). [default: world]")  # fmt: skip
@click.option("--device", help="auto (cuda or cpu), cpu, cuda, xpu, hpu, npu. [default: auto]")
@click.option("--collectives", help="Comma-separated: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, "
              "reduce, gather, scatter, send_recv, barrier, and what "
              "the coordinator does beside: see the sweep `coordinator`.")  # fmt: skip
@click.option("--dtypes", help="Comma-separated: float32, float16, bfloat16, float64, int8, uint8, int32, int64, …")
@click.option("--ops", help="Comma-separated: sum, prod, min, max, avg. [default: sum]")
@click.option("--sizes", help="Total message bytes: 8,1KiB,10MB or ranges 8:64MiB:x2, 1KiB:16KiB:+1KiB, or boundaries.")
@click.option("--layout", help="contiguous, strided.")
@click.option("--placement", help="in, out. [default: each collective's customary one]")
@click.option("--cache", help="hot, cold. [default: hot]")
@click.option("--mode", help="eager, graph (on a GPU). [default: eager]")
@click.option("--graph-timing", help="In graphs: isolated (ranks meet before each call) or chained (calls follow at "
              "once). [default: isolated]")  # fmt: skip
@click.option("--share-device", is_flag=True, default=None, help="More ranks than GPUs, for correctness: such times "
              "are marked and compared with nothing else.")  # fmt: skip
@click.option("--backends", help="auto (the policy picks) and names to force, comma-separated. [default: auto]")
@click.option("--policy", help="Dispatch policies by name or file, comma-separated. [default: commbench]")
@click.option("--launches", type=int, help="Fresh torchrun jobs; each measures every point. [default: 1]")
@click.option("--target-ci", help="Half-width of the median's 95 % interval to stop at. [default: 1%]")
@click.option("--max-time-per-point", help="Longest sampling of a point in a launch. [default: 0.5s]")
@click.option("--budget", help="Longest time for the whole sweep, such as 2m; points share it.")
@click.option("--seed", type=int, help="Seed of the random order and of the data. [default: 0]")
@click.option("--sync", help="How iterations start: window, barrier or none. [default: window]")
@click.option("--loop", help="Timed loop: python, or native where the backend is compiled code. [default: python]")
@click.option("--launcher", help="What starts the ranks: torchrun, mpirun (the one on PATH), or external: they are "
              "started already, and this command runs in each. [default: torchrun]")  # fmt: skip
@click.option("--mpirun-options", metavar="TEXT", help="Options for mpirun, such as '--bind-to none'.")
@_nodes.options
@click.option("--ca-provider", help="Whose custom all-reduce the backend `ca` runs: sgl_kernel, vllm or flashinfer. "
              "[default: the first that is installed]")  # fmt: skip
@click.option("--skew", metavar="RANK:TIME", help="Let one rank enter every call late, such as 1:300us.")
@click.option("--point-timeout", metavar="TIME", help="Longest time for a point in a launch; then its stacks are kept, "
              "the point is marked timeout, and the rest goes on. [default: 1 min and 10 times the usual]")  # fmt: skip
@click.option("--launch-timeout", metavar="TIME", help="Longest time for a launch. [default: 5 min to start, no end]")
@click.option("--resume", metavar="RUN", type=click.Path(path_type=Path), help="Go on with a run directory: measure "
              "what has no result, with the run's own spec, seed and order.")  # fmt: skip
@click.option("--retry", metavar="STATUSES", help="With --resume: repeat points that are failed, timeout, wrong or "
              "unsteady (comma-separated).")  # fmt: skip
@click.option("--force", is_flag=True, help="With --resume: go on although spec, version or machine differ.")
@click.option("--profile", metavar="[=ACTIVITIES]", help="Profile each point's checks and first block: a Chrome trace "
              "per rank and launch. Activities: cpu, cuda. [default: what the device has]")  # fmt: skip
@click.option("--trace", is_flag=True, help="Note spans of launches, points, visits and phases: trace.json.")
@click.option("--otlp-endpoint", metavar="URL", help="Send the spans there too, such as http://localhost:4318.")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory. [default: reports/<time>-<name>-<id>]")
@click.option("--dry-run", is_flag=True, help="Print the points, the time it may take and the command; launch nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
@click.option("--quiet", is_flag=True, help="Print problems and the report's path only.")
def command(
    spec_file: str | None,
    out: Path | None,
    resume: Path | None,
    retry: str | None,
    force: bool,
    profile: str | None,
    trace: bool,
    otlp_endpoint: str | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> int:
    """Measure collectives: SPEC is a sweep file or the name of a shipped one; flags override it.

    \b
    commbench sweep --tp 8
    commbench sweep decode --tp 4 --policy sglang-0.5.3
    commbench sweep --sizes 64:1MiB:x4 --dtypes float32 --collectives all_reduce,all_gather
    commbench sweep --resume reports/20260101-120000-sweep-1a2b --retry failed,timeout
    """
    from commbench.harness import run as harness
    from commbench.harness.views.look import Look

    look = Look.of(profile, trace, otlp_endpoint, os.environ)
    place = _nodes.take(flags)
    if resume is not None:
        if out is not None:
            raise click.UsageError("--out and --resume: a run that goes on stays where it is; leave --out away")
        return _resume(resume, spec_file, flags, place, retry, force, look, dry_run, as_json, quiet)
    if retry is not None or force:
        raise click.UsageError(
            f"{'--force' if retry is None else '--retry'} is for a run that goes on: add --resume RUN"
        )

    place.fit(flags, {} if spec_file is None else read_file(find_sweep(spec_file)))
    inside = _nodes.inside(flags, {} if spec_file is None else read_file(find_sweep(spec_file)))
    spec = _spec(spec_file, flags)
    place.check(spec)
    _nodes.check_inside(spec, inside, look)
    expansion, settings = harness.prepare(spec, None if inside is None else inside.job.local_size)
    look.check(settings.device)
    directory = out if out is not None else Path("reports") / harness.new_run_id(spec.name)
    if dry_run:
        _print_plan(harness.dry_run(expansion, spec, directory), as_json)
        return 0

    from commbench.store.run import Plan, check_writable

    plan = Plan(expansion.points, settings.to_dict())
    if spec.nnodes > 1 and place.among(spec.nnodes)[0] > 0:
        return _nodes.follow(place, spec, plan, out)
    if inside is not None:
        failed = _nodes.run_inside(inside, spec, expansion, settings, directory)
        return 0 if inside.job.rank else _finish(directory, as_json, quiet, False, failed)
    check_writable(directory)
    total = len(expansion.points) * spec.launches
    estimate_s = harness.estimate_s(expansion, spec)
    with _nodes.leading(place, spec, plan) as others:
        code = _watch(
            lambda on_event: harness.execute(spec, expansion, settings, directory, on_event, sys.argv, others),
            directory, total, estimate_s, look, as_json, quiet,
        )  # fmt: skip
        if others is not None:
            others.finish(code, "")
    return code


def _resume(
    directory: Path,
    spec_file: str | None,
    flags: dict[str, Any],
    place: _nodes.Place,
    retry: str | None,
    force: bool,
    look: Look,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    from commbench.harness import run as harness
    from commbench.harness.resume import parse_retry, unfinished
    from commbench.sweep import Expansion

    statuses = () if retry is None else parse_retry(retry)
    work = unfinished(directory, statuses)
    timeouts = {key: flags.pop(key) for key in ("point_timeout", "launch_timeout")}
    given = {key: value for key, value in timeouts.items() if value is not None}
    waiting = make_spec({**work.spec.to_dict(), **given}, {key: _FLAGS[key] for key in given})
    asked = None
    if spec_file is not None or any(value is not None for value in flags.values()):
        # flags alone change the run's own spec; a file stands for itself
        own = None if spec_file is not None else work.spec.to_dict()
        asked = _spec(spec_file, {**timeouts, **flags}, own)
    changed = harness.refuse_another(work, asked, force=force)
    total = len(work.points)
    if dry_run:
        for launch, point in work.points:
            click.echo(f"launch {launch}: {point.label()}")
    if dry_run or not total:
        click.echo(f"{total} points of {directory} are left to measure", err=not dry_run)
    if dry_run:
        return 0
    if not total:
        harness.conclude(work)
        return _finish(directory, as_json, quiet, False, None)
    look.check(work.plan.settings["device"])
    estimate_s = harness.estimate_s(Expansion(tuple(p for _, p in work.points), {}), waiting) / waiting.launches
    with _nodes.leading(place, work.spec, work.plan) as others:
        code = _watch(
            lambda on_event: harness.resume(
                work, on_event, retry=statuses, changed=changed, limits=harness.limits_of(waiting), argv=sys.argv,
                others=others,
            ),
            directory, total, estimate_s, look, as_json, quiet,
        )  # fmt: skip
        if others is not None:
            others.finish(code, "")
    return code


def _watch(
    measure: Callable[[Callable[[Event], None]], Run],
    directory: Path,
    total: int,
    estimate_s: float,
    look: Look,
    as_json: bool,
    quiet: bool,
) -> int:
    """Run what measures, showing how it goes; then report."""
    from commbench.harness.progress import watcher
    from commbench.harness.supervision.supervisor import StopAtOnce

    interrupted = failed = None
    warnings: list[str] = []
    with watcher(total, quiet=quiet, estimate_s=estimate_s) as on_event:
        try:
            with look.at(directory, warnings.append):
                measure(on_event)
        except StopAtOnce as error:
            raise Interrupted(f"interrupted twice; finished points are kept in {directory}") from error
        except KeyboardInterrupt as error:
            interrupted = error
        except LaunchError as error:
            failed = error
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    for line in [] if quiet else look.told(directory):
        click.echo(line, err=as_json)
    return _finish(directory, as_json, quiet, interrupted is not None, failed)


def _spec(spec_file: str | None, flags: dict[str, Any], own: dict[str, Any] | None = None) -> SweepSpec:
    """The spec of a file and flags; own: what flags change where there is no file."""
    settings: dict[str, Any] = dict(own or {})
    source: dict[str, str] = {}
    if spec_file is not None:
        path = find_sweep(spec_file)
        settings = read_file(path)
        source = {key: f"{path}: {key}" for key in settings}
    for key, flag in _FLAGS.items():
        if flags[key] is not None:
            settings[key] = flags[key]
            source[key] = flag
    return make_spec(settings, source)


def _print_plan(plan: dict[str, Any], as_json: bool) -> None:
    import shlex

    if as_json:
        click.echo(json.dumps(plan, indent=1))
        return
    from commbench.types import Point

    for record in plan["points"]:
        click.echo(Point.from_dict(record).label())
    for reason, count in plan["skipped_combinations"].items():
        click.echo(f"skipped {count} combinations: {reason}")
    seconds = plan["estimated_s"]
    rough = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
    click.echo(f"\n{len(plan['points'])} points × {plan['launches']} launches, about {rough}. Each launch runs:")
    click.echo(shlex.join(plan["command"]))


def _finish(directory: Path, as_json: bool, quiet: bool, interrupted: bool, failed: CommbenchError | None) -> int:
    """Report what there is, print it, and give the exit code."""
    from commbench.harness.run import FAILING
    from commbench.report import write_report
    from commbench.report.console import Console
    from commbench.report.summary import to_json
    from commbench.report.table import print_summary
    from commbench.store.run import open_run

    run: Run = open_run(directory)
    rows = run.rows()
    page = write_report([directory]) if rows else None
    if as_json:
        click.echo(json.dumps(to_json(run), indent=1, allow_nan=False))
    elif not quiet:
        print_summary(run, Console())
    statuses = [row["status"] for row in rows]
    if page is not None and not as_json:
        click.echo(f"report: {page}")
    elif page is not None:
        click.echo(f"report: {page}", err=True)
    if interrupted:
        raise Interrupted(f"interrupted; {len(rows)} finished points are kept in {directory}")
    if failed is not None:
        raise failed
    bad = sum(status in FAILING for status in statuses)
    if bad:
        click.echo(f"{bad} of {len(rows)} points are wrong, failed or timed out", err=True)
        return 1
    if rows and all(status == "skipped" for status in statuses):
        raise click.UsageError(f"every point was skipped: {rows[0]['reason']}")
    return 0
