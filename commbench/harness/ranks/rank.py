"""What torchrun or mpirun starts for each rank: send its output to the rank's own log, tie it to its launcher, join the
heartbeat, then run the worker.

Small on purpose: whatever goes wrong while torch is imported already lands in the log.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from pathlib import Path

from commbench.backends.mpi_job import find_job

STACK_SIGNAL = signal.SIGUSR2  # makes a rank write its Python stacks into its log, also while it is blocked in C code
_PR_SET_PDEATHSIG = 1


def log_path(directory: Path, launch: int, rank: int) -> Path:
    """Where a rank's output goes."""
    return directory / "logs" / f"launch-{launch}.rank-{rank}.log"


def die_with_parent() -> None:
    """Ask Linux to end this process when its parent ends, so that no rank outlives its launcher."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("the launcher of this rank is gone")


def main() -> None:
    die_with_parent()
    directory, launch = Path(sys.argv[1]), int(sys.argv[2])
    job = find_job()
    if "RANK" not in os.environ and job is not None:
        os.environ.update(job.variables())
    rank = int(os.environ["RANK"])
    log = os.open(log_path(directory, launch, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    from commbench.harness.launchers.binding import bind_rank
    from commbench.harness.supervision.heartbeat import join

    bind_rank(os.environ)

    try:
        heartbeat = join(rank, os.environ)
    except OSError as error:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks are on the host of the command that watches
            sys.exit(f"the command that watches this launch is gone: {error}")
        heartbeat = None
    from commbench.harness.ranks import worker

    worker.run(directory, launch, heartbeat)


if __name__ == "__main__":
    main()
