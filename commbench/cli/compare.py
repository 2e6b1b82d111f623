"""``commbench compare``: two runs, or two policies or backends of one run, point by point."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commbench.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from commbench.cli._sides import Side

_COLUMNS = {"policy": "policy", "backend": "backend_requested"}
_SPEC_FIELDS = {"policy": ("policy",), "backend": ("backends",)}


@click.command(context_settings={"max_content_width": 100})
@click.argument("base", metavar="BASE", type=click.Path(path_type=Path))
@click.argument("cand", metavar="[CAND]", required=False, type=click.Path(path_type=Path))
@click.option("--by", type=click.Choice(["policy", "backend"]), help="Line up two policies or two requested backends.")
@click.option("--values", metavar="A,B", help="With --by: the two to compare, baseline first. [default: the only two]")
@click.option("--paired", is_flag=True, help="Launch k of BASE and launch k of CAND were made together (gate --ab).")
@click.option(
    "--workload",
    type=click.Path(path_type=Path),
    help="Also answer in milliseconds per step of the model that this TOML file describes.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the plots and comparison.json.")
@click.option("--all", "everything", is_flag=True, help="Print every point, not only the worst 20.")
@click.option("--force", is_flag=True, help="Compare runs that do not belong together; the result is marked.")
@click.option("--same-hardware", is_flag=True, help="Accept another host name if the hardware is the same.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def command(
    base: Path,
    cand: Path | None,
    by: str | None,
    values: str | None,
    paired: bool,
    workload: Path | None,
    out: Path | None,
    everything: bool,
    force: bool,
    same_hardware: bool,
    as_json: bool,
) -> int:
    """Ratio of CAND over BASE with its interval, per point and per family, worst first.

    With --by, BASE alone is enough: two of its policies or backends are lined up. Exit code 0 whatever the
    ratios; use `commbench gate` for a verdict.

    \b
    commbench compare reports/before reports/after --out /tmp/before-after
    commbench compare reports/thresholds --by backend --values torch_dist,shm
    commbench compare reports/before reports/after --workload load.toml
    """
    from commbench.analysis.compare import compare
    from commbench.cli._sides import check_sides, read_side
    from commbench.report.compare import comparison_dict, plain, print_comparison, print_step_changes
    from commbench.report.console import Console

    if cand is None and by is None:
        raise click.UsageError("name a second run, or --by policy or --by backend to compare within one")
    if values is not None and by is None:
        raise click.UsageError("--values needs --by")
    load = None
    if workload is not None:
        from commbench.interop.workload_file import read_workload

        load = read_workload(workload)
    first = read_side(base)
    second = read_side(cand) if cand is not None else first
    may_differ = _SPEC_FIELDS[by] if by else ()
    forced, notes = check_sides(first, second, force=force, same_hardware=same_hardware, may_differ=may_differ)
    notes = [*dict.fromkeys([*first.problems, *second.problems]), *notes]
    names = (first.run.run_id, second.run.run_id)
    frames, in_pairs = (first.latencies, second.latencies), paired
    if by is None:
        comparison = compare(*frames, in_pairs=in_pairs)
    else:
        a, b = _two(by, values, first, second)
        frames, in_pairs = _by(by, a, b, *frames), paired or cand is None
        comparison = compare(*frames, key="series", in_pairs=in_pairs, same_picks=by == "policy")
        names = (f"{names[0]} {by} {a}", f"{names[1]} {by} {b}")
    document = comparison_dict(comparison, names=names, notes=notes, forced=forced)
    steps = []
    if load is not None:
        from commbench.analysis.workload import steps_of_sides

        steps = steps_of_sides(load, *frames, names, in_pairs=in_pairs)
        document["workload"] = {"name": load.name, "steps": [plain(asdict(step)) for step in steps]}
    if out is not None:
        from commbench.report.compare_plots import draw_comparison
        from commbench.store.run import write_json

        plots = draw_comparison(comparison, out, names=names, forced=forced)
        write_json(out / "comparison.json", document)
        if not as_json:
            click.echo(f"{out}: comparison.json, {', '.join(p.name for p in plots)}", err=True)
    if as_json:
        click.echo(json.dumps(document, indent=1, allow_nan=False))
    else:
        print_comparison(
            comparison, Console(), names=names, notes=notes, forced=forced, rows=None if everything else 20
        )
        if load is not None:
            print_step_changes(load, steps, Console())
    return 0


def _two(by: str, values: str | None, first: Side, second: Side) -> tuple[str, str]:
    column = _COLUMNS[by]
    of_first, of_second = (sorted(set(s.latencies[column])) for s in (first, second))
    if values is not None:
        parts = [v.strip() for v in values.split(",")]
        if len(parts) != 2 or not all(parts):
            raise UsageError(f"--values {values!r}: name two, as in --values A,B")
        for name, known, side in zip(parts, (of_first, of_second), (first, second), strict=True):
            if name not in known:
                raise UsageError(f"--values: {side.path} has no {by} {name!r}; it has {', '.join(known) or 'none'}")
        return parts[0], parts[1]
    if first is not second and len(of_first) == len(of_second) == 1:
        return of_first[0], of_second[0]
    if first is second and len(of_first) == 2:
        return of_first[0], of_first[1]
    found = ", ".join(dict.fromkeys([*of_first, *of_second])) or "none"
    raise UsageError(f"--by {by}: say which two with --values A,B; there are {found}")


def _by(by: str, a: str, b: str, first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    from commbench.analysis.compare import sides_of

    return sides_of(first, _COLUMNS[by], a, a)[0], sides_of(second, _COLUMNS[by], b, b)[1]
