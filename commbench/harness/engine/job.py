"""The ranks of an engine as processes: started, met, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
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
from commbench.harness.supervision.scratch import held_folder, remove_stale_folders
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
    held: int  # a descriptor: while it is open, no other command takes the folder for one that was left behind
    door: Door
    process: subprocess.Popen[bytes]
    owner: int = field(default_factory=os.getpid)
    links: dict[int, Link] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    failures: dict[int, tuple[int, str]] = field(default_factory=dict)  # rank → when (monotonic ns) and why it ended
    ended: str = ""  # why there are no ranks any more
    _gone: bool = False  # whether nothing of the job is left
    _ending: threading.RLock = field(default_factory=threading.RLock)
    _busy_ending: bool = False

    @classmethod
    def start(cls, ranks: int, variables: Mapping[str, str | None]) -> Job:
        remove_stale_folders()
        folder, held = held_folder("engine")
        if len(os.fsencode(folder)) > _LONGEST_FOLDER:
            os.close(held)
            folder.rmdir()
            folder, held = held_folder("engine", Path("/tmp"))
        door = None
        try:
            (folder / schema.LOGS_DIR).mkdir()
            door = Door(folder)
            own = {**variables, TOKEN_VARIABLE: door.token}
            program = Program(variables=own, module="commbench.harness.engine.start")
            with (folder / schema.LOGS_DIR / f"launch-0.{program.launcher}.log").open("ab") as stream:
                process = subprocess.Popen(
                    launch_command(folder, 0, ranks, program),
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    # torchrun makes folders, which it would leave in the temporary one
                    env={**environment_of(program), "PET_LOG_DIR": str(folder / schema.LOGS_DIR / "torchrun")},
                    start_new_session=True,  # Ctrl-C is the driver's
                )
        except BaseException:
            if door is not None:
                door.close()
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)
            raise
        return cls(ranks, program, folder, held, door, process)

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
        launch = Launch(self.folder, 0, self.ranks, {}, self.program, code=self.process.poll())
        told = launch.failure() if launch.code is not None else ""
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
        """End the ranks: by asking, then by signal; by signal at once when this is interrupted. May be called often, by
        any thread. When it returns nothing of the job is left; an interrupted one is taken up by the next."""
        if os.getpid() != self.owner:  # a forked child has a copy of this, and no claim to the ranks
            return
        self.ended = self.ended or why
        with self._ending:
            if self._gone or self._busy_ending:  # collection may come in the middle of it
                return
            self._busy_ending = True
            try:
                self._end_processes()
            finally:
                try:
                    self._clear()
                finally:
                    self._busy_ending = False

    def _end_processes(self) -> None:
        try:
            for link in self.links.values():
                with contextlib.suppress(Gone):
                    link.send({"command": "end"})
            patience_s = GRACE_S if self.links else 0.0  # nobody was asked where nobody has come in yet
            for seconds, more_firmly in ((patience_s, self.process.terminate), (GRACE_S, self.process.kill)):
                try:
                    self.process.wait(seconds)
                    return
                except subprocess.TimeoutExpired:
                    more_firmly()
        except BaseException:
            self.process.kill()  # its ranks end with it
            raise

    def _clear(self) -> None:
        self.process.wait()
        for link in self.links.values():
            with contextlib.suppress(Gone, OSError):  # a killed rank closes its end when it is gone
                while wait([link.fileno()], GRACE_S):
                    link.receive()
            closed_quietly(link)
        self.door.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._gone = True
        os.close(self.held)
