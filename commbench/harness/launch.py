"""Launches: one job of torchrun or mpirun each, watched from outside, that measures all points in one set of
processes."""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commbench.errors import LaunchError
from commbench.harness import mpirun as mpi
from commbench.harness.launchers import Program, environment_of, launch_command, launcher_facts, printable
from commbench.harness.rank import log_path
from commbench.store import schema
from commbench.store.run import Plan, PointLog, open_run, row_of, update_manifest
from commbench.types import Point

PROGRESS = "progress.jsonl"
POLL_S = 0.2
GRACE_S = 5.0  # between asking a job to end and ending it
MOST_DEATHS = 3  # launches that may die one after the other without finishing a point
_PR_SET_PDEATHSIG = 1

Event = Mapping[str, Any]


@dataclass(slots=True)
class _Tail:
    """New whole lines of a growing JSONL file."""

    path: Path
    offset: int = 0

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                data = stream.read()
        except FileNotFoundError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        if newline:
            self.offset += len(whole) + 1
            for line in whole.splitlines():
                yield json.loads(line)


@dataclass(slots=True)
class Launch:
    """One torchrun job while it runs, and what it told."""

    directory: Path
    index: int
    ranks: int
    program: Program = field(default_factory=Program)
    ready: dict[str, Any] = field(default_factory=dict)
    visiting: dict[str, Any] = field(default_factory=dict)
    canaries: dict[str, dict[str, float]] = field(default_factory=dict)  # start, end → canary → seconds
    finished: int = 0
    done: bool = False

    @property
    def _log(self) -> Path:
        return self.directory / schema.LOGS_DIR / f"launch-{self.index}.{self.program.launcher}.log"

    def run(self, on_event: Callable[[Event], None]) -> int:
        """Run the job to its end and give its exit status. On any exception no process of it is left."""
        command = launch_command(self.directory, self.index, self.ranks, self.program)
        log = self._log
        tail = _Tail(self.directory / PROGRESS)
        for _ in tail.read():  # earlier launches' lines
            pass
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None

        def tied_to_parent() -> None:
            if libc is not None:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        with log.open("ab") as stream:
            job = subprocess.Popen(
                command,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment_of(self.program),
                start_new_session=True,  # Ctrl-C reaches the command that watches, which then ends the job
                preexec_fn=tied_to_parent,
            )
        try:
            while True:
                code = job.poll()
                for event in tail.read():
                    self._note(event)
                    on_event(event)
                if code is not None:
                    return code
                time.sleep(POLL_S)
        finally:
            _end(job)

    def _note(self, event: Event) -> None:
        match event["event"]:
            case "ready":
                self.ready = {k: v for k, v in event.items() if k not in ("event", "launch")}
            case "visit":
                self.visiting = dict(event)
            case "canaries":
                names = set(event) - {"event", "launch", "time_s", "when"}
                self.canaries[event["when"]] = {name: event[name] for name in sorted(names)}
            case "point":
                self.finished += 1
            case "done":
                self.done = True

    def failure(self) -> str:
        """Why the job died, in one line: the error of the rank that failed first, or the signal that ended it."""
        told = _text(self._log)
        cause = mpi.cause(told) if self.program.launcher == "mpirun" else _torchrun_cause(told)
        if cause is not None and cause[1] < 0:
            return f"rank {cause[0]} was killed by {signal.Signals(-cause[1]).name}"
        for rank in [cause[0]] if cause is not None else range(self.ranks):
            lines = [line for line in _text(log_path(self.directory, self.index, rank)).splitlines() if line.strip()]
            if lines:
                # a traceback ends in "module.Error: message"; who reads the point wants the message
                message = re.sub(
                    r"^(commbench\.errors\.)?(PeerLost|PointFailed|CommbenchError): ", "", lines[-1].strip()
                )
                return message if message.startswith(f"rank {rank}: ") else f"rank {rank}: {message}"
        last = [line for line in told.splitlines() if line.strip()]
        return last[-1].strip() if last else "the job ended without a word"


def _torchrun_cause(log: str) -> tuple[int, int] | None:
    """(rank, exit status or minus the signal): torchrun ends the other ranks itself, only what it saw first counts."""
    found = re.search(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", log.rpartition("Root Cause")[2], re.DOTALL)
    return None if found is None else (int(found[1]), int(found[2]))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the job and, through its parent-death signal, its ranks."""
    if job.poll() is not None:
        return
    job.terminate()
    try:
        job.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def run_launch(
    directory: Path, index: int, ranks: int, on_event: Callable[[Event], None], program: Program | None = None
) -> dict[str, Any]:
    """Measure all points of the plan in one launch, starting again past a point that kills the job.

    Such a point is recorded as failed with the reason. Gives the launch's record for the manifest. Raises LaunchError
    when the job cannot start, with the ranks' own error, or dies again and again.
    """
    from commbench.store.samples import to_parquet  # numpy, which `sweep --dry-run` does without

    started = time.time()
    plan = Plan.load(directory)
    program = program or Program()
    deaths = 0
    record: dict[str, Any] = {
        "launch": index,
        "command": printable(launch_command(directory, index, ranks, program)),
        **launcher_facts(ranks, program),
        "started_s": started,
        "deaths": [],
    }
    try:
        while True:
            launch = Launch(directory, index, ranks, program)
            code = launch.run(on_event)
            record.update({k: v for k, v in launch.ready.items() if k not in ("time_s", "rank_facts")}, exit_code=code)
            if launch.ready:
                record.setdefault("startup_s", launch.ready["time_s"] - started)
                _keep_rank_facts(directory, launch.ready["rank_facts"])
            record["canaries"] = {**record.get("canaries", {}), **launch.canaries}
            if code == 0 and launch.done:
                return record
            why = launch.failure()
            record["deaths"].append(why)
            if not launch.ready:
                raise LaunchError(
                    f"launch {index} could not start: {why}; the ranks' output is in {directory / schema.LOGS_DIR}"
                )
            deaths = 1 if launch.finished else deaths + 1
            _blame(directory, index, plan, launch, why)
            if deaths >= MOST_DEATHS:
                raise LaunchError(
                    f"launch {index} died {deaths} times running: {why}; see {directory / schema.LOGS_DIR}"
                )
    finally:
        record["ended_s"] = time.time()
        to_parquet(directory, index)
        manifest = open_run(directory).manifest
        others = [r for r in manifest.get("launches", []) if r["launch"] != index]
        update_manifest(directory, launches=[*others, record])


def _keep_rank_facts(directory: Path, facts: dict[str, Any]) -> None:
    """What only a rank can tell (versions of loaded libraries) belongs to the run's fingerprint."""
    fingerprint = open_run(directory).manifest["fingerprint"]
    update_manifest(directory, fingerprint={**fingerprint, "rank": facts})


def _blame(directory: Path, index: int, plan: Plan, launch: Launch, why: str) -> None:
    """Record the point that was being visited when the job died."""
    order = launch.visiting.get("order")
    if order is None:
        return
    from commbench.harness.order import shuffled

    points: dict[int, Point] = dict(shuffled(plan.points, int(plan.settings["seed"]), index))
    log = PointLog(directory)
    try:
        values = {"run_id": directory.name, "launch": index, "order": order, "status": "failed", "reason": why}
        log.append(row_of(points[order], values))
    finally:
        log.close()
