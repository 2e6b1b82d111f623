"""Commands of many launches that are asked to stop: ``gate --ab`` and ``tune``. ``sweep`` has test_faults.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commbench.cli import main
from commbench.harness import ab, ab_sides
from commbench.harness import run as harness
from commbench.harness.order import shuffled
from commbench.store.run import Plan, PointLog, open_run, row_of
from tests.harness.faults import Sweep

SPEC = """
[sweep]
collectives = ["all_reduce", "broadcast"]
dtypes = ["float32"]
sizes = "8:16KiB:x2"
backends = ["fake"]

[run]
device = "cpu"
max_time_per_point = "200ms"
target_ci = 1e-9
"""  # no point reaches that interval: each takes its whole time, on any machine


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(SPEC)
    return str(path)


@pytest.fixture
def commbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the program in this process: (exit code, the last line on stderr)."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["commbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert out == ""
        return int(ended.value.code or 0), err.splitlines()[-1]

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces launching: each launch leaves one point, and in the third this process gets the signals ``with``."""
    state: dict[str, Any] = {"launches": [], "with": [signal.SIGINT]}

    def run_launch(directory: Path, index: int, *_: Any, **__: Any) -> dict[str, Any]:
        plan = Plan.load(directory)
        order, point = shuffled(plan.points, int(plan.settings["seed"]), index)[0]
        log = PointLog(directory)
        log.append(row_of(point, {"run_id": "x", "launch": index, "order": order, "status": "ok", "reason": ""}))
        log.close()
        state["launches"].append(directory)
        if len(state["launches"]) == 3:
            ask(*state["with"])
        return {"launch": index}

    def ask(sign: signal.Signals, *more: signal.Signals) -> None:
        try:
            os.kill(os.getpid(), sign)
        finally:  # where a launch would be ending its job
            if more:
                ask(*more)

    monkeypatch.setattr(ab, "run_launch", run_launch)
    monkeypatch.setattr(harness, "run_launch", run_launch)
    monkeypatch.setattr(ab_sides, "side_fingerprint", lambda side, device: {})
    return state


def outcomes(*runs: Path) -> list[tuple[str, int, bool]]:
    """Of each run: its outcome, its points, whether they are in Parquet."""
    return [(open_run(r).manifest["outcome"], len(open_run(r).rows()), (r / "points.parquet").exists()) for r in runs]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_ab_that_is_asked_to_stop_keeps_what_was_measured_and_says_so(
    tmp_path: Path, spec: str, commbench: Any, asked: dict[str, Any], sign: signal.Signals
) -> None:
    asked["with"] = [sign]
    out = tmp_path / "ab"
    code, said = commbench("gate", "--ab", spec, "--pairs", "5", "--out", str(out))
    assert code == 130
    assert said == f"error: interrupted, without a verdict; 3 finished points are kept in {out}"
    assert len(asked["launches"]) == 3
    assert sorted(outcomes(out / "screen" / "base", out / "screen" / "cand")) == [
        ("interrupted", 1, True),
        ("interrupted", 2, True),
    ]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_tuning_that_is_asked_to_stop_keeps_what_was_measured_and_says_so(
    tmp_path: Path, commbench: Any, asked: dict[str, Any], sign: signal.Signals
) -> None:
    asked["with"] = [sign]
    out, kept = tmp_path / "policy.toml", tmp_path / "runs"
    code, said = commbench("tune", "--tp", "2", "--device", "cpu", "--keep", str(kept), "--out", str(out))
    assert code == 130
    assert said == f"error: interrupted, without a policy; 3 finished points are kept in {kept}"
    assert outcomes(kept / "coarse") == [("interrupted", 3, True)]
    assert not out.exists()


def test_a_tuning_that_is_asked_to_stop_between_two_phases_says_what_is_kept(
    tmp_path: Path, commbench: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from commbench.analysis import confirm

    asked["launches"] = [tmp_path] * 3  # no launch asks
    monkeypatch.setattr(confirm, "refinement", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr("commbench.analysis.tune.tune", lambda *_, **__: None)
    kept = tmp_path / "runs"
    arguments = ["--launches", "2", "--keep", str(kept), "--out", str(tmp_path / "policy.toml")]
    code, said = commbench("tune", "--tp", "2", "--device", "cpu", *arguments)
    assert (code, said) == (130, f"error: interrupted, without a policy; 2 finished points are kept in {kept}")
    assert outcomes(kept / "coarse") == [("complete", 2, True)]


def test_being_asked_twice_ends_an_ab_without_another_file(
    tmp_path: Path, spec: str, commbench: Any, asked: dict[str, Any]
) -> None:
    asked["with"] = [signal.SIGINT, signal.SIGTERM]
    out = tmp_path / "ab"
    code, said = commbench("gate", "--ab", spec, "--pairs", "5", "--out", str(out))
    assert (code, said) == (130, f"error: interrupted twice; finished points are kept in {out}")
    assert {(outcome, parquet) for outcome, _, parquet in outcomes(*out.glob("screen/*"))} == {("interrupted", False)}


def test_an_ab_that_is_stopped_before_its_first_launch_says_that_nothing_was_measured(
    tmp_path: Path, spec: str, commbench: Any, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ab_sides, "side_fingerprint", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    code, said = commbench("gate", "--ab", spec, "--out", str(tmp_path / "ab"))
    assert (code, said) == (130, "error: interrupted, without a verdict; nothing was measured")


# ---- with real launches ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_no_process_outlives_an_ab_that_is_asked_to_stop(tmp_path: Path, spec: str, times: int) -> None:
    _, first = ab.launch_order(5, 0)[0]
    gate = Sweep(tmp_path, name=f"ab/screen/{first}")
    gate.start("gate", "--ab", spec, "--pairs", "5", "--out", str(tmp_path / "ab"), cli=True).wait_for_points(2)
    assert len(gate.ranks) >= 3
    for _ in range(times):
        gate.supervisor.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    code, stderr = gate.end()
    assert code == 130
    assert stderr.splitlines()[-1].startswith("error: interrupted")
    assert f"finished points are kept in {tmp_path / 'ab'}" in stderr
    run = open_run(gate.directory)
    assert run.manifest["outcome"] == "interrupted"
    assert 2 <= len(run.rows()) < 24


@pytest.mark.slow
def test_no_process_and_no_folder_outlives_a_tuning_that_is_asked_to_stop(tmp_path: Path) -> None:
    kept = tmp_path / "runs"
    tune = Sweep(tmp_path, name="runs/coarse")
    arguments = ["--device", "cpu", "--backends", "fake,torch_dist", "--keep", str(kept)]
    tune.start("tune", "--tp", "2", *arguments, "--out", str(tmp_path / "policy.toml"), cli=True).wait_for_points(2)
    assert list(tune.temporary.glob("commbench-tune-*"))
    tune.supervisor.send_signal(signal.SIGINT)
    code, stderr = tune.end()
    assert code == 130
    assert f"finished points are kept in {kept}" in stderr
    assert open_run(tune.directory).manifest["outcome"] == "interrupted"
