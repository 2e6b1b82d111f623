"""Our all-reduce on pinned processes, timed as the peers are. Prints one JSON line.

    shm_loop.py MODE RANKS BLOCK_NS BLOCKS SIZE...

MODE: ``c`` (native loop, separate buffers: the mean of back-to-back calls per block), ``c_oneshot``, ``c_twoshot``,
``c_in_place``, ``python`` (GroupCoordinator.all_reduce in place, the median of timed calls per block), ``gloo`` (the
same over torch.distributed), ``registered`` (native loop in place on registered tensors), ``copy`` (each rank copies
an array of that size at the same time: one memory pass) and ``add`` (each rank adds 1 to it in place).
COMMBENCH_SHM_THRESHOLD sets the two-shot threshold, for finding it.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import queue
import statistics
import sys
import tempfile
from time import perf_counter_ns
from typing import Any


def main(
    rank: int, n: int, folder: str, mode: str, block_ns: float, blocks: int, sizes: list[int], answers: Any
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if n <= len(cores):  # as the peers: bound to a core each, or left to the system where they outnumber the cores
        os.sched_setaffinity(0, {cores[rank]})
    import numpy as np
    import torch
    import torch.distributed as dist

    from commbench.backends import shm
    from commbench.backends.base import Group
    from commbench.native import load

    native = load()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", n), rank=rank, world_size=n)
    world: Any = dist.group.WORLD
    group = Group("world", tuple(range(n)), rank, torch.device("cpu"), world, world, True)
    if "COMMBENCH_SHM_CHUNK" in os.environ:
        shm.chunk_bytes = lambda n: int(os.environ["COMMBENCH_SHM_CHUNK"])
    kind = {"c_oneshot": shm.ShmOneShotBackend, "c_twoshot": shm.ShmTwoShotBackend}.get(mode, shm.ShmBackend)
    backend = kind(group)
    if "COMMBENCH_SHM_THRESHOLD" in os.environ:
        backend.twoshot_threshold = int(os.environ["COMMBENCH_SHM_THRESHOLD"])
    coordinator = None
    if mode in ("python", "gloo"):
        from commbench.coordinator.group import GroupCoordinator
        from commbench.policy import load_policy
        from commbench.types import Platform

        name = "shm" if mode == "python" else "torch_dist"
        coordinator = GroupCoordinator(group, load_policy("commbench"), Platform(one_host=True, world_size=n), [name])
        coordinator._force(name)

    def block_of(calls: int, x: torch.Tensor, out: torch.Tensor) -> float:
        """ns of one call."""
        if coordinator is not None:
            times = []
            reduce = coordinator.all_reduce
            backend.barrier()
            for _ in range(calls):
                start = perf_counter_ns()
                reduce(x)
                times.append(perf_counter_ns() - start)
            return statistics.median(times)
        if mode in ("copy", "add"):
            backend.barrier()
            start = perf_counter_ns()
            for _ in range(calls):
                if mode == "copy":
                    out.copy_(x)
                else:
                    x.add_(1)
            backend.barrier()
            return (perf_counter_ns() - start) / calls
        call = backend.native_call("all_reduce", x, out)
        starts, ends = np.zeros(1, np.int64), np.zeros(1, np.int64)
        backend.barrier()
        native.timed_loop(call, None, starts, ends, np.zeros(1, np.uint8), batch=calls)
        return float(ends[0] - starts[0]) / calls

    answer = {}
    for size in sizes:
        if mode == "registered":
            x = out = shm.empty((size // 4,), torch.float32, group).zero_()
        else:
            x = torch.zeros(size // 4)
            out = x if mode in ("c_in_place", "python", "gloo", "add") else torch.zeros(size // 4)
        block_of(3, x, out)
        calls = torch.tensor([int(block_ns / (block_of(4, x, out) + 1)) + 1])
        dist.broadcast(calls, 0)
        answer[size] = [block_of(int(calls), x, out) for _ in range(blocks)]
    backend.barrier()
    if rank == 0:
        answers.put(answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    mode, n = sys.argv[1], int(sys.argv[2])
    block_ns, blocks = float(sys.argv[3]), int(sys.argv[4])
    sizes = [int(s) for s in sys.argv[5:]]
    context = mp.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (n, folder, mode, block_ns, blocks, sizes, answers)
        processes = [context.Process(target=main, args=(rank, *arguments)) for rank in range(n)]
        for process in processes:
            process.start()
        while True:
            try:
                answer = answers.get(timeout=1)
                break
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    for process in processes:
                        process.kill()
                    raise SystemExit("a rank died") from None
        for process in processes:
            process.join()
    print(json.dumps({"version": mode, "ns": answer}))
