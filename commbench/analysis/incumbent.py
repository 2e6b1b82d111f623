"""Today's policy as tuning sees it: which kernel it takes, and at which sizes it changes its mind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from commbench.analysis.tune import Cell
from commbench.policy import Policy
from commbench.types import Platform

# Collectives whose caller passes one rank's part of the message; a policy looks at that part.
PER_RANK = frozenset({"all_gather", "gather", "scatter"})


@dataclass(frozen=True, slots=True)
class Incumbent:
    """A policy on one platform (its world size is that of each point)."""

    policy: Policy
    platform: Platform

    def kernel(self, collective: str, dtype: str, world_size: int, backend: str, size_bytes: int) -> str:
        """The backend that, forced, runs what ``backend`` runs at that size of the total array (see tune.KernelOf)."""
        if dtype == "none":
            return backend
        bound = self.policy.bind(replace(self.platform, world_size=world_size), collective, dtype)
        return bound.kernel(backend, size_bytes // (world_size if collective in PER_RANK else 1))

    def edges(self, cell: Cell) -> list[int]:
        """The sizes, in bytes of the total array, up to and including which an answer of the policy holds."""
        bound = self.policy.bind(replace(self.platform, world_size=cell.world_size), cell.collective, cell.dtype)
        scale = cell.world_size if cell.collective in PER_RANK else 1
        found = set()
        for threshold in bound.thresholds(cell.mode):
            last = threshold.size_bytes if threshold.strictness in ("<=", ">") else threshold.size_bytes - 1
            found.add(last * scale)
        return sorted(found)
