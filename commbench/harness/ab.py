"""A/B: launches of two sides in turn on one machine, so that whatever drifts meets both alike.

Pairs of launches run in ABBA order with a random start, each pair with one common random order of points. A stage is
such a set of pairs with two ordinary run directories as its result.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from commbench import __version__
from commbench.harness.ab_sides import BASE, CAND, AbSide
from commbench.harness.environment.fingerprint import redact
from commbench.harness.launch import Event, run_launch
from commbench.harness.launchers.commands import Program
from commbench.harness.run import limits_of
from commbench.harness.supervision.supervisor import interruptible, stopping
from commbench.measure.settings import Settings
from commbench.native.segment import remove_stale
from commbench.store.run import Plan, Run, check_writable, create, finish, open_run, update_manifest
from commbench.sweep import SweepSpec
from commbench.types import Point


def launch_order(pairs: int, seed: int) -> list[tuple[int, str]]:
    """(pair, side) in the order to launch: AB BA or BA AB by chance for every two pairs, so that drift cancels."""
    rng = random.Random(f"{seed}/ab")
    order: list[tuple[int, str]] = []
    first, second = BASE, CAND
    for pair in range(pairs):
        if pair % 2 == 0:
            first, second = (BASE, CAND) if rng.random() < 0.5 else (CAND, BASE)
        else:
            first, second = second, first
        order += [(pair, first), (pair, second)]
    return order


def started_by(program: Program, spec: SweepSpec) -> Program:
    """The program under the launcher that the spec names, its ranks bound as the spec says."""
    return replace(program, launcher=spec.launcher, mpirun_options=spec.mpirun_options, bind=spec.bind)


def run_stage(
    directory: Path,
    sides: Mapping[str, AbSide],
    points: Mapping[str, Sequence[Point]],
    spec: SweepSpec,
    settings: Settings,
    pairs: int,
    on_event: Callable[[Event], None],
    fingerprints: Mapping[str, Mapping[str, Any]],
) -> dict[str, Run]:
    """Launch ``pairs`` pairs of the points of each side; gives both runs, opened.

    On KeyboardInterrupt the ranks are stopped and finished points are kept; the manifests' outcome then is
    ``interrupted``, and the exception goes on (as StopAtOnce when the user asked twice). Raises LaunchError when a
    launch cannot start, and StoreError when ``directory`` cannot be used.
    """
    folders = {name: directory / name for name in (BASE, CAND)}
    for name, folder in folders.items():
        check_writable(folder)
        side = sides[name]
        told = {key: None if value is None else redact(key, value) for key, value in side.program.variables.items()}
        manifest = {
            "run_id": f"{directory.parent.name}-{directory.name}-{name}",
            "commbench": __version__ if side.known is None else side.known.version,
            "argv": [redact("", word) for word in sys.argv],
            "started_s": time.time(),
            "outcome": "running",
            "spec": spec.to_dict() | ({"policy": [side.policy]} if side.policy else {}),
            "settings": settings.to_dict(),
            "points_planned": len(points[name]) * pairs,
            "fingerprint": dict(fingerprints[name]),
            "ab": {"side": name, "python": side.program.python, "variables": told},
            "launches": [],
        }
        create(folder, manifest, Plan(tuple(points[name]), settings.to_dict()))
    remove_stale()
    outcome = "failed"
    with interruptible():
        try:
            for pair, name in launch_order(pairs, settings.seed):
                program = started_by(sides[name].program, spec)
                run_launch(folders[name], pair, spec.ranks, on_event, program, limits=limits_of(spec))
            outcome = "complete"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        finally:
            for folder in folders.values():
                if not stopping.hurried:
                    finish(folder)
                update_manifest(folder, outcome=outcome, ended_s=time.time())
    return {name: open_run(folder) for name, folder in folders.items()}
