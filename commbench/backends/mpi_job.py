"""What an MPI launcher tells its ranks through the environment. No torch, no MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

# (rank, size, rank on this host, ranks on this host): Open MPI's names, and those of Hydra (MPICH and Intel MPI)
_NAMES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True, slots=True)
class MpiJob:
    """This process's place in an MPI job."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    def variables(self) -> dict[str, str]:
        """The same as torch.distributed reads it (torchrun's names), without the rendezvous."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }


def find_job(environment: Mapping[str, str] | None = None) -> MpiJob | None:
    """The MPI job that this environment (None: the process's own) belongs to, or None outside of one.

    A launcher that says nothing of hosts is taken to use one.
    """
    env = os.environ if environment is None else environment
    for rank, size, local_rank, local_size in _NAMES:
        if env.get(rank, "").isdigit() and env.get(size, "").isdigit():
            return MpiJob(
                int(env[rank]), int(env[size]), int(env.get(local_rank, env[rank])), int(env.get(local_size, env[size]))
            )
    return None
