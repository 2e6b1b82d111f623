"""gpu-check on machines that are made up, and on this one, which has no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from commbench.errors import LaunchError
from commbench.harness.environment.gpu_check import Machine, check, chosen, lines_of, look, main, summary_of
from commbench.registry import BACKENDS
from commbench.sweep import expand, make_spec

H200 = "NVIDIA H200"
READY = {"torch_dist": None, "pynccl": None, "symm_mem": None, "ca": "sgl_kernel is not installed"}


def machine(gpus: int = 8, nccl: tuple[int, ...] = (2, 27, 5), **backends: str | None) -> Machine:
    return Machine((H200,) * gpus, "", READY | backends, nccl, ({"subject": "torch", "state": "ok"},))


def row(backend: str, mode: str, size: int, status: str = "ok", reason: str = "", **values: Any) -> dict[str, Any]:
    return {
        "backend_requested": backend, "mode": mode, "size_bytes": size, "status": status, "reason": reason,
        "latency_median_s": 1e-5 if status == "ok" else None, "ranks_agree": True, "repeatable": True, **values,
    }  # fmt: skip


class Sweeps:
    """Stands for the sweeps: all points are ok but those of ``spoilt`` (backend, mode) → status, reason."""

    def __init__(self, spoilt: Mapping[tuple[str, str], tuple[str, str]] | None = None) -> None:
        self.spoilt = spoilt or {}
        self.asked: list[tuple[Mapping[str, Any], float]] = []

    def __call__(self, settings: Mapping[str, Any], seconds: float) -> Sequence[Mapping[str, Any]]:
        self.asked.append((settings, seconds))
        spec = make_spec({**settings, "launch_timeout": f"{seconds}s"}, {})  # the settings are those of a sweep
        points = expand(spec, 1 << 40).points
        return [row(p.backend, p.mode, p.size_bytes, *self.spoilt.get((p.backend, p.mode), ("ok", ""))) for p in points]


def test_every_available_backend_is_checked_in_both_modes_and_then_swept() -> None:
    sweeps = Sweeps()
    found = check(machine(), sweeps)
    assert found["ok"]
    assert [e["name"] for e in found["backends"]] == ["torch_dist", "pynccl", "symm_mem"]
    assert {(e["eager"], e["graph"]) for e in found["backends"]} == {("ok", "ok")}
    assert found["left_out"] == {"ca": "sgl_kernel is not installed"}
    (checked, check_s), (swept, sweep_s) = sweeps.asked
    assert checked["mode"] == swept["mode"] == ["eager", "graph"]
    assert (checked["tp"], checked["share_device"]) == (8, False)
    assert check_s + sweep_s <= 180


def test_a_wrong_backend_is_a_finding_with_its_reason_and_is_swept_only_where_it_is_right() -> None:
    sweeps = Sweeps({("pynccl", "graph"): ("wrong", "7 elements are wrong"), ("symm_mem", "eager"): ("failed", "boom"),
                     ("symm_mem", "graph"): ("failed", "boom")})  # fmt: skip
    found = check(machine(), sweeps)
    assert not found["ok"]
    entries = {e["name"]: e for e in found["backends"]}
    assert (entries["pynccl"]["eager"], entries["pynccl"]["graph"]) == ("ok", "wrong")
    assert entries["pynccl"]["reason"] == "7 elements are wrong"
    assert sweeps.asked[1][0]["backends"] == ["torch_dist", "pynccl"]


def test_what_cannot_be_timed_in_a_moment_is_right_all_the_same() -> None:
    entry = summary_of("a", [row("a", "eager", 8, "unsteady"), row("a", "graph", 8, "refused")])
    assert (entry["eager"], entry["graph"], entry["reason"]) == ("ok", "ok", "")
    assert summary_of("a", [])["eager"] == "not measured"


def test_a_sweep_that_cannot_run_is_told_and_what_was_found_is_kept() -> None:
    def broken(settings: Mapping[str, Any], seconds: float) -> Sequence[Mapping[str, Any]]:
        raise LaunchError("rank 1 died")

    found = check(machine(), broken)
    assert not found["ok"]
    assert found["problem"].startswith("check: rank 1 died; check-torch_dist-pynccl-symm_mem: rank 1 died")
    assert found["doctor"]


def test_a_provider_that_ends_the_ranks_costs_the_others_nothing() -> None:
    sweeps = Sweeps()

    def measure(settings: Mapping[str, Any], seconds: float) -> Sequence[Mapping[str, Any]]:
        if "flashinfer" in settings["backends"]:
            raise LaunchError("launch 0 could not start: rank 0 was killed by SIGSEGV")
        return sweeps(settings, seconds)

    document = check(machine(flashinfer=None), measure)
    entries = {entry["name"]: entry["eager"] for entry in document["backends"]}
    assert entries == {"torch_dist": "ok", "pynccl": "ok", "symm_mem": "ok", "flashinfer": "not measured"}
    assert "SIGSEGV" in document["problem"]
    assert not document["ok"]


def test_on_one_gpu_two_ranks_share_it_where_the_libraries_allow() -> None:
    ranks, shared, left_out = chosen(machine(1))
    assert (ranks, shared) == (2, True)
    assert set(left_out) == {"ca", "torch_dist", "pynccl"}
    assert left_out["pynccl"] == "two ranks on one GPU take NCCL 2.30 or newer, here is 2.27.5"
    assert set(chosen(machine(1, (2, 30, 3)))[2]) == {"ca"}
    sweeps = Sweeps()
    found = check(machine(1), sweeps)
    assert found["shared_device"]
    assert sweeps.asked[0][0]["share_device"] is True
    assert "share it (times mean nothing beside others)" in lines_of(found, Path("x.json"))[0]


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 2), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (16, 8)])
def test_ranks_are_a_number_that_every_backend_takes(gpus: int, ranks: int) -> None:
    assert chosen(machine(gpus))[0] == ranks


def test_the_summary_fits_a_screen_and_names_what_is_new_to_hardware() -> None:
    backends = {name: None for name in BACKENDS if name not in ("fake", "mpi", "shm", "shm_oneshot", "shm_twoshot")}
    found = check(Machine((H200,) * 8, "", backends, (2, 30)), Sweeps({("qr", "eager"): ("failed", "x" * 500)}))
    lines = lines_of(found, Path("reports/gpu-check.json"))
    assert len(lines) <= 24
    assert max(map(len, lines)) < 180
    assert any(line.startswith("symm_mem ") and "first time on hardware" in line for line in lines)
    assert lines[-1] == "NOT all right; everything is in reports/gpu-check.json"


def test_a_machine_without_a_gpu_gives_one_line_a_document_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1
    assert printed[0].startswith("gpu-check: no GPU")
    document = json.loads((tmp_path / "gpu-check.json").read_text())
    assert document["ok"] is False
    assert document["problem"].startswith("no GPU")
    assert {n["section"] for n in document["doctor"]} >= {"main job", "backends"}
    assert "symm_mem" in document["not_proven_on_hardware"]
    assert list(tmp_path.iterdir()) == [tmp_path / "gpu-check.json"]


def test_the_document_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.gpu
def test_this_machines_gpus_are_all_right(tmp_path: Path) -> None:
    if not look().gpus:
        pytest.skip("no GPU here")
    done = subprocess.run(
        [sys.executable, "-m", "commbench.harness.environment.gpu_check", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
