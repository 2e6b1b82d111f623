"""How long judging takes: the command as a user runs it, in a process of its own, and its peak memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from commbench.store.history import add_run, load_series, open_history
from commbench.store.run import Plan, create, update_manifest
from commbench.store.schema import POINT_COLUMNS
from commbench.types import Point
from tests.nights import DAY_S, FINGERPRINT, SPEC, START_S, side_frame

pytestmark = [pytest.mark.perf, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]


def many_points(count: int) -> list[Point]:
    names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    return [
        Point(names[i % 5], "sum" if i % 5 in (0, 2) else "", "float32", 64 + 64 * (i // 20), 2,
              backend=("torch_dist", "shm", "shm_oneshot", "shm_twoshot")[i // 5 % 4], placement="in")
        for i in range(count)
    ]  # fmt: skip


def with_noise(frame: pd.DataFrame, seed: int) -> pd.DataFrame:
    noise = np.random.default_rng(seed).lognormal(0, 0.02, len(frame))
    return frame.assign(latency_median_s=frame["latency_median_s"] * noise)


def store_run(path: Path, points: list[Point], frame: pd.DataFrame, day: float = 0.0) -> Path:
    """A run directory with these latencies. Its decisions are as long as real ones."""
    launches = int(frame["launch"].max()) + 1
    manifest = {"run_id": path.name, "started_s": START_S + day * DAY_S, "spec": SPEC, "fingerprint": FINGERPRINT,
                "points_planned": len(frame), "launches": [{"launch": k} for k in range(launches)]}  # fmt: skip
    create(path, manifest, Plan(tuple(points), {}))
    rows = pd.DataFrame({name: frame.get(name) for name in POINT_COLUMNS}).astype(POINT_COLUMNS)
    rows["decision"] = '{"picked": "shm", "declined": [' + '{"backend": "x", "reason": "too large"},' * 12 + "]}"
    rows.to_json(path / "points.jsonl", orient="records", lines=True)
    rows.to_parquet(path / "points.parquet", index=False)
    update_manifest(path, outcome="complete")
    return path


def timed(*arguments: str, allowed: tuple[int, ...] = (0,)) -> tuple[float, float]:
    """(seconds, peak GiB) of a command, start of Python and imports included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "commbench", *arguments], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    seconds = time.perf_counter() - started
    assert done.returncode in allowed, done.stdout + done.stderr
    peak = max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / (1 << 20)
    print(f"{' '.join(arguments[:2])}: {seconds:.2f} s, at most {peak:.2f} GiB")
    return seconds, peak


def test_gate_judges_500_series_over_90_nights_in_5_s_and_1_gib(tmp_path: Path) -> None:
    points = many_points(500)
    frame = side_frame(points, launches=8)
    for day in range(90):
        manifest = {
            "run_id": f"n{day:03}",
            "started_s": START_S + day * DAY_S,
            "spec": SPEC,
            "fingerprint": FINGERPRINT,
        }
        add_run(tmp_path / "h", manifest, with_noise(frame, day), {})
    run = store_run(tmp_path / "tonight", points, with_noise(frame, 999), day=100)
    arguments = ("gate", "--baseline", "history", "--history", str(tmp_path / "h"), "--candidate", str(run))
    seconds, peak = timed(*arguments, "--nights", "90", allowed=(0, 1))
    assert seconds <= 5
    assert peak <= 1


@pytest.mark.parametrize("launches", [1, 5])
def test_compare_of_two_runs_of_10000_points_takes_at_most_5_s(tmp_path: Path, launches: int) -> None:
    points = many_points(10_000)
    frame = side_frame(points, launches=launches)
    runs = [str(store_run(tmp_path / f"r{s}", points, with_noise(frame, s))) for s in (1, 2)]
    assert timed("compare", *runs)[0] <= 5


def test_queries_of_365_nights_of_5000_points_take_at_most_2_s(tmp_path: Path) -> None:
    points = many_points(5000)
    frame = side_frame(points, launches=1)
    for day in range(365):
        manifest = {"run_id": f"n{day:03}", "started_s": START_S + day * DAY_S, "fingerprint": FINGERPRINT}
        add_run(tmp_path / "h", manifest, with_noise(frame, day), {})
    found = {}
    started = time.perf_counter()
    history = open_history(tmp_path / "h", now_s=START_S + 400 * DAY_S)
    found["list"] = time.perf_counter() - started
    started = time.perf_counter()
    one = load_series(history.nights, [points[77].point_id])
    found["one point"] = time.perf_counter() - started
    started = time.perf_counter()
    every = load_series(history.nights)
    found["every point"] = time.perf_counter() - started
    print({k: round(v, 2) for k, v in found.items()})
    assert one.log_mean.shape == (1, 365)
    assert every.log_mean.shape == (5000, 365)
    assert found["list"] + found["one point"] <= 2
    assert found["list"] + found["every point"] <= 2
