"""Profiles: torch's profiler with all its options on every rank of an engine, and the flag of a sweep."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from commbench import Engine
from commbench.cli.sweep import command
from commbench.errors import CommbenchError, EngineError, SpecError, UsageError
from commbench.harness.views.look import Look
from commbench.harness.views.profiling import parse_activities, written

A = np.ones(1000, dtype=np.float32)


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_options_pass_through_and_each_rank_writes_a_chrome_trace(engine: Engine, tmp_path: Path) -> None:
    folder = engine.start_profile(
        tmp_path / "traces", activities=["cpu"], record_shapes=True, profile_memory=True, with_stack=True,
        with_flops=True, with_modules=False, experimental_config={"verbose": True}, execution_trace_observer=True,
        acc_events=True,
    )  # fmt: skip
    assert folder == tmp_path / "traces"
    with pytest.raises(EngineError, match=f"a profile already runs, for {folder}; stop_profile"):
        engine.start_profile(tmp_path / "other")
    engine.all_reduce(A, backend="torch_dist")
    files = engine.stop_profile()
    assert [path.name for path in files] == ["launch-0.rank-0.trace.json", "launch-0.rank-1.trace.json"]
    for rank, path in enumerate(files):
        top = json.loads(path.read_text())
        passed = ("record_shapes", "profile_memory", "with_stack", "with_flops")
        assert {name: top[name] for name in passed} == dict.fromkeys(passed, 1)
        found = top["traceEvents"]
        (call,) = [e for e in found if e["name"] == "c10d::allreduce_"]
        assert [[1000]] in call["args"]["Input Dims"] or [1000] in call["args"]["Input Dims"]  # record_shapes
        names = Counter(e["name"] for e in found)
        assert any("engine/rank.py" in name for name in names)  # with_stack
        assert (folder / f"launch-0.rank-{rank}.execution.json").stat().st_size > 0
    assert engine.stop_profile() == files  # once more does no harm


def interrupt_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the next call waits for its replies."""
    ready = engine._calls._ready

    def interrupted(starting: float | None) -> Any:
        monkeypatch.setattr(engine._calls, "_ready", ready)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._calls, "_ready", interrupted)


def test_an_interrupted_start_leaves_a_profile_that_runs_and_an_interrupted_stop_one_that_does_not(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_once(engine, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        engine.start_profile(tmp_path / "one", activities=["cpu"])
    with pytest.raises(EngineError, match=f"a profile already runs, for {tmp_path / 'one'}; stop_profile"):
        engine.start_profile(tmp_path / "two")
    assert not (tmp_path / "two").exists()
    engine.all_reduce(A, backend="torch_dist")
    interrupt_once(engine, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        engine.stop_profile()
    files = engine.stop_profile()
    assert [path.name for path in files] == ["launch-0.rank-0.trace.json", "launch-0.rank-1.trace.json"]
    for path in files:
        assert path.parent == tmp_path / "one"
        assert Counter(e["name"] for e in events(path))["c10d::allreduce_"] == 1
    engine.start_profile(tmp_path / "three", activities=["cpu"])
    assert engine.stop_profile()[0].parent == tmp_path / "three"


def test_a_refused_start_leaves_no_profile(engine: Engine, tmp_path: Path) -> None:
    engine.start_profile(tmp_path, activities=["cpu"])
    engine.stop_profile()
    with pytest.raises(UsageError, match="has no option 'shapes'"):
        engine.start_profile(tmp_path / "refused", shapes=True)
    assert engine.stop_profile()[0].parent == tmp_path  # the last one that there was
    with pytest.raises(UsageError, match="folder=3 is no path"):
        engine.start_profile(3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_closing_an_engine_writes_the_profile_that_runs(tmp_path: Path) -> None:
    with Engine(tp=2, device="cpu") as engine:
        with pytest.raises(EngineError, match=r"no profile runs; start_profile\(\) starts one"):
            engine.stop_profile()
        engine.start_profile(tmp_path, activities=["cpu"])
        engine.all_reduce(A, backend="torch_dist")
    for rank in range(2):
        path = tmp_path / f"launch-0.rank-{rank}.trace.json"
        assert Counter(e["name"] for e in events(path))["c10d::allreduce_"] == 1


def test_a_callback_that_raises_in_the_middle_of_a_schedule_is_told_and_the_engine_goes_on(
    engine: Engine, tmp_path: Path
) -> None:
    schedule = {"wait": 0, "warmup": 0, "active": 1}
    engine.start_profile(tmp_path, activities=["cpu"], schedule=schedule, on_trace_ready=json.dumps)
    with pytest.raises(CommbenchError, match="not JSON serializable"):
        engine.all_reduce(A)
    with pytest.raises(CommbenchError, match="not JSON serializable"):
        engine.stop_profile()
    assert engine.stop_profile()  # what was written before
    assert engine.all_reduce(A)[0][0] == 2


def test_a_schedule_counts_calls_and_gives_a_trace_for_each_round(engine: Engine, tmp_path: Path) -> None:
    engine.start_profile(tmp_path, activities="cpu", schedule={"wait": 1, "warmup": 1, "active": 2, "repeat": 2})
    for _ in range(8):
        engine.all_reduce(A, backend="torch_dist")
    files = engine.stop_profile()
    assert [path.name for path in files[:2]] == ["launch-0.rank-0.trace.json", "launch-0.rank-0.1.trace.json"]
    for path in files:
        assert Counter(e["name"] for e in events(path))["c10d::allreduce_"] == 2


def test_options_that_cannot_be_are_named_and_the_engine_goes_on(engine: Engine, tmp_path: Path) -> None:
    for options, told in (
        ({"shapes": True}, "has no option 'shapes'; it has: activities, schedule"),
        ({"activities": ["tpu"]}, "activity 'tpu' is not available here; available: .*cpu"),
        ({"schedule": {"wait": 1}}, "schedule=.*missing .* required"),
        ({"schedule": {"wait": -1, "warmup": 0, "active": 1}}, "schedule="),
        ({"schedule": lambda step: None}, "schedule=<function .* cannot be sent to the ranks; it takes a dict"),
        ({"on_trace_ready": lambda profile: None}, "on_trace_ready=<function .* a function that a module holds"),
        ({"on_trace_ready": "os:nosuch"}, "on_trace_ready='os:nosuch' is not there on the ranks"),
        ({"experimental_config": {"nosuch": 1}}, "experimental_config="),
        ({"with_stack": object()}, "with_stack=<object .* cannot be sent"),
    ):
        with pytest.raises(UsageError, match=told):
            engine.start_profile(tmp_path, **options)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be made"):
        engine.start_profile(tmp_path / "file" / "folder")
    assert engine.all_reduce(A)[0][0] == 2


def test_a_function_of_a_module_hears_of_each_trace(engine: Engine, tmp_path: Path) -> None:
    assert written({"on_trace_ready": json.dumps})["on_trace_ready"] == "json:dumps"
    engine.start_profile(tmp_path, activities=["cpu"], on_trace_ready=json.dumps)  # which cannot take a profile
    with pytest.raises(CommbenchError, match="not JSON serializable"):
        engine.stop_profile()
    assert engine.all_reduce(A)[0][0] == 2


def test_the_flag_takes_activities_behind_an_equals_sign_only(tmp_path: Path) -> None:
    run = CliRunner().invoke
    plain = run(command, ["quick", "--dry-run"], standalone_mode=False).output
    assert (
        run(command, ["--profile", "quick", "--dry-run"], standalone_mode=False).output.splitlines()[:-1]
        == (plain.splitlines()[:-1])
    )
    problem = run(command, ["--profile=gpu", "--dry-run"], standalone_mode=False).exception
    assert isinstance(problem, SpecError)
    assert str(problem) == "--profile: unknown activity 'gpu'; available: cpu, cuda"


def test_activities_are_checked_before_anything_runs() -> None:
    assert parse_activities("CPU, cuda,cpu") == ("cpu", "cuda")
    with pytest.raises(SpecError, match="names no activity"):
        parse_activities(" ,")
    Look.of("cpu", False, None, {}).check("cpu")
    Look.of("cpu,cuda", False, None, {}).check("cuda")
    with pytest.raises(SpecError, match="activity 'cuda' needs --device cuda, this run is on cpu"):
        Look.of("cpu,cuda", False, None, {}).check("cpu")
