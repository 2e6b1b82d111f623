"""The candidate's latencies as a ``customSmallerIsBetter`` array, which benchmark dashboards of CI systems read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commbench.analysis.compare import Comparison


def to_smaller_is_better(comparison: Comparison) -> list[dict[str, Any]]:
    """A record per point that the candidate has: name, unit (µs), value, range where launches tell one, extra."""
    from commbench.analysis.effects import mean_variance, t_quantile

    points = comparison.points
    n, _, variance = mean_variance(comparison.aligned.cand)
    records = []
    for i, row in enumerate(points.to_dict("records")):
        seconds = float(row["cand_s"])
        if not math.isfinite(seconds):
            continue
        record: dict[str, Any] = {"name": row["label"], "unit": "µs", "value": round(seconds * 1e6, 6)}
        if n[i] > 1:
            half = float(t_quantile(0.975, n[i] - 1)) * math.sqrt(variance[i] / n[i]) * seconds * 1e6
            record["range"] = f"± {half:.3g}"
        record["extra"] = f"backend {row['cand_picked'] or 'none'}, {int(n[i])} launches"
        records.append(record)
    return records
