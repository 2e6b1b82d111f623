"""The row that comes out of a point: its status, what was counted, and the statistics of its samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from commbench.bandwidth import algbw_gb_per_s, busbw_gb_per_s
from commbench.measure import noise as noise_module
from commbench.measure.point_state import PointState
from commbench.measure.team import Team
from commbench.measure.timing import Timing
from commbench.statistics import is_steady, median_interval, quantile, remarks
from commbench.types import AUTO

Row = dict[str, Any]


def row_of(
    s: PointState,
    team: Team,
    timing: Timing,
    *,
    target_ci: float,
    shared_device: bool = False,
    clock_problem: str = "",
) -> Row:
    """``{"point", "values"}`` of a finished point, complete on rank 0. Collective.

    timing: what it was timed by. shared_device: ranks share a device. clock_problem: why times of different ranks were
    not compared, "" if they were.
    """
    mine = {
        "wrong": s.check.wrong_count,
        "error": s.check.max_abs_error,
        "counted": {name: n for name, n in s.calls_counted.items() if n},
        "expected": s.calls_made if s.place.takes_part else 0,
        "noise": noise_module.to_dict(noise_module.combine(s.noises)) if s.noises else None,
        "numerics": _numerics_of_rank(s),
    }
    ranks = [json.loads(text) for text in team.gather_texts(json.dumps(mine))]
    counted: dict[str, int] = {}
    for rank in ranks:
        for name, n in rank["counted"].items():
            counted[name] = counted.get(name, 0) + n
    picked = "+".join(sorted(counted))
    wrong = sum(rank["wrong"] for rank in ranks)
    errors = [rank["error"] for rank in ranks]
    numbers = numbers_over_ranks([rank["numerics"] for rank in ranks if rank["numerics"] is not None])
    status, reasons = s.status, [s.reason] if s.reason else []
    if status == "ok":
        accounted = all(sum(rank["counted"].values()) == rank["expected"] for rank in ranks)
        if not accounted:
            status = "failed"
            reasons.append(f"the backends counted {counted} calls, not {s.calls_made} on each of {len(ranks)} ranks")
        elif wrong:
            status = "wrong"
            reasons.append(f"{wrong} elements are wrong, the largest error is {max(errors):.3g}")
            if numbers.get("extremes_wrong") == wrong:
                reasons.append(
                    f"all on inputs near the ends of {s.point.dtype}'s range, whose reduction stays inside: a narrower "
                    "type on the way overflows or flushes them"
                )
        elif s.point.backend != AUTO and picked != s.point.backend:
            status = "failed"
            reasons.append(f"{s.point.backend} was asked for by name, but {picked or 'nothing'} was taken")
        elif team.rank == 0 and not len(s.all_latencies()):
            status = "unsteady"
            busy = "time windows were missed: something else keeps the ranks' cores busy"
            reasons.append(f"all {s.n_invalid} {f'samples are void: {s.void}' if s.void else busy}")
        elif team.rank == 0 and not s.steady and not is_steady(s.all_latencies()):
            # too few or too restless warm-up iterations prove nothing: the samples themselves may
            status = "unsteady"
            reasons.append(f"no steady state within {s.warmup_iterations} warm-up iterations, nor among the samples")
    if clock_problem:
        reasons.append(clock_problem)
    if status == "ok" and team.rank == 0:
        reasons += [text for text in (timing.remark(),) if text]
        if s.void:
            reasons.append(f"{s.n_invalid} samples are void, the last because {s.void}")
        elif s.n_invalid > len(s.all_latencies()):
            total = s.n_invalid + len(s.all_latencies())
            reasons.append(f"{s.n_invalid} of {total} time windows were missed: something else keeps the cores busy")
        reasons += remarks(s.all_latencies())
        if numbers.get("ranks_agree") is False:
            reasons.append("the ranks' results differ in some bits")
        if numbers.get("repeatable") is False:
            reasons.append("the same inputs gave other bits the second time")
    noises = [noise_module.from_dict(rank["noise"]) for rank in ranks if rank["noise"] is not None]
    values: Row = {
        "order": s.order,
        "backend_picked": picked,
        "provider": "" if not picked or "+" in picked else s.place.coordinator.provider(picked),
        "decision": s.decision,
        "sync": timing.sync,
        "loop": "native" if s.native else "python",
        "timing": timing.label(s),
        "oversubscribed": team.oversubscribed,
        "shared_device": shared_device,
        "status": status,
        "reason": "; ".join(reasons),
        "n_invalid": s.n_invalid,
        "iters_per_sample": s.batch,
        "warmup_iterations": s.warmup_iterations,
        "checked": s.checked,
        "wrong_count": wrong if s.checked else None,
        "max_abs_error": _finite(max(errors)) if s.checked else None,
        "quantised": s.quantised,
        **numbers,
        "noise": json.dumps(noise_module.record(noises, max(1, s.calls_made))) if noises else "",
        "elapsed_s": s.elapsed_s,
    }
    if team.rank == 0:
        values.update(_times(s, timing.sync, target_ci))
    return {"point": s.point, "values": values}


def _numerics_of_rank(s: PointState) -> Row | None:
    if s.numerics is None:
        return None
    found = s.numerics
    return {
        "relative": None if found.relative is None else _finite(found.relative),
        "ulp": None if found.ulp is None else _finite(found.ulp),
        "extremes_wrong": found.extremes_wrong,
        "digests": found.digests,
        "group": s.place.coordinator.ranks,
    }


def numbers_over_ranks(ranks: Sequence[Row]) -> Row:
    """The columns of an all-reduce's numbers from what each rank found; {} from none.

    Ranks agree if all of a group have the same bits on random and on extreme inputs (several groups may work at once).
    """
    if not ranks:
        return {}
    by_group: dict[tuple[int, ...], set[tuple[int, int]]] = {}
    for rank in ranks:
        random, _, extreme = rank["digests"]
        by_group.setdefault(tuple(rank["group"]), set()).add((random, extreme))
    relative, ulp = ([r[key] for r in ranks if r[key] is not None] for key in ("relative", "ulp"))
    return {
        "max_relative_error": max(relative, default=None),
        "max_ulp_error": max(ulp, default=None),
        "ranks_agree": all(len(bits) == 1 for bits in by_group.values()),
        "repeatable": all(r["digests"][0] == r["digests"][1] for r in ranks),
        "extremes_wrong": sum(r["extremes_wrong"] for r in ranks),
    }


def _times(s: PointState, sync: str, target_ci: float) -> Row:
    latencies = s.all_latencies()
    if not len(latencies):
        return {"n_samples": 0, "target_reached": False}
    interval = median_interval(latencies)
    synchronised = sync == "window" and s.batch == 1 and not s.local
    size, kind, n = s.point.size_bytes, s.point.collective, s.point.world_size
    return {
        "n_samples": len(latencies),
        "n_effective": interval.n_effective,
        "target_reached": interval.relative_half_width <= target_ci,
        "latency_median_s": interval.median,
        "latency_ci_low_s": interval.low if interval.exact else None,
        "latency_ci_high_s": interval.high if interval.exact else None,
        "latency_p90_s": quantile(latencies, 0.90),
        "latency_p99_s": quantile(latencies, 0.99),
        "latency_min_s": float(latencies.min()),
        "latency_max_s": float(latencies.max()),
        "t_win_median_s": float(np.median(np.concatenate(s.t_win))) if synchronised else None,
        "enqueue_median_s": float(np.median(np.concatenate(s.enqueue))) if s.enqueue else None,
        "skew_median_s": float(np.median(np.concatenate(s.skew))) if synchronised else None,
        "algbw_gb_per_s": algbw_gb_per_s(size, interval.median),
        "busbw_gb_per_s": busbw_gb_per_s(kind, size, interval.median, n),
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity; an error that is not finite is told by wrong_count."""
    return value if math.isfinite(value) else None
