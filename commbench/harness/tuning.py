"""The launches of a tuning: a coarse grid, more sizes where backends meet, and fresh launches to confirm.

What to measure next is decided by functions that the caller passes: judging results is not the harness's business.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from commbench.errors import SpecError
from commbench.harness import run as harness
from commbench.harness.launch import Event
from commbench.measure.settings import Settings
from commbench.policy import load_policy
from commbench.registry import BACKENDS
from commbench.store.run import Run
from commbench.sweep import Expansion, SweepSpec
from commbench.types import AUTO, Platform, Point

COARSE, REFINE, CONFIRM = "coarse", "refine", "confirm"
# Seconds that a launch takes beside its points, until it has been seen: starting ranks and torch, ending them.
START_S = 8.0
# Seconds of a launch's budget for each point, at least: buffers, checks and a few samples.
LEAST_PER_POINT_S = 0.03
FEWEST_HELD_OUT = 3  # launches that confirm, also when the time is used up
HALF_OCTAVE = 2**0.5

Chooser = Callable[[Sequence[Run]], Sequence[Point]]
Announce = Callable[[str, int, float], Callable[[Event], None]]


@dataclass(frozen=True, slots=True)
class Effort:
    """launches: of the coarse grid and of the refinement, each. held_out: launches that confirm. budget_s: wall time
    for everything; launches share what starting them leaves. Where starting takes longer than planned the refinement
    is left out and fewer launches confirm, but never fewer than FEWEST_HELD_OUT."""

    launches: int = 5
    held_out: int = 5
    budget_s: float = 270.0


def half_octaves(first: int, last: int, unit: int = 64) -> list[int]:
    """Sizes from first to last, both included, √2 apart, rounded to multiples of ``unit`` bytes."""
    sizes = []
    exact = float(first)
    while exact <= last * 1.001:
        sizes.append(max(1, round(exact / unit)) * unit if exact > unit else round(exact))
        exact *= HALF_OCTAVE
    return sorted(set(sizes))


def kernels_of(policy: str, platform: Platform, collective: str = "all_reduce") -> tuple[str, ...]:
    """The backends worth forcing on a platform: those that the policy asks, each split into its kernels, as far as
    commbench has them."""
    found: dict[str, None] = {}
    for route in load_policy(policy).data.order(collective, platform.device):
        kernels = [name for split in route.splits for name in (split.below, split.above) if name]
        for name in kernels or [route.backend]:
            if name in BACKENDS:
                found[name] = None
    return tuple(found)


def adaptive(
    spec: SweepSpec,
    expansion: Expansion,
    settings: Settings,
    out: Path,
    effort: Effort,
    *,
    refinement: Chooser,
    held_out: Chooser,
    announce: Announce,
    argv: Sequence[str] = (),
) -> list[Run]:
    """Measure the coarse grid, then what ``refinement`` asks for, then, in launches of their own, what ``held_out``
    asks for. Each is a run under ``out`` (``coarse``, ``refine``, ``confirm``); one without points is left out.

    announce(phase, measurements, seconds) gives the function that hears the launches' events. Raises what ``execute``
    raises, and SpecError when the budget cannot hold the launches.
    """
    started = time.monotonic()
    runs: list[Run] = []
    overhead = START_S
    count = 2 * effort.launches + effort.held_out
    least = count * overhead + effort.launches * len(expansion.points) * LEAST_PER_POINT_S
    if effort.budget_s < least:
        raise SpecError(
            f"--budget {effort.budget_s:.0f}s is too short: starting {count} launches and visiting "
            f"{len(expansion.points)} points takes about {least:.0f} s; ask for fewer points, or more time"
        )
    for phase, launches, choose in (
        (COARSE, effort.launches, None),
        (REFINE, effort.launches, refinement),
        (CONFIRM, effort.held_out, held_out),
    ):
        points = expansion.points if choose is None else tuple(choose(runs))
        if not points or not launches:
            continue
        left = effort.budget_s - (time.monotonic() - started)
        share = {COARSE: 0.45, REFINE: 0.5, CONFIRM: 1.0}[phase] * left
        least = overhead + len(points) * LEAST_PER_POINT_S
        if phase == REFINE and left < launches * least + FEWEST_HELD_OUT * (overhead + 1.0):
            continue  # a busy machine: what time is left goes into confirming
        if phase == CONFIRM:
            launches = min(launches, max(FEWEST_HELD_OUT, int(left / least)))
        per_launch = max(len(points) * LEAST_PER_POINT_S, share / launches - overhead)
        plan = replace(settings, budget_s=per_launch, seed=settings.seed + len(runs), backends=_forced(points))
        own_spec = spec.changed(launches=launches, name=f"tune-{phase}")
        seconds = launches * (overhead + min(per_launch, len(points) * settings.max_time_per_point_s))
        on_event = announce(phase, len(points) * launches, seconds)
        run = harness.execute(own_spec, Expansion(points, {}), plan, out / phase, on_event, list(argv) or sys.argv)
        runs.append(run)
        spent = [r["startup_s"] for r in run.manifest["launches"] if "startup_s" in r]
        if spent:  # starting takes what it took here, and ending a little more
            overhead = sum(spent) / len(spent) + 2.0
    return runs


def _forced(points: Sequence[Point]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(p.backend for p in points if p.backend != AUTO))
