"""Rank processes that stay, for tests of the shm backends: starting one costs seconds, a function in it nothing."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.ranks import rank_context, take_environment

START_TIMEOUT_S, CALL_TIMEOUT_S = 60, 60


class Ranks:
    """``n`` processes with a gloo group. run() calls a function in all of them and gives their answers."""

    def __init__(self, n: int, env: dict[str, str] | None = None) -> None:
        context = rank_context()
        self.n = n
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(n):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(rank, n, self._folder.name, theirs, {**os.environ, **(env or {})}), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        try:
            self._answers(range(n), START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def start(self, function: Callable[..., Any], *args: Any, only: range | list[int] | None = None) -> None:
        """function(group, *args) begins on every rank (or ``only`` some)."""
        for rank in range(self.n) if only is None else only:
            self._pipes[rank].send((function, args))

    def finish(self, only: range | list[int] | None = None, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        return self._answers(range(self.n) if only is None else only, timeout_s)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What function(group, *args) gives on every rank. AssertionError with the traceback where one raises."""
        self.start(function, *args)
        return self.finish()

    def _answers(self, ranks: range | list[int], timeout_s: float) -> list[Any]:
        answers, failures = [], []
        for rank in ranks:
            if not self._pipes[rank].poll(timeout_s):
                raise AssertionError(f"rank {rank} gave no answer in {timeout_s} s")
            ok, value = self._pipes[rank].recv()
            (answers if ok else failures).append(value if ok else f"rank {rank}:\n{value}")
        assert not failures, "\n".join(failures)
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _rank(rank: int, n: int, folder: str, pipe: Connection, env: dict[str, str]) -> None:
    take_environment(env)
    import torch
    import torch.distributed as dist

    from commbench.backends.base import Group

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), n), rank=rank, world_size=n)
    world = dist.group.WORLD
    group = Group("world", tuple(range(n)), rank, torch.device("cpu"), world, world, True)
    pipe.send((True, None))
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(group, *args)))
        except BaseException:  # noqa: BLE001 - reported to the test, which fails with it
            pipe.send((False, traceback.format_exc()))
