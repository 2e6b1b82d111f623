"""Sweeps with ``--device xpu``, ``hpu`` and ``npu``: refused with the reason where the device is not there, and whole
ones over vendors' packages that are played on the CPU (tests/backends/vendors)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commbench.harness.environment import devices
from commbench.harness.environment.devices import ACCELERATORS, Found

REPOSITORY = Path(__file__).resolve().parents[2]
PLAYED = REPOSITORY / "tests" / "backends" / "vendors"


def commbench(folder: Path, *words: str, played: bool = True, **variables: str) -> tuple[int, str]:
    """(exit code, what it says) of a command. played: with the vendors' packages."""
    path = [str(REPOSITORY), *([str(PLAYED)] if played else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "300", **variables}
    done = subprocess.run(
        [sys.executable, "-m", "commbench", *words], capture_output=True, text=True, cwd=folder, env=environment,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def sweep(folder: Path, device: str) -> tuple[int, str, dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    """(exit code, what it says, manifest, points by collective and backend) of a sweep on two ranks."""
    code, said = commbench(
        folder, "sweep", "--tp", "2", "--device", device, "--collectives", "all_reduce,all_gather,gather", "--dtypes",
        "float32", "--sizes", "1MiB", "--mode", "eager,graph", "--backends", f"auto,{device},pynccl",
        "--max-time-per-point", "0.1s", "--out", "run", "--quiet", SCRIPTED_LOG=str(folder / "log"),
    )  # fmt: skip
    manifest = json.loads((folder / "run" / "manifest.json").read_text())
    rows = [json.loads(line) for line in (folder / "run" / "points.jsonl").read_text().splitlines()]
    points = {(row["collective"], f"{row['backend_requested']} {row['mode']}"): row for row in rows}
    return code, said, manifest, points


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("xpu", "is built without XPU support; install a torch with XPU support"),
        ("hpu", "habana_frameworks is not installed; install Gaudi's torch bridge"),
        ("npu", "torch_npu is not installed; pip install torch-npu, and CANN"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_one_line_with_what_is_missing_and_the_remedy(
    tmp_path: Path, device: str, reason: str
) -> None:
    code, said = commbench(tmp_path, "sweep", "--device", device, played=False)
    assert code == 2
    (line,) = said.splitlines()
    assert line.startswith(f"error: --device {device}: ")
    assert reason in line


def test_devices_that_ranks_may_hold_by_now_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_seen", {})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(PLAYED)]))
    assert devices.ask("npu").count == 2
    monkeypatch.setattr(devices, "ASKING_S", 0.0)  # whoever asks gets no answer in that time
    assert devices.ask("npu").count == 2
    assert devices.ask("xpu").count == 0
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")  # other devices
    assert devices.ask("npu").count == 0


def test_more_ranks_than_devices_are_refused(tmp_path: Path) -> None:
    code, said = commbench(tmp_path, "sweep", "--device", "npu", "--tp", "4", "--dry-run")
    assert (code, said.count("\n")) == (2, 1)
    assert "with 4 ranks here: torch sees 2, one is needed for each rank" in said


@pytest.mark.parametrize(("words", "reason"), [("--mode graph", "captures no graphs on npu"),
                                               ("--share-device", "it is for --device cuda")])  # fmt: skip
def test_what_only_cuda_has_is_refused(tmp_path: Path, words: str, reason: str) -> None:
    code, said = commbench(tmp_path, "sweep", "--device", "npu", "--dry-run", *words.split())
    assert code == 2
    assert reason in said


def test_a_package_that_ends_the_process_which_imports_it_is_a_reason_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os, sys\nprint('no driver', file=sys.stderr, flush=True)\nos._exit(3)\n"
    (tmp_path / "torch_npu.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), str(tmp_path)]))
    found = devices.ask("npu")
    assert (found.count, found.reason) == (0, "asking torch for npu devices ended with exit status 3: no driver")
    assert found.remedy


def test_the_devices_that_a_command_knows_are_those_of_the_backends() -> None:
    from commbench.backends.accelerators import VENDORS
    from commbench.sweep import DEVICES

    assert set(ACCELERATORS) == set(VENDORS)
    assert {*ACCELERATORS, "auto", "cpu", "cuda"} == set(DEVICES)
    assert devices.look("npu") == Found(0, "torch_npu is not installed", VENDORS["npu"].install)


@pytest.mark.slow
def test_a_sweep_on_npu_takes_each_ranks_device_its_library_and_its_events(tmp_path: Path) -> None:
    code, said, manifest, points = sweep(tmp_path, "npu")
    assert code == 0, said
    log = (tmp_path / "log").read_text().splitlines()
    assert {"0 set_device npu:0", "1 set_device npu:1", "0 hccl of 2", "1 hccl of 2"} <= set(log)
    for collective in ("all_reduce", "all_gather", "gather"):
        for requested in ("auto", "npu"):
            row = points[collective, f"{requested} eager"]
            assert row["status"] in ("ok", "unsteady"), row
            assert row["backend_picked"] == "npu"
            assert row["latency_median_s"] > 0
            assert row["wrong_count"] == 0
            assert not row["shared_device"]
            assert "ranks met on the host" in row["reason"]
            assert "no events" not in row["reason"]
        assert points[collective, "pynccl eager"]["status"] == "skipped"
        graph = points[collective, "auto graph"]
        assert (graph["status"], "no graphs to capture" in graph["reason"]) == ("skipped", True)
    assert "hccl" in points["all_reduce", "auto eager"]["provider"]
    marks = manifest["fingerprint"]
    assert (marks["device"], marks["accelerators"]["kind"]) == ("npu", "npu")
    assert marks["rank"]["devices"] == [{"name": "a played npu", "memory_bytes": 1 << 34}] * 2


@pytest.mark.slow
def test_a_sweep_on_hpu_where_a_process_has_one_device_and_the_module_no_events(tmp_path: Path) -> None:
    code, said, manifest, points = sweep(tmp_path, "hpu")
    assert code == 0, said
    log = set((tmp_path / "log").read_text().splitlines())
    assert {"0 mark_step", "1 mark_step", "0 hccl of 2"} <= log
    assert not any("set_device" in line for line in log)
    row = points["all_reduce", "auto eager"]
    assert (row["status"] in ("ok", "unsteady"), row["backend_picked"], row["wrong_count"]) == (True, "hpu", 0)
    assert not row["shared_device"]  # both processes call theirs number 0
    assert "hpu has no events that tell times, so the host timed" in row["reason"]
    assert manifest["fingerprint"]["accelerators"]["kind"] == "hpu"
