"""``commbench regret`` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripted import one_shot_and_two_shot, rows, write_run

KIB = 1 << 10
Commbench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Today's policy takes shm, which is one-shot up to 32 KiB; one-shot is the faster up to 256 KiB."""
    curves = one_shot_and_two_shot(256 * KIB)
    found = rows(curves, lambda size: "shm", cv=0.01)
    two_shot = {(r["launch"], r["size_bytes"]): r for r in found if r["backend_requested"] == "shm_twoshot"}
    for row in found:
        if row["backend_picked"] == "shm" and row["size_bytes"] > 32 * KIB:
            row["latency_median_s"] = two_shot[row["launch"], row["size_bytes"]]["latency_median_s"]
    return write_run(tmp_path / "run", found)


def test_picks_come_worst_first_with_dead_zones_and_exit_1(commbench: Commbench, slow: Path) -> None:
    code, out, _ = commbench("regret", str(slow))
    assert code == 1
    lines = out.splitlines()
    first = next(line for line in lines if "shm_twoshot" in line)
    assert "45.2 KiB" in first  # the size after 32 KiB
    assert "dead zone: all_reduce float32 2 ranks, 45.2 KiB to " in out
    assert "noise: one kernel measured twice" in out


def test_one_json_document_and_nothing_else(commbench: Commbench, slow: Path) -> None:
    code, out, _ = commbench("regret", str(slow), "--json")
    document = json.loads(out)
    assert code == 1
    assert document["points"][0]["regret"] > 0.2
    assert document["points"][0]["dead"] is True
    assert document["dead_zones"][0]["picked"] == "shm_twoshot"


def test_a_good_policy_has_no_dead_zone_and_exit_0(commbench: Commbench, tmp_path: Path) -> None:
    curves = one_shot_and_two_shot(32 * KIB)
    picks = lambda size: "shm_oneshot" if size <= 32 * KIB else "shm_twoshot"  # noqa: E731
    code, out, _ = commbench("regret", str(write_run(tmp_path / "run", rows(curves, picks))))
    assert code == 0
    assert "0 dead zones" in out


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (lambda r: r["backend_requested"] == "auto", "no forced point"),
        (lambda r: r["backend_requested"] != "auto", "no auto"),
    ],
)
def test_a_run_with_half_of_what_is_needed_is_one_line_and_exit_2(
    commbench: Commbench, tmp_path: Path, keep: Callable[[dict[str, object]], bool], message: str
) -> None:
    found = [r for r in rows(one_shot_and_two_shot(1e5), lambda size: "shm_oneshot") if keep(r)]
    code, out, err = commbench("regret", str(write_run(tmp_path / "run", found)))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_path_that_is_no_run_is_exit_2(commbench: Commbench, tmp_path: Path) -> None:
    code, _, err = commbench("regret", str(tmp_path / "none"))
    assert code == 2
    assert "does not exist" in err


def test_a_run_is_read_by_the_split_that_it_was_measured_with(commbench: Commbench, tmp_path: Path) -> None:
    """The shipped threshold may have changed since: a pick of shm at 4 KiB was two-shot if the run says so."""
    curves = one_shot_and_two_shot(64 * KIB)
    found = rows(curves, lambda size: "shm_twoshot", sizes=[4 * KIB, 8 * KIB], cv=0.01)
    for row in found:
        if row["backend_requested"] == "auto":
            row["backend_picked"] = "shm"
    run = write_run(tmp_path / "run", found)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["launches"] = [{"launch": 0, "splits": {"commbench": {"shm": 2 * KIB}}}]
    (run / "manifest.json").write_text(json.dumps(manifest))
    _, out, _ = commbench("regret", str(run), "--json")
    assert {p["kernel"] for p in json.loads(out)["points"]} == {"shm_twoshot"}
