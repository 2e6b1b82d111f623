"""``commbench gate``: is the candidate slower than the baseline? Exit 0 no, 1 yes, 3 cannot be told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commbench.errors import UsageError

if TYPE_CHECKING:
    from commbench.analysis.gate import Judgement, Rule
    from commbench.cli._sides import Side


@click.command(context_settings={"max_content_width": 100})
@click.option("--baseline", metavar="RUN|history", help="Run directory, or `history` for the nights stored so far.")
@click.option("--candidate", metavar="RUN", type=click.Path(path_type=Path), help="Run directory to judge.")
@click.option("--margin", help="Slowdowns up to it are let be. [default: 1%; 3% on virtual machines and in containers]")
@click.option("--alpha", type=float, help="Chance of a false red in a night, at most. [default: 0.05]")
@click.option("--fewest", type=int, help="Launches a side below which nothing is judged. [default: 8]")
@click.option("--sensitivity", help="A family that would not show this slowdown is inconclusive. [default: 25%]")
@click.option("--force", is_flag=True, help="Judge runs that do not belong together; the result is marked.")
@click.option("--same-hardware", is_flag=True, help="Accept another host name if the hardware is the same.")
@click.option("--verbose", is_flag=True, help="Print green families too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def command(
    baseline: str | None,
    candidate: Path | None,
    margin: str | None,
    alpha: float | None,
    fewest: int | None,
    sensitivity: str | None,
    force: bool,
    same_hardware: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Red if, and only if, a collective got slower.

    A verdict for every family (collective × backend × size band), each with its reason. Exit codes: 0 nothing got
    slower, 1 something did, 2 bad input, 3 inconclusive (something is missing, changed or too noisy to tell).

    \b
    commbench gate --baseline reports/monday --candidate reports/tuesday
    """
    from rich.console import Console

    from commbench.analysis.gate import to_dict
    from commbench.report.compare import print_judgement

    if baseline is None or candidate is None:
        raise click.UsageError("name both sides: --baseline RUN|history --candidate RUN")
    rule_flags = (margin, alpha, fewest, sensitivity)
    names = (baseline, str(candidate))
    judgement = _stored(Path(baseline), candidate, rule_flags, force=force, same_hardware=same_hardware)
    if as_json:
        click.echo(json.dumps(to_dict(judgement), indent=1, allow_nan=False))
    else:
        print_judgement(judgement, Console(), names=names, verbose=verbose)
    return judgement.exit_code


def _stored(
    baseline: Path,
    candidate: Path,
    flags: tuple[str | None, float | None, int | None, str | None],
    *,
    force: bool,
    same_hardware: bool,
) -> Judgement:
    from commbench.analysis.canaries import compare_canaries, launch_values
    from commbench.analysis.compare import compare
    from commbench.analysis.gate import judge
    from commbench.cli._sides import check_sides, read_side

    base, cand = read_side(baseline), read_side(candidate)
    if base.path.resolve() == cand.path.resolve():
        raise UsageError(f"baseline and candidate are the same run, {base.path}")
    forced, notes = check_sides(base, cand, force=force, same_hardware=same_hardware)
    rule = make_rule(flags, [base, cand])
    before, after = (launch_values(side.manifest.get("launches", [])) for side in (base, cand))
    canaries = compare_canaries(before, after, rule.log_margin)
    return judge(
        compare(base.latencies, cand.latencies),
        rule,
        canaries=canaries,
        notes=[*_canary_notes(before, after), *notes],
        problems=[*base.problems, *cand.problems],
        forced=forced,
    )


def _canary_notes(before: object, after: object) -> list[str]:
    absent = [name for name, found in (("baseline", before), ("candidate", after)) if not found]
    if not absent:
        return []
    return [f"the {' and the '.join(absent)} recorded no canaries: a slower machine would look like slower code"]


def make_rule(
    flags: tuple[str | None, float | None, int | None, str | None], sides: list[Side], fewest: int | None = None
) -> Rule:
    """The rule from the flags; the margin by the machine where none is given. Raises SpecError or UsageError."""
    from commbench.analysis.gate import ALPHA, FEWEST_LAUNCHES, QUIET_MARGIN, SENSITIVITY, SHARED_MARGIN, Rule
    from commbench.harness.comparable import is_shared
    from commbench.units import parse_percent

    margin, alpha, least, sensitivity = flags
    shared = any(is_shared(side.manifest.get("fingerprint")) for side in sides)
    if alpha is not None and not 0 < alpha < 1:
        raise UsageError(f"--alpha {alpha}: must be between 0 and 1")
    if least is not None and least < 2:
        raise UsageError(f"--fewest {least}: a scatter needs at least 2 launches")
    return Rule(
        margin=parse_percent(margin) if margin is not None else SHARED_MARGIN if shared else QUIET_MARGIN,
        alpha=ALPHA if alpha is None else alpha,
        fewest=least if least is not None else fewest or FEWEST_LAUNCHES,
        sensitivity=SENSITIVITY if sensitivity is None else parse_percent(sensitivity),
    )
