"""``commbench sweep`` as a user meets it: real ranks, real files, every way to end."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from commbench.store.run import Run, open_run

FAKE = {"duration_s": 2e-4}
SMALL = ["--dtypes", "float32", "--max-time-per-point", "300ms"]


def sweep(process: Any, out: Path, *args: str, script: dict[str, Any] | None = None) -> tuple[int, str, str]:
    env = {"COMMBENCH_FAKE": json.dumps(FAKE | (script or {}))}
    started = process("sweep", "--out", str(out), *SMALL, *args, env=env)
    return ended(started)


def ended(started: subprocess.Popen[str], timeout_s: float = 150) -> tuple[int, str, str]:
    """Wait for the program; if it hangs, end it (its ranks end with it) and fail."""
    try:
        stdout, stderr = started.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        started.kill()
        stdout, stderr = started.communicate()
        pytest.fail(f"did not end within {timeout_s} s:\n{stdout}\n{stderr}")
    return started.returncode, stdout, stderr


def by_collective(run: Run) -> dict[str, dict[str, Any]]:
    return {row["collective"]: row for row in run.rows()}


@pytest.fixture(scope="module")
def measured(process: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, str, Path]:
    out = tmp_path_factory.mktemp("sweep") / "run"
    code, stdout, stderr = sweep(
        process, out, "--tp", "2", "--sizes", "8:4KiB:x8", "--backends", "auto,fake,torch_dist",
        "--collectives", "all_reduce,broadcast,barrier", "--launches", "2",
    )  # fmt: skip
    return code, stdout, stderr, out


@pytest.mark.slow
class TestAPlainSweep:
    def test_it_ends_well_and_names_its_report(self, measured: tuple[int, str, str, Path]) -> None:
        code, stdout, stderr, out = measured
        assert code == 0, stderr
        assert stdout.rstrip().endswith(f"report: {out / 'report.html'}")
        assert (out / "report.html").stat().st_size > 10_000

    def test_every_point_of_every_launch_has_a_line_and_a_parquet_row(self, measured: Any) -> None:
        import pandas as pd

        run = open_run(measured[3])
        planned = (4 + 4 + 1) * 3
        assert run.manifest["points_planned"] == 2 * planned
        assert run.manifest["outcome"] == "complete"
        for launch in (0, 1):
            assert len({r["point_id"] for r in run.rows() if r["launch"] == launch}) == planned
        pd.testing.assert_frame_equal(pd.read_parquet(measured[3] / "points.parquet"), run.points(), check_dtype=False)

    def test_every_point_is_ok_checked_and_took_what_was_forced(self, measured: Any) -> None:
        for row in open_run(measured[3]).rows():
            # something else on the machine may keep a real backend from settling; that is said, and no fault
            settled = ("ok",) if row["backend_picked"] == "fake" else ("ok", "unsteady")
            assert row["status"] in settled, row["reason"]
            assert row["checked"] == (row["collective"] != "barrier")
            assert row["wrong_count"] in (0, None)
            if row["backend_requested"] != "auto":
                assert row["backend_picked"] == row["backend_requested"]

    def test_a_scripted_duration_is_reported(self, measured: Any) -> None:
        for row in open_run(measured[3]).rows():
            if row["backend_picked"] == "fake":
                # never shorter than scripted; longer only by what the machine adds
                assert 0.99 * FAKE["duration_s"] <= row["latency_min_s"]
                assert row["latency_median_s"] < 2 * FAKE["duration_s"]

    def test_the_decision_gives_a_reason_for_every_backend_ahead(self, measured: Any) -> None:
        for row in open_run(measured[3]).rows():
            decision = json.loads(row["decision"])
            assert decision["picked"] == row["backend_picked"]
            assert all(d["reason"] for d in decision["declined"])

    def test_raw_samples_of_every_rank_are_kept_and_give_the_median(self, measured: Any) -> None:
        run = open_run(measured[3])
        row = next(r for r in run.rows() if r["timing"] == "single" and r["sync"] == "window")
        samples = run.samples(row["point_id"])
        samples = samples[samples.launch == row["launch"]]
        assert set(samples["rank"]) == {0, 1}
        seen = samples.groupby("iteration").agg(
            start=("start_ns", "max"), first=("start_ns", "min"), end=("end_ns", "max"), valid=("valid", "all")
        )
        spans = seen[seen.valid]
        begin = "start" if row["collective"] != "broadcast" else "first"
        latency = (spans.end - spans[begin]) * 1e-9
        assert row["n_invalid"] == (~seen.valid).sum()
        overhead = run.manifest["launches"][row["launch"]]["timer"]["overhead_s"]
        assert len(latency) == row["n_samples"]
        assert latency.median() - overhead == pytest.approx(row["latency_median_s"], rel=1e-6)

    def test_points_run_in_another_random_order_in_each_launch(self, measured: Any) -> None:
        rows = open_run(measured[3]).rows()
        orders = [
            [r["point_id"] for r in sorted((r for r in rows if r["launch"] == k), key=lambda r: r["order"])]
            for k in (0, 1)
        ]
        assert sorted(orders[0]) == sorted(orders[1])
        assert orders[0] != orders[1]

    def test_progress_goes_to_stderr(self, measured: Any) -> None:
        assert "measuring 54 points" in measured[2]
        assert "[54/54]" in measured[2]
        assert "[54/54]" not in measured[1]


@pytest.mark.slow
def test_wrong_failing_and_good_points_are_told_apart_and_the_sweep_goes_on(process: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, stdout, stderr = sweep(
        process, out, "--tp", "2", "--sizes", "64", "--backends", "fake", "--json",
        "--collectives", "all_reduce,broadcast,reduce_scatter",
        script={"wrong": {"rank": 1, "elements": 3}, "fail": {"rank": 1, "collective": "broadcast"}},
    )  # fmt: skip
    assert code == 1
    document = json.loads(stdout)
    assert document["run_id"] == "run"
    rows = by_collective(open_run(out))
    assert rows["all_reduce"]["status"] == "wrong"
    assert "elements are wrong" in rows["all_reduce"]["reason"]
    assert rows["broadcast"]["status"] == "failed"
    assert rows["broadcast"]["reason"].startswith("rank 1: scripted failure in broadcast on rank 1")
    assert rows["reduce_scatter"]["status"] == "wrong"
    assert "3 of 3 points are wrong, failed or timed out" in stderr


def test_a_rank_that_enters_late_by_300_us_shows_as_skew_and_not_as_latency(process: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, stderr = sweep(
        process, out, "--tp", "2", "--sizes", "64", "--backends", "fake", "--collectives", "all_reduce",
        "--skew", "1:300us", "--placement", "out",
    )  # fmt: skip
    assert code == 0, stderr
    run = open_run(out)
    (row,) = run.rows()
    assert row["skew_median_s"] == pytest.approx(300e-6, rel=0.05)
    assert row["latency_median_s"] == pytest.approx(FAKE["duration_s"], rel=0.05)
    assert row["t_win_median_s"] == pytest.approx(300e-6 + FAKE["duration_s"], rel=0.05)
    (launch,) = run.manifest["launches"]
    assert launch["start"]["skew_p50_s"] < 100e-6  # the instrument is calibrated without the delay
    assert len(launch["known_answers"]) == 6


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_its_point_and_the_sweep_goes_on(process: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, _ = sweep(
        process, out, "--tp", "2", "--sizes", "64", "--backends", "fake",
        "--collectives", "all_reduce,broadcast,all_gather", script={"die": {"rank": 1, "collective": "broadcast"}},
    )  # fmt: skip
    assert code == 1
    rows = by_collective(open_run(out))
    assert rows["broadcast"]["status"] == "failed"
    assert rows["broadcast"]["reason"] == "rank 1 was killed by SIGKILL"
    assert rows["all_reduce"]["status"] == rows["all_gather"]["status"] == "ok"


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_keeps_its_points_writes_its_report_and_leaves_no_process(
    process: Callable[..., subprocess.Popen[str]], tmp_path: Path, sign: signal.Signals
) -> None:
    out = tmp_path / "run"
    args = ["--tp", "2", "--sizes", "8:1MiB:x1.3", "--backends", "fake", "--collectives", "all_reduce"]
    started = process("sweep", "--out", str(out), *SMALL, *args, env={"COMMBENCH_FAKE": json.dumps(FAKE)})
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if (out / "points.jsonl").exists() and (out / "points.jsonl").read_text().count("\n") >= 2:
            break
        time.sleep(0.1)
    ranks = descendants(started.pid)
    assert len(ranks) >= 3  # torchrun and two ranks
    started.send_signal(sign)
    code, _, stderr = ended(started)
    assert code == 130
    run = open_run(out)
    kept = len(run.rows())
    assert f"{kept} finished points are kept" in stderr
    assert 2 <= kept < run.manifest["points_planned"]
    assert run.manifest["outcome"] == "interrupted"
    assert (out / "report.html").exists()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


@pytest.mark.slow
def test_more_ranks_than_cores_work_and_are_marked(process: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = (psutil.cpu_count() or 1) + 1
    code, stdout, stderr = sweep(
        process, out, "--tp", str(ranks), "--sizes", "4KiB:64KiB:x16", "--collectives", "all_reduce,all_gather"
    )
    assert code == 0, stdout + stderr
    for row in open_run(out).rows():
        assert row["oversubscribed"]
        assert row["sync"] == "barrier"
        assert row["status"] == "ok"
    assert "oversubscribed" in stdout
    assert "oversubscribed" in (out / "report.html").read_text()


def test_a_dry_run_prints_points_time_and_command_and_writes_nothing(
    commbench: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = commbench(
        "sweep", "--tp", "4", "--sizes", "8,64", "--dtypes", "float32", "--collectives", "reduce", "--dry-run"
    )
    assert code == 0
    assert "reduce float32 8 B [auto]" in out
    assert "2 points × 1 launches, about" in out
    assert "--nproc-per-node=4" in out
    assert list(tmp_path.iterdir()) == []


def test_flags_override_the_file(commbench: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text('[sweep]\ncollectives = ["all_reduce"]\nsizes = [8]\n[run]\ntp = 2\n')
    code, out, _ = commbench("sweep", "s.toml", "--tp", "3", "--sizes", "64", "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0
    assert {(p["world_size"], p["size_bytes"]) for p in plan["points"]} == {(3, 64)}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--collectives", "foo"], "--collectives: unknown collective 'foo'"),
        (["--dtypes", "float31"], "--dtypes: unknown dtype 'float31'"),
        (["--backends", "ncll"], "--backends: unknown backend 'ncll'"),
        (["--policy", "vlm"], "unknown policy 'vlm'"),
        (["--sizes", "9", "--dtypes", "float32"], "size 9 is no multiple of 4"),
        (["--sizes", "0"], "size 0"),
        (["--sizes", "-8"], "--sizes: size '-8' is negative"),
        (["--sizes", "8:4"], "ends below its start"),
        (["--sizes", "9999GiB"], "this host has"),
        (["--tp", "0"], "--tp: 0 ranks"),
        (["--tp", "100000"], "--tp 100000"),
        (["--tp", "many"], "'many' is not a valid integer"),
        (["--target-ci", "0"], "--target-ci: '0' must be between"),
        (["--budget", "soon"], "--budget: duration 'soon'"),
        (["--ops", "avg", "--dtypes", "int8"], "op avg does not exist for int8"),
        (["nowhere.toml"], "no sweep file nowhere.toml"),
        (["quik"], "unknown sweep 'quik'"),
        (["a", "b"], "unexpected extra argument"),
        (["--frobnicate"], "No such option"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2_and_nothing_is_written(
    commbench: Any, tmp_path: Path, monkeypatch: Any, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = commbench("sweep", *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(Path("/proc/driver/nvidia/gpus").exists(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused(commbench: Any) -> None:
    code, _, err = commbench("sweep", "--device", "cuda")
    assert code == 2
    assert "this machine shows no GPU" in err


def test_an_out_folder_that_cannot_take_a_run_is_refused_before_anything_starts(commbench: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    for target, message in (
        ("file", "is a file"),
        ("full", "is not empty"),
        ("file/run", "is a file"),
        ("/proc/run", "cannot be"),
    ):
        code, out, err = commbench("sweep", "--out", str(tmp_path / target))
        assert (code, out) == (2, "")
        assert message in err
        assert "measuring" not in err


def test_the_shipped_sweeps_are_listed_with_what_they_are_for(commbench: Any) -> None:
    code, out, _ = commbench("sweeps")
    assert code == 0
    for name in ("quick", "nightly", "thresholds", "decode"):
        assert any(line.startswith(name) and len(line) > 30 for line in out.splitlines())


def test_an_unknown_command_names_those_that_exist(commbench: Any) -> None:
    code, _, err = commbench("swep")
    assert code == 2
    assert err.startswith("error: no command 'swep'; commands: sweep, ")


def test_help_lists_every_command_without_importing_any(commbench: Any) -> None:
    from commbench.cli import COMMANDS

    code, out, _ = commbench("--help")
    assert code == 0
    for name in COMMANDS:
        assert f"  {name} " in out


def test_graphs_on_the_cpu_are_refused_alone_and_planned_in_a_list(commbench: Any) -> None:
    code, out, err = commbench("sweep", "--device", "cpu", "--mode", "graph")
    assert (code, out) == (2, "")
    assert err == "error: --mode graph: the CPU has no graphs to capture; take --mode eager, or a machine with a GPU\n"
    code, out, _ = commbench(
        "sweep", "--device", "cpu", "--mode", "eager,graph", "--sizes", "64", "--dtypes", "float32",
        "--collectives", "all_reduce,barrier", "--dry-run", "--json",
    )  # fmt: skip
    assert code == 0
    document = json.loads(out)
    assert sorted((p["collective"], p["mode"]) for p in document["points"]) == [
        ("all_reduce", "eager"), ("all_reduce", "graph"), ("barrier", "eager"),
    ]  # fmt: skip
    assert document["skipped_combinations"] == {"barrier waits on the host, so no graph holds it": 1}


def test_flags_of_gpus_that_do_not_fit_the_machine_are_refused(commbench: Any) -> None:
    for flags, message in (
        (("--share-device", "--device", "cpu"), "the ranks are on the CPU"),
        (("--graph-timing", "fast"), "allowed: isolated, chained"),
    ):
        code, _, err = commbench("sweep", *flags)
        assert code == 2
        assert message in err


@pytest.fixture(scope="module")
def found(process: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """Points by (backend, mode) of a sweep in which ``fake`` quantises."""
    out = tmp_path_factory.mktemp("numbers") / "run"
    code, _, stderr = sweep(
        process, out, "--collectives", "all_reduce", "--sizes", "4KiB", "--backends", "torch_dist,fake",
        "--device", "cpu", "--mode", "eager,graph", script={"quantised": "int8"},
    )  # fmt: skip
    assert code == 0, stderr
    return {(r["backend_requested"], r["mode"]): r for r in open_run(out).rows()}


@pytest.mark.slow
class TestNumbers:
    def test_an_exact_backend_is_correctly_rounded_on_two_ranks(self, found: Any) -> None:
        row = found["torch_dist", "eager"]
        assert row["max_ulp_error"] == 0.5
        assert (row["ranks_agree"], row["repeatable"], row["extremes_wrong"], row["quantised"]) == (True, True, 0, "")

    def test_a_quantised_backend_is_ok_within_its_level_and_marked(self, found: Any) -> None:
        row = found["fake", "eager"]
        assert (row["status"], row["quantised"]) == ("ok", "int8")
        assert row["max_ulp_error"] > 1000

    def test_graphs_are_skipped_with_the_reason_where_there_are_none(self, found: Any) -> None:
        row = found["fake", "graph"]
        assert row["status"] == "skipped"
        assert row["reason"] == "mode graph: cpu has no graphs to capture; take --mode eager"

    def test_a_cast_that_overflows_is_wrong(self, process: Any, tmp_path: Path) -> None:
        code, _, _ = sweep(
            process, tmp_path / "run", "--collectives", "all_reduce", "--sizes", "4KiB", "--backends", "fake",
            "--device", "cpu", "--dtypes", "bfloat16", script={"through": "float16"},
        )  # fmt: skip
        assert code == 1
        (row,) = open_run(tmp_path / "run").rows()
        assert row["status"] == "wrong"
        assert row["wrong_count"] == row["extremes_wrong"] > 0
        assert "near the ends of bfloat16's range" in row["reason"]
