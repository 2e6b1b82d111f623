"""One run on disk: create it, append to it while it runs, close it, read it.

While a run goes on, rank 0 of each launch appends a line per finished point to ``points.jsonl`` and the raw
samples to ``samples/launch-<k>.bin``; the command that started the run turns both into Parquet after each
launch. A crash at any moment therefore keeps every finished point.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commbench.errors import StoreError
from commbench.store import schema
from commbench.types import Point

if TYPE_CHECKING:
    import pandas as pd

PLAN = "plan.json"


def write_json(path: Path, document: Any) -> None:
    """Write a whole JSON file or nothing: a reader never sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as stream:
            json.dump(document, stream, indent=1, ensure_ascii=False, default=str)
            stream.write("\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class Plan:
    """What the ranks of every launch do: the points, and how to measure them (plain settings)."""

    points: tuple[Point, ...]
    settings: Mapping[str, Any]

    def save(self, directory: Path) -> None:
        write_json(directory / PLAN, {"points": [p.to_dict() for p in self.points], "settings": dict(self.settings)})

    @classmethod
    def load(cls, directory: Path) -> Plan:
        document = json.loads((directory / PLAN).read_text())
        return cls(tuple(Point.from_dict(p) for p in document["points"]), document["settings"])


def create(directory: Path, manifest: Mapping[str, Any], plan: Plan) -> Path:
    """Make a run directory with its manifest and plan.

    Raises StoreError when the path is a file, a folder with something in it, or cannot be written.
    """
    try:
        check_writable(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name in (schema.SAMPLES_DIR, schema.LOGS_DIR):
            (directory / name).mkdir()
        plan.save(directory)
        write_json(directory / schema.MANIFEST, {"schema_version": schema.SCHEMA_VERSION, **manifest})
        (directory / schema.POINTS_JSONL).touch()
    except OSError as error:
        raise StoreError(f"--out {directory} cannot be written: {error.strerror or error}") from error
    return directory


def check_writable(directory: Path) -> None:
    """Raise StoreError, before anything is measured, where ``create`` would."""
    if directory.exists():
        if not directory.is_dir():
            raise StoreError(f"--out {directory} is a file; name a new or empty folder")
        if any(directory.iterdir()):
            raise StoreError(f"--out {directory} is not empty; name a new or empty folder")
    nearest = directory
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise StoreError(f"--out {directory} cannot be made: {nearest} is a file")
    # /proc lets root "write" and makes no folder all the same
    if not os.access(nearest, os.W_OK | os.X_OK) or nearest.resolve().parts[:2] in (("/", "proc"), ("/", "sys")):
        raise StoreError(f"--out {directory} cannot be made: {nearest} is not writable")


def update_manifest(directory: Path, **changes: Any) -> dict[str, Any]:
    """Change top-level keys of the manifest, atomically; gives the new manifest."""
    path = directory / schema.MANIFEST
    manifest = {**json.loads(path.read_text()), **changes}
    write_json(path, manifest)
    return manifest


class PointLog:
    """Appends finished points to ``points.jsonl``; each is on disk (flushed) when ``append`` returns."""

    def __init__(self, directory: Path) -> None:
        # A line that a killed writer left unfinished must not swallow the next one.
        path = directory / schema.POINTS_JSONL
        with path.open("rb+") as stream:
            stream.seek(0, os.SEEK_END)
            if stream.tell():
                stream.seek(-1, os.SEEK_END)
                if stream.read(1) != b"\n":
                    stream.write(b"\n")
        self._stream = path.open("a")

    def append(self, row: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


@dataclass(slots=True)
class Run:
    """A run directory opened for reading. ``problems`` names lines that could not be read."""

    directory: Path
    manifest: dict[str, Any] = field(repr=False)  # pages of it
    problems: list[str] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        return str(self.manifest.get("run_id", self.directory.name))

    def rows(self, offset: int = 0) -> list[dict[str, Any]]:
        """The finished points as written, in the order they finished (also while the run goes on): one for each point
        and launch, the last where one was measured again. offset: bytes of the file to pass over."""
        found: dict[Any, dict[str, Any]] = {}
        for number, row in self._rows(offset):
            key = (row["point_id"], row.get("launch")) if "point_id" in row else number
            found.pop(key, None)  # the later one stands where it was finished
            found[key] = row
        return list(found.values())

    def _rows(self, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
        self.problems.clear()
        path = self.directory / schema.POINTS_JSONL
        if not path.exists():
            return
        with path.open("rb") as stream:
            stream.seek(offset)
            text = stream.read().decode(errors="replace")
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                self.problems.append(f"{path.name} line {number} is not readable and was skipped")
                continue
            if not isinstance(row, dict):
                self.problems.append(f"{path.name} line {number} is no record and was skipped")
                continue
            yield number, row

    def points(self) -> pd.DataFrame:
        """One row per finished point and launch, with exactly the columns of ``schema.POINT_COLUMNS``."""
        import pandas as pd

        rows = self.rows()
        frame = pd.DataFrame.from_records(rows, columns=list(schema.POINT_COLUMNS))
        return frame.astype(schema.POINT_COLUMNS)

    def samples(self, point_id: str | Collection[str] | None = None) -> pd.DataFrame:
        """Raw samples of one point, several or all, every launch: ``schema.SAMPLE_COLUMNS``."""
        from commbench.store.samples import read_samples

        return read_samples(self.directory, point_id)


def open_run(path: str | Path) -> Run:
    """Open a run directory. Raises StoreError if it is none, is unreadable or of a newer schema."""
    directory = Path(path)
    manifest_path = directory / schema.MANIFEST
    if not directory.exists():
        raise StoreError(f"{directory} does not exist; name a run directory such as reports/<run_id>")
    if not manifest_path.is_file():
        raise StoreError(f"{directory} is not a run directory: it has no {schema.MANIFEST}")
    try:
        manifest = json.loads(manifest_path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{manifest_path} is not a readable manifest: {error}") from error
    if not isinstance(manifest, dict) or "schema_version" not in manifest:
        raise StoreError(f"{manifest_path} is no manifest of a run: it has no schema_version; name a run directory")
    version = manifest["schema_version"]
    if not isinstance(version, int) or version > schema.SCHEMA_VERSION:
        raise StoreError(
            f"{directory} has schema version {version}, newer than the {schema.SCHEMA_VERSION} "
            "that this commbench reads; update commbench"
        )
    return Run(directory, manifest)


def finish(directory: Path) -> None:
    """Write ``points.parquet`` from ``points.jsonl``."""
    frame = open_run(directory).points()
    temporary = directory / f".{schema.POINTS_PARQUET}.tmp"
    try:
        frame.to_parquet(temporary, index=False)
        temporary.replace(directory / schema.POINTS_PARQUET)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def row_of(point: Point, values: Mapping[str, Any]) -> dict[str, Any]:
    """A ``points`` row: the point's own columns, then ``values``; unknown columns are an error."""
    row: dict[str, Any] = {
        "point_id": point.point_id,
        "point_key": point.point_key,
        "collective": point.collective,
        "op": point.op,
        "dtype": point.dtype,
        "size_bytes": point.size_bytes,
        "numel": point.numel,
        "layout": point.layout,
        "world_size": point.world_size,
        "group": point.group,
        "policy": point.policy,
        "backend_requested": point.backend,
        "mode": point.mode,
        "cache": point.cache,
        "placement": point.placement,
    }
    row.update(values)
    strange: Sequence[str] = sorted(set(row) - set(schema.POINT_COLUMNS))
    if strange:
        raise StoreError(f"columns {', '.join(strange)} are not in the schema")
    return {name: row.get(name) for name in schema.POINT_COLUMNS}
