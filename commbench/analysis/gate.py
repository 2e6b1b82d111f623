"""The gate's rule: from two lined-up sides to a verdict per family, each with its reason.

A family is red only if it is shown to be slower by more than the margin. It is green only if everything that was to
be measured was, with the same backends, quietly enough that a slowdown would have been seen, on a machine whose
canaries stood still. Whatever is neither is inconclusive, and says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from commbench.analysis.canaries import Canary
from commbench.analysis.compare import BETWEEN_LAUNCHES, BETWEEN_NIGHTS, BOTH, IDLE, MISSING, NEW, Comparison, percent
from commbench.analysis.effects import (
    Array,
    Effects,
    benjamini_hochberg,
    changed_p,
    hodges_lehmann,
    holm,
    row_means,
    row_medians,
    sign_flip_p,
    t_quantile,
)

if TYPE_CHECKING:
    import pandas as pd

QUIET_MARGIN = 0.01
SHARED_MARGIN = 0.03  # on virtual machines and in containers, whose neighbours one does not know
ALPHA = 0.05
POINTS_SHARE = 0.4  # of alpha; families get the rest
SCREEN_ALPHA = 0.02
FEWEST_LAUNCHES = 8  # of each side of stored runs, and nights of a history
FEWEST_PAIRS = 5
SENSITIVITY = 0.25
MOST_NAMED = 3  # points that a reason names
BROKEN = ("wrong", "failed", "timeout")


class Status(StrEnum):
    PASS = "pass"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"


EXIT_CODES = {Status.PASS: 0, Status.REGRESSION: 1, Status.INCONCLUSIVE: 3}


@dataclass(frozen=True, slots=True)
class Rule:
    """What counts as slower.

    margin: slowdowns up to it are nobody's business (a fraction). alpha: chance of a false red in a whole night, at
    most, if nothing got slower; POINTS_SHARE of it goes to single points, the rest to families. screen_alpha: per
    test of an A/B screen. fewest: launches (pairs, nights) below which nothing is judged. sensitivity: a family in
    which only a slowdown larger than this would be found (with 80 % power) is too noisy to be green.
    """

    margin: float = QUIET_MARGIN
    alpha: float = ALPHA
    screen_alpha: float = SCREEN_ALPHA
    fewest: int = FEWEST_LAUNCHES
    sensitivity: float = SENSITIVITY

    @property
    def log_margin(self) -> float:
        return math.log1p(self.margin)


@dataclass(frozen=True, slots=True)
class SlowPoint:
    """A point that was shown to be slower. p is adjusted for all points that were tested."""

    label: str
    ratio: float
    low: float
    high: float
    p: float
    base_s: float
    cand_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one family. ratio is candidate over baseline, with its 95 % interval; NaN where there is none.

    robust_ratio: the Hodges–Lehmann estimate. p: one-sided, against the margin, adjusted over all families. q: false
    discovery rate (for information). sign_flip_p: a check by randomisation from 14 pairs on. smallest_found: the
    slowdown (a fraction) that would be found with 80 % power. faster: shown to be faster by more than the margin.
    """

    family: str
    status: Status
    reason: str
    points: int
    compared: int
    n_base: int
    n_cand: int
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    robust_ratio: float = math.nan
    p: float = math.nan
    q: float = math.nan
    sign_flip_p: float = math.nan
    smallest_found: float = math.nan
    base_s: float = math.nan
    cand_s: float = math.nan
    faster: bool = False
    picks_changed: tuple[str, ...] = ()
    slow_points: tuple[SlowPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """A night's outcome: red if any family is, else inconclusive if any family is (or there is none), else green."""

    status: Status
    reason: str
    verdicts: tuple[Verdict, ...]
    rule: Rule
    method: str
    canaries: tuple[Canary, ...] = ()
    notes: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()  # differences that --force overrode

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def with_status(self, status: Status) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if v.status == status)


@dataclass(frozen=True, slots=True)
class _Tests:
    """Which rows of a comparison are tested, their adjusted p values, and the share of alpha that each kind has."""

    points: NDArray[np.bool_]
    families: NDArray[np.bool_]
    point_p: Array
    family_p: Array
    point_alpha: float
    family_alpha: float


def testable(comparison: Comparison, rule: Rule) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Rows of points and of families that have enough launches on both sides."""
    need = rule.fewest
    points = _enough(comparison.point_effects, need) & (comparison.points["state"].to_numpy() == BOTH)
    return points, _enough(comparison.family_effects, need)


def _enough(effects: Effects, need: int) -> NDArray[np.bool_]:
    return np.asarray((effects.n_base >= need) & (effects.n_cand >= need) & np.isfinite(effects.se))


def _single_point(comparison: Comparison) -> NDArray[np.bool_]:
    """Points that are their family's only compared one: the family's test is theirs."""
    alone = comparison.families.set_index("family")["compared"] == 1
    return np.asarray(comparison.points["family"].map(alone).to_numpy(dtype=bool))


def _tests(comparison: Comparison, rule: Rule, only: Suspects | None = None) -> _Tests:
    points, families = testable(comparison, rule)
    if only is None:
        points &= ~_single_point(comparison)
    else:  # the screen has sorted out already which points stand for themselves
        points &= comparison.points["point_id"].isin(only.points).to_numpy()
        families &= comparison.families["family"].isin(only.families).to_numpy()
    point_p = np.where(points, comparison.point_effects.p_slower(rule.log_margin), np.nan)
    family_p = np.where(families, comparison.family_effects.p_slower(rule.log_margin), np.nan)
    point_alpha = rule.alpha * (POINTS_SHARE if families.any() else 1)
    family_alpha = rule.alpha * (1 - POINTS_SHARE if points.any() else 1)
    stored = only is None and comparison.unit == BETWEEN_LAUNCHES
    point_p = _changed(comparison, points, point_p, point_alpha) if stored else holm(point_p)
    return _Tests(points, families, point_p, holm(family_p), point_alpha, family_alpha)


def _changed(comparison: Comparison, points: NDArray[np.bool_], against_margin: Array, level: float) -> Array:
    """Adjusted p of the single points of stored runs: that of having become slower at all, over all points; and of
    those that have, if larger, that of being slower by no more than the margin (Holm over them)."""
    p = np.full(len(points), np.nan)
    sides = comparison.aligned
    p[points] = changed_p(sides.base[points], sides.cand[points])
    found = np.flatnonzero(points & (np.nan_to_num(p, nan=1.0) <= level))
    p[found] = np.maximum(p[found], holm(against_margin[found]))
    return p


# ---- screening ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Suspects:
    """What a screen found worth launching again: families as a whole, and single points (by point_id)."""

    families: frozenset[str]
    points: frozenset[str]
    relaunch: frozenset[str]  # every point_id that the confirmation measures

    def __bool__(self) -> bool:
        return bool(self.relaunch)


def screen(comparison: Comparison, rule: Rule) -> Suspects:
    """Families and points whose own test is at or below ``rule.screen_alpha``, without any correction: a second look on
    fresh data follows."""
    points, families = testable(comparison, rule)
    points &= ~_single_point(comparison)
    with np.errstate(invalid="ignore"):
        slow_points = points & (comparison.point_effects.p_slower(rule.log_margin) <= rule.screen_alpha)
        slow_families = families & (comparison.family_effects.p_slower(rule.log_margin) <= rule.screen_alpha)
    names = frozenset(comparison.families["family"][slow_families])
    ids = frozenset(comparison.points["point_id"][slow_points])
    whole = comparison.points["family"].isin(names) & (comparison.points["state"] == BOTH)
    return Suspects(names, ids, ids | frozenset(comparison.points["point_id"][whole]))


# ---- judging --------------------------------------------------------------------------------------------------------


def judge(
    comparison: Comparison,
    rule: Rule,
    *,
    canaries: Sequence[Canary] = (),
    notes: Sequence[str] = (),
    problems: Sequence[str] = (),
    forced: Sequence[str] = (),
    confirmation: tuple[Suspects, Comparison | None] | None = None,
) -> Judgement:
    """Verdicts by the stored rule, or by the confirmation of an A/B screen if one is given.

    Stored: one-sided t against the margin for every family, Holm; every point by maxT over shuffled launches, and the
    points that became slower against the margin (see ``_changed``). History: t against the margin for families and
    points, Holm. A/B: the same on the confirmation's fresh launches, over the suspects only (None as its comparison:
    nothing was suspect). A canary that moved makes every family inconclusive. problems: what is wrong with the runs as
    a whole (a candidate that is not complete): then the night cannot be green.
    """
    moved = _moved(canaries)
    suspects, confirmed = (None, None) if confirmation is None else confirmation
    if suspects is not None:
        method = "A/B, interleaved"
    else:
        method = "nights of the history" if comparison.unit == BETWEEN_NIGHTS else "stored runs"
    night = _night(comparison, comparison if confirmed is None else confirmed, rule, suspects, moved)
    raw = comparison.family_effects.p_slower(rule.log_margin)
    q = dict(zip(comparison.families["family"], benjamini_hochberg(raw), strict=True))
    verdicts = [
        replace(_verdict(night, family, rows), q=float(q[family]))
        for family, rows in night.rows.items()
        if not (rows["state"] == IDLE).all()
    ]
    verdicts.sort(key=_worst_first)
    status, reason = _overall(verdicts, moved, problems)
    said = (*notes, *_idle_notes(comparison))
    return Judgement(status, reason, tuple(verdicts), rule, method, tuple(canaries), said, tuple(forced))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a table of points, as plain arrays: frames are slow to cut into hundreds of small pieces."""

    columns: Mapping[str, NDArray[Any]]
    index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name][self.index]

    def where(self, mask: NDArray[np.bool_]) -> _Rows:
        return _Rows(self.columns, self.index[mask])


_TEXT = (
    "point_id", "label", "state", "base_picked", "cand_picked", "base_status", "cand_status", "base_reason",
    "cand_reason", "base_how", "cand_how",
)  # fmt: skip
_NUMBERS = (
    "ratio", "ratio_low", "ratio_high", "base_s", "cand_s", "base_usable", "cand_usable", "base_unsteady",
    "cand_unsteady",
)  # fmt: skip


def _by_family(points: pd.DataFrame) -> dict[str, _Rows]:
    columns: dict[str, NDArray[Any]] = {name: points[name].to_numpy(dtype=object) for name in _TEXT}
    columns |= {name: points[name].to_numpy(dtype=np.float64) for name in _NUMBERS}
    columns["pick_changed"] = points["pick_changed"].to_numpy(dtype=bool)
    families = points["family"].to_numpy(dtype=object)
    members: dict[str, list[int]] = {}
    for i, family in enumerate(families):
        members.setdefault(str(family), []).append(i)
    return {family: _Rows(columns, np.array(rows, dtype=np.int64)) for family, rows in members.items()}


def _moved(canaries: Sequence[Canary]) -> tuple[str, ...]:
    return tuple(
        f"the machine changed: canary {c.name} {percent(c.ratio)} ({percent(c.low)} to {percent(c.high)})"
        for c in canaries
        if c.moved
    )


def _idle_notes(comparison: Comparison) -> list[str]:
    labels = [str(v) for v in comparison.points["label"][comparison.points["state"] == IDLE]]
    return [f"{len(labels)} points cannot be timed on either side: {_names(labels)}"] if labels else []


@dataclass(frozen=True, slots=True)
class _Night:
    """What all verdicts of a night share. ``deciding`` is the confirmation where there is one, else the comparison."""

    comparison: Comparison
    deciding: Comparison
    tests: _Tests
    rule: Rule
    suspects: Suspects | None  # of an A/B screen
    moved: tuple[str, ...]  # canaries
    rows: Mapping[str, _Rows]  # family → its points
    deciding_rows: Mapping[str, _Rows]
    places: Mapping[str, int]  # family → its row in the comparison
    deciding_places: Mapping[str, int]
    reach: Array  # per family: the difference of logs that would be found
    faster: NDArray[np.bool_]
    ratios: Array  # (ratio, low, high, Hodges–Lehmann) × families
    deciding_ratios: Array


def _night(
    comparison: Comparison, deciding: Comparison, rule: Rule, suspects: Suspects | None, moved: tuple[str, ...]
) -> _Night:
    tests = _tests(deciding, rule, suspects)
    count = max(1, len(comparison.families))
    # The level a family has to pass by itself: the screen's, or Holm's first step over all families.
    level = rule.screen_alpha if suspects is not None else tests.family_alpha / count
    with np.errstate(invalid="ignore"):
        faster = comparison.family_effects.p_faster(rule.log_margin) <= rule.alpha / 2 / count
    rows = _by_family(comparison.points)
    places = {str(f): i for i, f in enumerate(comparison.families["family"])}
    same = deciding is comparison
    return _Night(
        comparison=comparison,
        deciding=deciding,
        tests=tests,
        rule=rule,
        suspects=suspects,
        moved=moved,
        rows=rows,
        deciding_rows=rows if same else _by_family(deciding.points),
        places=places,
        deciding_places=places if same else {str(f): i for i, f in enumerate(deciding.families["family"])},
        reach=np.expm1(comparison.family_effects.smallest_found(rule.log_margin, level)),
        faster=np.asarray(faster),
        ratios=(ratios := _ratios(comparison)),
        deciding_ratios=ratios if same else _ratios(deciding),
    )


def _ratios(comparison: Comparison) -> Array:
    columns = ("ratio", "ratio_low", "ratio_high")
    robust = np.exp(_robust(comparison, comparison.family_base, comparison.family_cand))
    return np.stack([*(comparison.families[c].to_numpy(dtype=np.float64) for c in columns), robust])


def _verdict(night: _Night, family: str, rows: _Rows) -> Verdict:
    comparison, rule = night.comparison, night.rule
    index = night.places[family]
    shown, at = comparison, index
    decided = night.deciding_places.get(family)
    if decided is not None:
        shown, at = night.deciding, decided
    effects = shown.family_effects
    ratio, low, high, robust = (float(v) for v in (night.ratios if decided is None else night.deciding_ratios)[:, at])
    base, cand = shown.family_base[at : at + 1], shown.family_cand[at : at + 1]
    slow = _slow_points(night, family)
    p = float(night.tests.family_p[decided]) if decided is not None else math.nan
    slow_family = p <= night.tests.family_alpha and robust >= 1 + rule.margin
    reach, faster = float(night.reach[index]), bool(night.faster[index])
    doubts = _doubts(night, family, rows)
    if not doubts and not reach <= rule.sensitivity:
        hidden = f"a factor of {1 + reach:.3g}" if reach >= 1 else f"{reach:.0%}"
        doubts.append(f"noise hides slowdowns below {hidden}, and {rule.sensitivity:.0%} is to be seen at least")
    changed = rows.where(rows["pick_changed"])
    picks = tuple(_pick_texts(changed))
    interval = f"{percent(ratio)} ({percent(low)} to {percent(high)})"
    if night.moved:
        status, reason = Status.INCONCLUSIVE, "; ".join(night.moved)
    elif slow_family or slow:
        status = Status.REGRESSION
        reason = _slow_text(rule, interval if slow_family else "", slow, len(rows))
        reason += f"; {_picks_text(picks)}" if picks else ""
    elif doubts:
        status, reason = Status.INCONCLUSIVE, "; ".join(doubts)
    else:
        status, reason = Status.PASS, f"{'faster' if faster else 'not slower'}: {interval}"
        if night.suspects is not None and _was_suspect(night.suspects, family, rows):
            reason += "; suspect in the screen, not confirmed on fresh launches"
    both = rows.where(rows["state"] == BOTH)
    return Verdict(
        family=family,
        status=status,
        reason=reason,
        points=len(rows),
        compared=len(both),
        n_base=int(effects.n_base[at]),
        n_cand=int(effects.n_cand[at]),
        ratio=ratio,
        low=low,
        high=high,
        robust_ratio=robust,
        p=p,
        sign_flip_p=sign_flip_p((cand - base)[0], rule.log_margin) if shown.in_pairs else math.nan,
        smallest_found=reach,
        base_s=_geometric_mean(both["base_s"]),
        cand_s=_geometric_mean(both["cand_s"]),
        faster=faster,
        picks_changed=picks,
        slow_points=slow,
    )


def _slow_text(rule: Rule, interval: str, slow: Sequence[SlowPoint], points: int) -> str:
    if interval:
        text = f"slower: {interval}, margin {rule.margin:.1%}"
        return f"{text}; worst {slow[0].label} {percent(slow[0].ratio)}" if slow else text
    worst = slow[0]
    span = f"{percent(worst.low)} to {percent(worst.high)}"
    return (
        f"{len(slow)} of {points} points slower, worst {worst.label} {percent(worst.ratio)} ({span}), "
        f"margin {rule.margin:.1%}"
    )


def _geometric_mean(seconds: Array) -> float:
    """Several points' times as one; NaN of none."""
    return float(np.exp(np.log(seconds).mean())) if len(seconds) else math.nan


def _robust(comparison: Comparison, base: Array, cand: Array) -> Array:
    """Hodges–Lehmann per row; of a night, the distance of its mean from the middle night."""
    if comparison.unit == BETWEEN_NIGHTS:
        return row_means(cand) - row_medians(base)
    return hodges_lehmann(base, cand, in_pairs=comparison.in_pairs)


def _slow_points(night: _Night, family: str) -> tuple[SlowPoint, ...]:
    """The family's points that were shown to be slower, worst first."""
    rows = night.deciding_rows.get(family)
    if rows is None:
        return ()
    p = night.tests.point_p
    with np.errstate(invalid="ignore"):
        rows = rows.where(p[rows.index] <= night.tests.point_alpha)
    if not len(rows):
        return ()
    sides = night.deciding.aligned
    robust = _robust(night.deciding, sides.base[rows.index], sides.cand[rows.index])
    rows = rows.where(np.exp(robust) >= 1 + night.rule.margin)
    names = ("ratio", "ratio_low", "ratio_high")
    found = [
        SlowPoint(str(label), float(ratio), float(low), float(high), float(p[i]), float(base_s), float(cand_s))
        for label, ratio, low, high, i, base_s, cand_s in zip(
            rows["label"], *(rows[n] for n in names), rows.index, rows["base_s"], rows["cand_s"], strict=True
        )
    ]
    return tuple(sorted(found, key=lambda point: -point.ratio))


def _doubts(night: _Night, family: str, rows: _Rows) -> list[str]:
    """Why a family that is not red cannot be called green either."""
    comparison, rule = night.comparison, night.rule
    total = len(rows)
    doubts = []
    for state, text in ((MISSING, "missing in the candidate"), (NEW, "missing in the baseline")):
        some = rows.where(rows["state"] == state)
        if len(some):
            doubts.append(f"{len(some)} of {total} points {text}: {_named(some)}{_why(some, state)}")
    changed = rows.where(rows["pick_changed"])
    if len(changed):
        doubts.append(_picks_text(_pick_texts(changed)))
    both = rows.where(rows["state"] == BOTH)
    how = zip(both["base_how"], both["cand_how"], strict=True)
    other = both.where(np.array([not set(b.split("+")) & set(c.split("+")) for b, c in how], dtype=bool))
    if len(other):
        change = f"{other['base_how'][0]} → {other['cand_how'][0]}"
        doubts.append(f"{len(other)} of {total} points are timed in another way ({change}): {_named(other)}")
    nights = comparison.unit == BETWEEN_NIGHTS
    few = both.where((both["base_usable"] < rule.fewest) | (both["cand_usable"] < rule.fewest))
    if len(few):
        b, c = int(few["base_usable"].min()), int(few["cand_usable"].min())
        units = f"{b} {'nights' if nights else 'launches'} in the baseline, {c} launches in the candidate"
        doubts.append(f"{len(few)} of {total} points have too little: {units}, {rule.fewest} needed: {_named(few)}")
    for side, name in (("base", "baseline"), ("cand", "candidate")):
        unsteady = both.where(both[f"{side}_unsteady"] * 2 > both[f"{side}_usable"])
        if len(unsteady):
            doubts.append(f"{len(unsteady)} of {total} points are unsteady in the {name}: {_named(unsteady)}")
        for status in BROKEN:
            some = both.where(both[f"{side}_status"] == status)
            if len(some):
                doubts.append(f"{len(some)} of {total} points are {status} in the {name}: {_named(some)}")
    suspects = night.suspects
    if suspects is not None and _was_suspect(suspects, family, rows) and not _retested(night, suspects, family, rows):
        doubts.append("suspect in the screen, and the launches that were to confirm it gave too little")
    return doubts


def _retested(night: _Night, suspects: Suspects, family: str, rows: _Rows) -> bool:
    """Whether every suspect of this family was tested again."""
    place = night.deciding_places.get(family)
    if place is None:
        return False
    again = night.deciding_rows[family]
    tested = set(again["point_id"][night.tests.points[again.index]])
    wanted = suspects.points & set(rows["point_id"])
    return wanted <= tested and (family not in suspects.families or bool(night.tests.families[place]))


def _named(rows: _Rows) -> str:
    return _names([str(v) for v in rows["label"]])


def _names(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - MOST_NAMED} more" if len(labels) > MOST_NAMED else ""
    return ", ".join(labels[:MOST_NAMED]) + more


def _why(rows: _Rows, state: str) -> str:
    side = "cand" if state == MISSING else "base"
    status, reason = str(rows[f"{side}_status"][0]), str(rows[f"{side}_reason"][0])
    if not status or status in ("ok", "unsteady"):
        return ""
    return f" ({status}{': ' + reason if reason else ''})"


def _pick_texts(changed: _Rows) -> list[str]:
    columns = ("label", "base_picked", "cand_picked")
    return [f"{label}: {b} → {c}" for label, b, c in zip(*(changed[c] for c in columns), strict=True)]


def _picks_text(picks: Sequence[str]) -> str:
    more = f" and {len(picks) - MOST_NAMED} more" if len(picks) > MOST_NAMED else ""
    return f"the backend taken changed: {', '.join(picks[:MOST_NAMED])}{more}"


def _was_suspect(suspects: Suspects, family: str, rows: _Rows) -> bool:
    return family in suspects.families or not suspects.points.isdisjoint(rows["point_id"])


def _worst_first(verdict: Verdict) -> tuple[int, float, str]:
    rank = {Status.REGRESSION: 0, Status.INCONCLUSIVE: 1, Status.PASS: 2}[verdict.status]
    worst = max([verdict.ratio, *(p.ratio for p in verdict.slow_points)], key=lambda r: -1.0 if math.isnan(r) else r)
    return rank, -worst if math.isfinite(worst) else 0.0, verdict.family


def _overall(verdicts: Sequence[Verdict], moved: Sequence[str], problems: Sequence[str]) -> tuple[Status, str]:
    if moved:
        return Status.INCONCLUSIVE, "; ".join(moved)
    red = [v for v in verdicts if v.status == Status.REGRESSION]
    open_ones = [v for v in verdicts if v.status == Status.INCONCLUSIVE]
    total = f"{len(verdicts)} {'family' if len(verdicts) == 1 else 'families'}"
    if red:
        also = f", {len(open_ones)} inconclusive" if open_ones else ""
        return Status.REGRESSION, "; ".join([f"{len(red)} of {total} slower{also}", *problems])
    if not verdicts:
        nothing = "nothing could be compared: neither side has a point that was timed"
        return Status.INCONCLUSIVE, "; ".join([*problems, nothing])
    if open_ones or problems:
        none = f"{len(open_ones)} of {total} inconclusive, none shown to be slower"
        return Status.INCONCLUSIVE, "; ".join([*problems, none])
    faster = sum(v.faster for v in verdicts)
    return Status.PASS, f"none of {total} slower" + (f", {faster} faster" if faster else "")


def smallest_found(cv: float, launches: int, alpha: float, margin: float) -> float:
    """The slowdown (a fraction) that ``launches`` a side with this launch CV find with 80 % power at level alpha."""
    df = 2.0 * launches - 2
    se = cv * math.sqrt(2 / launches)
    reach = float(t_quantile(1 - alpha, df) + t_quantile(0.8, df)) * se
    return math.expm1(math.log1p(margin) + reach)


def to_dict(judgement: Judgement) -> dict[str, Any]:
    """The judgement as plain data for JSON; numbers that are not known are None."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    found: dict[str, Any] = plain(asdict(judgement)) | {"exit_code": judgement.exit_code}
    return found
