"""Two sides lined up: which points both have, what each point's ratio is, and the same per family.

A family is a collective × backend × size band. Neighbouring sizes of one backend move together, so a family is
judged first and by one number per launch: the mean over its points of the log latency, each point taken relative
to its own baseline.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from commbench.analysis.effects import Array, Effects, against_nights, paired, row_means, welch
from commbench.errors import UsageError
from commbench.store.latencies import SHARED, how_of
from commbench.types import COLLECTIVES, NO_DTYPE, Point
from commbench.units import format_size

if TYPE_CHECKING:
    import pandas as pd

USABLE = ("ok", "unsteady")  # statuses whose launch medians count; what unsteadiness adds shows in their scatter
UNTIMED = ("skipped", "refused")  # on both sides: the machine cannot time this point, and nothing has changed
# Upper ends of the size bands: latency-bound, small, middle, bandwidth-bound, large.
BANDS: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 16 << 20)

BOTH, MISSING, NEW, IDLE = "both", "missing", "new", "not measured"
BETWEEN_LAUNCHES = "between launches"
BETWEEN_PAIRS = "between pairs of launches"
BETWEEN_NIGHTS = "between nights"
WITHIN_LAUNCHES = "within one launch only"
NO_INTERVAL = "none"

_BADNESS = {"wrong": 0, "failed": 1, "timeout": 2, "refused": 3, "skipped": 4, "unsteady": 5, "ok": 6}


def band(size_bytes: int) -> str:
    """The size band of a message: ``≤4 KiB``, ``4–64 KiB``, ``64 KiB–1 MiB``, ``1–16 MiB`` or ``>16 MiB``."""
    if size_bytes <= BANDS[0]:
        return f"≤{format_size(BANDS[0])}"
    for low, high in itertools.pairwise(BANDS):
        if size_bytes <= high:
            start, end = format_size(low), format_size(high)
            return f"{start.split(' ')[0] if start.split(' ')[1] == end.split(' ')[1] else start}–{end}"
    return f">{format_size(BANDS[-1])}"


@dataclass(frozen=True, slots=True)
class Aligned:
    """Two sides, series by series. ``points`` has a row per series; base and cand are (series, launches) log medians.

    Columns of points: what the point is (IDENTITY of the store), label, family, state (BOTH, MISSING, NEW, IDLE),
    base_picked, cand_picked, pick_changed, base_s, cand_s (geometric means of the launch medians, in seconds),
    base_usable, cand_usable (launches), base_unsteady, cand_unsteady, base_status, cand_status (the worst),
    base_reason, cand_reason, base_how, cand_how (how iterations started and were timed).
    """

    points: pd.DataFrame
    base: Array
    cand: Array


@dataclass(frozen=True, slots=True)
class Comparison:
    """Aligned sides with their ratios. ``points`` adds ratio, ratio_low, ratio_high and interval_from; ``families`` has
    a row per family with family, points, ratio, ratio_low, ratio_high, states counted, and picks_changed.

    point_effects belong to the rows of points, family_effects to those of families; both are NaN where nothing can be
    compared. family_base and family_cand are the (families, launches) numbers behind the latter.
    """

    aligned: Aligned
    points: pd.DataFrame
    families: pd.DataFrame
    point_effects: Effects
    family_effects: Effects
    family_base: Array
    family_cand: Array
    in_pairs: bool
    unit: str  # BETWEEN_LAUNCHES, BETWEEN_PAIRS or BETWEEN_NIGHTS


@dataclass(frozen=True, slots=True)
class Nights:
    """Earlier nights as a baseline. ``points``: a row per series with the store's identity columns, picked and how.

    means, launches, variances: (series, nights) mean log latency, launches behind it, variance between them.
    """

    points: pd.DataFrame
    means: Array
    launches: Array
    variances: Array


def labels(points: pd.DataFrame) -> list[str]:
    """A readable line per row: ``all_reduce float32 64 KiB [auto]``."""
    columns = (
        "collective", "op", "dtype", "size_bytes", "world_size", "layout", "group", "backend_requested", "policy",
        "mode", "cache", "placement",
    )  # fmt: skip
    several_policies = points["policy"].nunique() > 1
    found = []
    for values in zip(*(points[c] for c in columns), strict=True):
        point = Point(values[0], values[1], values[2], int(values[3]), int(values[4]), *values[5:])
        if point.collective in COLLECTIVES and (point.dtype == NO_DTYPE or point.size_bytes > 0):
            text = point.label()
        else:
            text = f"{point.collective} {format_size(point.size_bytes)} [{point.backend}]"
        found.append(text[:-1] + f", {point.policy}]" if several_policies else text)
    return found


def align(base: pd.DataFrame, cand: pd.DataFrame, key: str = "point_id") -> Aligned:
    """Line two frames (one row per point and launch, the columns of ``store.latencies``) up on ``key``.

    A launch counts where its status is in USABLE. Every point of either side gets a row. Raises UsageError for a point
    whose ranks shared a device on one side only: such times are of another kind.
    """
    import pandas as pd

    keys = pd.Index(pd.unique(pd.concat([base[key], cand[key]], ignore_index=True)))
    sides = {name: _side(frame, key, keys) for name, frame in (("base", base), ("cand", cand))}
    identity = _identity(base, cand, key, keys)
    points = identity.assign(
        **{f"{name}_{column}": values for name, side in sides.items() for column, values in side.facts.items()}
    )
    _refuse_shared(points)
    return Aligned(_described(points), sides["base"].logs, sides["cand"].logs)


def _refuse_shared(points: pd.DataFrame) -> None:
    shared = {side: points[f"{side}_how"].str.contains(SHARED, regex=False) for side in ("base", "cand")}
    both = (points["base_how"] != "") & (points["cand_how"] != "")
    odd = both & (shared["base"] != shared["cand"])
    if odd.any():
        which = "baseline" if bool(shared["base"][odd].iloc[0]) else "candidate"
        raise UsageError(
            f"{labels(points[odd])[0]}: the ranks of the {which} shared a device, those of the other side had one "
            "each; such times are never compared"
        )


def _identity(base: pd.DataFrame, cand: pd.DataFrame, key: str, keys: pd.Index) -> pd.DataFrame:
    import pandas as pd

    from commbench.store.latencies import IDENTITY

    columns = list(dict.fromkeys([key, *IDENTITY]))
    both = pd.concat([base[columns], cand[columns]], ignore_index=True).drop_duplicates(key)
    return both.set_index(key, drop=False).loc[keys].reset_index(drop=True)


def _described(points: pd.DataFrame) -> pd.DataFrame:
    """Add state, pick_changed, family and label."""
    has_base, has_cand = points["base_rows"].to_numpy() > 0, points["cand_rows"].to_numpy() > 0
    used_base, used_cand = points["base_usable"].to_numpy() > 0, points["cand_usable"].to_numpy() > 0
    idle = points["base_status"].isin(UNTIMED).to_numpy() & points["cand_status"].isin(UNTIMED).to_numpy()
    state = np.select(
        [used_base & used_cand, idle, has_base & ~used_cand, has_cand & ~used_base],
        [BOTH, IDLE, MISSING, NEW],
        default=IDLE,
    )
    base_picked, cand_picked = points["base_picked"].to_numpy(dtype=str), points["cand_picked"].to_numpy(dtype=str)
    changed = (base_picked != "") & (cand_picked != "") & (base_picked != cand_picked)
    asked = points["backend_requested"].to_numpy(dtype=str)
    backend = np.where(base_picked != "", base_picked, np.where(cand_picked != "", cand_picked, asked))
    bands = {size: band(int(size)) for size in points["size_bytes"].unique()}
    names = [
        " · ".join([c, b, *([] if m == "eager" else [m]), *([] if d == NO_DTYPE else [bands[s]])])
        for c, b, m, d, s in zip(
            points["collective"], backend, points["mode"], points["dtype"], points["size_bytes"], strict=True
        )
    ]
    return points.assign(state=state, pick_changed=changed, family=names, label=labels(points))


@dataclass(frozen=True, slots=True)
class _Side:
    logs: Array
    facts: dict[str, Any]


def _side(frame: pd.DataFrame, key: str, keys: pd.Index) -> _Side:
    """One side's matrix of log medians, and its facts per series."""
    import pandas as pd

    rows = keys.get_indexer(pd.Index(frame[key]))
    launches, columns = np.unique(frame["launch"].to_numpy(dtype=np.int64), return_inverse=True)
    status = frame["status"].to_numpy(dtype=str, na_value="failed")
    latency = frame["latency_median_s"].to_numpy(dtype=np.float64, na_value=np.nan)
    usable = np.isin(status, USABLE) & (latency > 0)
    logs = np.full((len(keys), max(1, len(launches))), np.nan)
    logs[rows[usable], columns[usable]] = np.log(latency[usable])
    badness = np.array([_BADNESS.get(s, 1) for s in status], dtype=np.int64)
    worst = np.full(len(keys), max(_BADNESS.values()) + 1)
    np.minimum.at(worst, rows, badness)
    names = {v: k for k, v in _BADNESS.items()} | {max(_BADNESS.values()) + 1: ""}
    reason = np.full(len(keys), "", dtype=object)
    how = how_of(frame)
    guilty = badness == worst[rows]
    reason[rows[guilty]] = frame["reason"].fillna("").to_numpy(dtype=object)[guilty]
    return _Side(
        logs,
        {
            "rows": np.bincount(rows, minlength=len(keys)),
            "usable": np.isfinite(logs).sum(axis=1),
            "unsteady": np.bincount(rows[status == "unsteady"], minlength=len(keys)),
            "s": np.exp(row_means(logs)),
            "status": [names[int(w)] for w in worst],
            "reason": reason,
            "picked": _joined(frame, key, "backend_picked", keys),
            "how": _joined(frame.assign(how=how)[usable], key, "how", keys),
            "low_s": _single(frame, "latency_ci_low_s", rows, usable, logs),
            "high_s": _single(frame, "latency_ci_high_s", rows, usable, logs),
        },
    )


def _single(frame: pd.DataFrame, column: str, rows: NDArray[np.int64], usable: NDArray[np.bool_], logs: Array) -> Array:
    """The interval's end within the launch, for series that have one launch only; NaN for others."""
    values = np.full(len(logs), np.nan)
    values[rows[usable]] = frame[column].to_numpy(dtype=np.float64, na_value=np.nan)[usable]
    values[np.isfinite(logs).sum(axis=1) != 1] = np.nan
    return values


def _joined(values: pd.DataFrame, key: str, column: str, keys: pd.Index) -> NDArray[np.object_]:
    """The texts that each series has in ``column``; several joined by ``+`` in alphabetical order; "" where none."""
    import pandas as pd

    texts = values[[key, column]].fillna("").drop_duplicates()
    texts = texts[texts[column] != ""]
    result = np.full(len(keys), "", dtype=object)
    twice = texts[key].duplicated(keep=False)
    once = texts[~twice]
    result[keys.get_indexer(pd.Index(once[key]))] = once[column].to_numpy(dtype=object)
    for name, group in texts[twice].groupby(key, sort=False):
        result[keys.get_loc(name)] = "+".join(sorted({b for text in group[column] for b in text.split("+")}))
    return result


# ---- effects --------------------------------------------------------------------------------------------------------


def compare(
    base: pd.DataFrame,
    cand: pd.DataFrame,
    *,
    key: str = "point_id",
    in_pairs: bool = False,
    same_picks: bool = True,
) -> Comparison:
    """Ratios of candidate over baseline, per point and per family, each with its 95 % interval.

    base, cand: one row per point and launch, with the columns of ``store.latencies``. in_pairs: launch k of one side
    was made together with launch k of the other. A point with one launch on some side gets the interval from within the
    launches: wide enough for the samples, blind to what differs between launches, and marked so. same_picks: both sides
    are to take the same backend; false where backends are what is compared.
    """
    aligned = align(base, cand, key)
    if not same_picks:
        aligned = replace(aligned, points=_between_backends(aligned.points))
    if in_pairs:
        aligned = _same_launches(aligned, base, cand)
    return compare_aligned(aligned, in_pairs=in_pairs)


def compare_aligned(aligned: Aligned, *, in_pairs: bool = False) -> Comparison:
    """``compare`` for sides that are lined up already (for pairs: column k of both made together)."""
    members, names = _families(aligned.points)
    centre = row_means(aligned.base)
    family_base = _family_means(aligned.base - centre[:, None], members, len(names))
    family_cand = _family_means(aligned.cand - centre[:, None], members, len(names))
    statistic = paired if in_pairs else welch
    comparison = _result(
        aligned,
        names,
        members,
        statistic(aligned.base, aligned.cand),
        statistic(family_base, family_cand),
        BETWEEN_PAIRS if in_pairs else BETWEEN_LAUNCHES,
    )
    return replace(comparison, family_base=family_base, family_cand=family_cand, in_pairs=in_pairs)


def _between_backends(points: pd.DataFrame) -> pd.DataFrame:
    """Labels without the backend, and families that name both, where backends are what is compared."""
    both = [f"{b} → {c}" if b != c else b for b, c in zip(points["base_picked"], points["cand_picked"], strict=True)]
    families = []
    for family, names in zip(points["family"], both, strict=True):
        collective, _, *rest = str(family).split(" · ")
        families.append(" · ".join([collective, names, *rest]))
    short = [label.rpartition(" [")[0] for label in points["label"]]
    return points.assign(pick_changed=False, family=families, label=short)


def compare_with_nights(nights: Nights, cand: pd.DataFrame) -> Comparison:
    """The same for one night's launches against earlier nights; base_usable then counts nights."""
    import pandas as pd

    keys = pd.Index(pd.unique(pd.concat([nights.points["point_id"], cand["point_id"]], ignore_index=True)))
    place = keys.get_indexer(pd.Index(nights.points["point_id"]))
    shape = (len(keys), max(1, nights.means.shape[1]))
    means, launches, variances = np.full(shape, np.nan), np.zeros(shape), np.full(shape, np.nan)
    if nights.means.shape[1]:
        means[place], launches[place], variances[place] = nights.means, nights.launches, nights.variances
    side = _side(cand, "point_id", keys)
    picked = np.full(len(keys), "", dtype=object)
    picked[place] = nights.points["picked"].to_numpy(dtype=object)
    how = side.facts["how"].copy()
    how[place] = nights.points["how"].to_numpy(dtype=object)
    count = np.isfinite(means).sum(axis=1)
    base_facts = {
        "rows": count, "usable": count, "unsteady": np.zeros(len(keys), dtype=np.int64),
        "s": np.exp(row_means(means)), "status": np.where(count > 0, "ok", ""),
        "reason": np.full(len(keys), "", dtype=object), "picked": picked, "how": how,
        "low_s": np.full(len(keys), np.nan), "high_s": np.full(len(keys), np.nan),
    }  # fmt: skip
    points = _identity(nights.points, cand, "point_id", keys).assign(
        **{f"base_{k}": v for k, v in base_facts.items()}, **{f"cand_{k}": v for k, v in side.facts.items()}
    )
    aligned = Aligned(_described(points), means, side.logs)
    members, names = _families(aligned.points)
    centre = row_means(means)
    family_base = _family_means(means - centre[:, None], members, len(names))
    family_cand = _family_means(side.logs - centre[:, None], members, len(names))
    family_launches = np.nan_to_num(_family_means(np.where(np.isfinite(means), launches, np.nan), members, len(names)))
    with np.errstate(invalid="ignore"):
        # launches within a night scatter as the candidate's do: a family's own were not kept
        own = np.array([np.var(r[np.isfinite(r)], ddof=1) if np.isfinite(r).sum() > 1 else np.nan for r in family_cand])
    within = np.broadcast_to(own[:, None], family_base.shape)
    comparison = _result(
        aligned,
        names,
        members,
        against_nights(means, launches, variances, side.logs),
        against_nights(family_base, family_launches, within, family_cand),
        BETWEEN_NIGHTS,
    )
    return replace(comparison, family_base=family_base, family_cand=family_cand)


def _same_launches(aligned: Aligned, base: pd.DataFrame, cand: pd.DataFrame) -> Aligned:
    """The matrices on one common set of launch numbers, so that columns are pairs."""
    of_base, of_cand = (np.unique(f["launch"].to_numpy(dtype=np.int64)) for f in (base, cand))
    every = np.union1d(of_base, of_cand)

    def spread(logs: Array, own: NDArray[np.int64]) -> Array:
        wide = np.full((len(logs), max(1, len(every))), np.nan)
        if len(own):
            wide[:, np.searchsorted(every, own)] = logs
        return wide

    return replace(aligned, base=spread(aligned.base, of_base), cand=spread(aligned.cand, of_cand))


def _families(points: pd.DataFrame) -> tuple[NDArray[np.int64], list[str]]:
    """The family of each row as an index into their names, in order of appearance; −1 for rows not compared."""
    import pandas as pd

    codes, names = pd.factorize(points["family"])
    members = np.where(points["state"].to_numpy() == BOTH, codes, -1)
    # a family of which nothing can be compared keeps its row, without members
    return members.astype(np.int64), [str(n) for n in names]


def _family_means(values: Array, members: NDArray[np.int64], families: int) -> Array:
    """(families, launches): the mean over a family's points in each launch, of those that are there."""
    rows = members >= 0
    there = np.isfinite(values[rows])
    total, count = np.zeros((families, values.shape[1])), np.zeros((families, values.shape[1]))
    np.add.at(total, members[rows], np.where(there, values[rows], 0.0))
    np.add.at(count, members[rows], there)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(count > 0, total / count, np.nan))


def _result(
    aligned: Aligned,
    names: list[str],
    members: NDArray[np.int64],
    point_effects: Effects,
    family_effects: Effects,
    unit: str,
) -> Comparison:
    import pandas as pd

    points = aligned.points
    low, high = point_effects.interval()
    source = np.where(np.isfinite(low), unit, NO_INTERVAL).astype(object)
    within_low = _log(points["cand_low_s"]) - _log(points["base_high_s"])
    within_high = _log(points["cand_high_s"]) - _log(points["base_low_s"])
    single = ~np.isfinite(low) & np.isfinite(within_low) & np.isfinite(within_high)
    source[single] = WITHIN_LAUNCHES
    points = points.assign(
        ratio=np.exp(point_effects.estimate),
        ratio_low=np.exp(np.where(single, within_low, low)),
        ratio_high=np.exp(np.where(single, within_high, high)),
        interval_from=source,
    )
    family_low, family_high = family_effects.interval()
    grouped = points.groupby("family", sort=False)
    families = pd.DataFrame(
        {
            "family": names,
            "points": grouped.size().reindex(names).to_numpy(),
            "compared": np.bincount(members[members >= 0], minlength=len(names)),
            "missing": _counts(points, names, points["state"] == MISSING),
            "new": _counts(points, names, points["state"] == NEW),
            "picks_changed": _counts(points, names, points["pick_changed"]),
            "ratio": np.exp(family_effects.estimate),
            "ratio_low": np.exp(family_low),
            "ratio_high": np.exp(family_high),
        }
    )
    empty = np.empty((0, 0))
    return Comparison(
        replace(aligned, points=points), points, families, point_effects, family_effects, empty, empty, False, unit
    )


def _counts(points: pd.DataFrame, names: list[str], mask: Any) -> NDArray[np.int64]:
    found = points.loc[mask, "family"].value_counts()
    return np.asarray(found.reindex(names).fillna(0).to_numpy(), dtype=np.int64)


def _log(values: pd.Series) -> Array:
    numbers = values.to_numpy(dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(numbers > 0, np.log(numbers), np.nan))


# ---- one run against itself -----------------------------------------------------------------------------------------


def sides_of(frame: pd.DataFrame, column: str, base: str, cand: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The points that asked for policy (or backend) ``base``, and those for ``cand``, with a common key ``series``.

    column: policy or backend_requested. The key is point_key with the other of the two, so that only one thing differs.
    """
    other = {"policy": "backend_requested", "backend_requested": "policy"}[column]
    keyed = frame.assign(series=frame["point_key"].astype(str) + "/" + frame[other].astype(str))
    return keyed[keyed[column] == base], keyed[keyed[column] == cand]


def percent(ratio: float) -> str:
    """``+3.2 %`` of 1.032; ``×4.1`` from a doubling on, where percents stop saying much."""
    if not math.isfinite(ratio):
        return "–"
    if ratio >= 2 or ratio <= 0.5:
        return f"×{ratio:.3g}"
    return f"{(ratio - 1) * 100:+.1f} %"


def counts_of(comparison: Comparison) -> Mapping[str, int]:
    """How many points are compared, missing, new, not measured on both sides, and of another pick."""
    state = comparison.points["state"].value_counts()
    return {
        "compared": int(state.get(BOTH, 0)),
        "missing": int(state.get(MISSING, 0)),
        "new": int(state.get(NEW, 0)),
        "not_measured": int(state.get(IDLE, 0)),
        "picks_changed": int(comparison.points["pick_changed"].sum()),
    }
