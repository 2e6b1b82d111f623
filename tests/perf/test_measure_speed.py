"""How many points a launch measures in a minute, and what their raw samples cost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from commbench.store.run import Plan, create, open_run
from commbench.store.samples import SampleLog, to_parquet

POINTS, BLOCKS, RANKS, N = 1000, 8, 2, 250  # a visit's block of a small message; two million pairs of times


def test_raw_samples_of_a_thousand_points_are_written_and_read_back_in_bounded_memory(
    benchmark: Any, tmp_path: Path
) -> None:
    create(tmp_path / "run", {"run_id": "run"}, Plan((), {}))
    rng = np.random.default_rng(0)
    starts = np.arange(N, dtype=np.int64) * 20_000 + rng.integers(0, 500, (RANKS, N))
    ends = starts + rng.integers(1500, 2500, (RANKS, N))
    valid = np.ones((RANKS, N), dtype=bool)
    times: dict[str, float] = {}

    def write_and_read() -> int:
        began = time.perf_counter()
        log = SampleLog(tmp_path / "run", 0)
        for block in range(BLOCKS):
            for point in range(POINTS):
                log.append(f"{point:016x}", block * N, starts + point, ends + point, valid)
        log.close()
        times["write"] = time.perf_counter() - began
        to_parquet(tmp_path / "run", 0)
        times["parquet"] = time.perf_counter() - began - times["write"]
        frame = open_run(tmp_path / "run").samples()
        times["read"] = time.perf_counter() - began - times["write"] - times["parquet"]
        return len(frame)

    rows = benchmark.pedantic(write_and_read, rounds=1, warmup_rounds=1)
    assert rows == POINTS * BLOCKS * RANKS * N
    benchmark.extra_info.update(times)
    # the peer: the same numbers as one array, in one numpy file
    began = time.perf_counter()
    np.save(tmp_path / "peer.npy", np.broadcast_to(np.stack([starts, ends]), (BLOCKS * POINTS, 2, RANKS, N)))
    np.load(tmp_path / "peer.npy")
    benchmark.extra_info["over_numpy"] = sum(times.values()) / (time.perf_counter() - began)


def test_memory_does_not_grow_with_the_points_already_written(tmp_path: Path) -> None:
    create(tmp_path / "run", {"run_id": "run"}, Plan((), {}))
    times = np.zeros((RANKS, N), dtype=np.int64)
    log = SampleLog(tmp_path / "run", 0)
    tracemalloc.start()
    try:
        for point in range(4 * POINTS):
            log.append(f"{point:016x}", 0, times, times, np.ones((RANKS, N), dtype=bool))
        log.close()
        while_writing = tracemalloc.get_traced_memory()[1]
        to_parquet(tmp_path / "run", 0)
        at_most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = 4 * POINTS * RANKS * N * 17
    assert while_writing < held / 20
    assert at_most < held


def test_points_per_minute_at_one_percent(benchmark: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        sys.executable, "-m", "commbench", "sweep", "--tp", "2", "--backends", "shm", "--loop", "native",
        "--sizes", "8:64KiB:x2", "--collectives", "all_reduce,all_gather,reduce_scatter,broadcast",
        "--dtypes", "float32,bfloat16", "--target-ci", "1%", "--quiet", "--out", str(out),
    ]  # fmt: skip
    benchmark.pedantic(subprocess.run, (command,), {"check": True, "capture_output": True}, rounds=1)
    rows = [json.loads(line) for line in (out / "points.jsonl").read_text().splitlines()]
    assert len(rows) >= 100
    assert all(row["status"] == "ok" for row in rows)
    reached = sum(bool(row["target_reached"]) for row in rows)
    # points measured one after the other: their own times add up, whatever else the machine does
    benchmark.extra_info["points_per_minute"] = 60 * len(rows) / sum(row["elapsed_s"] for row in rows)
    benchmark.extra_info["reached_one_percent"] = reached / len(rows)
