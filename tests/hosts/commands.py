"""Commands on the hosts of ``machines``, and what they leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.harness.faults import left_in
from tests.hosts.machines import Host, wait_for

LIMIT_S = 150


def command(host: Host, count: int, *options: str) -> list[str]:
    where = ["--nnodes", str(count), "--node-rank", str(host.number), "--rdzv-endpoint", f"10.87.0.1:{29400}"]
    return [sys.executable, "-m", "commbench", "sweep", *where, "--tp", str(count), "--dtypes", "float32", *options]


def start(made: list[Host], count: int, out: Path, *options: str) -> list[subprocess.Popen[str]]:
    """The command of each host; node 0's writes into ``out``."""
    return [
        host.start(command(host, count, *options, *(["--out", str(out)] if host.number == 0 else []))) for host in made
    ]


def ended(jobs: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, what it said on stderr) of each."""
    found = []
    for job in jobs:
        _, said = job.communicate(timeout=LIMIT_S)
        found.append((job.returncode, said))
    return found


def said_until(job: subprocess.Popen[str], words: str) -> str:
    """What a command says on stderr, up to a line with these words. It must end by itself where it never says them."""
    assert job.stderr is not None
    said = ""
    for line in job.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "points.jsonl").read_text().splitlines()]


def manifest(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text())  # type: ignore[no-any-return]


def ranks_of(host: Host) -> list[psutil.Process]:
    found = []
    for process in host.processes():
        words = words_of(process)
        if "commbench.harness.ranks.rank" in words and "commbench.harness.launchers.agent" not in words:
            found.append(process)
    return found


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; [] of one that ends just now."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def command_on(host: Host) -> psutil.Process:
    """The one that watches."""
    (found,) = [p for p in host.processes() if words_of(p)[1:4] == ["-m", "commbench", "sweep"]]
    return found


def assert_nothing_is_left(made: list[Host]) -> None:
    for host in made:
        wait_for(
            lambda host=host: all(words_of(p)[:1] in ([], ["unshare"]) for p in host.processes()),
            15,
            f"{host.name} is empty",
        )
        assert host.segments() == [], f"{host.name}'s shared memory"
        left = left_in(host.temporary)
        assert left == [], f"{host.name} still has {left}"


def wait_until_they_measure(jobs: list[subprocess.Popen[str]], out: Path, job: int = 1) -> None:
    """Until the ranks of these commands visit a point in the so many-th job of the run."""

    def visits() -> bool:
        assert all(command.poll() is None for command in jobs), "a command has ended"
        path = out / "progress.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        told = [json.loads(line)["event"] for line in lines if line.endswith("\n")]
        ready = [place for place, event in enumerate(told) if event == "ready"]
        return len(ready) >= job and "visit" in told[ready[job - 1] :]

    try:
        wait_for(visits, 90, f"job {job} measures")
    except AssertionError as error:
        for command in jobs:
            command.terminate()
        raise AssertionError(f"{error}: {ended(jobs)}") from error
