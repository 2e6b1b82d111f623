"""What ``compare``, ``gate`` and ``history`` share: reading a side, and refusing sides that do not belong together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commbench.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from commbench.store.run import Run


@dataclass(frozen=True, slots=True)
class Side:
    """A run read for comparison. ``problems`` says what makes it less than a whole run."""

    path: Path
    run: Run
    latencies: pd.DataFrame
    problems: tuple[str, ...]

    @property
    def manifest(self) -> dict[str, Any]:
        return self.run.manifest


def read_side(path: Path) -> Side:
    """Read a run directory. Raises StoreError when it is none, or holds numbers that cannot be true."""
    from commbench.store.latencies import read_latencies
    from commbench.store.run import open_run

    run = open_run(path)
    latencies = read_latencies(run)
    problems = list(run.problems)
    outcome = run.manifest.get("outcome", "unknown")
    if outcome != "complete":
        problems.append(f"{path} is {outcome}, not complete")
    planned = run.manifest.get("points_planned")
    if isinstance(planned, int) and len(latencies) < planned:
        problems.append(f"{path} has {len(latencies)} of {planned} planned rows")
    return Side(path, run, latencies, tuple(problems))


def check_sides(
    base: Side, cand: Side, *, force: bool, same_hardware: bool = False, may_differ: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    """(differences that --force overrode, notes). Raises UsageError naming the differences without --force."""
    from commbench.harness.environment.comparable import compare_manifests

    found = compare_manifests(base.manifest, cand.manifest, may_differ=may_differ, same_hardware=same_hardware)
    if found.refusals and not force:
        raise UsageError(refusal(str(base.path), str(cand.path), found.refusals))
    return list(found.refusals), [f"environment: {note}" for note in found.notes]


def refusal(base: str, cand: str, differences: tuple[str, ...]) -> str:
    shown = "; ".join(differences[:4]) + (f"; and {len(differences) - 4} more" if len(differences) > 4 else "")
    hint = "--force compares them all the same and marks the result"
    if all(d.startswith("host.name:") for d in differences):
        hint = "--same-hardware accepts another host of the same hardware"
    return f"{base} and {cand} do not belong together: {shown}; {hint}"
