"""Sweeps that go wrong, and what must not be left of them: helpers of the tests of faults.

Each sweep runs in a process of its own with a temporary folder of its own and, where the system lets us make
namespaces, with a /dev/shm of its own, so that whatever stays behind is its own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from commbench.store.run import Run, open_run

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("sweep_driver.py")
DURATION_S = 2e-4
SPEC = {"backends": "fake", "sizes": "64", "dtypes": "float32", "max_time_per_point": 0.15, "point_timeout": 2.0}


@cache
def can_unshare() -> bool:
    """Whether a process may have mounts of its own here."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    return subprocess.run(command, capture_output=True).returncode == 0


def quick_stacks(folder: Path) -> dict[str, str]:
    """Variables under which native stacks cost nothing. A debugger reads torch's symbols for seconds on every core:
    where a test is about something else, this stands in for it."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "py-spy").write_text("#!/bin/sh\necho 'Thread 1 (idle)'\n")
    (tools / "py-spy").chmod(0o755)
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


@dataclass
class Sweep:
    """A sweep in a process of its own, in ``folder``/run; or another command, whose run in ``folder`` is ``name``."""

    folder: Path
    script: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    before: str = ""  # shell commands inside the namespaces, where they can be made
    may_be_half_written: bool = False  # a command was killed, or could remove nothing: going on with the run does
    name: str = "run"
    process: subprocess.Popen[str] | None = None
    ranks: list[psutil.Process] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.folder / self.name

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def start(self, *arguments: str, cli: bool = False, **spec: Any) -> Sweep:
        """``arguments`` after the run's folder; without any, a new sweep of SPEC and ``spec``."""
        self.temporary.mkdir(exist_ok=True)
        if cli:
            command = [sys.executable, "-m", "commbench", *arguments]
        else:
            what = arguments or (json.dumps(SPEC | spec),)
            command = [sys.executable, str(DRIVER), str(self.directory), *what]
        if can_unshare():
            shell = (
                f"mount -t tmpfs none /dev/shm && {self.before or 'true'} && {{ {shlex.join(command)}; code=$?; "
                f"ls -A /dev/shm > {self.folder}/shm; exit $code; }}"
            )
            command = ["unshare", "--mount", "--map-root-user", "sh", "-c", shell]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary),
                 "COMMBENCH_FAKE": json.dumps({"duration_s": DURATION_S} | self.script), **self.variables},
        )  # fmt: skip
        return self

    @property
    def supervisor(self) -> psutil.Process:
        """The command that watches."""
        assert self.process is not None
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            line = process.cmdline()
            if len(line) > 1 and ("sweep_driver.py" in line[1] or line[1:3] == ["-m", "commbench"]):
                return process
        raise AssertionError("no supervisor")

    def wait_for(self, condition: Callable[[Run], bool], timeout_s: float = 60.0) -> Sweep:
        """Wait until the run directory shows something; then remember the processes of the job."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"ended early: {self.process.communicate()}")
            if (self.directory / "progress.jsonl").exists() and condition(open_run(self.directory)):
                self.ranks = self.supervisor.children(recursive=True)
                return self
            time.sleep(0.05)
        raise AssertionError("the run did not come that far in time")

    def wait_for_points(self, count: int) -> Sweep:
        return self.wait_for(lambda run: len(run.rows()) >= count)

    def wait_for_visits(self, count: int) -> Sweep:
        return self.wait_for(lambda run: len(events(run.directory, "visit")) >= count)

    def wait_for_visits_of_job(self, job: int) -> Sweep:
        """Until the so many-th job of the run measures."""

        def measures(run: Run) -> bool:
            ready = events(run.directory, "ready")
            seen = [v["time_s"] for v in events(run.directory, "visit")]
            return len(ready) >= job and bool(seen) and seen[-1] > ready[job - 1]["time_s"]

        return self.wait_for(measures)

    def end(self, timeout_s: float = 240.0) -> tuple[int, str]:
        """Wait for its end: (exit code, stderr). Nothing of it may be left."""
        assert self.process is not None
        try:
            _, stderr = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        self.nothing_is_left()
        return self.process.returncode, stderr

    def run(self, *arguments: str, **spec: Any) -> tuple[int, str]:
        return self.start(*arguments, **spec).end()

    def nothing_is_left(self, within_s: float = 3.0) -> None:
        """No process, shared memory or temporary file. (No port either: those go with their processes.)"""
        _, alive = psutil.wait_procs([*self.ranks, *_processes_of(self.directory)], timeout=within_s)
        assert not alive, [p.cmdline() for p in alive]
        assert not _processes_of(self.directory)
        left = left_in(self.temporary)
        assert not left, left
        if self.directory.is_dir() and not self.may_be_half_written:
            hidden = [str(p) for p in self.directory.rglob(".*")]
            assert not hidden, hidden
        shm = self.folder / "shm"
        if shm.exists():
            assert shm.read_text().split() == []

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["collective"]: row for row in open_run(self.directory).rows()}

    def resumed(self) -> dict[str, dict[str, Any]]:
        """The rows after going on without faults: every point must have one then."""
        self.script, self.before, self.may_be_half_written = {}, "", False
        code, stderr = self.run("--resume")
        assert code == 0, stderr
        run = open_run(self.directory)
        assert run.manifest["outcome"] == "complete"
        assert len(run.rows()) == run.manifest["points_planned"]
        return self.rows()


def left_in(temporary: Path) -> list[str]:
    """What is in a folder for temporary files, without the cache of torch's compiler: torch makes that one as soon as
    anything in it imports its compiler, and keeps it for the next program."""
    found = sorted(str(p.relative_to(temporary)) for p in temporary.rglob("*"))
    return [name for name in found if not name.startswith("torchinductor_")]


def _processes_of(directory: Path) -> list[psutil.Process]:
    """Ranks and launchers that name the run's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(directory) in line and "sh" not in line[:1] and process.pid != os.getpid():
            found.append(process)
    return found


def events(directory: Path, name: str) -> list[dict[str, Any]]:
    """The events of that name, also of a run that goes on: before the first, and where the last is half written."""
    path = directory / "progress.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [e for e in (json.loads(line) for line in lines if line.endswith("\n")) if e["event"] == name]
