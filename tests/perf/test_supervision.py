"""What being watched costs the times that are measured, and what going on with a large run costs its user."""

from __future__ import annotations

import json
import math
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commbench.harness import run as harness
from commbench.harness.launch import run_launch
from commbench.harness.launchers.commands import Program, environment_of, launch_command
from commbench.harness.order import shuffled
from commbench.harness.ranks.work import write_work
from commbench.store.run import Plan, create, open_run, row_of
from commbench.sweep import make_spec

PAIRS = 8
SMALL = {"sizes": "64,1KiB", "dtypes": "float32", "collectives": "all_reduce,broadcast", "max_time_per_point": 0.5,
         "backends": "shm"}  # fmt: skip


def medians(folder: Path, watched: bool) -> dict[str, float]:
    """Each point's latency in one launch: under the supervisor, or with torchrun alone and no heartbeat."""
    spec = make_spec(SMALL, {})
    expansion, settings = harness.prepare(spec)
    create(folder, harness.new_manifest(spec, expansion, settings, folder), Plan(expansion.points, settings.to_dict()))
    if watched:
        run_launch(folder, 0, spec.ranks, lambda event: None)
    else:
        write_work(folder, 0, range(len(expansion.points)))
        command = launch_command(folder, 0, spec.ranks, Program())
        subprocess.run(command, env=environment_of(Program()), check=True, capture_output=True)
    return {row["point_id"]: row["latency_median_s"] for row in open_run(folder).rows()}


def test_being_watched_costs_nothing_that_can_be_measured(tmp_path: Path, record_property: Any) -> None:
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for pair in range(PAIRS):  # the two in turn, so that drift meets both
        for watched in ((True, False), (False, True))[pair % 2]:
            found[watched].append(medians(tmp_path / f"{pair}-{watched}", watched))
    # what else the machine does only adds, and to whole launches: each side's best launch of a point is without it
    best = {
        watched: {p: min(launch[p] for launch in launches) for p in launches[0]} for watched, launches in found.items()
    }
    ratio = math.exp(statistics.mean(math.log(best[True][p] / best[False][p]) for p in best[True]))
    print(f"watched / not watched: {ratio:.3f} (best of {PAIRS} launches each, {len(best[True])} points)")
    record_property("ratio", ratio)
    assert ratio < 1.02


def large_run(folder: Path) -> None:
    """A run of 10,000 points, as an interrupted sweep leaves it: all but the last three have rows."""
    flags = {"sizes": "64:640000:+64", "dtypes": "float32", "collectives": "all_reduce", "backends": "fake"}
    spec = make_spec(flags, {})
    expansion, settings = harness.prepare(spec)
    assert len(expansion.points) == 10_000
    manifest = harness.new_manifest(spec, expansion, settings, folder) | {"outcome": "interrupted"}
    create(folder, manifest, Plan(expansion.points, settings.to_dict()))
    declined = [{"backend": f"backend-{k}", "reason": "the message is too large for it"} for k in range(8)]
    decision = json.dumps({"picked": "fake", "declined": declined})
    with (folder / "points.jsonl").open("w") as stream:
        for order, point in shuffled(expansion.points, settings.seed, 0)[:-3]:
            values = {"run_id": folder.name, "launch": 0, "order": order, "status": "ok", "latency_median_s": 1e-5,
                      "decision": decision, "backend_picked": "fake"}  # fmt: skip
            stream.write(json.dumps(row_of(point, values)) + "\n")


def test_going_on_with_a_run_of_10000_points_starts_within_2_s(tmp_path: Path, record_property: Any) -> None:
    folder = tmp_path / "run"
    large_run(folder)
    log = folder / "logs" / "launch-0.torchrun.log"
    taken = []
    for _ in range(3):
        log.unlink(missing_ok=True)
        started = time.perf_counter()
        command = subprocess.Popen(
            [sys.executable, "-m", "commbench", "sweep", "--resume", str(folder), "--quiet"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        while not log.exists() and command.poll() is None:
            time.sleep(0.01)
        taken.append(time.perf_counter() - started)
        assert log.exists()
        command.send_signal(signal.SIGINT)
        time.sleep(0.05)
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=30) == 130
    print(f"from the command to the ranks' launcher: {', '.join(f'{t:.2f}' for t in taken)} s")
    record_property("seconds", min(taken))
    assert min(taken) <= 2


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_a_relaunch_takes_at_most_half_as_long_again_as_the_first_launch(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    ratios = []
    monkeypatch.setenv("COMMBENCH_FAKE", json.dumps({fault: {"rank": 1, "collective": "broadcast", "call": 30}}))
    for k in range(3):
        spec = make_spec(SMALL | {"backends": "fake", "sizes": "64", "point_timeout": 1.5}, {})
        expansion, settings = harness.prepare(spec)
        run = harness.execute(spec, expansion, settings, tmp_path / str(k), lambda event: None)
        first, again = run.manifest["launches"][0]["startups_s"]
        ratios.append(again / first)
    record_property("ratio", statistics.median(ratios))
    print(f"relaunch / first launch after {fault}: {', '.join(f'{r:.2f}' for r in ratios)}")
    assert statistics.median(ratios) <= 1.5
