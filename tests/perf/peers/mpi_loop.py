"""All-reduce through mpi4py, in place, timed call by call as shm_loop.py does. mpi_loop.py BLOCK_NS BLOCKS SIZE..."""

import json
import statistics
import sys
from time import perf_counter_ns

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
block_ns, blocks = float(sys.argv[1]), int(sys.argv[2])
answer = {}
for size in map(int, sys.argv[3:]):
    x = np.zeros(size // 4, dtype=np.float32)
    for _ in range(3):
        comm.Allreduce(MPI.IN_PLACE, x)
    start = perf_counter_ns()
    for _ in range(4):
        comm.Allreduce(MPI.IN_PLACE, x)
    calls = comm.bcast(int(block_ns / ((perf_counter_ns() - start) / 4 + 1)) + 1)
    medians = []
    for _ in range(blocks):
        times = []
        comm.Barrier()
        for _ in range(calls):
            start = perf_counter_ns()
            comm.Allreduce(MPI.IN_PLACE, x)
            times.append(perf_counter_ns() - start)
        medians.append(statistics.median(times))
    answer[size] = medians
if comm.rank == 0:
    print(json.dumps({"version": MPI.Get_library_version().splitlines()[0], "ns": answer}))
