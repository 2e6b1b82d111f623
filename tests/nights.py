"""Runs with scripted launch medians, for judging: written with the store's own writer, nothing is launched."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from commbench.store.run import Plan, create, finish, row_of, update_manifest
from commbench.types import COLLECTIVES, Point

START_S = 1_780_000_000.0
DAY_S = 86_400.0
FINGERPRINT: dict[str, Any] = {
    "device": "cpu",
    "host": {"name": "node7", "arch": "x86_64", "kernel": "6.1", "os": "Test Linux", "virtual_machine": None,
             "container": None},
    "cpu": {"model": "Test CPU", "logical_cpus": 4, "cores": 4, "sockets": 1, "affinity": "0-3"},
    "memory": {"total_bytes": 64 << 30},
    "versions": {"python": "3.11.7", "implementation": "CPython", "torch": "2.6.0", "git_sha": "0" * 40,
                 "git_dirty": False},
    "env": {"OMP_NUM_THREADS": "1"},
}  # fmt: skip
SPEC: dict[str, Any] = {"collectives": ["all_reduce"], "sizes": "8:64KiB:x2", "tp": 2, "launches": 10, "sync": "window"}
CANARIES = {"memcpy_s": 2e-3, "arithmetic_s": 4e-4, "spin_barrier_s": 5e-7}


def points_of(
    collectives: Sequence[str] = ("all_reduce", "all_gather"),
    backends: Sequence[str] = ("torch_dist", "shm"),
    sizes: Sequence[int] = (64, 512, 4096, 8192, 65536),
) -> list[Point]:
    """Forced backends only, so that a point's backend is known from the point."""
    return [
        Point(c, "sum" if COLLECTIVES[c].reduces else "", "float32", s, 2, backend=b,
              placement=COLLECTIVES[c].placements[0])
        for c in collectives for b in backends for s in sizes
    ]  # fmt: skip


def base_latency_s(point: Point) -> float:
    return (20e-6 if point.backend == "torch_dist" else 2e-6) + point.size_bytes * 1e-10


def write_run(
    directory: Path,
    points: Sequence[Point],
    *,
    launches: int = 10,
    cv: float = 0.02,
    seed: int = 0,
    slower: Callable[[Point], float] = lambda p: 1.0,
    started_s: float = START_S,
    canary_cv: float = 0.01,
    canary_factor: float = 1.0,
    canaries: bool = True,
    rows: Callable[[Point, int, dict[str, Any]], dict[str, Any] | None] = lambda point, launch, values: values,
    outcome: str = "complete",
    fingerprint: Mapping[str, Any] = FINGERPRINT,
    spec: Mapping[str, Any] = SPEC,
) -> Path:
    """A whole run: log-normal launch medians around ``base_latency_s`` × ``slower(point)``.

    rows may change the values of a (point, launch), or drop it by giving None.
    """
    random = np.random.default_rng(seed)
    records = [
        {"launch": k, "canaries": {
            when: {n: v * canary_factor * random.lognormal(0, canary_cv) for n, v in CANARIES.items()}
            for when in ("start", "end")}} if canaries else {"launch": k}
        for k in range(launches)
    ]  # fmt: skip
    manifest = {
        "run_id": directory.name, "started_s": started_s, "outcome": "running", "spec": dict(spec),
        "settings": {"seed": seed}, "points_planned": len(points) * launches, "fingerprint": dict(fingerprint),
        "launches": records, "commbench": "0.1.0",
    }  # fmt: skip
    create(directory, manifest, Plan(tuple(points), {"seed": seed}))
    lines = []
    for launch in range(launches):
        for order, point in enumerate(points):
            latency = base_latency_s(point) * slower(point) * random.lognormal(0, cv)
            values: dict[str, Any] | None = {
                "run_id": directory.name, "launch": launch, "order": order, "backend_picked": point.backend,
                "sync": "window", "loop": "native", "timing": "single", "status": "ok", "reason": "", "n_samples": 100,
                "latency_median_s": latency, "latency_ci_low_s": latency * 0.99, "latency_ci_high_s": latency * 1.01,
                "checked": True, "wrong_count": 0,
            }  # fmt: skip
            values = rows(point, launch, values)
            if values is not None:
                lines.append(json.dumps(row_of(point, values)))
    (directory / "points.jsonl").write_text("".join(line + "\n" for line in lines))
    finish(directory)
    update_manifest(directory, outcome=outcome)
    return directory


def side_frame(
    points: Sequence[Point],
    *,
    launches: int = 10,
    cv: float = 0.02,
    seed: int = 0,
    slower: Callable[[Point], float] = lambda p: 1.0,
    change: Callable[[Point, int, dict[str, Any]], dict[str, Any] | None] = lambda point, launch, row: row,
) -> Any:
    """One side of a comparison as ``read_latencies`` would give it, without a disk. ``change`` as ``rows`` above."""
    import pandas as pd

    from commbench.store.latencies import COLUMNS

    random = np.random.default_rng(seed)
    rows = []
    known = [
        {**p.to_dict(), "backend_requested": p.backend, "backend_picked": p.backend, "point_id": p.point_id,
         "point_key": p.point_key, "sync": "window", "timing": "single", "status": "ok", "reason": ""}
        for p in points
    ]  # fmt: skip
    for launch in range(launches):
        for point, facts in zip(points, known, strict=True):
            latency = base_latency_s(point) * slower(point) * random.lognormal(0, cv)
            row: dict[str, Any] | None = {
                **facts, "launch": launch, "latency_median_s": latency, "latency_ci_low_s": latency * 0.99,
                "latency_ci_high_s": latency * 1.01,
            }  # fmt: skip
            row = change(point, launch, row)
            if row is not None:
                rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))
