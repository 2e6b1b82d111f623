"""Temporary folders of commands: gone with them, or with a later command where they were killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from commbench.harness.supervision.scratch import remove_stale_folders, scratch_folder

KILLED = """
import os, signal, sys, tempfile
from commbench.harness.supervision.scratch import scratch_folder
tempfile.tempdir = sys.argv[1]
with scratch_folder(sys.argv[2]) as folder:
    (folder / "logs").mkdir()
    (folder / "logs" / "launch-0.rank-1.log").write_text("words")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_its_users_alone_and_goes_at_the_end_with_what_is_in_it(temporary: Path) -> None:
    with scratch_folder("tune") as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "tuned.toml").write_text("x")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("what", ["calibrate", "node", "rank", "tune"])
def test_what_a_killed_command_left_goes_with_the_next_and_what_a_living_one_holds_stays(
    what: str, temporary: Path
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(temporary), what])
    assert killed.returncode == -signal.SIGKILL
    (left,) = temporary.iterdir()
    assert (left / "logs" / "launch-0.rank-1.log").exists()
    with scratch_folder("rank") as mine:
        assert list(temporary.iterdir()) == [mine]
        assert remove_stale_folders() == []
        assert mine.is_dir()


def test_nothing_but_folders_of_our_own_names_is_removed(temporary: Path) -> None:
    kept = [temporary / name for name in ("commbench-notes-1", "commbench-node-", "other", "commbench-rank-file")]
    for path in kept[:3]:
        path.mkdir()
    kept[3].write_text("a file")
    elsewhere = temporary / "other" / "kept"
    elsewhere.mkdir()
    link = temporary / "commbench-node-link"
    link.symlink_to(elsewhere, target_is_directory=True)
    assert remove_stale_folders() == []
    assert elsewhere.is_dir()
    assert all(path.exists() for path in [*kept, link])


def test_a_folder_that_another_command_takes_for_stale_before_it_is_held_is_made_anew(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp
    removed: list[Path] = []

    def made_and_removed(**named: Any) -> str:
        path = make(**named)
        if not removed:
            removed.extend(remove_stale_folders())
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_removed)
    with scratch_folder("node") as folder:
        assert folder.is_dir()
        assert removed
        assert folder not in removed
    assert list(temporary.iterdir()) == []
