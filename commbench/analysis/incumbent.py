"""Today's policy as tuning sees it: which kernel it takes, and at which sizes it changes its mind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from commbench.analysis.tune import Cell
from commbench.policy import Policy
from commbench.types import Platform

# Collectives whose caller passes one rank's part of the message; a policy looks at that part.
PER_RANK = frozenset({"all_gather", "gather", "scatter"})


@dataclass(frozen=True, slots=True)
class Incumbent:
    """A policy on one platform (its world size is that of each point).

    splits: backend → the largest size of its kernel for small messages when the points were measured, where a run
    tells; the policy may have changed since.
    """

    policy: Policy
    platform: Platform
    splits: Mapping[str, int] = field(default_factory=dict)

    def kernel(self, collective: str, dtype: str, world_size: int, backend: str, size_bytes: int) -> str:
        """The backend that, forced, runs what ``backend`` runs at that size of the total array (see tune.KernelOf)."""
        if dtype == "none":
            return backend
        bound = self.policy.bind(replace(self.platform, world_size=world_size), collective, dtype)
        return bound.kernel(backend, size_bytes // (world_size if collective in PER_RANK else 1), self.splits)

    def edges(self, cell: Cell) -> list[int]:
        """The sizes, in bytes of the total array, up to and including which an answer of the policy holds."""
        bound = self.policy.bind(replace(self.platform, world_size=cell.world_size), cell.collective, cell.dtype)
        scale = cell.world_size if cell.collective in PER_RANK else 1
        found = {size * scale for size in self.splits.values()}
        for threshold in bound.thresholds(cell.mode):
            last = threshold.size_bytes if threshold.strictness in ("<=", ">") else threshold.size_bytes - 1
            found.add(last * scale)
        return sorted(found)
