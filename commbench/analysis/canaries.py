"""Canaries: fixed work, timed in every launch. Where they moved, the machine did, and code cannot be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commbench.analysis.effects import Array, Effects, against_nights, paired, welch

# Over all canaries of a night together: one quiet night in a hundred is called moved by chance.
ALPHA = 0.01


@dataclass(frozen=True, slots=True)
class Canary:
    """One canary's ratio candidate/baseline with its 95 % interval, and whether it moved. NaN: not to be known."""

    name: str
    ratio: float
    low: float
    high: float
    moved: bool


def launch_values(launches: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """canary → launch → log seconds, from the launch records of a manifest.

    A launch's value is the geometric mean of its start and its end. Numbers that are not positive are left out.
    """
    found: dict[str, dict[int, float]] = {}
    for record in launches:
        readings: dict[str, list[float]] = {}
        for values in (record.get("canaries") or {}).values():
            for name, seconds in values.items():
                if isinstance(seconds, int | float) and np.isfinite(seconds) and seconds > 0:
                    readings.setdefault(name, []).append(float(np.log(seconds)))
        for name, logs in readings.items():
            found.setdefault(name, {})[int(record["launch"])] = float(np.mean(logs))
    return found


def compare_canaries(
    base: Mapping[str, Mapping[int, float]],
    cand: Mapping[str, Mapping[int, float]],
    limit: float,
    *,
    in_pairs: bool = False,
) -> list[Canary]:
    """Whether each canary of both sides moved by more than ``limit`` (a difference of logs), up or down."""
    names = sorted(set(base) & set(cand))
    launches = sorted({k for name in names for side in (base, cand) for k in side[name]})
    before, after = (
        np.array([[side[n].get(k, np.nan) for k in launches] for n in names]).reshape(len(names), len(launches))
        for side in (base, cand)
    )
    return _judged(names, (paired if in_pairs else welch)(before, after), limit)


def compare_canary_nights(
    nights: Sequence[Mapping[str, Mapping[int, float]]], cand: Mapping[str, Mapping[int, float]], limit: float
) -> list[Canary]:
    """The same for one night against earlier ones, each night a mapping as ``launch_values`` gives it."""
    names = sorted({n for night in nights for n in night} & set(cand))
    shape = (len(names), len(nights))
    means, counts, variances = np.full(shape, np.nan), np.zeros(shape), np.full(shape, np.nan)
    for j, night in enumerate(nights):
        for i, name in enumerate(names):
            logs = np.array(list(night.get(name, {}).values()))
            if len(logs):
                means[i, j], counts[i, j] = logs.mean(), len(logs)
                variances[i, j] = logs.var(ddof=1) if len(logs) > 1 else np.nan
    width = max((len(cand[n]) for n in names), default=0)
    after = np.full((len(names), width), np.nan)
    for i, name in enumerate(names):
        after[i, : len(cand[name])] = list(cand[name].values())
    return _judged(names, against_nights(means, counts, variances, after), limit)


def _judged(names: list[str], effects: Effects, limit: float) -> list[Canary]:
    if not names:
        return []
    p: Array = np.fmin(effects.p_slower(limit), effects.p_faster(limit))
    low, high = effects.interval()
    threshold = ALPHA / 2 / len(names)  # both directions, all canaries
    ratio, low, high = np.exp(effects.estimate), np.exp(low), np.exp(high)
    return [
        Canary(name, float(ratio[i]), float(low[i]), float(high[i]), bool(p[i] <= threshold))
        for i, name in enumerate(names)
    ]
