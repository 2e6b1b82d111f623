"""Proof that ranks share one host: by shared memory, not by counts or names."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch.distributed as dist

from commbench.errors import CollectiveError
from commbench.native.segment import directories, make_file


def shared_memory_folder() -> Path:
    """Where files live in memory: the user's choice, /dev/shm, or the temporary folder where the system has neither."""
    places = directories()
    return next((folder for folder in places if os.access(folder, os.W_OK)), places[-1])


def in_the_same_node_as(process_group: Any, source_rank: int = 0) -> list[bool]:
    """For each rank of the group, whether it shares memory with rank source_rank of the group. Collective.

    That rank writes a secret; hosts (or containers) with shared memory of their own see another file system, where it
    is not. Raises CollectiveError for a source that is no rank of the group, and for an NCCL group (objects go over
    the CPU).
    """
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if not 0 <= source_rank < size:
        raise CollectiveError(f"in_the_same_node_as: source_rank={source_rank} is no rank of a group of {size}")
    if dist.get_backend(process_group) == "nccl":
        raise CollectiveError("in_the_same_node_as: the group is nccl; give the CPU (gloo) group")
    secret = secrets.token_hex(16)
    fd, path = -1, None
    proof: list[Any] = [None]
    if rank == source_rank:
        try:
            fd, path = make_file(shared_memory_folder())
            os.write(fd, secret.encode())
            proof = [(str(path), secret, boot_id())]
        except OSError:  # no room: then nothing can be proven
            proof = [None]
    try:
        dist.broadcast_object_list(proof, src=dist.get_global_rank(process_group, source_rank), group=process_group)
        answers: list[Any] = [None] * size
        dist.all_gather_object(answers, _sees(proof[0]), group=process_group)
    finally:
        if path is not None:
            path.unlink(missing_ok=True)
            os.close(fd)
    return answers


def boot_id() -> str:
    """The running kernel's own id; a shared network folder has the secret too, but not this."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _sees(proof: tuple[str, str, str] | None) -> bool:
    if proof is None:
        return False
    path, secret, boot = proof
    try:
        return Path(path).read_text() == secret and boot == boot_id()
    except OSError:
        return False
