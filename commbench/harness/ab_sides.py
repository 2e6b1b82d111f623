"""The two sides of an A/B: what each one's ranks run, and whether its own commbench can measure what is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import commbench
from commbench.errors import SpecError, UsageError
from commbench.harness.launchers.commands import Program, environment_of
from commbench.harness.supervision import heartbeat
from commbench.measure.settings import Settings
from commbench.store.schema import SCHEMA_VERSION
from commbench.sweep import SweepSpec
from commbench.types import AUTO, Point

BASE, CAND = "base", "cand"
OLDEST_PYTHON = (3, 11)
# what starts a rank, the newest name first: an earlier commbench has it elsewhere
RANK_MODULES = ("commbench.harness.ranks.rank", "commbench.harness.rank")
AGENTS = ("commbench.harness.launchers.agent", "commbench.harness.agent")
_FINGERPRINTS = ("commbench.harness.environment.fingerprint", "commbench.harness.fingerprint")
# settings that say how long to wait: a commbench that does not know them waits in its own way
_WAITING = frozenset({"patience_s"})
_PROBE_TIMEOUT_S = 60.0
# Run by a side's Python: what its commbench is and knows. It names nothing that an earlier commbench lacks.
_PROBE = """
import importlib.util, json, sys
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
def first(names):
    return next((name for name in names if there(name)), "")
found = {"python": sys.version_info[:2]}
if there("commbench"):
    from dataclasses import fields
    import commbench
    from commbench.measure.settings import Settings
    from commbench.registry import BACKENDS
    from commbench.store.schema import SCHEMA_VERSION
    from commbench.types import COLLECTIVES, Point
    watch = first(["commbench.harness.supervision.heartbeat", "commbench.harness.heartbeat"])
    page = getattr(importlib.import_module(watch), "FORMAT", 0) if watch else 0
    ranks, agents, fingerprints = json.loads(sys.argv[1])
    found |= {
        "version": commbench.__version__, "path": commbench.__path__[0], "schema": SCHEMA_VERSION,
        "rank": first(ranks), "agent": first(agents), "fingerprint": first(fingerprints), "heartbeat": page,
        "binds": bool(first(["commbench.harness.launchers.binding", "commbench.harness.binding"])),
        "settings": [f.name for f in fields(Settings)], "point": [f.name for f in fields(Point)],
        "backends": list(BACKENDS), "collectives": list(COLLECTIVES),
    }
print(json.dumps(found))
"""
_FINGERPRINT = (
    "import importlib, json, sys; module = importlib.import_module(sys.argv[1]); "
    "print(json.dumps(module.fingerprint(sys.argv[2]), default=str))"
)


@dataclass(frozen=True, slots=True)
class Known:
    """What a side's own commbench is: its version and place, the name of its fingerprint's module, whether it binds
    ranks, and the names of the settings, fields of points, backends and collectives that it knows."""

    version: str
    path: str
    schema: int
    fingerprint: str
    binds: bool
    settings: frozenset[str]
    point: frozenset[str]
    backends: frozenset[str]
    collectives: frozenset[str]


@dataclass(frozen=True, slots=True)
class AbSide:
    """One side: what its ranks run, its dispatch policy (None: the spec's), and a name for people. known: what its own
    commbench is; None where its ranks run this one."""

    side: str
    program: Program = field(default_factory=Program)
    policy: str | None = None
    known: Known | None = None

    @property
    def name(self) -> str:
        parts = [self.policy or ""]
        if self.program.python != sys.executable:
            parts.append(self.program.python)
        parts += [f"{k}={v}" for k, v in self.program.variables.items()]
        return " ".join(p for p in parts if p) or "this commbench"


def make_side(side: str, python: str | None, variables: Sequence[str], policy: str | None) -> AbSide:
    """A side from its flags. variables: ``NAME=value``. Raises UsageError for a malformed one, and for a Python that
    does not run, is too old, has no torch, or has a commbench whose ranks this one cannot start."""
    flag = f"--{side}"
    found: dict[str, str | None] = {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag}-env {text!r}: write NAME=value")
        found[name] = value
    if python is None:
        return AbSide(side, Program(variables=found), policy)
    what = f"{flag}-python {python}"
    # asked as one with a commbench of its own: else it would find this one on its path
    own = Program(python, found, own_commbench=True)
    names = json.dumps([RANK_MODULES, AGENTS, _FINGERPRINTS])
    facts = _answer(_run([python, "-c", _PROBE, names], own, what), what)
    if tuple(facts["python"]) < OLDEST_PYTHON:
        version, oldest = (".".join(map(str, v)) for v in (facts["python"], OLDEST_PYTHON))
        raise UsageError(f"{what} is Python {version}; commbench needs {oldest} or newer")
    if "version" not in facts or Path(facts["path"]).resolve() == Path(commbench.__file__).resolve().parent:
        program, known = Program(python, found), None
    else:
        if not facts["rank"]:
            raise UsageError(
                f"{what}: its commbench {facts['version']} has no ranks that this one knows how to start; measure each "
                "side by itself with `commbench sweep`, and judge the stored runs"
            )
        program = replace(
            own, module=facts["rank"], agent=facts["agent"], watched=facts["heartbeat"] == heartbeat.FORMAT
        )
        known = Known(
            *(facts[key] for key in ("version", "path", "schema", "fingerprint", "binds")),
            *(frozenset(facts[key]) for key in ("settings", "point", "backends", "collectives")),
        )
    worker = program.module.rpartition(".")[0] + ".worker"
    _run([python, "-c", f"import torch.distributed.run, {worker}"], program, what)
    return AbSide(side, program, policy, known)


def check_side(side: AbSide, spec: SweepSpec, points: Sequence[Point], settings: Settings) -> None:
    """Raise UsageError where this side's own commbench would not measure what the spec says: it writes another schema,
    or does not know a setting, backend or collective. It would leave out what it does not know without a word."""
    known = side.known
    if known is None:
        return
    usual = Settings(tp=spec.ranks).to_dict()  # one group of all ranks is what there was before groups had a size
    strange = [name for name, value in settings.to_dict().items()
               if value != usual[name] and name not in known.settings | _WAITING]  # fmt: skip
    strange += ["bind"] if spec.bind and not known.binds else []
    strange += [f"the point's {name}" for name in points[0].to_dict() if name not in known.point]
    strange += [f"backend {name}" for name in dict.fromkeys(p.backend for p in points)
                if name != AUTO and name not in known.backends]  # fmt: skip
    strange += [f"collective {name}" for name in dict.fromkeys(p.collective for p in points)
                if name not in known.collectives]  # fmt: skip
    what = f"--{side.side}-python {side.program.python}: its commbench {known.version} ({known.path})"
    if known.schema != SCHEMA_VERSION:
        raise UsageError(
            f"{what} writes runs of schema {known.schema}, this one of schema {SCHEMA_VERSION}; measure each side by "
            "itself with its own `commbench sweep`, and judge the stored runs with the newer one"
        )
    if strange:
        raise UsageError(
            f"{what} does not know {', '.join(strange)}, which the sweep asks for; leave it out of the sweep, or "
            "install a newer commbench there"
        )


def check_spec(spec: SweepSpec, where: str) -> None:
    """Raise SpecError for what no A/B can do: it starts all launches of both sides by itself, on this host.

    where: the sweep's file.
    """
    if spec.nnodes > 1:
        raise SpecError(
            f"{where}: nnodes: an A/B measures on one host; take nnodes = 1, or measure each side by itself with "
            "`commbench sweep` and judge the stored runs"
        )
    if spec.launcher == "external":
        raise SpecError(
            f"{where}: launcher: an A/B starts the launches of both sides itself; take torchrun or mpirun in place of "
            "external"
        )


def _answer(done: subprocess.CompletedProcess[str], what: str) -> dict[str, Any]:
    """The JSON on the last line that a side's Python printed. Raises UsageError where there is none."""
    try:
        return dict(json.loads(done.stdout.strip().rpartition("\n")[2]))
    except ValueError as error:
        raise UsageError(f"{what} printed something else than it was asked for: {error}") from error


def _run(command: list[str], program: Program, what: str) -> subprocess.CompletedProcess[str]:
    environment = environment_of(program)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, env=environment, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{what} does not run: {error}") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise UsageError(f"{what} does not work: {said[-1].strip() if said else f'exit {done.returncode}'}")
    return done


def side_fingerprint(side: AbSide, device: str) -> dict[str, Any]:
    """The fingerprint that this side's own Python gives, with its versions and variables."""
    module = _FINGERPRINTS[0] if side.known is None else side.known.fingerprint
    what = f"the {side.side} side's Python"
    return _answer(_run([side.program.python, "-c", _FINGERPRINT, module, device], side.program, what), what)
