"""The ranks of an engine as processes: started, met, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from commbench.errors import LaunchError
from commbench.harness.engine.channel import TOKEN_VARIABLE, Door, Gone, Link, closed_quietly
from commbench.harness.launch import Launch
from commbench.harness.launchers.commands import Program, environment_of, launch_command
from commbench.harness.ranks.rank import log_path
from commbench.store import schema

GRACE_S = 5.0  # for ranks to end by themselves, and again for the job after it was asked to
POLL_S = 0.1
_LONGEST_FOLDER = 90  # bytes; the kernel takes 107 for a socket's path


@dataclass(slots=True)
class Job:
    """The processes of one engine. Knows nothing of the engine that owns it, so that this can end the ranks when the
    engine is collected."""

    ranks: int
    program: Program
    folder: Path
    door: Door
    process: subprocess.Popen[bytes]
    owner: int = field(default_factory=os.getpid)
    links: dict[int, Link] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    failures: dict[int, tuple[int, str]] = field(default_factory=dict)  # rank → when (monotonic ns) and why it ended
    ended: str = ""  # why there are no ranks any more

    @classmethod
    def start(cls, ranks: int, variables: Mapping[str, str | None]) -> Job:
        folder = Path(tempfile.mkdtemp(prefix="commbench-engine-"))
        if len(os.fsencode(folder)) > _LONGEST_FOLDER:
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="commbench-engine-", dir="/tmp"))
        (folder / schema.LOGS_DIR).mkdir()
        door = Door(folder)
        program = Program(variables={**variables, TOKEN_VARIABLE: door.token}, module="commbench.harness.engine.rank")
        try:
            with (folder / schema.LOGS_DIR / f"launch-0.{program.launcher}.log").open("ab") as stream:
                process = subprocess.Popen(
                    launch_command(folder, 0, ranks, program),
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment_of(program),
                    start_new_session=True,  # Ctrl-C is the driver's
                )
        except BaseException:
            door.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(ranks, program, folder, door, process)

    def meet(self, deadline: float) -> None:
        """Wait until every rank has come in. Raises LaunchError."""
        while len(self.links) < self.ranks:
            link = self.door.accept(POLL_S)
            if link is not None:
                with contextlib.suppress(Gone):  # it died since; the job's end tells
                    hello, _ = link.receive()
                    self.links[hello["hello"]], self.pids[hello["hello"]] = link, hello["pid"]
            if self.process.poll() is not None:
                raise self.failed_start(self.cause())
            if time.monotonic() > deadline:
                missing = ", ".join(str(r) for r in range(self.ranks) if r not in self.links)
                raise self.failed_start(f"ranks {missing} did not report in time")
        self.door.close()

    def failed_start(self, why: str) -> LaunchError:
        """With the output of the ranks that have some, as a note."""
        error = LaunchError(f"the engine could not start: {why}")
        for rank in range(self.ranks):
            path = log_path(self.folder, 0, rank)
            text = path.read_text(errors="replace").strip() if path.exists() else ""
            if text:
                error.add_note(f"--- output of rank {rank} ---\n{text[-4000:]}")
        return error

    def cause(self) -> str:
        """Why the job is over, after it was given a moment to say so: a signal, or the error that came first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        for rank, link in self.links.items():
            with contextlib.suppress(Gone):  # what it said before it was gone
                while wait([link.fileno()], 0):
                    self.note(rank, link.receive()[0])
        if self.process.poll() is None and not self.failures:
            return "a rank closed its connection"
        told = Launch(self.folder, 0, self.ranks, {}, self.program).failure() if self.process.poll() is not None else ""
        if self.failures and "was killed by" not in told:
            rank = min(self.failures, key=lambda r: self.failures[r][0])
            return f"rank {rank}: {self.failures[rank][1]}"
        return told

    def note(self, rank: int, message: Mapping[str, Any]) -> bool:
        """Keep what a rank said of its own end; whether it did."""
        if "failed" not in message:
            return False
        self.failures[rank] = (message["at_ns"], message["failed"])
        return True

    def end(self, why: str = "it was closed") -> None:
        """End the ranks: by asking, then by signal. May be called often. Nothing of the job is left afterwards."""
        if self.ended or os.getpid() != self.owner:  # a forked child has a copy of this, and no claim to the ranks
            return
        self.ended = why
        for link in self.links.values():
            with contextlib.suppress(Gone):
                link.send({"command": "end"})
        try:
            self.process.wait(GRACE_S if self.links else 0)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for link in self.links.values():
            with contextlib.suppress(Gone):  # a killed rank closes its end when it is gone
                while wait([link.fileno()], GRACE_S):
                    link.receive()
            closed_quietly(link)
        self.door.close()
        shutil.rmtree(self.folder, ignore_errors=True)
