"""``commbench gate`` on runs and histories with scripted latencies: exit codes, refusals, outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from commbench.types import Point
from tests.nights import DAY_S, FINGERPRINT, START_S, points_of, write_run

POINTS = points_of(collectives=("all_reduce",), sizes=(64, 4096, 65536))
Run = Callable[..., tuple[int, str, str]]


def slow_shm(point: Point) -> float:
    return 1.2 if point.backend == "shm" and point.size_bytes <= 4096 else 1.0


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_run(tmp_path / "base", POINTS, seed=1)


def judged(commbench: Run, base: Path, cand: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = commbench("gate", "--baseline", str(base), "--candidate", str(cand), "--json", *more)
    return code, json.loads(out)


def test_the_same_speed_is_green(commbench: Run, base: Path, tmp_path: Path) -> None:
    code, document = judged(commbench, base, write_run(tmp_path / "cand", POINTS, seed=2))
    assert (code, document["status"]) == (0, "pass")
    assert document["rule"]["margin"] == 0.01


def test_a_slower_family_is_red_and_no_other(commbench: Run, base: Path, tmp_path: Path) -> None:
    code, document = judged(commbench, base, write_run(tmp_path / "cand", POINTS, seed=2, slower=slow_shm))
    assert (code, document["status"]) == (1, "regression")
    red = [v["family"] for v in document["verdicts"] if v["status"] == "regression"]
    assert red == ["all_reduce · shm · ≤4 KiB"]


def test_a_night_whose_canary_moved_is_inconclusive(commbench: Run, base: Path, tmp_path: Path) -> None:
    cand = write_run(tmp_path / "cand", POINTS, seed=2, slower=lambda p: 1.3, canary_factor=1.3)
    code, document = judged(commbench, base, cand)
    assert code == 3
    assert "the machine changed: canary" in document["reason"]


def test_an_empty_candidate_is_inconclusive(commbench: Run, base: Path, tmp_path: Path) -> None:
    cand = write_run(tmp_path / "cand", POINTS, rows=lambda p, k, v: None)
    code, document = judged(commbench, base, cand)
    assert code == 3
    assert "0 of 60 planned rows" in document["reason"]


def test_an_interrupted_candidate_is_inconclusive(commbench: Run, base: Path, tmp_path: Path) -> None:
    cand = write_run(tmp_path / "cand", POINTS, seed=2, outcome="interrupted")
    code, document = judged(commbench, base, cand)
    assert code == 3
    assert "interrupted, not complete" in document["reason"]


def test_a_partial_candidate_names_the_points_that_are_missing(commbench: Run, base: Path, tmp_path: Path) -> None:
    cand = write_run(tmp_path / "cand", POINTS, seed=2, rows=lambda p, k, v: None if p == POINTS[0] else v)
    code, document = judged(commbench, base, cand)
    assert code == 3
    reasons = " ".join(v["reason"] for v in document["verdicts"])
    assert "missing in the candidate: all_reduce float32 64 B [torch_dist]" in reasons


def test_a_run_against_itself_is_refused(commbench: Run, base: Path) -> None:
    code, _, err = commbench("gate", "--baseline", str(base), "--candidate", str(base))
    assert (code, "the same run" in err) == (2, True)


def test_another_machine_is_refused_and_force_marks_the_result(commbench: Run, base: Path, tmp_path: Path) -> None:
    other = {**FINGERPRINT, "cpu": {**FINGERPRINT["cpu"], "model": "Other"}}
    cand = write_run(tmp_path / "cand", POINTS, seed=2, fingerprint=other)
    code, _, err = commbench("gate", "--baseline", str(base), "--candidate", str(cand))
    assert code == 2
    assert "cpu.model: Test CPU → Other" in err
    code, document = judged(commbench, base, cand, "--force")
    assert code == 0
    assert document["forced"] == ["cpu.model: Test CPU → Other"]


def test_a_virtual_machine_gets_the_wider_margin(commbench: Run, tmp_path: Path) -> None:
    shared = {**FINGERPRINT, "host": {**FINGERPRINT["host"], "virtual_machine": "QEMU"}}
    runs = [write_run(tmp_path / f"r{s}", POINTS, seed=s, fingerprint=shared) for s in (1, 2)]
    assert judged(commbench, *runs)[1]["rule"]["margin"] == 0.03
    assert judged(commbench, *runs, "--margin", "2%")[1]["rule"]["margin"] == 0.02


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name both sides"),
        (("--baseline", "x"), "name both sides"),
        (("--ab", "quick", "--candidate", "x"), "leave --baseline and --candidate out"),
        (("--baseline", "x", "--candidate", "y", "--base-env", "A=1"), "--base-env: only with --ab"),
        (("--ab", "quick", "--pairs", "3"), "--pairs 3: must be 5 to 1000"),
        (("--ab", "quick", "--base-env", "novalue"), "write NAME=value"),
        (("--ab", "quick", "--cand-python", "/nowhere/python"), "does not run"),
        (("--ab", "nosuchsweep"), "unknown sweep 'nosuchsweep'"),
        (("--baseline", "history", "--candidate", "x", "--nights", "1"), "--nights 1"),
        (("--baseline", "x", "--candidate", "y", "--add"), "--add: only with --baseline history"),
    ],
)
def test_bad_flags_end_with_one_line_and_exit_code_two(commbench: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = commbench("gate", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_margins_and_levels_out_of_range_are_refused(commbench: Run, base: Path, tmp_path: Path) -> None:
    cand = write_run(tmp_path / "cand", POINTS, seed=2)
    for flag, value in (("--margin", "-1%"), ("--alpha", "2"), ("--fewest", "1"), ("--sensitivity", "nan")):
        code, _, err = commbench("gate", "--baseline", str(base), "--candidate", str(cand), flag, value)
        assert code == 2, flag
        assert len(err.strip().splitlines()) == 1


def test_every_output_is_written_and_readable(commbench: Run, base: Path, tmp_path: Path) -> None:
    cand = write_run(tmp_path / "cand", POINTS, seed=2, slower=slow_shm)
    summary, junit = tmp_path / "summary.md", tmp_path / "junit.xml"
    summary.write_text("earlier steps\n")
    code, out, _ = commbench(
        "gate", "--baseline", str(base), "--candidate", str(cand), "--out", str(tmp_path / "gate"),
        "--markdown", str(summary), "--junit", str(junit), "--annotations",
    )  # fmt: skip
    assert code == 1
    assert "::error title=all_reduce · shm · ≤4 KiB::slower" in out
    assert summary.read_text().startswith("earlier steps\n## 🔴 commbench gate: regression")
    assert ElementTree.parse(junit).find(".//failure") is not None
    names = {p.name for p in (tmp_path / "gate").iterdir()}
    assert names >= {"verdict.json", "summary.md", "junit.xml", "annotations.txt", "smaller-is-better.json",
                     "metrics.txt", "benchmark-baseline.json", "benchmark-candidate.json", "families.png"}  # fmt: skip
    assert json.loads((tmp_path / "gate" / "verdict.json").read_text())["exit_code"] == 1


@pytest.mark.parametrize("option", ["--markdown", "--junit"])
def test_an_output_that_meets_a_full_disk_is_named(commbench: Run, base: Path, tmp_path: Path, option: str) -> None:
    cand = write_run(tmp_path / "cand", POINTS, seed=2)
    code, _, err = commbench("gate", "--baseline", str(base), "--candidate", str(cand), option, "/dev/full")
    assert (code, err) == (2, f"error: {option} /dev/full cannot be written: No space left on device\n")


# ---- history --------------------------------------------------------------------------------------------------------


@pytest.fixture
def history(commbench: Run, tmp_path: Path) -> Path:
    """Nine nights of two launches."""
    for day in range(9):
        run = write_run(tmp_path / f"night{day}", POINTS, launches=2, seed=10 + day, started_s=START_S + day * DAY_S)
        assert commbench("history", "add", str(run), "--history", str(tmp_path / "history"))[0] == 0
    return tmp_path / "history"


def tonight(tmp_path: Path, name: str, **options: Any) -> Path:
    return write_run(tmp_path / name, POINTS, launches=8, started_s=START_S + 20 * DAY_S, **options)


def against(commbench: Run, history: Path, cand: Path, *more: str) -> tuple[int, dict[str, Any]]:
    arguments = ("--baseline", "history", "--history", str(history), "--candidate", str(cand), "--json", *more)
    code, out, _ = commbench("gate", *arguments)
    return code, json.loads(out)


def test_nights_make_a_baseline(commbench: Run, history: Path, tmp_path: Path) -> None:
    assert against(commbench, history, tonight(tmp_path, "usual", seed=40))[0] == 0
    code, document = against(commbench, history, tonight(tmp_path, "slow", seed=41, slower=slow_shm))
    assert code == 1
    assert [v["family"] for v in document["verdicts"] if v["status"] == "regression"] == ["all_reduce · shm · ≤4 KiB"]
    noisy = tonight(tmp_path, "noisy", seed=42, slower=lambda p: 1.5, canary_factor=1.5)
    assert against(commbench, history, noisy)[0] == 3


def test_skipped_files_of_the_history_are_named_and_counted(commbench: Run, history: Path, tmp_path: Path) -> None:
    (history / "broken.parquet").write_text("junk")
    code, document = against(commbench, history, tonight(tmp_path, "usual", seed=40))
    assert code == 0
    assert any("history: skipped broken.parquet" in note for note in document["notes"])


def test_nights_of_another_machine_are_refused_or_left_out(commbench: Run, history: Path, tmp_path: Path) -> None:
    other = {**FINGERPRINT, "cpu": {**FINGERPRINT["cpu"], "model": "Other"}}
    cand = tonight(tmp_path, "other", seed=40, fingerprint=other)
    code, _, err = commbench(
        "gate", "--baseline", "history", "--history", str(history), "--candidate", str(cand)
    )  # fmt: skip
    assert (code, "cpu.model" in err) == (2, True)
    commbench("history", "add", str(cand), "--history", str(history))
    late = write_run(tmp_path / "late", POINTS, launches=8, seed=43, started_s=START_S + 30 * DAY_S)
    code, document = against(commbench, history, late)
    assert code == 0
    assert any("left out 1 nights of another kind" in note for note in document["notes"])


def test_a_candidate_that_is_in_the_history_is_not_its_own_baseline(
    commbench: Run, history: Path, tmp_path: Path
) -> None:
    cand = tonight(tmp_path, "slow", seed=41, slower=slow_shm)
    commbench("history", "add", str(cand), "--history", str(history))
    assert against(commbench, history, cand)[0] == 1


def test_good_nights_are_kept_and_bad_ones_are_not(commbench: Run, history: Path, tmp_path: Path) -> None:
    for name, code, options in (
        ("usual", 0, {"seed": 40}),
        ("slow", 1, {"seed": 41, "slower": slow_shm}),
        ("noisy", 3, {"seed": 42, "canary_factor": 1.5}),
    ):
        assert against(commbench, history, tonight(tmp_path, name, **options), "--add")[0] == code
        assert (history / f"{name}.parquet").exists() == (code == 0)


def test_a_history_grows_from_nothing_and_is_inconclusive_until_it_has_eight_nights(
    commbench: Run, tmp_path: Path
) -> None:
    codes = []
    for day in range(9):
        run = write_run(tmp_path / f"n{day}", POINTS, launches=8, seed=60 + day, started_s=START_S + day * DAY_S)
        code, document = against(commbench, tmp_path / "new", run, "--add")
        codes.append(code)
        if day < 8:
            assert f"the history has {day} nights to judge by, 8 are needed" in document["reason"]
    assert codes == [3] * 8 + [0]


def test_an_accepted_slowdown_starts_a_new_baseline(commbench: Run, history: Path, tmp_path: Path) -> None:
    cand = tonight(tmp_path, "slow", seed=41, slower=slow_shm)
    code, out, _ = commbench("history", "add", str(cand), "--history", str(history), "--accept", "new checks")
    assert (code, out.startswith("added")) == (0, True)
    late = write_run(tmp_path / "late", POINTS, launches=8, seed=43, slower=slow_shm, started_s=START_S + 30 * DAY_S)
    code, document = against(commbench, history, late)
    assert code == 3
    assert "the history has 1 nights" in document["reason"]
    assert any("new checks" in note for note in document["notes"])


def test_a_new_level_in_the_history_is_told_as_advice(commbench: Run, tmp_path: Path) -> None:
    for day in range(16):
        run = write_run(
            tmp_path / f"n{day:02}", POINTS, launches=2, seed=60 + day, started_s=START_S + day * DAY_S,
            slower=slow_shm if day >= 8 else lambda p: 1.0,
        )  # fmt: skip
        commbench("history", "add", str(run), "--history", str(tmp_path / "h"))
    _, document = against(commbench, tmp_path / "h", tonight(tmp_path, "now", seed=90, slower=slow_shm))
    (advice,) = [note for note in document["notes"] if note.startswith("advisory")]
    assert "all_reduce · shm · ≤4 KiB" in advice
    assert "from n08 on" in advice


# ---- A/B ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces launching by scripted runs; what each stage was asked to measure is kept in ``stages``."""
    from commbench.harness import ab, ab_sides

    state: dict[str, Any] = {"factor": {"screen": 1.0, "confirm": 1.0}, "stages": []}

    def run_stage(directory, sides, points, spec, settings, pairs, on_event, fingerprints):  # type: ignore[no-untyped-def]
        from commbench.store.run import open_run

        state["stages"].append((directory.name, {s: len(p) for s, p in points.items()}))
        runs = {}
        for side in (ab.BASE, ab.CAND):
            factor = state["factor"][directory.name] if side == ab.CAND else 1.0
            path = directory / side
            seed = len(state["stages"]) * 10 + (side == ab.CAND)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_run(path, points[side], launches=pairs, seed=seed, slower=lambda p, f=factor: f)
            runs[side] = open_run(path)
        return runs

    monkeypatch.setattr(ab, "run_stage", run_stage)
    monkeypatch.setattr(ab_sides, "side_fingerprint", lambda side, device: dict(FINGERPRINT))
    return state


def ab_spec(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text('[sweep]\ncollectives = ["all_reduce"]\ndtypes = ["float32"]\nsizes = "64,4KiB"\n'
                    'backends = ["torch_dist", "fake"]\n[run]\ndevice = "cpu"\n')  # fmt: skip
    return str(path)


def ab_gate(commbench: Run, tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    code, out, err = commbench("gate", "--ab", ab_spec(tmp_path), "--out", str(tmp_path / "ab"), "--json", *more)
    assert out, err
    return code, json.loads(out)


def test_ab_without_suspects_is_green_after_one_stage(commbench: Run, tmp_path: Path, scripted: dict[str, Any]) -> None:
    code, document = ab_gate(commbench, tmp_path)
    assert (code, document["method"]) == (0, "A/B, interleaved")
    assert "both sides run the same commbench in the same environment: what differs is chance" in document["notes"]
    assert [name for name, _ in scripted["stages"]] == ["screen"]


def test_ab_launches_suspects_again_and_is_red_if_they_are_slow_again(
    commbench: Run, tmp_path: Path, scripted: dict[str, Any]
) -> None:
    scripted["factor"] = {"screen": 1.2, "confirm": 1.2}
    code, document = ab_gate(commbench, tmp_path)
    assert code == 1
    assert [name for name, _ in scripted["stages"]] == ["screen", "confirm"]
    assert {v["status"] for v in document["verdicts"]} == {"regression"}


def test_ab_is_green_if_suspects_are_not_slow_again(commbench: Run, tmp_path: Path, scripted: dict[str, Any]) -> None:
    scripted["factor"] = {"screen": 1.2, "confirm": 1.0}
    code, document = ab_gate(commbench, tmp_path)
    assert code == 0
    assert "not confirmed on fresh launches" in document["verdicts"][0]["reason"]


def test_ab_of_two_policies_lines_points_up_by_what_they_are(
    commbench: Run, tmp_path: Path, scripted: dict[str, Any]
) -> None:
    scripted["factor"] = {"screen": 1.2, "confirm": 1.2}
    code, document = ab_gate(commbench, tmp_path, "--base-policy", "commbench", "--cand-policy", "sglang-0.5.3")
    assert code == 1
    assert all(v["compared"] == v["points"] for v in document["verdicts"])
