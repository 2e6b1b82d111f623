"""Going on with a run: what is left, what is repeated, and when it is refused. No job is started here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commbench.errors import SpecError, StoreError, UsageError
from commbench.harness import resume as module
from commbench.harness.launch import Again, Launch, left_over, run_launch, unrepeated
from commbench.harness.launchers.commands import Program
from commbench.harness.order import shuffled
from commbench.harness.ranks.work import read_work, remove_work, with_patience, write_work
from commbench.harness.resume import (
    differences,
    held,
    parse_retry,
    record_of,
    remove_temporaries,
    settle_samples,
    unfinished,
)
from commbench.harness.run import conclude, new_manifest, prepare, refuse_another, resume
from commbench.harness.supervision.supervisor import Limits
from commbench.measure.settings import Settings
from commbench.store.run import Plan, PointLog, create, open_run, row_of, update_manifest
from commbench.store.samples import SampleLog, to_parquet
from commbench.sweep import make_spec
from commbench.types import Point

FLAGS = {"sizes": "64:1KiB:x2", "dtypes": "float32", "collectives": "all_reduce,broadcast", "backends": "fake",
         "launches": 2, "seed": 7, "target_ci": 0.03}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Ten points in two launches, none measured."""
    spec = make_spec(FLAGS, {})
    expansion, settings = prepare(spec)
    directory = tmp_path / "run"
    create(directory, new_manifest(spec, expansion, settings, directory), Plan(expansion.points, settings.to_dict()))
    return directory


def measured(run: Path, launch: int, orders: range, status: str = "ok") -> list[Point]:
    points = dict(shuffled(Plan.load(run).points, 7, launch))
    log = PointLog(run)
    for order in orders:
        values = {"run_id": "run", "launch": launch, "order": order, "status": status, "reason": ""}
        log.append(row_of(points[order], values))
    log.close()
    return [points[order] for order in orders]


def test_exactly_the_points_without_a_result_are_left_in_their_launchs_order(run: Path) -> None:
    measured(run, 0, range(10))
    measured(run, 1, range(4))
    work = unfinished(run)
    assert work.left == {1: [4, 5, 6, 7, 8, 9]}
    assert [p for _, p in work.points] == [p for _, p in shuffled(Plan.load(run).points, 7, 1)][4:]
    assert work.spec == make_spec(FLAGS, {})


def test_named_statuses_are_repeated_and_no_others(run: Path) -> None:
    measured(run, 0, range(8))
    failed = measured(run, 0, range(8, 9), "failed")
    late = measured(run, 0, range(9, 10), "timeout")
    measured(run, 1, range(10))
    assert unfinished(run).left == {}
    assert unfinished(run, ["failed"]).left == {0: [8]}
    work = unfinished(run, ["failed", "timeout"])
    assert work.left == {0: [8, 9]}
    assert work.again.pairs == {(0, failed[0].point_id), (0, late[0].point_id)}


def test_a_repeated_point_is_left_over_until_its_new_row_stands_whatever_that_says(run: Path) -> None:
    measured(run, 0, range(10), "failed")
    work = unfinished(run, ["failed"])
    ordered = shuffled(work.plan.points, 7, 0)
    assert left_over(run, 0, ordered, work.again) == list(range(10))
    measured(run, 0, range(3), "failed")
    assert left_over(run, 0, ordered, work.again) == list(range(3, 10))
    assert left_over(run, 0, ordered, Again()) == []


def test_a_repeated_point_has_one_row_the_last(run: Path) -> None:
    measured(run, 0, range(3), "failed")
    (again,) = measured(run, 0, range(1, 2), "ok")
    measured(run, 1, range(1), "failed")
    rows = open_run(run).rows()
    assert [(r["launch"], r["order"], r["status"]) for r in rows] == [
        (0, 0, "failed"), (0, 2, "failed"), (0, 1, "ok"), (1, 0, "failed"),
    ]  # fmt: skip
    points = open_run(run).points()
    assert points.loc[points["point_id"] == again.point_id, "status"].tolist()[0] == "ok"


@pytest.mark.parametrize("text", ["slow", "failed,", "", ",", "ok", "skipped,failed"])
def test_only_statuses_that_can_be_repeated_are_taken(text: str) -> None:
    if text == "failed,":
        assert parse_retry(text) == ("failed",)
    else:
        with pytest.raises(UsageError, match="allowed: failed, timeout, wrong, unsteady"):
            parse_retry(text)


# ---- the same measurement? -----------------------------------------------------------------------------------------


def test_a_run_on_the_same_machine_and_version_goes_on(run: Path) -> None:
    assert refuse_another(unfinished(run)) == []
    assert refuse_another(unfinished(run), make_spec(FLAGS | {"point_timeout": "9s", "name": "x"}, {})) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"target_ci": 0.01}, "spec.target_ci: 0.03 → 0.01"), ({"sizes": "64"}, "spec.sizes: 64:1KiB:x2 → 64"),
     ({"seed": 8}, "spec.seed: 7 → 8"), ({"launches": 3}, "spec.launches: 2 → 3")],
)  # fmt: skip
def test_another_spec_is_refused_with_the_difference(run: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match="not the same measurement") as error:
        refuse_another(unfinished(run), make_spec(FLAGS | changes, {}))
    assert said in str(error.value)
    assert "--force" in str(error.value)
    assert refuse_another(unfinished(run), make_spec(FLAGS | changes, {}), force=True) == [said]


def test_ranks_have_the_patience_of_the_timeouts_that_the_run_goes_on_with(run: Path) -> None:
    plan = Plan.load(run)
    planned = Settings.from_dict(plan.settings)
    for point_s, patience_s in ((600.0, 630.0), (1.0, planned.patience_s)):
        launch = Launch(run, 0, 2, dict(enumerate(plan.points)), limits=Limits(point_s))
        told = launch.environment(Program(), "")
        assert with_patience(planned, told) == replace(planned, patience_s=patience_s)
    assert with_patience(planned, {}) == planned


def test_another_version_is_refused_with_both(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__version__", "9.9")
    with pytest.raises(UsageError, match=r"commbench: .* → 9\.9"):
        refuse_another(unfinished(run))


def test_another_machine_and_other_libraries_are_told(run: Path) -> None:
    work = unfinished(run)
    machine = json.loads(json.dumps(work.manifest["fingerprint"]))
    machine["cpu"]["model"] = "another"
    machine["versions"]["torch"] = "9.9"
    told = differences(work, None, machine)
    assert any(text.startswith("cpu.model:") for text in told)
    assert any(text.startswith("versions.torch:") and text.endswith("9.9") for text in told)


def test_a_folder_that_is_no_run_or_has_no_plan_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        unfinished(tmp_path / "nowhere")
    update_manifest(run, spec={"colour": "blue"})
    with pytest.raises(UsageError, match="colour"):
        unfinished(run)
    (run / "plan.json").write_text("{")
    with pytest.raises(StoreError, match="its plan or spec is not readable"):
        unfinished(run)


def test_two_commands_do_not_measure_into_one_run(run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from commbench.harness.resume import held\n"
        "from commbench.errors import StoreError\n"
        f"try:\n    with held(Path({str(run)!r})): sys.exit(0)\nexcept StoreError as e: print(e); sys.exit(5)"
    )
    with held(run):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 5
        assert "is being measured by another commbench" in done.stdout
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_what_a_killed_command_left_half_written_is_taken_away(run: Path) -> None:
    names = set(run.rglob("*"))
    (run / ".manifest.json.abc").write_text("{")
    (run / "samples" / ".launch-0.parquet.tmp").write_bytes(b"PAR1")
    (run / "logs" / ".launch-0" / "x").mkdir(parents=True)
    remove_temporaries(run)
    assert set(run.rglob("*")) == names
    (run / ".git").mkdir()
    (run / ".notes").write_text("the user's own")
    remove_temporaries(run)
    assert set(run.rglob("*")) == names | {run / ".git", run / ".notes"}


@pytest.mark.parametrize("killed", [False, True])
def test_a_point_whose_repetition_was_not_finished_keeps_its_row_and_its_samples(run: Path, killed: bool) -> None:
    points = measured(run, 0, range(3), "unsteady")

    def sample(log: SampleLog, point: Point, first_ns: int) -> None:
        log.append(point.point_id, 0, np.array([[first_ns]]), np.array([[first_ns + 1]]), np.array([[True]]))

    log = SampleLog(run, 0)
    for point in points:
        sample(log, point, 10)
    log.close()
    to_parquet(run, 0)
    work = unfinished(run, ["unsteady"])
    measured(run, 0, range(1), "ok")  # the first one was repeated, the second one begun
    log = SampleLog(run, 0)
    for point in points[:2]:
        sample(log, point, 20)
    log.close()
    left = unrepeated(run, 0, shuffled(work.plan.points, 7, 0), work.again)
    assert left == {p.point_id for p in points[1:]}
    if killed:  # the command did not come to it; the next one does
        update_manifest(run, resumed=[record_of([], ["unsteady"], ["x"], work.again)])
        settle_samples(unfinished(run))
    else:
        to_parquet(run, 0, left)
    assert not list((run / "samples").glob("*.bin"))
    assert [open_run(run).samples(p.point_id)["start_ns"].tolist() for p in points] == [[20], [10], [10]]


def test_a_run_whose_command_was_killed_after_its_last_point_is_closed(run: Path) -> None:
    for launch in (0, 1):
        points = measured(run, launch, range(10))
    log = SampleLog(run, 1)
    log.append(points[0].point_id, 0, np.array([[1]]), np.array([[2]]), np.array([[True]]))
    log.close()
    write_work(run, 1, [9])
    assert open_run(run).manifest["outcome"] == "running"
    conclude(unfinished(run))
    assert open_run(run).manifest["outcome"] == "complete"
    assert open_run(run).manifest["statuses"] == {"ok": 20}
    assert {p.name for p in run.rglob("*.parquet")} == {"points.parquet", "launch-1.parquet"}
    assert not (run / "work.json").exists()


def test_the_record_of_going_on_holds_no_secret() -> None:
    record = record_of([], [], ["x", "sweep", "--otlp-endpoint", "http://me:hush@collector:4318"])
    assert "hush" not in str(record)
    assert "collector" in str(record)


def test_a_run_inside_an_outside_launchers_ranks_does_not_go_on(run: Path) -> None:
    update_manifest(run, spec=open_run(run).manifest["spec"] | {"launcher": "external"}, outcome="failed")
    with pytest.raises(SpecError, match="somebody else"):
        resume(unfinished(run), lambda event: None)
    assert open_run(run).manifest["outcome"] == "failed"
    with pytest.raises(SpecError, match="somebody else"):  # it would start the command that runs, again and again
        run_launch(run, 0, 2, lambda event: None, Program(launcher="external"))


def test_the_ranks_are_told_what_to_measure_and_refuse_what_is_anothers(run: Path) -> None:
    assert read_work(run, 0) is None
    write_work(run, 0, {3, 1})
    assert read_work(run, 0) == [1, 3]
    with pytest.raises(StoreError, match="launch 0"):
        read_work(run, 1)
    remove_work(run)
    assert not (run / "work.json").exists()


# ---- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--retry", "failed"], "--retry is for a run that goes on: add --resume RUN"),
        (["--force"], "--force is for a run that goes on"),
        (["--resume", "nowhere"], "nowhere does not exist"),
        (["--resume", "{run}", "--out", "x"], "--out and --resume"),
        (["--resume", "{run}", "--retry", "slow"], "--retry 'slow'"),
        (["--resume", "{run}", "--seed", "1"], "spec.seed: 7 → 1"),
        (["--resume", "{run}", "--point-timeout", "soon"], "--point-timeout: duration 'soon'"),
        (["--point-timeout", "10ms"], "--point-timeout: 0.01 s is not longer than the 0.5 s"),
        (["--launch-timeout", "0"], "--launch-timeout"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    run: Path, tmp_path: Path, args: list[str], message: str, monkeypatch: Any, capsys: Any
) -> None:
    from commbench.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["commbench", "sweep", *(a.format(run=run) for a in args)])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_dry_run_shows_what_is_left(run: Path, monkeypatch: Any, capsys: Any) -> None:
    from commbench.cli import main

    measured(run, 0, range(10))
    measured(run, 1, range(9))
    monkeypatch.setattr(sys, "argv", ["commbench", "sweep", "--resume", str(run), "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, _ = capsys.readouterr()
    assert ended.value.code == 0
    last = dict(shuffled(Plan.load(run).points, 7, 1))[9]
    assert out == f"launch 1: {last.label()}\n1 points of {run} are left to measure\n"
