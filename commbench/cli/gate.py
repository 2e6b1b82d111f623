"""``commbench gate``: is the candidate slower than the baseline? Exit 0 no, 1 yes, 3 cannot be told."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commbench.cli._click import named
from commbench.errors import CommbenchError, Interrupted, UsageError

if TYPE_CHECKING:
    from commbench.analysis.compare import Comparison
    from commbench.analysis.gate import Judgement, Rule
    from commbench.harness.ab_sides import AbSide
    from commbench.measure.settings import Settings
    from commbench.store.run import Run
    from commbench.sweep import SweepSpec
    from commbench.types import Point

HISTORY = "history"
DEFAULT_HISTORY = Path("reports/history")
DEFAULT_NIGHTS = 30
DEFAULT_PAIRS = 10
SCREEN, CONFIRM = "screen", "confirm"  # of --ab: the stages, and their folders
MOST_CHANGES = 5  # change points that a judgement names


@dataclass(frozen=True, slots=True)
class Judged:
    """A judgement with what its outputs need."""

    judgement: Judgement
    comparison: Comparison
    names: tuple[str, str]
    manifests: tuple[Mapping[str, Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RuleFlags:
    """The rule as the flags give it; None where they do not."""

    margin: str | None
    alpha: float | None
    fewest: int | None
    sensitivity: str | None

    def rule(self, fingerprints: Sequence[Mapping[str, Any] | None], fewest: int) -> Rule:
        """The margin depends on the machine where none is given. Raises SpecError or UsageError."""
        from commbench.analysis.gate import ALPHA, QUIET_MARGIN, SENSITIVITY, SHARED_MARGIN, Rule
        from commbench.harness.environment.comparable import is_shared
        from commbench.units import parse_percent

        if self.alpha is not None and not 0 < self.alpha < 1:
            raise UsageError(f"--alpha {self.alpha}: must be between 0 and 1")
        if self.fewest is not None and self.fewest < 2:
            raise UsageError(f"--fewest {self.fewest}: a scatter needs at least 2 launches")
        usual = SHARED_MARGIN if any(is_shared(f) for f in fingerprints) else QUIET_MARGIN
        return Rule(
            margin=named("--margin", parse_percent, self.margin) if self.margin is not None else usual,
            alpha=ALPHA if self.alpha is None else self.alpha,
            fewest=fewest if self.fewest is None else self.fewest,
            sensitivity=SENSITIVITY
            if self.sensitivity is None
            else named("--sensitivity", parse_percent, self.sensitivity),
        )


@click.command(context_settings={"max_content_width": 100})
@click.option("--baseline", metavar="RUN|history", help="Run directory, or `history` for the nights stored so far.")
@click.option("--candidate", metavar="RUN", type=click.Path(path_type=Path), help="Run directory to judge.")
@click.option("--history", "history_dir", type=click.Path(path_type=Path), default=DEFAULT_HISTORY,
              help="Folder of the history. [default: reports/history]")  # fmt: skip
@click.option("--nights", type=int, default=DEFAULT_NIGHTS, help="Nights of the history to judge by. [default: 30]")
@click.option("--add", "keep", is_flag=True, help="Keep the candidate in the history if it is green, or if the history "
              "is still too short to judge by.")  # fmt: skip
@click.option("--ab", metavar="SPEC", help="Measure both sides now, in turn: a sweep file or a shipped sweep.")
@click.option("--base-python", metavar="PATH", help="With --ab: the baseline's Python (its commbench, if it has one).")
@click.option("--cand-python", metavar="PATH", help="With --ab: the candidate's Python.")
@click.option("--base-policy", metavar="NAME", help="With --ab: the baseline's dispatch policy.")
@click.option("--cand-policy", metavar="NAME", help="With --ab: the candidate's dispatch policy.")
@click.option("--base-env", metavar="NAME=VALUE", multiple=True, help="With --ab: a variable of the baseline's ranks.")
@click.option("--cand-env", metavar="NAME=VALUE", multiple=True, help="With --ab: a variable of the candidate's ranks.")
@click.option("--pairs", type=int, help="With --ab: launches a side, and again for suspects. [default: 10]")
@click.option("--margin", help="Slowdowns up to it are let be. [default: 1%; 3% on virtual machines and in containers]")
@click.option("--alpha", type=float, help="Chance of a false red in a night, at most. [default: 0.05]")
@click.option(
    "--fewest", type=int, help="Launches a side below which nothing is judged. [default: 8; 5 pairs with --ab]"
)
@click.option("--sensitivity", help="A family that would not show this slowdown is inconclusive. [default: 25%]")
@click.option("--force", is_flag=True, help="Judge runs that do not belong together; the result is marked.")
@click.option("--same-hardware", is_flag=True, help="Accept another host name if the hardware is the same.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for every output, and for the runs of --ab.")
@click.option("--markdown", type=click.Path(path_type=Path), help="Append a summary, as to $GITHUB_STEP_SUMMARY.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML.")
@click.option("--annotations", is_flag=True, help="Print annotations for GitHub Actions on stdout.")
@click.option("--verbose", is_flag=True, help="Print green families too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def command(
    baseline: str | None,
    candidate: Path | None,
    ab: str | None,
    history_dir: Path,
    nights: int,
    keep: bool,
    margin: str | None,
    alpha: float | None,
    fewest: int | None,
    sensitivity: str | None,
    force: bool,
    same_hardware: bool,
    out: Path | None,
    markdown: Path | None,
    junit: Path | None,
    annotations: bool,
    verbose: bool,
    as_json: bool,
    **sides: Any,
) -> int:
    """Red if, and only if, a collective got slower.

    A verdict for every family (collective × backend × size band), each with its reason. Exit codes: 0 nothing got
    slower, 1 something did, 2 bad input, 3 inconclusive (something is missing, changed or too noisy to tell).

    \b
    commbench gate --baseline reports/monday --candidate reports/tuesday
    commbench gate --baseline history --candidate reports/tonight --out reports/tonight/gate
    commbench gate --ab quick --base-python old/bin/python --cand-python new/bin/python
    commbench gate --ab quick --cand-env OMP_NUM_THREADS=2
    """
    flags = RuleFlags(margin, alpha, fewest, sensitivity)
    given = sorted("--" + name.replace("_", "-") for name, value in sides.items() if value)
    try:
        if ab is not None:
            if baseline is not None or candidate is not None:
                raise click.UsageError("--ab measures both sides itself; leave --baseline and --candidate out")
            judged, out = _ab(ab, flags, out, sides, quiet=as_json)
        else:
            if given:
                raise click.UsageError(f"{', '.join(given)}: only with --ab")
            if baseline is None or candidate is None:
                raise click.UsageError("name both sides: --baseline RUN|history --candidate RUN; or --ab SPEC")
            if keep and baseline != HISTORY:
                raise click.UsageError("--add: only with --baseline history")
            if nights < 2:
                raise click.UsageError(f"--nights {nights}: a history has at least 2")
            if baseline == HISTORY:
                judged = _history(history_dir, nights, candidate, flags, force, same_hardware, keep)
            else:
                judged = _stored(Path(baseline), candidate, flags, force, same_hardware)
    except Interrupted:
        raise
    except CommbenchError as error:
        if error.exit_code == 1:  # 1 says that something got slower, and nothing else
            raise UsageError(str(error)) from error
        raise
    _tell(judged, out, markdown, junit, annotations, verbose, as_json)
    return judged.judgement.exit_code


# ---- the three ways of judging --------------------------------------------------------------------------------------


def _stored(baseline: Path, candidate: Path, flags: RuleFlags, force: bool, same_hardware: bool) -> Judged:
    from commbench.analysis.canaries import compare_canaries, launch_values
    from commbench.analysis.compare import compare
    from commbench.analysis.gate import FEWEST_LAUNCHES, judge
    from commbench.cli._sides import check_sides, read_side

    base, cand = read_side(baseline), read_side(candidate)
    if base.path.resolve() == cand.path.resolve():
        raise UsageError(f"baseline and candidate are the same run, {base.path}")
    forced, notes = check_sides(base, cand, force=force, same_hardware=same_hardware)
    rule = flags.rule([base.manifest.get("fingerprint"), cand.manifest.get("fingerprint")], FEWEST_LAUNCHES)
    before, after = (launch_values(side.manifest.get("launches", [])) for side in (base, cand))
    comparison = compare(base.latencies, cand.latencies)
    judgement = judge(
        comparison,
        rule,
        canaries=compare_canaries(before, after, rule.log_margin),
        notes=[*_canary_notes(before, after), *notes],
        problems=[*base.problems, *cand.problems],
        forced=forced,
    )
    return Judged(judgement, comparison, (base.run.run_id, cand.run.run_id), (base.manifest, cand.manifest))


def _history(
    directory: Path, most: int, candidate: Path, flags: RuleFlags, force: bool, same_hardware: bool, keep: bool
) -> Judged:
    from commbench.analysis.canaries import compare_canary_nights, launch_values
    from commbench.analysis.compare import Nights, compare_with_nights
    from commbench.analysis.gate import FEWEST_LAUNCHES, Status, judge
    from commbench.cli._sides import read_side
    from commbench.store.history import History, add_run, baseline_nights, load_series, open_history

    cand = read_side(candidate)
    # the first night of all starts the history
    history = History(directory, []) if keep and not directory.exists() else open_history(directory)
    started_s = float(cand.manifest.get("started_s") or 0.0)
    chosen, notes = baseline_nights(history, started_s, cand.run.run_id, most)
    notes = [*(f"history: skipped {text}" for text in history.skipped), *(f"history: {text}" for text in notes)]
    chosen, forced, left_out = _of_one_kind(chosen, cand.manifest, str(candidate), force, same_hardware)
    notes += left_out
    series = load_series(chosen)
    notes += [f"history: skipped {text}" for text in series.skipped]
    rule = flags.rule([cand.manifest.get("fingerprint")], FEWEST_LAUNCHES)
    comparison = compare_with_nights(
        Nights(series.points, series.log_mean, series.launches, series.log_variance), cand.latencies
    )
    after = launch_values(cand.manifest.get("launches", []))
    before = [night.facts["canaries"] for night in series.nights]
    short = len(series.nights) < rule.fewest
    problems = list(cand.problems)
    if short:
        problems.append(f"the history has {len(series.nights)} nights to judge by, {rule.fewest} are needed")
    judgement = judge(
        comparison,
        rule,
        canaries=compare_canary_nights(before, after, rule.log_margin),
        notes=[*_canary_notes([b for b in before if b], after), *notes, *_changes(comparison, series.nights)],
        problems=problems,
        forced=forced,
    )
    if keep and not cand.problems and not forced and (judgement.status == Status.PASS or short):
        add_run(directory, cand.manifest | {"run_id": cand.run.run_id}, cand.latencies, after)
    baseline = f"{len(series.nights)} nights of {directory}"
    manifest = {"fingerprint": series.nights[-1].fingerprint if series.nights else {}}
    return Judged(judgement, comparison, (baseline, cand.run.run_id), (manifest, cand.manifest))


def _of_one_kind(
    nights: Sequence[Any], manifest: Mapping[str, Any], candidate: str, force: bool, same_hardware: bool
) -> tuple[list[Any], list[str], list[str]]:
    """The nights of the candidate's machine and spec, what --force overrode, and a note on those left out.

    Raises UsageError when there are nights and none belongs to the candidate.
    """
    from commbench.cli._sides import refusal
    from commbench.harness.environment.comparable import compare_manifests

    kept: list[Any] = []
    strange: dict[str, int] = {}
    first: tuple[str, ...] = ()
    version = manifest.get("schema_version")
    for night in nights:
        facts = {"schema_version": version, "spec": night.facts.get("spec"), "fingerprint": night.facts["fingerprint"]}
        found = compare_manifests(facts, manifest, same_hardware=same_hardware)
        if found.refusals:
            first = first or found.refusals
            strange["; ".join(found.refusals[:2])] = strange.get("; ".join(found.refusals[:2]), 0) + 1
        if force or not found.refusals:
            kept.append(night)
    if force:
        return kept, [f"{count} nights: {text}" for text, count in strange.items()], []
    if nights and not kept:
        raise UsageError(refusal("the history", candidate, first))
    return kept, [], [f"history: left out {count} nights of another kind: {text}" for text, count in strange.items()]


def _changes(comparison: Comparison, nights: Sequence[Any]) -> list[str]:
    """Advisory: levels that changed within the nights and the candidate, largest first."""
    import numpy as np

    from commbench.analysis.changepoints import change_points
    from commbench.analysis.compare import percent

    found = []
    with np.errstate(invalid="ignore"):
        latest = [row[np.isfinite(row)].mean() if np.isfinite(row).any() else np.nan for row in comparison.family_cand]
    for family, base, last in zip(comparison.families["family"], comparison.family_base, latest, strict=True):
        for change in change_points(np.append(base, last)):
            when = nights[change.index].run_id if change.index < len(nights) else "the candidate"
            found.append((abs(np.log(change.ratio)), f"{family} {percent(change.ratio)} from {when} on"))
    found.sort(key=lambda item: -item[0])
    lines = [f"advisory, a new level: {text}" for _, text in found[:MOST_CHANGES]]
    return [*lines, f"advisory: and {len(found) - MOST_CHANGES} more"] if len(found) > MOST_CHANGES else lines


def _ab(name: str, flags: RuleFlags, out: Path | None, given: Mapping[str, Any], quiet: bool) -> tuple[Judged, Path]:
    from commbench.analysis.gate import FEWEST_PAIRS
    from commbench.harness import ab_sides as ab
    from commbench.harness.run import interruptible_in, new_run_id, prepare
    from commbench.sweep import find_sweep, make_spec, read_file

    pairs = DEFAULT_PAIRS if given["pairs"] is None else int(given["pairs"])
    if not FEWEST_PAIRS <= pairs <= 1000:
        raise UsageError(f"--pairs {pairs}: must be {FEWEST_PAIRS} to 1000")
    path = find_sweep(name)
    settings = read_file(path)
    sides = {
        side: ab.make_side(side, given[f"{side}_python"], given[f"{side}_env"], given[f"{side}_policy"])
        for side in (ab.BASE, ab.CAND)
    }
    specs, points = {}, {}
    for side, what in sides.items():
        own = {**settings, "launches": pairs} | ({"policy": [what.policy]} if what.policy else {})
        specs[side] = make_spec(own, {key: f"{path}: {key}" for key in settings})
        ab.check_spec(specs[side], str(path))
        expansion, measure = prepare(specs[side])
        points[side] = expansion.points
        ab.check_side(what, specs[side], expansion.points, measure)
    if not quiet and settings.get("launches", pairs) != pairs:
        click.echo(f"{path}: launches = {settings['launches']} is for a sweep; --pairs says how many here", err=True)
    directory = out if out is not None else Path("reports") / new_run_id(f"ab-{specs[ab.BASE].name}")
    runs = [f"{stage}/{side}" for stage in (SCREEN, CONFIRM) for side in sides]
    with interruptible_in(directory, runs, "a verdict"):
        judged = _in_pairs(directory, sides, points, specs[ab.BASE], measure, pairs, flags, quiet)
    return judged, directory


def _in_pairs(
    directory: Path,
    sides: Mapping[str, AbSide],
    points: Mapping[str, Sequence[Point]],
    spec: SweepSpec,
    measure: Settings,
    pairs: int,
    flags: RuleFlags,
    quiet: bool,
) -> Judged:
    """Launch both sides in turn, the suspects once more, and judge."""
    from dataclasses import replace

    from commbench.analysis.canaries import compare_canaries, launch_values
    from commbench.analysis.gate import FEWEST_PAIRS, judge, screen
    from commbench.harness import ab
    from commbench.harness.ab_sides import BASE, CAND, side_fingerprint
    from commbench.harness.environment.fingerprint import differences
    from commbench.harness.progress import watcher
    from commbench.harness.run import estimate_s
    from commbench.sweep import Expansion

    by_policy = sides[BASE].policy != sides[CAND].policy
    fingerprints = {side: side_fingerprint(what, measure.device) for side, what in sides.items()}
    rule = flags.rule(list(fingerprints.values()), FEWEST_PAIRS)

    def stage(label: str, chosen: Mapping[str, Sequence[Point]], seed: int) -> Mapping[str, Run]:
        total = sum(len(p) for p in chosen.values()) * pairs
        seconds = sum(estimate_s(Expansion(tuple(p), {}), spec) for p in chosen.values())
        with watcher(total, quiet=quiet, estimate_s=seconds) as on_event:
            return ab.run_stage(
                directory / label,
                sides,
                chosen,
                spec,
                replace(measure, seed=seed),
                pairs,
                on_event,
                fingerprints,
            )

    if not quiet:
        click.echo(f"screen: {pairs} pairs of launches", err=True)
    first = stage(SCREEN, points, measure.seed)
    screened, problems = _compared(first, by_policy, sides)
    suspects = screen(screened, rule)
    confirmed = None
    runs = [first]
    if suspects:
        keyed = {s: [p for p in of if _identity(p, by_policy) in suspects.relaunch] for s, of in points.items()}
        if not quiet:
            click.echo(f"confirm: {len(keyed[BASE])} suspect points, {pairs} fresh pairs", err=True)
        second = stage(CONFIRM, keyed, measure.seed + 1)
        confirmed, more = _compared(second, by_policy, sides)
        problems += more
        runs.append(second)
    before, after = (
        {
            canary: {stage_number * pairs + k: v for k, v in values.items()}
            for stage_number, run in enumerate(runs)
            for canary, values in launch_values(run[side].manifest.get("launches", [])).items()
        }
        for side in (BASE, CAND)
    )
    notes = _canary_notes(before, after)
    changed = differences(fingerprints[BASE], fingerprints[CAND])
    notes += [f"environment: {text}" for text in changed]
    base, cand = ((side.policy, side.program.variables, side.known) for side in (sides[BASE], sides[CAND]))
    if not changed and base == cand:
        notes.append("both sides run the same commbench in the same environment: what differs is chance")
    judgement = judge(
        screened,
        rule,
        canaries=compare_canaries(before, after, rule.log_margin, in_pairs=True),
        notes=notes,
        problems=problems,
        confirmation=(suspects, confirmed),
    )
    names = (sides[BASE].name, sides[CAND].name)
    return Judged(judgement, screened, names, (first[BASE].manifest, first[CAND].manifest))


def _identity(point: Any, by_policy: bool) -> str:
    return f"{point.point_key}/{point.backend}" if by_policy else str(point.point_id)


def _compared(runs: Mapping[str, Any], by_policy: bool, sides: Mapping[str, Any]) -> tuple[Comparison, list[str]]:
    from commbench.analysis.compare import compare
    from commbench.cli._sides import read_side

    read = {side: read_side(run.directory) for side, run in runs.items()}
    frames = {side: one.latencies for side, one in read.items()}
    if by_policy:
        frames = {
            side: f.assign(point_id=f["point_key"].astype(str) + "/" + f["backend_requested"].astype(str))
            for side, f in frames.items()
        }
    problems = [text for one in read.values() for text in one.problems]
    return compare(frames["base"], frames["cand"], in_pairs=True, same_picks=not by_policy), problems


def _canary_notes(before: object, after: object) -> list[str]:
    absent = [name for name, found in (("baseline", before), ("candidate", after)) if not found]
    if not absent:
        return []
    return [f"the {' and the '.join(absent)} recorded no canaries: a slower machine would look like slower code"]


# ---- outputs --------------------------------------------------------------------------------------------------------


def _tell(
    judged: Judged,
    out: Path | None,
    markdown: Path | None,
    junit: Path | None,
    annotations: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    from commbench.analysis.gate import to_dict
    from commbench.interop.annotations import to_annotations
    from commbench.interop.junit import to_junit
    from commbench.interop.markdown import to_markdown
    from commbench.interop.outputs import write_outputs
    from commbench.report.compare import print_judgement
    from commbench.report.console import Console

    judgement, names = judged.judgement, judged.names
    now = datetime.datetime.now(datetime.UTC)
    if out is not None:
        from commbench.report.compare_plots import draw_comparison

        write_outputs(out, judgement, judged.comparison, names=names, manifests=judged.manifests, when=now)
        draw_comparison(judged.comparison, out, names=names, forced=judgement.forced)
    option = f"--markdown {markdown}"
    try:
        if markdown is not None:
            with markdown.open("a", encoding="utf-8") as stream:
                stream.write(to_markdown(judgement, names=names))
        option = f"--junit {junit}"
        if junit is not None:
            host = str(((judged.manifests[1].get("fingerprint") or {}).get("host") or {}).get("name") or "")
            junit.write_text(to_junit(judgement, host=host, when=now, names=names), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} cannot be written: {error.strerror}") from error
    if as_json:
        click.echo(json.dumps({"baseline": names[0], "candidate": names[1], **to_dict(judgement)}, indent=1))
    else:
        print_judgement(judgement, Console(), names=names, verbose=verbose)
        if out is not None:
            click.echo(f"outputs: {out}", err=True)
    if annotations and not as_json:
        click.echo(to_annotations(judgement), nl=False)
