"""Real processes as ranks, for tests: run a function on each and get what they return."""

from __future__ import annotations

import datetime
import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any


def rank_context() -> ForkServerContext:
    """Processes with torch and nothing of ours, whose import costs a spawned process seconds: they are forked from a
    server that imported it. They have the environment of that server, so give them yours (``take_environment``)."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.testing", "numpy", "pytest"])
    return context


def take_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _main(
    target: Callable[..., Any], rank: int, size: int, variables: dict[str, str], results: Any, args: tuple[Any, ...]
) -> None:
    take_environment(variables | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
    import torch

    torch.set_num_threads(1)
    try:
        results.put((rank, "ok", target(rank, size, *args)))
    except BaseException:  # noqa: BLE001 - the parent raises it, with the rank's traceback
        results.put((rank, "error", traceback.format_exc()))


def start_ranks(target: Callable[..., Any], size: int, *args: Any) -> tuple[list[ForkServerProcess], Any]:
    """target(rank, size, *args) begins on ``size`` processes: the processes, and the queue of what they return."""
    context = rank_context()
    results = context.Queue()
    variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        context.Process(target=_main, args=(target, rank, size, variables, results, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes, results


def run_ranks(target: Callable[..., Any], size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """target(rank, size, *args) on ``size`` processes; their results in rank order.

    Raises AssertionError with the traceback of a rank that raised. No process outlives the call.
    """
    processes, results = start_ranks(target, size, *args)
    answers: dict[int, Any] = {}
    try:
        for _ in range(size):
            rank, kind, value = results.get(timeout=timeout_s)
            assert kind == "ok", f"rank {rank}:\n{value}"
            answers[rank] = value
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        results.close()
    return [answers[rank] for rank in range(size)]


def world(timeout_s: float = 30) -> Any:
    """The group of all ranks over gloo, inside a rank."""
    import torch

    from commbench.coordinator.world import world_group

    return world_group(torch.device("cpu"), datetime.timedelta(seconds=timeout_s))
