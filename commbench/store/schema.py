"""The columns of a run, as a public contract.

Bump SCHEMA_VERSION when a column changes meaning. A column that is added does not: runs written before it are read
with nothing in it.
"""

from __future__ import annotations

SCHEMA_VERSION = 1

# name → pandas dtype; JSON columns hold a JSON text
POINT_COLUMNS: dict[str, str] = {
    "run_id": "string",
    "launch": "Int64",
    "point_id": "string",
    "point_key": "string",
    "order": "Int64",  # place in the launch's random order
    "collective": "string",
    "op": "string",
    "dtype": "string",
    "size_bytes": "Int64",
    "numel": "Int64",
    "layout": "string",
    "world_size": "Int64",
    "group": "string",
    "policy": "string",
    "backend_requested": "string",
    "backend_picked": "string",  # from the backends' call counters; "a+b" if a point's calls were split; "" if none ran
    "provider": "string",
    "decision": "string",  # JSON of types.Decision, "" where none was made
    "mode": "string",
    "cache": "string",
    "placement": "string",
    "sync": "string",  # window | barrier | none
    "loop": "string",  # native | python
    "timing": "string",  # single | batched; isolated | chained in graphs
    "oversubscribed": "boolean",
    "shared_device": "boolean",
    "status": "string",
    "reason": "string",
    "target_reached": "boolean",
    "n_samples": "Int64",
    "iters_per_sample": "Int64",
    "n_effective": "Float64",
    "n_invalid": "Int64",
    "latency_median_s": "Float64",
    "latency_ci_low_s": "Float64",
    "latency_ci_high_s": "Float64",
    "latency_p90_s": "Float64",
    "latency_p99_s": "Float64",
    "latency_min_s": "Float64",
    "latency_max_s": "Float64",
    "t_win_median_s": "Float64",
    "skew_median_s": "Float64",
    "enqueue_median_s": "Float64",  # on a device: the host's time to queue a sample's call, or to launch a graph
    "algbw_gb_per_s": "Float64",
    "busbw_gb_per_s": "Float64",
    "checked": "boolean",  # results compared with a reference before and after timing
    "wrong_count": "Int64",
    "max_abs_error": "Float64",
    # all-reduce only (measure/numerics.py), against the answer in float64
    "max_relative_error": "Float64",  # |error| over the sum of the inputs' magnitudes
    "max_ulp_error": "Float64",  # |error| in units in the last place of the right answer; 0.5: correctly rounded
    "ranks_agree": "boolean",  # every rank got the same bits
    "repeatable": "boolean",  # the same inputs gave the same bits again
    "extremes_wrong": "Int64",  # wrong elements among results near both ends of the dtype's range; part of wrong_count
    "quantised": "string",  # the level at which data travelled (types.QUANTISED); "" where they arrived as they are
    "warmup_iterations": "Int64",
    "noise": "string",  # JSON
    "elapsed_s": "Float64",  # wall time that the point took, all included
}

SAMPLE_COLUMNS: dict[str, str] = {
    "launch": "int32",
    "point_id": "string",
    "rank": "int32",
    "iteration": "int32",
    "start_ns": "int64",
    "end_ns": "int64",
    "valid": "bool",
    "block": "int32",  # number of the first iteration of the uninterrupted loop that this one is of; -1: not recorded
}

# What the files of a run directory are called.
MANIFEST = "manifest.json"
POINTS_JSONL = "points.jsonl"
POINTS_PARQUET = "points.parquet"
SAMPLES_DIR = "samples"
LOGS_DIR = "logs"
PLOTS_DIR = "plots"
REPORT_HTML = "report.html"
