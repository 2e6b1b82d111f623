"""From raw samples to the latency of each iteration, by the definition that its point was measured under."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from commbench.types import COLLECTIVES

if TYPE_CHECKING:
    import pandas as pd


def iteration_latencies(samples: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """Columns point_id, launch, iteration, latency_s (of one call): one row per valid iteration.

    ``samples`` has the columns of ``schema.SAMPLE_COLUMNS``, ``points`` is one row per point and launch.
    An iteration is valid when it is so on every rank. Started in a window and timed one call at a time: t_last =
    max end − max start for a synchronising collective, t_win = max end − min start for another. Otherwise (sync
    barrier or none, batches): the largest end − start of a rank. Batches are divided by their calls. The cost of the
    empty loop is not taken off: it is a constant of the run, and raw samples are shown as they were taken.
    """
    keys = ["point_id", "launch", "iteration"]
    frame = samples.assign(duration=samples["end_ns"] - samples["start_ns"], point_id=samples["point_id"].astype(str))
    grouped = frame.groupby(keys, sort=True, observed=True)
    per = grouped.agg(
        first_start=("start_ns", "min"),
        last_start=("start_ns", "max"),
        last_end=("end_ns", "max"),
        longest=("duration", "max"),
        valid=("valid", "all"),
    ).reset_index()
    columns = ["point_id", "launch", "collective", "sync", "timing", "iters_per_sample"]
    facts = points[columns].drop_duplicates(["point_id", "launch"], keep="last")
    facts = facts.astype({"point_id": str, "launch": "int64"})
    per = per.astype({"launch": "int64"}).merge(facts, on=["point_id", "launch"], how="inner")
    per = per[per["valid"]]
    synchronising = per["collective"].map({c.name: c.synchronising for c in COLLECTIVES.values()}).fillna(False)
    windowed = (per["sync"] == "window").to_numpy(dtype=bool, na_value=False)
    single = (per["timing"] != "batched").to_numpy(dtype=bool, na_value=True)
    t_last = (per["last_end"] - per["last_start"]).to_numpy(dtype=np.float64)
    t_win = (per["last_end"] - per["first_start"]).to_numpy(dtype=np.float64)
    longest = per["longest"].to_numpy(dtype=np.float64)
    own = np.where(windowed & single, np.where(synchronising.to_numpy(dtype=bool), t_last, t_win), longest)
    calls = per["iters_per_sample"].fillna(1).to_numpy(dtype=np.float64)
    result: pd.DataFrame = per[keys].assign(latency_s=own * 1e-9 / calls).reset_index(drop=True)
    return result
