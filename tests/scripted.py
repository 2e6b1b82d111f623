"""Measurements with scripted curves: known crossovers, chosen noise, no process launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from commbench.store import schema
from commbench.store.run import Plan, PointLog, create, finish, row_of, update_manifest
from commbench.types import AUTO, Point

Curve = Callable[[float], float]  # size in bytes → seconds


def half_octaves(first: int = 10, last: int = 22) -> list[int]:
    """Sizes √2 apart from 2^first to 2^last, multiples of 16."""
    return [round(2 ** (k / 2) / 16) * 16 for k in range(2 * first, 2 * last + 1)]


def one_shot_and_two_shot(crossover: float) -> dict[str, Curve]:
    """Latency + bytes: the first has half the latency, the second half the cost per byte; equal at ``crossover``."""
    latency = 2e-6
    per_byte = 2 * latency / crossover
    return {
        "shm_oneshot": lambda s: latency + per_byte * s,
        "shm_twoshot": lambda s: 2 * latency + per_byte / 2 * s,
    }


def rows(
    curves: Mapping[str, Curve],
    today: Callable[[int], str],
    *,
    sizes: Sequence[int] = (),
    launches: int = 5,
    cv: float = 0.02,
    seed: int = 0,
    like: Point | None = None,
    picked_by: Mapping[str, Callable[[int], str]] | None = None,
) -> list[dict[str, Any]]:
    """One row per point and launch: every curve forced, and ``auto`` as ``today`` picks (policy ``commbench``).

    Launch medians are log-normal around the curve with that coefficient of variation, and all of a launch share a
    factor of the same spread. picked_by: further policies' auto points.
    """
    rng = np.random.default_rng(seed)
    base = like or Point("all_reduce", "sum", "float32", 1024, 2)
    policies = {"commbench": today, **(picked_by or {})}
    found = []
    for launch in range(launches):
        common = cv * rng.standard_normal()
        for size in sizes or half_octaves():
            asked = [(name, base.policy, name) for name in curves]
            asked += [(AUTO, policy, pick(size)) for policy, pick in policies.items()]
            for backend, policy, picked in asked:
                kernel = picked if picked in curves else {"shm": "shm_oneshot"}.get(picked, picked)
                latency = curves[kernel](size) * math.exp(common + cv * rng.standard_normal())
                point = replace(base, size_bytes=size, backend=backend, policy=policy)
                values = {
                    "run_id": "scripted", "launch": launch, "order": 0, "backend_picked": picked, "status": "ok",
                    "checked": True, "wrong_count": 0, "latency_median_s": latency, "latency_ci_low_s": latency * 0.98,
                    "latency_ci_high_s": latency * 1.02, "n_samples": 100, "n_effective": 100.0,
                }  # fmt: skip
                found.append(row_of(point, values))
    return found


def frame(found: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a run gives them."""
    return pd.DataFrame.from_records(list(found), columns=list(schema.POINT_COLUMNS)).astype(schema.POINT_COLUMNS)


def write_run(directory: Path, found: Sequence[Mapping[str, Any]], **spec: Any) -> Path:
    """A run directory that holds these rows."""
    launches = len({row["launch"] for row in found})
    manifest = {
        "run_id": directory.name,
        "outcome": "running",
        "spec": {"tp": 2, "policy": ["commbench"], "launches": launches, **spec},
        "settings": {"device": "cpu"},
        "fingerprint": {"env": {}},
        # shm was one-shot up to 32 KiB, whatever the shipped policy says today
        "launches": [{"launch": 0, "splits": {"commbench": {"shm": 32 << 10}}}],
    }
    create(directory, manifest, Plan((), {"seed": 0}))
    log = PointLog(directory)
    for row in found:
        log.append({**row, "run_id": directory.name})
    log.close()
    finish(directory)
    update_manifest(directory, outcome="complete")
    return directory
