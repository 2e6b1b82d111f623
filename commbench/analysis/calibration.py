"""What a machine's numbers can support: judged from a run of a few quiet points and its launches' own calibration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CLAIMS = (0.01, 0.05, 0.20)  # slowdowns that people claim
ALPHA, POWER = 0.05, 0.80
MOST_LAUNCHES = 1000


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """One scripted duration: what was reported for it, and whether that is within 1 % or the timer's resolution."""

    loop: str
    scripted_s: float
    reported_s: float
    allowed_s: float

    @property
    def error_s(self) -> float:
        return self.reported_s - self.scripted_s

    @property
    def good(self) -> bool:
        return abs(self.error_s) <= self.allowed_s


def known_answers(launches: Sequence[Mapping[str, Any]]) -> list[KnownAnswer]:
    """The launches' known-answer checks, the median over launches for each loop and duration.

    ``launches``: the manifest's launch records, with ``known_answers`` and ``timer``.
    """
    reported: dict[tuple[str, float], list[float]] = {}
    resolution = 0.0
    for launch in launches:
        resolution = max(resolution, launch["timer"]["resolution_s"])
        for answer in launch.get("known_answers", []):
            reported.setdefault((answer["loop"], answer["scripted_s"]), []).append(answer["reported_s"])
    return [
        KnownAnswer(loop, scripted, float(np.median(values)), max(0.01 * scripted, resolution))
        for (loop, scripted), values in reported.items()
    ]


def launch_cv(medians: Iterable[float]) -> float:
    """Launch-to-launch coefficient of variation: the standard deviation of the logarithms of launch medians.

    NaN for fewer than two launches.
    """
    logs = np.log(np.fromiter(medians, dtype=float))
    return float(np.std(logs, ddof=1)) if len(logs) > 1 else math.nan


def detectable_slowdown(cv: float, launches: int) -> float:
    """The smallest relative slowdown that ``launches`` launches a side find with 80 % power at 5 % (one-sided).

    (t_0.95 + t_0.80) · cv · √(2 / launches), with 2·launches − 2 degrees of freedom: the usual sample-size formula
    of the two-sample t test, on logarithms. NaN for fewer than two launches.
    """
    if launches < 2 or math.isnan(cv):
        return math.nan
    from scipy.special import stdtrit

    freedom = 2 * launches - 2
    quantiles = float(stdtrit(freedom, 1 - ALPHA) + stdtrit(freedom, POWER))
    return math.expm1(quantiles * cv * math.sqrt(2 / launches))


def launches_needed(cv: float, slowdown: float) -> int | None:
    """The fewest launches a side that find ``slowdown``; None if more than MOST_LAUNCHES would be needed."""
    if math.isnan(cv):
        return None
    low, high = 2, MOST_LAUNCHES
    if detectable_slowdown(cv, high) > slowdown:
        return None
    while low < high:
        middle = (low + high) // 2
        if detectable_slowdown(cv, middle) <= slowdown:
            high = middle
        else:
            low = middle + 1
    return low


@dataclass(frozen=True, slots=True)
class Calibration:
    """The verdict on a machine. cv: the median over points of the launch-to-launch variation; cv_worst the largest."""

    resolution_s: float
    overhead_s: float
    spread_s: float
    skew_p50_s: float
    skew_p99_s: float
    missed_windows: float
    sync: str
    answers: tuple[KnownAnswer, ...]
    launches: int
    cv: float
    cv_worst: float
    noisy_points: int
    points: int

    def detectable(self, launches: int) -> float:
        return detectable_slowdown(self.cv, launches)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; NaN as None."""

        def plain(value: float) -> float | None:
            return None if math.isnan(value) else value

        return {
            "timer": {"resolution_s": self.resolution_s, "overhead_s": self.overhead_s, "spread_s": self.spread_s},
            "start": {
                "sync": self.sync,
                "skew_p50_s": self.skew_p50_s,
                "skew_p99_s": self.skew_p99_s,
                "missed_windows": self.missed_windows,
            },
            "known_answers": [
                {
                    "loop": a.loop,
                    "scripted_s": a.scripted_s,
                    "reported_s": a.reported_s,
                    "allowed_s": a.allowed_s,
                    "good": a.good,
                }
                for a in self.answers
            ],
            "launches": self.launches,
            "launch_cv": plain(self.cv),
            "launch_cv_worst": plain(self.cv_worst),
            "detectable_slowdown": plain(self.detectable(self.launches)),
            "launches_needed": {f"{claim:.0%}": launches_needed(self.cv, claim) for claim in CLAIMS},
            "noisy_points": self.noisy_points,
            "points": self.points,
        }


def calibrate(rows: Sequence[Mapping[str, Any]], launches: Sequence[Mapping[str, Any]]) -> Calibration:
    """Judge a run: ``rows`` of its points (several launches), ``launches`` of its manifest.

    Raises ValueError when no launch has calibrated or no point was measured.
    """
    done = [launch for launch in launches if "timer" in launch]
    medians: dict[str, list[float]] = {}
    for row in rows:
        if row["status"] == "ok" and row["latency_median_s"]:
            medians.setdefault(row["point_id"], []).append(row["latency_median_s"])
    if not done or not medians:
        raise ValueError("nothing was measured; see the reasons of the points")
    variations = [cv for cv in (launch_cv(values) for values in medians.values()) if not math.isnan(cv)]

    noisy = sum(bool(json.loads(row["noise"]).get("marks")) for row in rows if row.get("noise"))
    return Calibration(
        resolution_s=max(launch["timer"]["resolution_s"] for launch in done),
        overhead_s=float(np.median([launch["timer"]["overhead_s"] for launch in done])),
        spread_s=float(np.median([launch["timer"]["spread_s"] for launch in done])),
        skew_p50_s=float(np.median([launch["start"]["skew_p50_s"] for launch in done])),
        skew_p99_s=float(np.median([launch["start"]["skew_p99_s"] for launch in done])),
        missed_windows=max(launch["start"]["missed_windows"] for launch in done),
        sync=str(done[0]["start"]["sync"]),
        answers=tuple(known_answers(done)),
        launches=len(done),
        cv=float(np.median(variations)) if variations else math.nan,
        cv_worst=max(variations, default=math.nan),
        noisy_points=noisy,
        points=len(rows),
    )
