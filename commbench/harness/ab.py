"""A/B: launches of two sides in turn on one machine, so that whatever drifts meets both alike.

Pairs of launches run in ABBA order with a random start, each pair with one common random order of points. A stage is
such a set of pairs with two ordinary run directories as its result.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from commbench import __version__
from commbench.errors import UsageError
from commbench.harness.environment.fingerprint import redact
from commbench.harness.launch import Event, run_launch
from commbench.harness.launchers.commands import Program, environment_of
from commbench.measure.settings import Settings
from commbench.store.run import Plan, Run, check_writable, create, finish, open_run, update_manifest
from commbench.sweep import SweepSpec
from commbench.types import Point

BASE, CAND = "base", "cand"
_PROBE_TIMEOUT_S = 60.0
_OWN = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('commbench') else 3)"
_FINGERPRINT = (
    "import json, sys; from commbench.harness.environment.fingerprint import fingerprint; "
    "print(json.dumps(fingerprint(sys.argv[1]), default=str))"
)


@dataclass(frozen=True, slots=True)
class AbSide:
    """One side: what its ranks run, its dispatch policy (None: the spec's), and a name for people."""

    side: str
    program: Program = field(default_factory=Program)
    policy: str | None = None

    @property
    def name(self) -> str:
        parts = [self.policy or ""]
        if self.program.python != sys.executable:
            parts.append(self.program.python)
        parts += [f"{k}={v}" for k, v in self.program.variables.items()]
        return " ".join(p for p in parts if p) or ("baseline" if self.side == BASE else "candidate")


def make_side(side: str, python: str | None, variables: Sequence[str], policy: str | None) -> AbSide:
    """A side from its flags. variables: ``NAME=value``. Raises UsageError for a malformed one or a Python that does not
    run or has no torch."""
    flag = f"--{side}"
    found: dict[str, str | None] = {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag}-env {text!r}: write NAME=value")
        found[name] = value
    program = Program(variables=found)
    if python is not None:
        own = _run([python, "-P", "-c", _OWN], program, f"{flag}-python {python}", allowed=(0, 3)).returncode == 0
        program = Program(python, found, own_commbench=own)
        _run([python, "-P", "-c", "import torch.distributed.run"], program, f"{flag}-python {python}")
    return AbSide(side, program, policy)


def _run(
    command: list[str], program: Program, what: str, allowed: tuple[int, ...] = (0,)
) -> subprocess.CompletedProcess[str]:
    environment = environment_of(program)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, env=environment, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{what} does not run: {error}") from error
    if done.returncode not in allowed:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UsageError(f"{what} does not work: {said[-1].strip() if said else f'exit {done.returncode}'}")
    return done


def side_fingerprint(side: AbSide, device: str) -> dict[str, Any]:
    """The fingerprint that this side's own Python gives, with its versions and variables."""
    command = [side.program.python, "-P", "-c", _FINGERPRINT, device]
    done = _run(command, side.program, f"the {side.side} side's Python")
    try:
        found = json.loads(done.stdout)
    except ValueError as error:
        raise UsageError(f"the {side.side} side's commbench gave no fingerprint: {error}") from error
    return dict(found)


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
    """The program under the launcher that the spec names."""
    return replace(program, launcher=spec.launcher, mpirun_options=spec.mpirun_options)


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

    On KeyboardInterrupt finished points are kept, and the exception goes on. Raises LaunchError when a launch cannot
    start, and StoreError when ``directory`` cannot be used.
    """
    folders = {name: directory / name for name in (BASE, CAND)}
    for name, folder in folders.items():
        check_writable(folder)
        side = sides[name]
        told = {key: None if value is None else redact(key, value) for key, value in side.program.variables.items()}
        manifest = {
            "run_id": f"{directory.parent.name}-{directory.name}-{name}",
            "commbench": __version__,
            "argv": [redact("", word) for word in sys.argv],
            "started_s": time.time(),
            "outcome": "running",
            "spec": spec.model_dump() | ({"policy": [side.policy]} if side.policy else {}),
            "settings": settings.to_dict(),
            "points_planned": len(points[name]) * pairs,
            "fingerprint": dict(fingerprints[name]),
            "ab": {"side": name, "python": side.program.python, "variables": told},
            "launches": [],
        }
        create(folder, manifest, Plan(tuple(points[name]), settings.to_dict()))
    outcome = "failed"
    try:
        for pair, name in launch_order(pairs, settings.seed):
            run_launch(folders[name], pair, spec.ranks, on_event, started_by(sides[name].program, spec))
        outcome = "complete"
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        for folder in folders.values():
            finish(folder)
            update_manifest(folder, outcome=outcome, ended_s=time.time())
    return {name: open_run(folder) for name, folder in folders.items()}
