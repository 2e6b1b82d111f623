"""``commbench history`` on runs with scripted latencies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nights import DAY_S, FINGERPRINT, START_S, points_of, write_run

POINTS = points_of(collectives=("all_reduce",), sizes=(64, 65536))
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def history(commbench: Run, tmp_path: Path) -> Path:
    """Twelve nights: torch changes at night 4, shm is slower from night 6 on."""
    for day in range(12):
        newer = {**FINGERPRINT, "versions": {**FINGERPRINT["versions"], "torch": "2.7.0"}}
        run = write_run(
            tmp_path / f"night{day:02}", POINTS, launches=2, seed=day, started_s=START_S + day * DAY_S, cv=0.005,
            slower=lambda p, day=day: 1.3 if day >= 6 and p.backend == "shm" else 1.0,
            fingerprint=FINGERPRINT if day < 4 else newer,
        )  # fmt: skip
        code, out, _ = commbench("history", "add", str(run), "--history", str(tmp_path / "h"))
        assert (code, out.startswith("added")) == (0, True)
    return tmp_path / "h"


def test_nights_are_listed_with_what_changed_in_the_environment(commbench: Run, history: Path) -> None:
    (history / "junk.parquet").write_text("junk")
    code, out, err = commbench("history", "list", "--history", str(history))
    assert code == 0
    assert "versions.torch: 2.6.0 → 2.7.0" in " ".join(out.split())
    assert err.startswith("skipped 1 files:\n  junk.parquet")
    nights = json.loads(commbench("history", "list", "--history", str(history), "--json")[1])["nights"]
    assert [bool(n["environment_change"]) for n in nights] == [i == 4 for i in range(12)]


def test_a_point_is_shown_night_by_night_with_its_new_level(commbench: Run, history: Path) -> None:
    code, out, _ = commbench("history", "show", "64 B shm", "--history", str(history), "--json")
    assert code == 0
    document = json.loads(out)
    assert document["label"] == "all_reduce float32 64 B [shm]"
    (change,) = [n for n in document["nights"] if n["change"] is not None]
    assert change["run_id"] == "night06"
    assert change["change"] == pytest.approx(1.3, rel=0.03)
    text = " ".join(commbench("history", "show", "64 B shm", "--history", str(history))[1].split())
    assert "new level +" in text


def test_a_point_that_a_night_lacks_is_shown_as_absent(commbench: Run, history: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "night12", POINTS[1:], launches=2, seed=12, started_s=START_S + 12 * DAY_S)
    commbench("history", "add", str(run), "--history", str(history))
    document = json.loads(commbench("history", "show", POINTS[0].point_id, "--history", str(history), "--json")[1])
    assert document["nights"][-1]["latency_s"] is None
    assert document["nights"][-2]["latency_s"] > 0


def test_words_that_name_several_points_are_refused_with_their_names(commbench: Run, history: Path) -> None:
    code, _, err = commbench("history", "show", "shm", "--history", str(history))
    assert code == 2
    assert "names 2 points: all_reduce float32 64" in err


def test_points_are_listed_without_a_name(commbench: Run, history: Path) -> None:
    code, out, _ = commbench("history", "show", "--history", str(history))
    assert code == 0
    assert len(out.splitlines()) == len(POINTS)
    assert f"{POINTS[0].point_id}  all_reduce float32 64 B [torch_dist]" in out


def test_trends_are_drawn_with_marks_for_environment_and_changes(commbench: Run, history: Path, tmp_path: Path) -> None:
    code, out, _ = commbench("history", "plot", "--history", str(history), "--out", str(tmp_path / "t.png"))
    assert code == 0
    assert out.startswith(str(tmp_path / "t.png"))
    svg = (tmp_path / "t.svg").read_text()
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "versions.torch: 2.6.0" in svg or svg.count("<!--") > 10  # text is drawn as paths, named in comments
    assert "<!-- Latency over nights -->" in svg
    assert any(line.strip().startswith("<!--  +3") for line in svg.splitlines())


def test_a_run_that_is_not_complete_is_added_only_by_force(commbench: Run, tmp_path: Path) -> None:
    run = write_run(tmp_path / "part", POINTS, launches=2, outcome="interrupted")
    code, _, err = commbench("history", "add", str(run), "--history", str(tmp_path / "h"))
    assert (code, "interrupted, not complete" in err) == (2, True)
    assert commbench("history", "add", str(run), "--history", str(tmp_path / "h"), "--force")[0] == 0


@pytest.mark.parametrize("command", ["list", "show", "plot"])
def test_a_history_that_is_not_there_is_one_clear_line(commbench: Run, tmp_path: Path, command: str) -> None:
    code, _, err = commbench("history", command, "--history", str(tmp_path / "none"))
    assert (code, "does not exist" in err, len(err.splitlines())) == (2, True, 1)


def test_an_empty_history_has_nothing_to_draw(commbench: Run, tmp_path: Path) -> None:
    (tmp_path / "h").mkdir()
    code, _, err = commbench("history", "plot", "--history", str(tmp_path / "h"))
    assert (code, "no latencies to draw" in err) == (2, True)
    assert commbench("history", "list", "--history", str(tmp_path / "h"))[0] == 0
