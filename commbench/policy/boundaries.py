"""The sizes worth measuring because a policy changes its mind there: ``--sizes boundaries``."""

from __future__ import annotations

from dataclasses import dataclass

from commbench.policy.evaluate import Policy
from commbench.types import COLLECTIVES, DTYPES, Platform

_LARGEST = 1 << 32  # a threshold beyond 4 GiB is no size that anyone sweeps
_PER_RANK = frozenset({"all_gather", "gather", "scatter"})  # the caller's tensor is one rank's part of the message


@dataclass(frozen=True, slots=True)
class Probe:
    """One message to measure, and why: ``size_bytes`` is the total array, as everywhere in a sweep."""

    size_bytes: int
    layout: str
    why: str


def probes(policy: Policy, collective: str, dtype: str, platform: Platform) -> list[Probe]:
    """The messages around every threshold of the policy, smallest first.

    For each threshold: one element less, exactly, one element more, the 16-byte steps around it, a size that is a
    multiple of 4 but not of 16 bytes, one that is not a multiple of 4 (where the element is smaller), and the exact
    size strided. Sizes that the collective cannot have (not a whole number of elements for each rank) are left out.
    """
    kind = COLLECTIVES[collective]
    itemsize = DTYPES[dtype].itemsize
    scale = platform.world_size if collective in _PER_RANK else 1
    whole = itemsize * (platform.world_size if kind.splits else 1)
    found: dict[tuple[int, str], Probe] = {}
    for _, limit, strictness, what in policy.thresholds(collective, dtype, platform):
        if limit > _LARGEST:
            continue
        named = f"{what} ({strictness})"
        around = {
            limit - 16: "16 bytes below",
            limit - itemsize: "one element below",
            limit: "exactly",
            limit + itemsize: "one element above",
            limit + 4: "a multiple of 4, not of 16",
            limit + 2: "not a multiple of 4",
            limit + 16: "16 bytes above",
        }
        for size, where in around.items():
            if size > 0 and size % itemsize == 0 and size * scale % whole == 0:
                found.setdefault((size * scale, "contiguous"), Probe(size * scale, "contiguous", f"{named}: {where}"))
        if limit > 0 and limit % itemsize == 0 and limit * scale % whole == 0:
            found.setdefault((limit * scale, "strided"), Probe(limit * scale, "strided", f"{named}: strided"))
    return [found[key] for key in sorted(found)]


def probe_sizes(policy: Policy, collective: str, dtype: str, platform: Platform) -> list[int]:
    """The sizes of ``probes``, in bytes of the total array, each once, smallest first. Empty where the policy has no
    threshold there."""
    return sorted({p.size_bytes for p in probes(policy, collective, dtype, platform)})
