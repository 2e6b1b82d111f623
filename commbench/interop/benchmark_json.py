"""Runs as the JSON of pytest-benchmark, so that ``pytest-benchmark compare`` reads them.

A benchmark is a point, a round is a launch (its median). The statistics are defined as that tool defines them.
"""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from commbench.analysis.compare import Comparison

FORMAT = "5.0.0"  # of the tool whose format this is


def to_benchmark_json(
    comparison: Comparison, side: str, *, manifest: Mapping[str, Any], when: datetime.datetime
) -> dict[str, Any]:
    """One side (``base`` or ``cand``) as a document. manifest: of that side's run, for machine and commit."""
    logs = comparison.aligned.base if side == "base" else comparison.aligned.cand
    benchmarks = []
    rows = [{str(k): v for k, v in r.items()} for r in comparison.points.to_dict("records")]
    for row, values in zip(rows, logs, strict=True):
        data = [float(v) for v in np.exp(values[np.isfinite(values)])]
        if data:
            benchmarks.append(_benchmark(row, data, str(row[f"{side}_picked"])))
    fingerprint = manifest.get("fingerprint") or {}
    host, versions = fingerprint.get("host") or {}, fingerprint.get("versions") or {}
    return {
        "machine_info": {
            "node": host.get("name"),
            "processor": (fingerprint.get("cpu") or {}).get("model"),
            "machine": host.get("arch"),
            "python_compiler": "",
            "python_implementation": versions.get("implementation") or "",
            "python_implementation_version": versions.get("python") or "",
            "python_version": versions.get("python") or "",
            "python_build": [],
            "release": host.get("kernel"),
            "system": host.get("os"),
            "cpu": {"brand_raw": (fingerprint.get("cpu") or {}).get("model")},
        },
        "commit_info": {
            "id": versions.get("git_sha") or "unversioned",
            "time": None,
            "author_time": None,
            "dirty": bool(versions.get("git_dirty")),
            "project": "commbench",
            "branch": "(unknown)",
        },
        "benchmarks": benchmarks,
        "datetime": when.astimezone(datetime.UTC).isoformat(),
        "version": FORMAT,
    }


def _benchmark(row: Mapping[str, Any], data: Sequence[float], backend: str) -> dict[str, Any]:
    return {
        "group": row["family"],
        "name": row["label"],
        "fullname": f"commbench::{row['label']}",
        "params": None,
        "param": None,
        "extra_info": {"point_id": row["point_id"], "backend": backend, "size_bytes": int(row["size_bytes"])},
        "options": {
            "disable_gc": False, "timer": "perf_counter", "min_rounds": len(data), "max_time": 0.0, "min_time": 0.0,
            "warmup": False,
        },
        "stats": {**round_statistics(data), "iterations": 1, "data": list(data)},
    }  # fmt: skip


def round_statistics(data: Sequence[float]) -> dict[str, Any]:
    """min, max, mean, stddev, median, quartiles, outliers and rates of some rounds, in seconds (at least one)."""
    ordered = sorted(data)
    n = len(ordered)
    mean = statistics.mean(ordered)
    stddev = statistics.stdev(ordered) if n > 1 else 0.0
    q1, q3 = _quartiles(ordered)
    iqr = q3 - q1
    inside = [v for v in ordered if q1 - 1.5 * iqr <= v <= q3 + 1.5 * iqr]
    deviating = sum(abs(v - mean) > stddev for v in ordered)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": stddev,
        "rounds": n,
        "median": statistics.median(ordered),
        "iqr": iqr,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": n - len(inside),
        "stddev_outliers": deviating,
        "outliers": f"{deviating};{n - len(inside)}",
        "ld15iqr": inside[0],
        "hd15iqr": inside[-1],
        "ops": 1 / mean if mean > 0 and math.isfinite(mean) else 0.0,
        "total": math.fsum(ordered),
    }


def _quartiles(ordered: Sequence[float]) -> tuple[float, float]:
    """Tukey's hinges without the median (even n), or method 3 of the usual list (odd n), as pytest-benchmark does."""
    n = len(ordered)
    if n == 1:
        return ordered[0], ordered[0]
    if n % 2 == 0:
        return statistics.median(ordered[: n // 2]), statistics.median(ordered[n // 2 :])
    k = n // 4
    if n % 4 == 1:
        return (
            0.25 * ordered[k - 1] + 0.75 * ordered[k],
            0.75 * ordered[3 * k] + 0.25 * ordered[3 * k + 1],
        )
    return (
        0.75 * ordered[k] + 0.25 * ordered[k + 1],
        0.25 * ordered[3 * k + 1] + 0.75 * ordered[3 * k + 2],
    )
