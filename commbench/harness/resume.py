"""Going on with a run: what has no result yet, what is to be repeated, and whether it still is the same measurement."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from commbench import __version__
from commbench.errors import CommbenchError, StoreError, UsageError
from commbench.harness.environment.comparable import compare_manifests
from commbench.harness.environment.fingerprint import redact
from commbench.harness.launch import NOTHING_AGAIN, Again, unrepeated
from commbench.harness.order import shuffled
from commbench.store import schema
from commbench.store.run import PLAN, Plan, open_run
from commbench.sweep import SweepSpec, make_spec
from commbench.types import Point

RETRIED = ("failed", "timeout", "wrong", "unsteady")
# of a spec, what may be another when a run goes on: it changes no number
_FREE = ("name", "description", "point_timeout", "launch_timeout")
# what commbench writes under before it gives a file its name: JSON, Parquet, the page, torchrun's folder in logs
_TEMPORARIES = (".*.json.*", ".*.parquet.tmp", ".*.html.tmp", ".launch-*")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run that goes on. left: launch → places of the points to measure; again: those of them that have a result."""

    directory: Path
    manifest: Mapping[str, Any]
    spec: SweepSpec
    plan: Plan
    left: Mapping[int, Sequence[int]]
    again: Again

    @property
    def points(self) -> list[tuple[int, Point]]:
        """(launch, point) in the order in which they will be measured."""
        seed = int(self.plan.settings["seed"])
        found = []
        for launch, orders in self.left.items():
            wanted = set(orders)
            found += [(launch, p) for order, p in shuffled(self.plan.points, seed, launch) if order in wanted]
        return found


def parse_retry(text: str) -> tuple[str, ...]:
    """Statuses from ``failed,timeout``. Raises UsageError for one that is not among RETRIED."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    strange = [name for name in names if name not in RETRIED]
    if strange or not names:
        raise UsageError(f"--retry {text!r}: {', '.join(strange) or 'nothing'} cannot be repeated; "
                         f"allowed: {', '.join(RETRIED)}")  # fmt: skip
    return names


def unfinished(directory: Path, retry: Sequence[str] = ()) -> Unfinished:
    """What a run has left to measure. Raises StoreError when the folder is no run, or has no plan to go on with."""
    run = open_run(directory)
    try:
        plan = Plan.load(directory)
        where = f"{directory / schema.MANIFEST}: spec."
        spec = make_spec(run.manifest["spec"], {key: where + key for key in run.manifest["spec"]})
        seed = int(plan.settings["seed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{directory} cannot be resumed: its plan or spec is not readable: {error}") from error
    rows = run.rows()
    pairs = frozenset((int(r["launch"]), str(r["point_id"])) for r in rows if r.get("status") in retry)
    done = {(r.get("launch"), r.get("point_id")) for r in rows} - pairs
    left: dict[int, list[int]] = {}
    for launch in range(spec.launches):
        orders = [order for order, p in shuffled(plan.points, seed, launch) if (launch, p.point_id) not in done]
        if orders:
            left[launch] = orders
    path = directory / schema.POINTS_JSONL
    offset = path.stat().st_size if path.exists() else 0
    return Unfinished(directory, run.manifest, spec, plan, left, Again(pairs, offset))


def differences(work: Unfinished, spec: SweepSpec | None, machine: Mapping[str, Any]) -> list[str]:
    """Why what would be measured now does not belong to the run: the spec (where one is given again), the version of
    commbench or of the libraries, the machine. machine: a fingerprint taken now."""
    found = []
    if spec is not None:
        now, then = spec.to_dict(), work.spec.to_dict()
        found += [f"spec.{k}: {then[k]} → {now[k]}" for k in then if k not in _FREE and then[k] != now[k]]
    version = work.manifest.get("commbench")
    if version != __version__:
        found.append(f"commbench: {version} → {__version__}")
    compared = compare_manifests(work.manifest, {**work.manifest, "fingerprint": machine})
    return found + list(compared.refusals) + [note for note in compared.notes if note.startswith("versions.")]


def record_of(
    differences: Sequence[str], retry: Sequence[str], argv: Sequence[str], again: Again = NOTHING_AGAIN
) -> dict[str, Any]:
    """What the manifest keeps of a run's going on."""
    return {
        "resumed_s": time.time(),
        "commbench": __version__,
        "argv": ["commbench", *(redact("", word) for word in argv[1:])],
        "retry": list(retry),
        "again": {"pairs": sorted(again.pairs), "offset": again.offset},
        "forced": list(differences),
    }


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a run directory, so that no second command measures into it. The hold ends with this process.

    Raises StoreError when another process has it.
    """
    fd = os.open(directory / PLAN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"{directory} is being measured by another commbench; wait for it, or end it") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # file systems without locks
                raise
        yield
    finally:
        os.close(fd)


def remove_temporaries(directory: Path) -> None:
    """Take away what a command left in its run's folder that was killed while it wrote, and nothing of the user's.

    The caller holds the run.
    """
    for folder in (directory, directory / schema.SAMPLES_DIR, directory / schema.LOGS_DIR):
        for path in {found for pattern in _TEMPORARIES for found in folder.glob(pattern)}:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def settle_samples(work: Unfinished) -> None:
    """Turn the logs of samples into Parquet that a killed command left, of launches that have nothing left to measure
    or in which it repeated points. Samples of a repetition without a new row are left out, so that rows and samples
    belong together. The caller holds the run."""
    from commbench.store.samples import to_parquet

    told = (work.manifest.get("resumed") or [{}])[-1].get("again", {"pairs": (), "offset": 0})
    again = Again(frozenset((int(launch), str(point)) for launch, point in told["pairs"]), int(told["offset"]))
    repeated = {launch for launch, _ in again.pairs}
    seed = int(work.plan.settings["seed"])
    for log in sorted((work.directory / schema.SAMPLES_DIR).glob("launch-*.bin")):
        launch = int(log.stem.partition("-")[2])
        if launch in repeated or launch not in work.left:  # others are turned when they are over
            ordered = shuffled(work.plan.points, seed, launch)
            to_parquet(work.directory, launch, unrepeated(work.directory, launch, ordered, again))


def kept_after(error: BaseException, directory: Path) -> CommbenchError:
    """The error to show when a run directory cannot be written any more, with what is kept and how to go on."""
    if isinstance(error, OSError):
        name = error.filename if isinstance(error.filename, str) else str(directory)
        what = f"{name} cannot be written: {error.strerror or error}"
    else:
        what = str(error)
    try:
        kept = f"{len(open_run(directory).rows())} finished points are kept"
    except (CommbenchError, OSError, json.JSONDecodeError):
        kept = "nothing in it can be read now"
    return StoreError(f"{what}; {kept}; mend that and go on with: commbench sweep --resume {directory}")
