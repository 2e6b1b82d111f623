"""Calls of an engine: commands to its ranks and what they answer, one at a time and all ranks in step."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, NoReturn

from commbench import errors
from commbench.errors import BackendUnavailable, CommbenchError, EngineError, PeerLost
from commbench.harness.engine.channel import Gone
from commbench.harness.engine.job import GRACE_S, POLL_S, Job

Message = dict[str, Any]
Replies = list[tuple[Message, list[bytes]]]  # by rank


class Calls:
    """What a driver says to the ranks of one job.

    interruption: what ended the present call early (Ctrl-C, or what a callback raised), where it could be stopped.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lock = threading.RLock()
        self._busy = ""
        self._numbers = itertools.count(1)
        self.interruption: BaseException | None = None

    @property
    def ranks(self) -> int:
        return self._job.ranks

    def check_usable(self) -> None:
        """Raises EngineError where there are no ranks to talk to (any more)."""
        job = self._job
        if os.getpid() != job.owner:
            raise EngineError(f"this engine belongs to process {job.owner}; a forked process needs one of its own")
        if job.ended:
            raise EngineError(f"this engine has ended: {job.ended}; start another")

    @contextlib.contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """One call at a time. A call from inside another (a callback of measure) would wait for itself."""
        self.check_usable()
        with self._lock:
            self.check_usable()
            if self._busy:
                raise EngineError(f"{what} was called from inside {self._busy}, which must return first")
            self._busy = what
            try:
                yield
            finally:
                self._busy = ""

    def run(self, what: str, messages: Sequence[Message], buffers: Sequence[Sequence[Any]] | None = None) -> Replies:
        """A call of one exchange."""
        with self.turn(what):
            return self.exchange(messages, buffers=buffers)

    def end(self) -> None:
        """End the ranks; a call of another thread is given a moment to return first, and raises where it does not."""
        mine = self._lock.acquire(timeout=GRACE_S)
        try:
            self._job.end()
        finally:
            if mine:
                self._lock.release()

    def exchange(
        self,
        messages: Sequence[Message],
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
        *,
        buffers: Sequence[Sequence[Any]] | None = None,
        starting: float | None = None,
    ) -> Replies:
        """Send each rank its message and wait for all replies.

        starting: a deadline, while the engine comes up. With ``on_event`` the call can be stopped: what on_event
        raises, or Ctrl-C, asks the ranks to stop, and is kept in ``interruption``; a second Ctrl-C ends the engine.
        Without it Ctrl-C leaves the call to the ranks, who finish it; its replies are passed over.
        """
        job = self._job
        call = next(self._numbers)
        self.interruption = None
        with self._whole_messages():
            for rank, message in enumerate(messages):
                try:
                    job.links[rank].send({**message, "call": call}, buffers[rank] if buffers else ())
                except Gone:
                    self._lost(rank, starting is not None)
        replies: dict[int, tuple[Message, list[bytes]]] = {}
        problems: dict[int, Message] = {}
        while len(replies) + len(problems) < job.ranks:
            try:
                for rank, message, data in self._ready(starting):
                    if message["call"] != call:
                        continue  # of a call that was interrupted
                    if "event" in message:
                        if on_event is not None and self.interruption is None:
                            on_event(message)
                    elif "error" in message:
                        problems[rank] = message["error"]
                        if message["error"]["type"] == "PeerLost":
                            self._lost(rank, False, message["error"]["message"])
                    else:
                        replies[rank] = ({**message["reply"], "arrays": message["arrays"]}, data)
                if starting is not None and time.monotonic() > starting:
                    late = ", ".join(str(r) for r in range(job.ranks) if r not in replies)
                    raise job.failed_start(f"ranks {late} did not become ready in time")
            except (KeyboardInterrupt, Exception) as error:  # whatever on_event raises
                if on_event is None or job.ended:
                    raise
                if self.interruption is not None:  # the run directory is closed now, so nobody may write to it
                    job.end("it was interrupted twice")
                    raise
                self.interruption = error
                with contextlib.suppress(Gone):  # then the next message tells
                    job.links[0].send({"command": "stop", "call": call})
        if problems:
            self._raise(problems)
        return [replies[rank] for rank in range(job.ranks)]

    def _ready(self, starting: float | None) -> Iterator[tuple[int, Message, list[bytes]]]:
        """Messages that have arrived, one of each rank at most, after waiting a moment for the first."""
        job = self._job
        with self._open_links():
            ready = wait([link.fileno() for link in job.links.values()], POLL_S)
        for rank, link in job.links.items():
            with self._open_links():
                if link.fileno() not in ready:
                    continue
                with self._whole_messages():
                    try:
                        message, data = link.receive()
                    except Gone:
                        self._lost(rank, starting is not None)
            if not job.note(rank, message):
                yield rank, message, data

    @contextlib.contextmanager
    def _open_links(self) -> Iterator[None]:
        """Another thread that ends the engine closes the connections, which this one may be about to read."""
        try:
            yield
        except OSError:
            self.check_usable()
            raise

    @contextlib.contextmanager
    def _whole_messages(self) -> Iterator[None]:
        """A message that was cut in two (by Ctrl-C) leaves a connection that nobody can read any more."""
        try:
            yield
        except KeyboardInterrupt:
            self._job.end("a call was interrupted in the middle of a message")
            raise

    def _lost(self, rank: int, starting: bool, told: str = "") -> NoReturn:
        """A rank is gone, or told that a peer is: find out which was the first, and why."""
        job = self._job
        self.check_usable()
        why = job.cause()
        if not why.startswith("rank "):
            why = f"rank {rank}: {told}" if told else f"rank {rank} is gone ({why})"
        named = why.split()[1].rstrip(":,")
        first = int(named) if named.isdigit() else rank
        problem = job.failed_start(why) if starting else PeerLost(f"the engine ended: {why}", first)
        job.end(why)
        raise problem

    def _raise(self, problems: Mapping[int, Message]) -> NoReturn:
        """What the ranks raised, as the driver's. Ranks that answered differently are not in step any more."""
        rank = min(problems)
        told = problems[rank]
        everywhere = len(problems) == self.ranks
        message = told["message"] if everywhere else f"rank {rank}: {told['message']}"
        if not everywhere:
            self._job.end(f"only some ranks failed: {message}")
        if told["type"] == "BackendUnavailable":
            raise BackendUnavailable(told["backend"], told["reason"], told["remedy"])
        kind = getattr(errors, told["type"], None)
        if not (isinstance(kind, type) and issubclass(kind, CommbenchError)):
            kind = CommbenchError
        raise kind(message)


class PartOfEngine:
    """What the parts of an engine share: a way to its ranks."""

    _calls: Calls

    @property
    def ranks(self) -> int:
        """How many processes this engine has."""
        return self._calls.ranks
