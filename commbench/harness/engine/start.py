"""What torchrun starts for each rank of an engine: tie it to its launcher, send its output to its log, meet the driver,
then be a rank until the driver says to end.

Torch is imported when all that stands: whatever goes wrong then is told to the driver.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from commbench.errors import CommbenchError
from commbench.harness.engine.channel import Gone, Link, enter
from commbench.harness.ranks.rank import die_with_parent, log_path

Message = dict[str, Any]


def _end_without_driver(folder: Path) -> NoReturn:
    """Nobody is left to tell, or to clean up, and peers may hold this rank in a collective."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class Inbox:
    """The driver's messages, read by a thread of their own: so this rank also ends when the driver dies while it waits
    for other ranks. The thread sleeps in the kernel; it takes nothing from what is being measured."""

    def __init__(self, link: Link, folder: Path) -> None:
        self._link = link
        self._folder = folder
        self._messages: queue.SimpleQueue[tuple[Message, list[bytes]]] = queue.SimpleQueue()
        self.stopped = -1  # the last call that the driver wants to end early
        threading.Thread(target=self._read, name="commbench-inbox", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                message, buffers = self._link.receive()
            except Gone:
                _end_without_driver(self._folder)
            if message["command"] == "stop":
                self.stopped = message["call"]
            else:
                self._messages.put((message, buffers))

    def next(self) -> tuple[Message, list[bytes]]:
        return self._messages.get()


def serve(folder: Path) -> None:
    """Meet the driver, set up, and answer until it says to end. What ends this rank in between is told first: peers end
    with it, and only the moment says whose error was the cause."""
    rank = int(os.environ["RANK"])
    try:
        link = enter(folder)
        link.send({"hello": rank, "pid": os.getpid()})
    except Gone:
        _end_without_driver(folder)
    try:
        _answer_all(folder, rank, link)
    except Exception as error:
        name = "" if isinstance(error, CommbenchError) else f"{type(error).__name__}: "
        text = name + (str(error).strip().partition("\n")[0] or "no word of why")
        with contextlib.suppress(Gone):
            link.send({"failed": text, "at_ns": time.monotonic_ns()})
        raise


def _answer_all(folder: Path, rank: int, link: Link) -> None:
    inbox = Inbox(link, folder)
    from commbench.harness.engine.rank import EngineRank

    setup, _ = inbox.next()
    engine = EngineRank(link, inbox, setup)
    link.send({"call": setup["call"], "reply": engine.facts() if rank == 0 else {}, "arrays": []})
    while True:
        message, buffers = inbox.next()
        if message["command"] == "end":
            break
        engine.answer(message, buffers)
    engine.close()


def main() -> None:
    die_with_parent()
    folder, launch = Path(sys.argv[1]), int(sys.argv[2])
    log = os.open(log_path(folder, launch, int(os.environ["RANK"])), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        serve(folder)
    except BaseException:  # noqa: BLE001 - whatever ends a rank belongs in its log
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # peers may be waiting in a collective, and torch's own teardown would wait for them


if __name__ == "__main__":
    main()
