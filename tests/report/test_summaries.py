from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from commbench.errors import StoreError
from commbench.report.summary import (
    Summary,
    checked_text,
    decision_of,
    gather_sizes,
    label,
    noise_marks,
    records,
    summarise,
    to_json,
)
from commbench.store.run import PLAN, PointLog, open_run, row_of
from commbench.types import COLLECTIVES, Point
from tests.runs import grid

Build = Callable[..., Path]


def summary_of(path: Path) -> Summary:
    return summarise(open_run(path))


def test_a_good_run_says_what_and_where(build_run: Build) -> None:
    found = summary_of(build_run(grid(sizes=[8, 64], world_size=2)))
    assert (found.host, found.ranks_text, found.device, found.launches_text) == (
        "testhost",
        "2 ranks",
        "cpu",
        "1 launch",
    )
    assert found.command == "commbench sweep --tp 2"
    assert found.started == "2026-11-30 09:00:00 UTC"
    assert (found.verdict, found.level, found.problems, found.marks) == ("2 points: all ok", "good", [], [])


def test_more_ranks_than_cores_are_marked(build_run: Build) -> None:
    found = summary_of(build_run(grid(sizes=[64], world_size=8), cores=2))
    assert found.marks == ["8 ranks on 2 cores: oversubscribed"]


def test_ranks_that_share_a_device_are_marked(build_run: Build) -> None:
    found = summary_of(build_run(grid(), changes={"shared_device": True}))
    assert found.marks == ["ranks share a device: not comparable with one rank per device"]


def test_every_problem_is_named_worst_first_with_its_reason(build_run: Build) -> None:
    points = grid(sizes=[8, 64, 512, 4096])
    problems = {
        points[0].point_id: ("unsteady", "no steady state within 8 iterations"),
        points[1].point_id: ("wrong", "3 of 16 elements differ"),
        points[2].point_id: ("unsteady", "no steady state within 12 iterations"),
    }
    found = summary_of(build_run(points, problems=problems))
    assert [p.line for p in found.problems] == [
        "wrong: all_reduce float32 [auto] 64 B — 3 of 16 elements differ",
        "unsteady: all_reduce float32 [auto] 8 B, 512 B — no steady state within 8–12 iterations",
    ]
    assert found.verdict == "4 points: 1 ok, 1 wrong, 2 unsteady"
    assert found.level == "bad"


def test_faults_that_differ_in_numbers_are_told_apart(build_run: Build) -> None:
    points = grid(sizes=[8, 64])
    problems = {p.point_id: ("timeout", f"rank {i} did not answer") for i, p in enumerate(points)}
    found = summary_of(build_run(points, problems=problems))
    assert [p.reason for p in found.problems] == ["rank 0 did not answer", "rank 1 did not answer"]


def test_unsteady_points_deserve_a_look_but_are_no_fault(build_run: Build) -> None:
    points = grid(sizes=[8, 64])
    assert summary_of(build_run(points, problems={points[0].point_id: ("unsteady", "why")})).level == "note"


def test_skipped_points_leave_a_run_good(build_run: Build) -> None:
    points = grid(sizes=[8, 64])
    found = summary_of(build_run(points, problems={points[0].point_id: ("skipped", "shm has no float16")}))
    assert found.level == "good"
    assert found.problems[0].reason == "shm has no float16"


def test_points_that_were_never_reached_are_counted_and_named(build_run: Build) -> None:
    points = grid(sizes=[8, 64, 512])
    found = summary_of(build_run(points, unmeasured={points[2].point_id}, outcome="interrupted"))
    assert found.verdict == "2 points: all ok; 1 of 3 planned not measured; the run was interrupted"
    assert found.unmeasured == ("all_reduce float32 512 B [auto]",)
    assert found.level == "bad"


def test_a_run_that_ended_early_is_never_good_even_if_each_point_has_a_result(build_run: Build) -> None:
    found = summary_of(build_run(grid(sizes=[8]), launches=2, outcome="interrupted"))
    assert found.verdict == "1 point: ok; the run was interrupted"
    assert found.level == "note"


def test_a_run_without_any_point_is_told_as_such(build_run: Build) -> None:
    points = grid(sizes=[8])
    found = summary_of(build_run(points, unmeasured={points[0].point_id}, finished=False))
    assert found.verdict == "no point was measured; 1 of 1 planned not measured; the run is not over"
    assert (found.ranks, found.problems) == ([2], [])


def test_a_run_that_goes_on_can_be_read(build_run: Build) -> None:
    assert len(summary_of(build_run(grid(), finished=False)).points) == 4


def test_a_row_with_nothing_but_its_fate_can_be_read(build_run: Build) -> None:
    points = grid(sizes=[8, 64])
    path = build_run(points, unmeasured={points[1].point_id})
    log = PointLog(path)
    values = {"run_id": "run-a", "launch": 0, "order": 1, "status": "failed", "reason": "rank 1 died: SIGSEGV"}
    log.append(row_of(points[1], values))
    log.close()
    found = summary_of(path)
    assert found.problems[0].line == "failed: all_reduce float32 [auto] 64 B — rank 1 died: SIGSEGV"
    row = records(found.points)[1]
    assert (row["checked"], row["decision"], row["latency_median_s"]) == (None, None, None)
    assert checked_text(row) == "no"


def test_damaged_lines_are_passed_on(build_run: Build) -> None:
    path = build_run(grid())
    with (path / "points.jsonl").open("a") as stream:
        stream.write("{torn")
    assert summary_of(path).damaged == ["points.jsonl line 5 is not readable and was skipped"]


def test_a_plan_that_cannot_be_read_is_an_error_that_names_it(build_run: Build) -> None:
    path = build_run(grid())
    (path / PLAN).write_text("{}")
    with pytest.raises(StoreError, match=PLAN):
        summary_of(path)


def test_a_run_without_a_plan_claims_nothing_about_missing_points(build_run: Build) -> None:
    path = build_run(grid())
    (path / PLAN).unlink()
    assert summary_of(path).planned is None


def test_points_measured_in_noise_and_without_the_precision_asked_for_are_counted(build_run: Build) -> None:
    noise = json.dumps({"marks": ["other processes used 50.0% of the CPU time"]})
    found = summary_of(build_run(grid(sizes=[8, 64]), launches=2, changes={"noise": noise, "target_reached": False}))
    assert (found.noisy, found.imprecise) == (2, 2)


def test_points_stand_in_the_customary_order(build_run: Build) -> None:
    points = grid(("barrier", "all_gather", "all_reduce"), ("bfloat16", "float32"), [64, 8], ("shm", "auto"))
    found = summary_of(build_run(points)).points
    assert list(dict.fromkeys(found["collective"])) == ["all_reduce", "all_gather", "barrier"]
    assert list(found["dtype"][:4]) == ["float32"] * 4
    assert list(found["size_bytes"][:4]) == [8, 8, 64, 64]
    assert list(found["backend_requested"][:2]) == ["auto", "shm"]


def test_labels_say_what_the_point_itself_would(build_run: Build) -> None:
    points = [*grid(COLLECTIVES, ("float16",), [64]), Point("all_reduce", "max", "int8", 64, 2, layout="strided")]
    found = summary_of(build_run(points))
    assert {label(row) for row in records(found.points)} == {p.label() for p in points}


def test_labels_that_differ_in_size_are_gathered() -> None:
    texts = ["all_reduce float32 8 B [auto]", "barrier [auto]", "all_reduce float32 1.5 MiB [auto]"]
    assert gather_sizes(texts) == "all_reduce float32 [auto] 8 B, 1.5 MiB; barrier [auto]"


@pytest.mark.parametrize("text", [None, "", "{", "3", "null"])
def test_a_decision_that_is_not_there_is_none(text: str | None) -> None:
    assert decision_of({"decision": text}) is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"marks": 3}', "{}"])
def test_noise_that_says_nothing_marks_nothing(text: str | None) -> None:
    assert noise_marks(text) == []


def test_the_json_document_is_plain_complete_and_in_units_by_name(build_run: Build) -> None:
    points = grid(("all_reduce", "barrier"), sizes=[8, 64])
    path = build_run(points, launches=2, problems={points[0].point_id: ("failed", "boom")})
    document = json.loads(json.dumps(to_json(open_run(path)), allow_nan=False))
    assert document["counts"] == {"ok": 2, "failed": 1}
    assert document["problems"] == [
        {"status": "failed", "reason": "boom", "points": [points[0].label()],
         "point_ids": [points[0].point_id]}
    ]  # fmt: skip
    assert (document["host"], document["launches"], document["good"]) == ("testhost", 2, False)
    failed, ok, barrier = document["points"]
    assert (failed["latency_median_s"], failed["status"]) == (None, "failed")
    assert ok["decision"]["picked"] == "shm"
    assert (ok["size_bytes"], ok["checked"], ok["launches"]) == (64, True, 2)
    assert 1e-6 < ok["latency_ci_low_s"] <= ok["latency_median_s"] <= ok["latency_ci_high_s"] < 2e-6
    assert barrier["busbw_gb_per_s"] is None
