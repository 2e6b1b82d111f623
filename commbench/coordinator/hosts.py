"""Proof that all ranks of a group share one host: by shared memory, not by counts or names."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist


def prove_one_host(cpu_group: Any) -> bool:
    """Whether every rank can read what rank 0 has written into its shared memory. Collective; the same on all ranks.

    Hosts (or containers) with shared memory of their own see another file system, so the secret is not there.
    """
    rank, size = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    secret = secrets.token_hex(16)
    path = folder / f"commbench-{secrets.token_hex(16)}"
    told: list[Any] = [None] * size
    written = False
    if rank == 0:
        try:
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as stream:
                stream.write(secret)
            written = True
        except OSError:
            path.unlink(missing_ok=True)
    dist.all_gather_object(told, (str(path), secret, written), group=cpu_group)
    path_of_first, secret_of_first, written = told[0]
    try:
        seen = written and Path(path_of_first).read_text() == secret_of_first
    except OSError:
        seen = False
    answers: list[Any] = [None] * size
    dist.all_gather_object(answers, seen, group=cpu_group)
    if rank == 0:
        path.unlink(missing_ok=True)
    return all(answers)
