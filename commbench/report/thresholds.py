"""The sizes at which a policy changes its mind, for the map of picks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commbench.errors import CommbenchError
from commbench.policy import load_policy
from commbench.report.summary import Summary
from commbench.types import Platform
from commbench.units import format_size

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Threshold:
    """A message size at which an answer of the policy changes, with its words."""

    size_bytes: int
    text: str


def thresholds_of(summary: Summary, points: pd.DataFrame) -> tuple[list[Threshold], str]:
    """Thresholds of the policies of ``points`` (one collective) that lie among their sizes, and a note.

    Only all-reduce has any: for it the caller's tensor is the message, so bytes mean the same on both sides. The
    note says why thresholds are missing, where they are ("" otherwise).
    """
    if set(points["collective"]) != {"all_reduce"}:
        return [], ""
    low, high = int(points["size_bytes"].min()), int(points["size_bytes"].max())
    policies = sorted({str(p) for p in points["policy"]})
    texts: dict[tuple[int, str], None] = {}
    notes = []
    for name in policies:
        try:
            policy = load_policy(name)
            found = [
                entry
                for ranks in sorted({int(n) for n in points["world_size"]})
                for dtype in dict.fromkeys(str(d) for d in points["dtype"])
                for entry in policy.thresholds("all_reduce", dtype, platform_of(summary, ranks))
            ]
        except CommbenchError as error:
            notes.append(f"thresholds not drawn: {error}")
            continue
        for _, size, strictness, what in found:
            if low <= size <= high:
                sized = what if format_size(size) in what else f"{what} ({strictness} {format_size(size)})"
                sized = sized.replace("<=", "≤").replace(">=", "≥")
                texts[size, f"{name}: {sized}" if len(policies) > 1 else sized] = None
    return [Threshold(size, text) for size, text in sorted(texts)], "; ".join(notes)


def platform_of(summary: Summary, ranks: int) -> Platform:
    """The platform that the run's coordinator saw, as far as the run tells.

    What a launch recorded as usable counts; where none did, backends that the run took are set up, and all others
    were never asked for. Policies read their parameters from the environment variables of the fingerprint.
    """
    usable: dict[str, str | None] = {}
    for record in summary.launch_records:
        if isinstance(found := record.get("usable"), Mapping):
            usable.update({str(name): None if why is None else str(why) for name, why in found.items()})
    if not usable:
        taken = {b for picked in summary.points["backend_picked"].dropna() for b in str(picked).split("+") if b}
        usable = dict.fromkeys(sorted(taken))
    variables = summary.fingerprint.get("env")
    env = {str(k): str(v) for k, v in variables.items()} if isinstance(variables, Mapping) else {}
    return Platform(device=summary.device, world_size=ranks, one_host=True, usable=usable, env=env)
