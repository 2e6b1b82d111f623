"""What torchrun or mpirun starts for each rank: send its output to the rank's own log, then run the worker.

Small on purpose: whatever goes wrong while torch is imported already lands in the log.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from commbench.backends.mpi_job import find_job


def log_path(directory: Path, launch: int, rank: int) -> Path:
    """Where a rank's output goes."""
    return directory / "logs" / f"launch-{launch}.rank-{rank}.log"


def main() -> None:
    directory, launch = Path(sys.argv[1]), int(sys.argv[2])
    job = find_job()
    if "RANK" not in os.environ and job is not None:
        os.environ.update(job.variables())
    path = log_path(directory, launch, int(os.environ["RANK"]))
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    from commbench.harness import worker

    worker.run(directory, launch)


if __name__ == "__main__":
    main()
