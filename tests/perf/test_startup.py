"""What a user waits for before anything is measured, beside what cannot be avoided, in one run."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BARE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


def wall_s(*command: str, rounds: int = 7) -> float:
    """Median wall time of a command."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@pytest.mark.parametrize("args", [["--help"], ["sweeps"], ["sweep", "--tp", "8", "--dry-run"]], ids=" ".join)
def test_commands_that_measure_nothing_start_in_little_more_than_their_libraries(
    benchmark: Any, args: list[str]
) -> None:
    libraries = wall_s(sys.executable, "-c", "import click, psutil, tomllib, json, subprocess")
    ours = wall_s(sys.executable, "-m", "commbench", *args)
    benchmark.extra_info["ratio"] = ours / libraries
    benchmark.pedantic(
        subprocess.run, ([sys.executable, "-m", "commbench", *args],), {"capture_output": True}, rounds=3
    )
    assert ours < 4 * libraries  # click and psutil; a dry run also reads policies and the machine


@pytest.mark.parametrize("args", [["--help"], ["sweeps"], ["sweep", "--dry-run"], ["policies"]], ids=" ".join)
def test_commands_that_measure_nothing_import_no_torch_pandas_or_matplotlib(args: list[str]) -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print([m for m in ('torch','pandas','matplotlib','numpy') if m in sys.modules], "
        "file=sys.stderr))\n"
        f"sys.argv = ['commbench', *{args!r}]\n"
        "from commbench.cli import main\nmain()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0
    assert ended.stderr.strip().splitlines()[-1] == "[]"


def first_iteration_s(out: Path) -> float:
    """From the command to the ranks being ready to time, as the launch's record has it."""
    started = time.time()
    command = [sys.executable, "-m", "commbench", "sweep", "--tp", "2", "--out", str(out), "--quiet"]
    small = ["--sizes", "8", "--dtypes", "float32", "--collectives", "all_reduce", "--max-time-per-point", "50ms"]
    subprocess.run([*command, *small], check=True, capture_output=True)
    for line in (out / "progress.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "visit":
            return float(event["time_s"]) - started
    raise AssertionError("no point was visited")


def test_the_first_timed_iteration_comes_within_twice_the_time_of_a_bare_torchrun(
    benchmark: Any, tmp_path: Path
) -> None:
    script = tmp_path / "bare.py"
    script.write_text(BARE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    ours, bare = [], []
    for k in range(3):  # alternating, so that drift falls on both
        bare.append(wall_s(*torchrun, rounds=1))
        ours.append(first_iteration_s(tmp_path / f"run-{k}"))
    ratio = statistics.median(ours) / statistics.median(bare)
    benchmark.extra_info["ratio"] = ratio
    benchmark.pedantic(wall_s, torchrun, {"rounds": 1}, rounds=1)
    assert ratio < 2


def test_a_hundred_small_points_finish_in_a_minute(benchmark: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command: list[str] = [
        sys.executable, "-m", "commbench", "sweep", "--tp", "2", "--sizes", "8:64KiB:x2", "--quiet", "--out", str(out),
        "--collectives", "all_reduce,all_gather,reduce_scatter,broadcast", "--dtypes", "float32,bfloat16",
        "--target-ci", "5%",
    ]  # fmt: skip
    run: Callable[..., Any] = subprocess.run
    benchmark.pedantic(run, (command,), {"check": True, "capture_output": True}, rounds=1)
    rows = [json.loads(line) for line in (out / "points.jsonl").read_text().splitlines()]
    assert len(rows) >= 100
    assert all(row["status"] == "ok" for row in rows)
    # points measured one after the other: their own times add up, whatever else the machine does
    benchmark.extra_info["points_per_minute"] = 60 * len(rows) / sum(row["elapsed_s"] for row in rows)
