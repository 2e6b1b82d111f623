"""The page's section on regret."""

from __future__ import annotations

from pathlib import Path

from commbench.report import write_report
from tests.scripted import one_shot_and_two_shot, rows, write_run

KIB = 1 << 10


def test_the_page_lists_picks_worst_first_and_marks_dead_zones(tmp_path: Path) -> None:
    picks = lambda size: "shm_oneshot" if size <= 4 * KIB else "shm_twoshot"  # noqa: E731
    found = rows(one_shot_and_two_shot(64 * KIB), picks, cv=0.01, launches=4)
    page = write_report([write_run(tmp_path / "run", found)]).read_text()
    section = page[page.index('id="regret"') : page.index('id="points"')]
    assert "Dead zone: all_reduce float32 2 ranks, 5.66 KiB to" in section
    assert "shm_twoshot is taken, shm_oneshot is faster" in section
    assert section.index('class="problem"') < section.index("0.0 %")


def test_a_run_without_forced_points_has_no_such_section(tmp_path: Path) -> None:
    found = rows(one_shot_and_two_shot(1e5), lambda size: "shm_oneshot")
    found = [row for row in found if row["backend_requested"] == "auto"]
    assert 'id="regret"' not in write_report([write_run(tmp_path / "run", found)]).read_text()


def test_a_policy_that_is_gone_is_said(tmp_path: Path) -> None:
    found = rows(one_shot_and_two_shot(1e5), lambda size: "shm_oneshot")
    for row in found:
        row["policy"] = "gone.toml"
    page = write_report([write_run(tmp_path / "run", found, policy=["gone.toml"])]).read_text()
    assert "regret cannot be told" in page
