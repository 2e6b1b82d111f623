"""Sweeps under random faults: ``python -m tests.perf.soak MINUTES [SEED]``, by hand; its summary is in docs/faults.md.

Runs follow each other until the time is up. Every few seconds something goes wrong: a rank is killed, stopped or made
to crash, the launcher or the watching command is killed, the command is asked to stop, the last line of points.jsonl is
cut. A command that has ended is started again with --resume, until every point of its run has a row. One collective of
every run hangs by script, so that points that end jobs are among them. At the end every planned point must be measured
or named, and nothing may be left behind.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from commbench.harness.supervision.stacks import process_state
from commbench.store.run import Run, open_run
from tests.harness.faults import Sweep

SPEC_TIMEOUT_S = 4.0
SPEC = {
    "backends": "fake,torch_dist,shm", "sizes": "64,4KiB", "dtypes": "float32",
    "collectives": "all_reduce,all_gather,broadcast,reduce_scatter", "max_time_per_point": 0.2,
    "point_timeout": SPEC_TIMEOUT_S,
    "launches": 2,
}  # fmt: skip
SCRIPT = {
    "hang": {"rank": 1, "collective": "broadcast", "call": 40},
}
EVERY_S = (0.3, 3.0)  # of measuring, between faults
EARLY = 0.1  # of the faults come while ranks start
AT_RANKS = {
    "SIGKILL of a rank": signal.SIGKILL,
    "SIGSEGV of a rank": signal.SIGSEGV,
    "SIGSTOP of a rank": signal.SIGSTOP,
}
AT_COMMAND = {
    "Ctrl-C": signal.SIGINT,
    "SIGTERM": signal.SIGTERM,
    "SIGHUP": signal.SIGHUP,
    "SIGKILL of the command": signal.SIGKILL,
}
LAUNCHER, CUT = "SIGKILL of the launcher", "last line of points.jsonl cut"


class Soak:
    def __init__(self, minutes: float, seed: int) -> None:
        self.rng = random.Random(seed)
        self.until = time.monotonic() + 60 * minutes
        self.faults: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.unnamed: list[str] = []
        self.left: list[str] = []
        self.runs = self.resumes = self.jobs = self.planned = 0

    def run(self) -> None:
        while time.monotonic() < self.until:
            with tempfile.TemporaryDirectory(prefix="soak-") as folder:
                self.one_run(Path(folder))

    def one_run(self, folder: Path) -> None:
        sweep = Sweep(folder, SCRIPT, may_be_half_written=True)
        arguments: tuple[str, ...] = ()
        self.runs += 1
        for _ in range(200):
            sweep.start(*arguments, **({} if arguments else SPEC))
            self.disturb(sweep)
            if self.complete(sweep):
                break
            if (sweep.directory / "plan.json").exists():
                if self.rng.random() < 0.2:
                    self.cut(sweep)
                arguments = ("--resume",)
                self.resumes += 1
        self.account(sweep)

    def disturb(self, sweep: Sweep) -> None:
        """Faults at this command until it ends."""
        assert sweep.process is not None
        early, wait = self.rng.random() < EARLY, self.rng.uniform(*EVERY_S)
        due = time.monotonic() + wait
        while sweep.process.poll() is None:
            time.sleep(0.1)
            if not (early or self.measuring(sweep)):
                due = time.monotonic() + wait
            elif due <= time.monotonic() < self.until:
                self.fault(sweep)
                early, wait = self.rng.random() < EARLY, self.rng.uniform(*EVERY_S)
                due = time.monotonic() + wait
        sweep.process.communicate()
        try:
            sweep.nothing_is_left(within_s=10)
        except AssertionError as error:
            self.left.append(str(error))

    def measuring(self, sweep: Sweep) -> bool:
        """Whether rank 0 has told something just now."""
        told = sweep.directory / "progress.jsonl"
        return told.exists() and time.time() - told.stat().st_mtime < 1.0

    def fault(self, sweep: Sweep) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, AssertionError):  # what would be hit has just ended
            command = sweep.supervisor
            family = command.children(recursive=True)
            ranks = [
                p for p in family if "commbench.harness.ranks.rank" in p.cmdline()[2:4] and p.ppid() != command.pid
            ]
            kind = self.rng.choice([*AT_RANKS, *AT_COMMAND, LAUNCHER])
            if kind in AT_COMMAND:
                if not (sweep.directory / "plan.json").exists():
                    return
                command.send_signal(AT_COMMAND[kind])
            elif kind == LAUNCHER and command.children():
                command.children()[0].kill()
            elif ranks and kind in AT_RANKS:
                self.rng.choice(ranks).send_signal(AT_RANKS[kind])
            else:
                return
            self.faults[kind] += 1

    def cut(self, sweep: Sweep) -> None:
        path = sweep.directory / "points.jsonl"
        size = path.stat().st_size
        if size > 40:
            with path.open("rb+") as stream:
                stream.truncate(size - 20)
            self.faults[CUT] += 1

    def complete(self, sweep: Sweep) -> bool:
        if not (sweep.directory / "manifest.json").exists():
            return False
        run = open_run(sweep.directory)
        return run.manifest["outcome"] == "complete" and len(run.rows()) == run.manifest["points_planned"]

    def account(self, sweep: Sweep) -> None:
        sweep.may_be_half_written = False
        try:
            sweep.nothing_is_left()
        except AssertionError as error:
            self.left.append(str(error))
        run: Run = open_run(sweep.directory)
        rows = run.rows()
        self.planned += run.manifest["points_planned"]
        self.jobs += sum(len(r.get("startups_s", [])) for r in run.manifest["launches"])
        self.statuses.update(row["status"] for row in rows)
        self.unnamed += [row["point_id"] for row in rows if row["status"] != "ok" and not row["reason"]]
        with contextlib.suppress(psutil.NoSuchProcess):
            self.left += [str(p) for p in psutil.Process().children(recursive=True) if process_state(p.pid, 0)]

    def summary(self, minutes: float, seed: int) -> str:
        have = sum(self.statuses.values())
        lines = [
            f"{minutes:g} minutes, seed {seed}: {self.runs} runs, {self.jobs} jobs, {self.resumes} times resumed",
            f"faults: {sum(self.faults.values())} at random ("
            + ", ".join(f"{kind} {n}" for kind, n in sorted(self.faults.items()))
            + ")",
            f"points: {self.planned} planned, {have} with a result ("
            + ", ".join(f"{status} {n}" for status, n in sorted(self.statuses.items()))
            + ")",
            f"not ok and without a reason: {len(self.unnamed)}",
            f"left behind: {'; '.join(self.left) or 'nothing'}",
        ]
        return "\n".join(lines)

    @property
    def good(self) -> bool:
        return sum(self.statuses.values()) == self.planned and not self.unnamed and not self.left


def main() -> int:
    minutes = float(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    soak = Soak(minutes, seed)
    soak.run()
    print(soak.summary(minutes, seed))
    return 0 if soak.good else 1


if __name__ == "__main__":
    sys.exit(main())
