"""The latencies of a run as comparisons need them: few columns, read fast, and refused when they cannot be true."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commbench.errors import StoreError
from commbench.store import schema
from commbench.store.run import Run

if TYPE_CHECKING:
    import pandas as pd

# What a point is, and what it gave in one launch. Everything else of a row plays no part in a comparison.
IDENTITY: tuple[str, ...] = (
    "point_id", "point_key", "collective", "op", "dtype", "size_bytes", "layout", "world_size", "group", "policy",
    "backend_requested", "mode", "cache", "placement",
)  # fmt: skip
MEASURED: tuple[str, ...] = (
    "launch", "backend_picked", "sync", "timing", "status", "reason", "latency_median_s", "latency_ci_low_s",
    "latency_ci_high_s", "shared_device", "quantised",
)  # fmt: skip
COLUMNS = (*IDENTITY, *MEASURED)
ADDED = frozenset({"quantised"})  # columns that runs of earlier versions lack: nothing stands in them then
SHARED = "on a shared device"


def read_latencies(run: Run) -> pd.DataFrame:
    """One row per point and launch, the columns of COLUMNS; of a point measured twice in a launch, the later row.

    Reads ``points.parquet`` where it is whole, else the lines written so far. Raises StoreError for rows of other
    columns (another unit, another tool), and for a point that is ok with a latency that is no positive number.
    """
    path = run.directory / schema.POINTS_PARQUET
    lines = run.directory / schema.POINTS_JSONL
    if path.is_file() and (not lines.exists() or path.stat().st_mtime >= lines.stat().st_mtime):
        frame = _from_parquet(run)
    else:
        frame = run.points()
        _check_columns(run, {name for row in run.rows()[:1] for name in row})
    frame = frame[list(COLUMNS)].drop_duplicates(["point_id", "launch"], keep="last").reset_index(drop=True)
    _check_latencies(run, frame)
    return frame


def how_of(frame: pd.DataFrame) -> pd.Series:
    """Under which conditions each row was measured, in words: only rows with the same can be held against each other.

    How iterations started and were timed, whether ranks shared a device, and the level at which data were quantised.
    """
    shared = frame["shared_device"].astype("boolean").fillna(False).astype(bool)
    level = frame["quantised"].astype("string").fillna("").astype(str)
    return (
        frame["sync"].fillna("").astype(str)
        + " "
        + frame["timing"].fillna("").astype(str)
        + shared.map({True: f" {SHARED}", False: ""})
        + level.where(level == "", " quantised to " + level)
    )


def _from_parquet(run: Run) -> pd.DataFrame:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = run.directory / schema.POINTS_PARQUET
    try:
        there = set(pq.read_schema(path).names)
        _check_columns(run, there)
        frame: pd.DataFrame = pq.read_table(path, columns=[c for c in COLUMNS if c in there]).to_pandas()
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path} cannot be read: {error}; remove it to have {schema.POINTS_JSONL} read") from error
    frame = frame.reindex(columns=list(COLUMNS))
    return frame.astype({name: schema.POINT_COLUMNS[name] for name in COLUMNS})


def _check_columns(run: Run, found: set[str]) -> None:
    if not found:
        return
    missing = sorted(set(COLUMNS) - found - ADDED)
    if missing:
        others = sorted(found - set(schema.POINT_COLUMNS))
        hint = f" and has {', '.join(others)}" if others else ""
        raise StoreError(f"{run.directory}: the points lack {', '.join(missing)}{hint}; latencies are in seconds")


def _check_latencies(run: Run, frame: pd.DataFrame) -> None:
    import numpy as np

    latency = frame["latency_median_s"].to_numpy(dtype=np.float64, na_value=np.nan)
    status = frame["status"].to_numpy(dtype=str, na_value="failed")
    # an unsteady point may have no latency at all: every window of it was missed
    bad = (status == "ok") & ~(np.isfinite(latency) & (latency > 0))
    bad |= (status == "unsteady") & ~np.isnan(latency) & ~(np.isfinite(latency) & (latency > 0))
    if bad.any():
        first = frame[bad].iloc[0]
        value = latency[bad][0]
        raise StoreError(
            f"{run.directory}: {int(bad.sum())} rows are {first['status']} without a positive latency, the first is "
            f"{first['collective']} {first['dtype']} {first['size_bytes']} bytes in launch {first['launch']} with "
            f"{value} s; the run is damaged"
        )
