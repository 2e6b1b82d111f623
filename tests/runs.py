"""Builds synthetic runs with the store's own writer: realistic latencies, no process launched."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from commbench.bandwidth import algbw_gb_per_s, busbw_gb_per_s
from commbench.statistics import median_interval, quantile
from commbench.store.run import Plan, PointLog, create, finish, row_of, update_manifest
from commbench.store.samples import SampleLog, to_parquet
from commbench.types import COLLECTIVES, DTYPES, Decision, Declined, Point

# seconds at size 0, and seconds per byte
SPEED = {"torch_dist": (180e-6, 1.2e-9), "shm": (1.2e-6, 0.25e-9), "shm_oneshot": (0.9e-6, 0.6e-9), "fake": (1e-5, 0.0)}


@dataclass
class RunBuilder:
    """Writes a run directory: ``points`` are measured unless ``problems`` or ``unmeasured`` says otherwise."""

    directory: Path
    points: list[Point]
    launches: int = 1
    samples: int = 40
    seed: int = 7
    cores: int = 2
    threshold: int = 64 * 1024  # auto takes shm below it and torch_dist from it
    problems: dict[str, tuple[str, str]] = field(default_factory=dict)  # point_id → status, reason
    problem_launches: frozenset[int] | None = None  # None: all
    unmeasured: set[str] = field(default_factory=set)
    outcome: str = "complete"
    finished: bool = True
    changes: dict[str, Any] = field(default_factory=dict)  # columns to set on every row
    manifest: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Path:
        manifest = {
            "run_id": self.directory.name,
            "argv": ["/usr/bin/commbench", "sweep", "--tp", "2"],
            "started_s": 1796029200.0,
            "outcome": "running",
            "spec": {"tp": self.points[0].world_size, "launches": self.launches, "seed": self.seed},
            "settings": {"device": "cpu", "seed": self.seed},
            "fingerprint": {
                "host": {"name": "testhost", "os": "Test Linux"},
                "cpu": {"model": "Test CPU", "cores": 4, "affinity": f"0-{self.cores - 1}", "governor": None},
                "versions": {"python": "3.11", "torch": "2.6", "commbench": "0.1.0"},
                "env": {"OMP_NUM_THREADS": "1"},
            },
            "launches": [
                {"launch": k, "cores": self.cores, "usable": {"shm": None, "torch_dist": None}}
                for k in range(self.launches)
            ],
            **self.manifest,
        }
        create(self.directory, manifest, Plan(tuple(self.points), {"seed": self.seed}))
        random = np.random.default_rng(self.seed)
        log = PointLog(self.directory)
        for launch in range(self.launches):
            samples = SampleLog(self.directory, launch)
            order = random.permutation(len(self.points))
            for place, i in enumerate(order):
                point = self.points[int(i)]
                if point.point_id not in self.unmeasured:
                    log.append(self.row(point, launch, place, random, samples))
            samples.close()
            if self.finished:
                to_parquet(self.directory, launch)
        log.close()
        if self.finished:
            finish(self.directory)
            update_manifest(self.directory, outcome=self.outcome)
        return self.directory

    def pick(self, point: Point) -> str:
        if point.backend != "auto":
            return point.backend
        return "shm" if point.size_bytes < self.threshold and point.collective == "all_reduce" else "torch_dist"

    def row(self, point: Point, launch: int, place: int, random: np.random.Generator, log: SampleLog) -> dict[str, Any]:
        picked = self.pick(point)
        affected = self.problem_launches is None or launch in self.problem_launches
        status, reason = self.problems.get(point.point_id, ("ok", "")) if affected else ("ok", "")
        common = {
            "run_id": self.directory.name,
            "launch": launch,
            "order": place,
            "decision": json.dumps(self.decision(point, picked).to_dict()),
            "provider": "synthetic 1.0",
            "sync": "window",
            "loop": "python",
            "timing": "single",
            "oversubscribed": point.world_size > self.cores,
            "shared_device": False,
            "status": status,
            "reason": reason,
            "checked": True,
            "wrong_count": 3 if status == "wrong" else 0,
            "elapsed_s": 0.5,
        }
        if status in ("failed", "timeout", "skipped", "refused"):
            silent = {"backend_picked": "" if status == "skipped" else picked, "checked": False}
            return row_of(point, {**common, **silent, **self.changes})
        base, per_byte = SPEED.get(picked, (20e-6, 0.8e-9))
        scale = (base + per_byte * point.size_bytes) * (1 + point.world_size / 20)
        scale *= 1 + 0.02 * random.standard_normal()
        times = scale * random.lognormal(0.0, 0.05, self.samples) + scale * 0.3 * (random.random(self.samples) < 0.03)
        self.log_samples(log, point, times, random)
        interval = median_interval(times)
        values = {
            "backend_picked": picked,
            "target_reached": True,
            "n_samples": self.samples,
            "iters_per_sample": 1,
            "n_effective": interval.n_effective,
            "n_invalid": 0,
            "latency_median_s": interval.median,
            "latency_ci_low_s": interval.low,
            "latency_ci_high_s": interval.high,
            "latency_p90_s": quantile(times, 0.9),
            "latency_p99_s": quantile(times, 0.99),
            "latency_min_s": float(times.min()),
            "latency_max_s": float(times.max()),
            "t_win_median_s": interval.median * 1.05,
            "skew_median_s": interval.median * 0.05,
            "algbw_gb_per_s": algbw_gb_per_s(point.size_bytes, interval.median),
            "busbw_gb_per_s": busbw_gb_per_s(point.collective, point.size_bytes, interval.median, point.world_size),
            "max_abs_error": 0.0,
            "warmup_iterations": 10,
            "noise": json.dumps({"steal_share": 0.0, "marks": []}),
        }
        return row_of(point, {**common, **values, **self.changes})

    def log_samples(self, log: SampleLog, point: Point, times: np.ndarray, random: np.random.Generator) -> None:
        """Ranks start within 50 ns; the last start is 0, so t_last is exactly ``times``."""
        n, ranks = len(times), point.world_size
        origin = 10**9 + np.cumsum(np.full(n, 2 * int(times.max() * 1e9) + 1000))
        start = origin - random.integers(0, 50, (ranks, n))
        start[0] = origin
        last = np.round(times * 1e9).astype(np.int64)
        if not COLLECTIVES[point.collective].synchronising:
            last = last - (origin - start.min(axis=0))  # then t_win is ``times``
        end = origin + last - random.integers(0, 50, (ranks, n))
        end[ranks - 1] = origin + last
        log.append(point.point_id, 0, start, end, np.ones(n, dtype=bool))

    def decision(self, point: Point, picked: str) -> Decision:
        declined = ()
        if point.backend == "auto" and picked == "torch_dist":
            declined = (Declined("shm", f"{point.size_bytes} bytes is not below its limit <{self.threshold}>"),)
        return Decision(picked, declined, point.policy, "", "last in the order" if declined else "it takes every call")


def grid(
    collectives: Iterable[str] = ("all_reduce",),
    dtypes: Iterable[str] = ("float32",),
    sizes: Iterable[int] = (8, 1024, 65536, 1 << 20),
    backends: Iterable[str] = ("auto",),
    world_size: int = 2,
    **common: Any,
) -> list[Point]:
    """Every combination, as points; a barrier once per backend, with no size and no dtype."""
    points: list[Point] = []
    for name in collectives:
        kind = COLLECTIVES[name]
        for backend in backends:
            given = {"placement": kind.placements[0], **common}
            base = Point(name, "sum" if kind.reduces else "", "none", 0, world_size, backend=backend, **given)
            if not kind.has_data:
                points.append(base)
                continue
            for dtype in dtypes:
                step = DTYPES[dtype].itemsize * world_size
                points += [
                    replace(base, dtype=dtype, size_bytes=size - size % step or 8 * world_size) for size in sizes
                ]
    return list(dict.fromkeys(points))
