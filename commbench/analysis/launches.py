"""From launches to points: one row per point, with the launch median as the statistical unit.

Samples of one launch share its process placement, memory layout and connections, so they say little about the
next launch. With several launches the interval is therefore taken over the per-launch medians; only a single
launch falls back on the interval within it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from commbench.bandwidth import algbw_gb_per_s, busbw_gb_per_s
from commbench.statistics import CONFIDENCE, FEWEST_FOR_INTERVAL, median_interval
from commbench.store.schema import POINT_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

# Worst first. A point is what its worst launch was.
SEVERITY: tuple[str, ...] = ("wrong", "failed", "timeout", "refused", "unsteady", "skipped", "ok")
# Statuses that accuse nobody: their reasons may be told in summary.
MILD = frozenset({"refused", "unsteady", "skipped"})
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:–[0-9]+(?:\.[0-9]+)?)?")  # or a range of two
# Whose latencies describe the point, best first; only the best kind that is there is used.
_TRUST = {"ok": 0, "unsteady": 1, "wrong": 2}

WITHIN_LAUNCH = "within the launch"
T_ON_LOGS = "t on the logs of the launch medians"
ORDER_STATISTICS = "order statistics of the launch medians"

# Columns that aggregation adds to those of the store's schema.
EXTRA_COLUMNS: dict[str, str] = {
    "launches": "Int64",  # launches that have a row for the point
    "launches_used": "Int64",  # launches whose latencies went into the figures
    "launch_cv": "Float64",  # coefficient of variation between launch medians (standard deviation of their logs)
    "interval_from": "string",  # WITHIN_LAUNCH, T_ON_LOGS or ORDER_STATISTICS
}

SMALL_BYTES = 1024  # below, a call takes about as long as the timer's own noise

_PER_LAUNCH = ("launch", "order")  # meaningless once launches are merged
_MERGE: dict[str, str] = {
    "latency_p90_s": "median",
    "latency_p99_s": "median",
    "latency_min_s": "min",
    "latency_max_s": "max",
    "t_win_median_s": "median",
    "skew_median_s": "median",
    "enqueue_median_s": "median",
    "n_samples": "sum",
    "n_effective": "sum",
    "n_invalid": "sum",
    "iters_per_sample": "max",
    "warmup_iterations": "max",
    "target_reached": "min",
}
_MERGE_ALL: dict[str, str] = {
    "wrong_count": "sum",
    "max_abs_error": "max",
    "max_relative_error": "max",
    "max_ulp_error": "max",
    "ranks_agree": "min",
    "repeatable": "min",
    "extremes_wrong": "sum",
    "elapsed_s": "sum",
    "checked": "min",
    "oversubscribed": "max",
    "shared_device": "max",
}


@dataclass(frozen=True, slots=True)
class LaunchInterval:
    """Median of per-launch medians with its 95 % interval, in their unit; ``method`` says how it was found."""

    median: float
    low: float
    high: float
    launches: int
    method: str


def t_quantile(probability: float, degrees: ArrayLike) -> NDArray[np.float64]:
    """Student's t quantile."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(degrees, probability), dtype=np.float64)


def interval_over_launches(medians: ArrayLike) -> LaunchInterval:
    """The 95 % interval over the medians of two or more launches.

    Below six launches no order-statistic interval exists: then exp(mean ± t·s/√n) of the logarithms, Student's t
    with n − 1 degrees of freedom. It always holds the median, which is the estimate given in both cases
    (|median − mean| ≤ s·√((n−1)/n) for n numbers, and t/√n is larger up to n = 5). From six on, order statistics.
    Raises ValueError for fewer than two launches, and for a median that is not a positive number.
    """
    values = np.asarray(medians, dtype=np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(f"an interval over launches needs two launches or more, not {values.size}")
    if not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError("launch medians must be positive numbers")
    n = len(values)
    if n >= FEWEST_FOR_INTERVAL:
        interval = median_interval(values, effective=float(n))
        return LaunchInterval(interval.median, interval.low, interval.high, n, ORDER_STATISTICS)
    logs = np.log(values)
    half = float(t_quantile((1 + CONFIDENCE) / 2, n - 1)) * float(logs.std(ddof=1)) / math.sqrt(n)
    median = float(np.median(values))
    centre = float(logs.mean())
    # Rounding alone may leave the median a bit outside when all launches agree.
    low, high = min(math.exp(centre - half), median), max(math.exp(centre + half), median)
    return LaunchInterval(median, low, high, n, T_ON_LOGS)


def merge_launches(points: pd.DataFrame) -> pd.DataFrame:
    """One row per point from one row per point and launch.

    Takes a frame with the columns of ``schema.POINT_COLUMNS``; where a launch has a point twice (a retry), the
    later row counts. Gives those columns but launch and order, and EXTRA_COLUMNS, in the order in which
    points first appear.

    status is that of the worst launch (SEVERITY), and reason says in which launches. Figures come from the launches
    that are ok; where none is, from the unsteady ones, then from wrong ones (status tells). median, p90, p99,
    t_win and skew: the median over launches; min and max over all samples; bandwidths from the median.
    """
    frame = points.drop_duplicates(["point_id", "launch"], keep="last")
    grouped = frame.groupby("point_id", sort=False)
    merged = grouped.first().drop(columns=list(_PER_LAUNCH))
    for column, how in _MERGE_ALL.items():
        merged[column] = grouped[column].agg(how)
    merged["launches"] = grouped.size()

    severity = frame["status"].map({s: i for i, s in enumerate(SEVERITY)}).fillna(1)
    worst = severity.groupby(frame["point_id"], sort=False).min()
    merged["status"] = worst.map(lambda i: SEVERITY[int(i)])
    _join_reasons(frame, merged)
    picks = frame[frame["backend_picked"].fillna("") != ""].groupby("point_id", sort=False)["backend_picked"]
    split = picks.agg(lambda names: "+".join(sorted({n for name in names for n in name.split("+")})))
    merged["backend_picked"] = split.reindex(merged.index).fillna("")

    trust = frame["status"].map(_TRUST).fillna(3).where(frame["latency_median_s"].notna())
    used = frame[trust.notna() & (trust == trust.groupby(frame["point_id"]).transform("min"))]
    _merge_figures(used, merged)
    merged = merged.reset_index()
    columns = {c: k for c, k in POINT_COLUMNS.items() if c not in _PER_LAUNCH} | EXTRA_COLUMNS
    result: pd.DataFrame = merged[list(columns)].astype(columns)
    return result


@dataclass(frozen=True, slots=True)
class Variation:
    """How much the launch medians of one backend's points scatter: coefficients of variation over points."""

    backend: str
    small: bool  # messages below SMALL_BYTES
    points: int
    launches: int  # the most that a point has
    median: float
    worst: float

    @property
    def what(self) -> str:
        return f"{self.backend} {'<' if self.small else '≥'} 1 KiB"


_MAY_DIFFER = frozenset({"seed", "target_ci", "max_time_per_point_s", "budget_s", "patience_s", "backends"})


def variations(frames: Sequence[pd.DataFrame]) -> list[Variation]:
    """Launch-to-launch variation by backend taken, below and from 1 KiB.

    frames: one per run, one row per point and launch; every launch of every run counts as a launch of its own. A
    point's coefficient is the standard deviation of the logarithms of its launch medians (those that are ok). Points
    with fewer than two launches are left out.
    """
    import pandas as pd

    own = []
    for number, frame in enumerate(frames):
        rows = frame.drop_duplicates(["point_id", "launch"], keep="last")
        rows = rows[(rows["status"] == "ok") & rows["latency_median_s"].notna()]
        own.append(rows[["point_id", "launch", "size_bytes", "backend_picked", "latency_median_s"]].assign(run=number))
    if not own:
        return []
    rows = pd.concat(own, ignore_index=True)
    rows["log"] = np.log(rows["latency_median_s"].astype("float64"))
    grouped = rows.groupby(["point_id", "backend_picked"], sort=False)
    points = pd.DataFrame(
        {"cv": grouped["log"].std(ddof=1), "launches": grouped.size(), "size": grouped["size_bytes"].first()}
    ).reset_index()
    points = points[points["launches"] > 1]
    points["small"] = points["size"] < SMALL_BYTES
    return [
        Variation(str(backend), bool(small), len(group), int(group["launches"].max()), float(group["cv"].median()),
                  float(group["cv"].max()))
        for (backend, small), group in points.groupby(["backend_picked", "small"])
    ]  # fmt: skip


def repeats(manifests: Sequence[Mapping[str, Any]]) -> bool:
    """Whether runs measured in the same way, so that their launches are launches of one thing.

    Settings that say how often and how long, the seed, and backends that were only set up may differ.
    """
    ways = []
    for manifest in manifests:
        settings = manifest.get("settings")
        known = settings if isinstance(settings, Mapping) else {}
        ways.append({name: value for name, value in known.items() if name not in _MAY_DIFFER})
    return all(way == ways[0] for way in ways)


def variation_text(found: Sequence[Variation]) -> str:
    """``over 5 launches: shm ≥ 1 KiB 3.1 % (worst 6.0 %), …``; "" where there is nothing to tell."""
    if not found:
        return ""
    parts = [f"{v.what} {v.median:.1%} (worst {v.worst:.1%})" for v in found]
    return f"over {max(v.launches for v in found)} launches: {', '.join(parts)}"


def common_texts(texts: Iterable[str]) -> dict[str, list[int]]:
    """Texts that differ only in numbers as one, with the range of each number; with the places of its members.

    ``["after 3 of 9 s", "after 5 of 9 s"]`` gives ``{"after 3–5 of 9 s": [0, 1]}``.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for place, text in enumerate(texts):
        found.setdefault(_NUMBER.sub("#", text), []).append((place, text))
    merged = {}
    for members in found.values():
        first = members[0][1]
        columns = list(zip(*(_NUMBER.findall(text) for _, text in members), strict=True))
        words = _NUMBER.split(first)
        text = words[0] + "".join(_range(c) + word for c, word in zip(columns, words[1:], strict=True))
        merged[text] = [place for place, _ in members]
    return merged


def _range(found: tuple[str, ...]) -> str:
    numbers = [number for text in found for number in text.split("–")]
    low, high = min(numbers, key=float), max(numbers, key=float)
    return low if float(low) == float(high) else f"{low}–{high}"


def _join_reasons(frame: pd.DataFrame, merged: pd.DataFrame) -> None:
    """Reasons of one launch as they are. Of several: faults with their launches named, the others counted."""
    said = frame[frame["reason"].fillna("") != ""]
    joined: dict[str, str] = {}
    for point_id, group in said.groupby("point_id", sort=False):
        total = int(merged["launches"][point_id])
        reasons = [str(reason) for reason in group["reason"]]
        if total == 1:
            joined[str(point_id)] = reasons[-1]
            continue
        mild = group["status"].isin(MILD).to_numpy()
        faults: dict[str, list[str]] = {}
        for launch, reason, m in zip(group["launch"], reasons, mild, strict=True):
            if not m:
                faults.setdefault(reason, []).append(str(launch))
        parts = [
            reason if len(own) == total else f"launch {', '.join(own)} of {total}: {reason}"
            for reason, own in faults.items()
        ]
        for text, places in common_texts(r for r, m in zip(reasons, mild, strict=True) if m).items():
            parts.append(text if len(places) == total else f"in {len(places)} of {total} launches: {text}")
        joined[str(point_id)] = "; ".join(parts)
    merged["reason"] = [joined.get(str(point_id), "") for point_id in merged.index]


def _merge_figures(used: pd.DataFrame, merged: pd.DataFrame) -> None:
    """Put the figures of the used launches into ``merged`` (indexed by point_id), NaN where there are none."""
    import pandas as pd

    grouped = used.groupby("point_id", sort=False)
    for column, how in _MERGE.items():
        merged[column] = grouped[column].agg(how).reindex(merged.index)
    count = grouped.size().reindex(merged.index).fillna(0).astype("int64")
    merged["launches_used"] = count
    columns = ["latency_median_s", "latency_ci_low_s", "latency_ci_high_s"]
    first = grouped[columns].first().reindex(merged.index)
    figures = {c: first[c].to_numpy(dtype=np.float64, na_value=np.nan, copy=True) for c in columns}
    spread = np.full(len(merged), np.nan)
    method = np.where(count.to_numpy() == 1, WITHIN_LAUNCH, "")
    method = method.astype(object)
    place = {point_id: i for i, point_id in enumerate(merged.index)}
    many = used[used["point_id"].map(count) > 1]
    for point_id, own in many.groupby("point_id", sort=False)["latency_median_s"]:
        i = place[point_id]
        values = own.to_numpy(dtype=np.float64)
        interval = interval_over_launches(values)
        figures["latency_median_s"][i] = interval.median
        figures["latency_ci_low_s"][i], figures["latency_ci_high_s"][i] = interval.low, interval.high
        spread[i] = np.log(values).std(ddof=1)
        method[i] = interval.method
    for column in columns:
        merged[column] = figures[column]
    merged["launch_cv"] = spread
    merged["interval_from"] = method
    medians = figures["latency_median_s"]
    sizes = merged["size_bytes"].to_numpy(dtype=np.int64, na_value=0)
    ranks = merged["world_size"].to_numpy(dtype=np.int64, na_value=1)
    merged["algbw_gb_per_s"] = pd.array(
        [algbw_gb_per_s(int(s), float(t)) for s, t in zip(sizes, medians, strict=True)], dtype="Float64"
    )
    merged["busbw_gb_per_s"] = pd.array(
        [
            busbw_gb_per_s(c, int(s), float(t), int(n))
            for c, s, t, n in zip(merged["collective"], sizes, medians, ranks, strict=True)
        ],
        dtype="Float64",
    )
