"""Many nights in one folder: a Parquet file per run, never changed once it is there.

No index and no lock: a run is written to a file of its own under a temporary name and then given its name in one step,
so nightly jobs that run at the same time lose nothing, and a reader sees whole files only. A file holds one row per
point (the launch medians kept as a list) and, in its metadata, what the run was: time, machine, spec, canaries.

Schema versions: 1 is a run's own ``points.parquet`` copied into the folder (a row per point and launch, no metadata);
it is read as it is. 2 is what ``add_run`` writes.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commbench.errors import StoreError, UsageError
from commbench.store import schema
from commbench.store.latencies import COLUMNS, IDENTITY, how_of

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray

HISTORY_SCHEMA = 2
METADATA = b"commbench.history"
USABLE = ("ok", "unsteady")
CLOCK_AHEAD_S = 86_400.0  # a run that starts later than this after now has a clock that cannot be trusted
EARLIEST_S = 946_684_800.0  # 2000-01-01: before that a clock was never set
READERS = 4

# Columns of a file that are numbers. key: the point_id as a number, by which files are searched. log_mean and
# log_variance: of the natural logs of the launch medians in seconds.
_NUMBERS = ("key", "launches", "log_mean", "log_variance")


@dataclass(frozen=True, slots=True)
class Night:
    """One stored run. ``facts``: run_id, started_s, fingerprint, spec, canaries (canary → launch → log seconds), note,
    accepted (whether it starts a new baseline), points, launches."""

    path: Path
    version: int
    facts: Mapping[str, Any]
    footer: Any = None  # parquet's own, so that it need not be read again

    @property
    def run_id(self) -> str:
        return str(self.facts["run_id"])

    @property
    def started_s(self) -> float:
        return float(self.facts["started_s"])

    @property
    def fingerprint(self) -> dict[str, Any]:
        found = self.facts.get("fingerprint")
        return found if isinstance(found, dict) else {}

    @property
    def day(self) -> str:
        return datetime.datetime.fromtimestamp(self.started_s, datetime.UTC).strftime("%Y-%m-%d %H:%M")

    def table(self, columns: Sequence[str]) -> pa.Table:
        """Some columns, one row per point. Raises StoreError when the file cannot be read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            if self.version == 1:
                return _summed(pq.read_table(self.path, columns=list(COLUMNS)).to_pandas()).select(list(columns))
            return pq.ParquetFile(self.path, metadata=self.footer, pre_buffer=False).read(
                columns=list(columns), use_threads=False
            )
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"{self.path} cannot be read: {error}; remove it from the history") from error


@dataclass(slots=True)
class History:
    """The nights of a folder by time, and what had to be skipped and why."""

    directory: Path
    nights: list[Night]
    skipped: list[str] = field(default_factory=list)


def add_run(
    directory: Path,
    manifest: Mapping[str, Any],
    latencies: pd.DataFrame,
    canaries: Mapping[str, Mapping[int, float]],
    *,
    note: str = "",
    accepted: bool = False,
) -> tuple[Path, bool]:
    """Keep a run; gives its file, and false if the very same run was there already.

    latencies: as ``read_latencies`` gives them. Raises StoreError for a run without any point, for another run
    under the same run_id, and when the folder cannot be written.
    """
    import pyarrow.parquet as pq

    run_id = str(manifest.get("run_id", ""))
    if not re.fullmatch(r"[\w.+-]{1,200}", run_id) or run_id.startswith("."):
        raise StoreError(f"run_id {run_id!r} is no file name; a run is kept under it")
    if latencies.empty:
        raise StoreError(f"{run_id} has no points; an empty run is no night to compare with")
    table = _summed(latencies)
    facts = {
        "schema_version": HISTORY_SCHEMA,
        "run_id": run_id,
        "started_s": float(manifest.get("started_s") or 0.0),
        "added_s": time.time(),
        "fingerprint": manifest.get("fingerprint"),
        "spec": manifest.get("spec"),
        "outcome": manifest.get("outcome"),
        "commbench": manifest.get("commbench"),
        "canaries": {name: {str(k): v for k, v in values.items()} for name, values in canaries.items()},
        "points": table.num_rows,
        "launches": int(latencies["launch"].nunique()),
        "note": note,
        "accepted": accepted,
        "digest": _digest(table, float(manifest.get("started_s") or 0.0)),
    }
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), METADATA: json.dumps(facts, default=str)})
    final = directory / f"{run_id}.parquet"
    temporary = directory / f".{run_id}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # numbers are quicker to read as they are than through a dictionary of all of them
        texts = [field.name for field in table.schema if str(field.type).endswith("string")]
        pq.write_table(
            table, temporary, compression="zstd", use_dictionary=texts
        )  # numbers: quicker to read as they are
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        placed = _place(temporary, final)
    except OSError as error:
        raise StoreError(f"history {directory} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    if not placed:
        there = _open(final)
        if there.facts.get("digest") != facts["digest"]:
            raise StoreError(f"{final} holds another run of the same run_id; give one of them another name")
    return final, placed


def _place(temporary: Path, final: Path) -> bool:
    """Give the file its name in one step, unless a file has it already."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if final.exists():  # a file system without links: two jobs adding the same run would write the same bytes
            return False
        temporary.replace(final)
    return True


def _digest(table: pa.Table, started_s: float) -> str:
    """Of what was measured and when: a copy of a run under another name has the same.

    Two nights of a few points can give the same medians, since a clock has steps.
    """
    digest = hashlib.blake2b(repr(started_s).encode(), digest_size=16)
    for name in ("point_id", "log_mean", "launches"):
        digest.update(repr(table.column(name).to_pylist()).encode())
    return digest.hexdigest()


def _summed(latencies: pd.DataFrame) -> pa.Table:
    """One row per point from one row per point and launch, sorted by point_id."""
    import numpy as np
    import pyarrow as pa

    frame = latencies.drop_duplicates(["point_id", "launch"], keep="last")
    frame = frame.assign(
        how=how_of(frame),
        backend_picked=frame["backend_picked"].fillna(""),
    )
    latency = frame["latency_median_s"].to_numpy(dtype=np.float64, na_value=np.nan)
    good = frame["status"].isin(USABLE).to_numpy() & (latency > 0)
    used = frame[good].assign(log=np.log(latency[good]), seconds=latency[good]).sort_values(["point_id", "launch"])
    per_point = used.groupby("point_id", sort=True)
    result = frame[list(IDENTITY)].drop_duplicates("point_id").set_index("point_id", drop=False).sort_index()
    result = result.assign(
        picked=_joined(frame, "backend_picked"),
        how=_joined(used, "how"),
        status=_joined(frame, "status"),
        launches=per_point.size(),
        log_mean=per_point["log"].mean(),
        log_variance=per_point["log"].var(ddof=1),
    )
    result[["picked", "how", "status"]] = result[["picked", "how", "status"]].fillna("")
    result["launches"] = result["launches"].fillna(0).astype("int64")
    result["key"] = np.array([point_number(v) for v in result.index], dtype=np.uint64)
    lists: pd.Series = per_point["seconds"].agg(list)
    medians = [values if isinstance(values, list) else [] for values in lists.reindex(result.index)]
    result = result.astype({name: schema.POINT_COLUMNS[name] for name in IDENTITY})
    table = pa.Table.from_pandas(result.reset_index(drop=True), preserve_index=False)
    return table.append_column("medians_s", pa.array(medians, pa.list_(pa.float64())))


def point_number(point_id: str) -> int:
    """A point_id (16 hexadecimal digits) as a number. Raises StoreError for what is no point_id."""
    try:
        number = int(point_id, 16)
    except ValueError:
        raise StoreError(f"{point_id!r} is no point_id: it has 16 hexadecimal digits") from None
    return number & 0xFFFF_FFFF_FFFF_FFFF


def _joined(frame: pd.DataFrame, column: str) -> pd.Series:
    """point_id → its texts in ``column``, several joined by ``+``."""
    texts = frame[["point_id", column]].drop_duplicates()
    texts = texts[texts[column] != ""].sort_values(column)
    twice = texts["point_id"].duplicated(keep=False)
    if not twice.any():
        return texts.set_index("point_id")[column]
    joined: pd.Series = texts.groupby("point_id")[column].agg("+".join)
    return joined


# ---- reading --------------------------------------------------------------------------------------------------------


def open_history(directory: Path, *, now_s: float | None = None) -> History:
    """The nights of a folder, oldest first. Raises StoreError if it is no folder.

    A file that is damaged, newer than this commbench, or from an impossible time is skipped and named, and so is a
    second file of the same run. Everything else in the folder is not looked at.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise StoreError(f"history {directory} {what}; `commbench history add RUN --history DIR` starts one")
    now_s = time.time() if now_s is None else now_s
    paths = sorted(p for p in directory.glob("*.parquet") if not p.name.startswith("."))
    with ThreadPoolExecutor(READERS) as pool:
        opened = list(pool.map(_try_open, paths))
    history = History(directory, [], [text for text in opened if isinstance(text, str)])
    seen: dict[str, str] = {}
    nights = [n for n in opened if isinstance(n, Night)]
    for night in sorted(nights, key=lambda n: (n.started_s, n.path.name)):
        if not EARLIEST_S <= night.started_s <= now_s + CLOCK_AHEAD_S:
            history.skipped.append(f"{night.path.name}: started at {night.day}, which its clock cannot have known")
            continue
        twin = seen.get(night.run_id) or seen.get(str(night.facts.get("digest")))
        if twin is not None:
            history.skipped.append(f"{night.path.name}: the same run as {twin}")
            continue
        seen[night.run_id] = night.path.name
        if night.facts.get("digest"):
            seen[str(night.facts["digest"])] = night.path.name
        history.nights.append(night)
    return history


def _try_open(path: Path) -> Night | str:
    try:
        return _open(path)
    except StoreError as error:
        return str(error)


def _open(path: Path) -> Night:
    """Read a file's facts. Raises StoreError saying what is wrong with it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        footer = pq.read_metadata(path)
        raw = (footer.metadata or {}).get(METADATA)
        if raw is None:
            return Night(path, 1, _facts_of_version_1(path, footer), footer)
        facts = json.loads(raw)
        version = int(facts["schema_version"])
        float(facts["started_s"])
        str(facts["run_id"])
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path.name}: damaged, {str(error).splitlines()[0]}") from error
    if version > HISTORY_SCHEMA:
        raise StoreError(f"{path.name}: schema version {version} is newer than {HISTORY_SCHEMA}; update commbench")
    facts["canaries"] = {n: {int(k): v for k, v in c.items()} for n, c in (facts.get("canaries") or {}).items()}
    return Night(path, version, facts, footer)


def _facts_of_version_1(path: Path, footer: Any) -> dict[str, Any]:
    """What a bare ``points.parquet`` tells: its run_id, and the time in it (of the file, where there is none)."""
    import pyarrow.parquet as pq

    missing = sorted(set(COLUMNS) - set(footer.schema.to_arrow_schema().names))
    if missing:
        raise StoreError(f"{path.name}: no run, it lacks the columns {', '.join(missing[:4])}")
    ids = pq.read_table(path, columns=["run_id", "launch"]).to_pandas() if "run_id" in footer.schema.names else None
    if ids is None or ids.empty:
        raise StoreError(f"{path.name}: no run, it has no rows with a run_id")
    run_id = str(ids["run_id"].iloc[0])
    found = re.match(r"(\d{8}-\d{6})", run_id)
    try:
        moment = datetime.datetime.strptime(found[1], "%Y%m%d-%H%M%S") if found else None
    except ValueError:
        moment = None
    started = moment.replace(tzinfo=datetime.UTC).timestamp() if moment else path.stat().st_mtime
    return {
        "schema_version": 1, "run_id": run_id, "started_s": started, "fingerprint": None, "spec": None, "canaries": {},
        "note": "", "accepted": False, "digest": None, "launches": int(ids["launch"].nunique()),
    }  # fmt: skip


def baseline_nights(history: History, started_s: float, run_id: str, most: int) -> tuple[list[Night], list[str]]:
    """The last ``most`` nights that a run may be held against, and notes on those left out.

    Nights from the last accepted one on, older than the run, and not the run itself.
    """
    earlier = [n for n in history.nights if n.run_id != run_id and n.started_s < started_s]
    later = [n for n in history.nights if n.run_id != run_id and n.started_s >= started_s]
    notes = []
    if later:
        names = ", ".join(n.run_id for n in later[:3]) + (" …" if len(later) > 3 else "")
        notes.append(f"{len(later)} nights start after the candidate and were left out (clock skew?): {names}")
    accepted = [i for i, n in enumerate(earlier) if n.facts.get("accepted")]
    if accepted:
        first = earlier[accepted[-1]]
        why = f" ({first.facts['note']})" if first.facts.get("note") else ""
        notes.append(f"nights before {first.run_id} are of an earlier baseline{why}")
        earlier = earlier[accepted[-1] :]
    return earlier[-most:], notes


@dataclass(frozen=True, slots=True)
class Series:
    """Points by nights. ``points``: a row per point with IDENTITY, picked and how (of the last night that has it).

    log_mean, launches, log_variance: (points, nights); NaN, 0 and NaN where a night lacks the point.
    """

    nights: tuple[Night, ...]
    points: pd.DataFrame
    log_mean: NDArray[np.float64]
    launches: NDArray[np.float64]
    log_variance: NDArray[np.float64]
    skipped: tuple[str, ...]


def load_series(nights: Sequence[Night], point_ids: Collection[str] | None = None) -> Series:
    """The numbers of some nights, for some points or all. A file that cannot be read is skipped and named."""
    import numpy as np

    def read(night: Night) -> list[NDArray[Any]] | str:
        try:
            table = night.table(_NUMBERS)
        except StoreError as error:
            return str(error)
        return [table.column(name).to_numpy() for name in _NUMBERS]

    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(read, nights))
    skipped = tuple(f for f in found if isinstance(f, str))
    kept = [(n, f) for n, f in zip(nights, found, strict=True) if not isinstance(f, str)]
    if point_ids is None:
        keys = np.unique(np.concatenate([f[0] for _, f in kept])) if kept else np.empty(0, dtype=np.uint64)
    else:
        keys = np.array(sorted({point_number(i) for i in point_ids}), dtype=np.uint64)
    shape = (len(kept), len(keys))
    matrices = (np.full(shape, np.nan), np.zeros(shape), np.full(shape, np.nan))
    for j, (_, (own, launches, mean, variance)) in enumerate(kept):
        if len(own) == len(keys) and (own == keys).all():  # as it mostly is
            for matrix, values in zip(matrices, (mean, launches, variance), strict=True):
                matrix[j] = values
            continue
        place = np.searchsorted(keys, own)
        known = place < len(keys)
        known[known] = keys[place[known]] == own[known]
        for matrix, values in zip(matrices, (mean, launches, variance), strict=True):
            matrix[j, place[known]] = values[known]
    log_mean, launches_of, variances = (np.ascontiguousarray(m.T) for m in matrices)
    points, more = _identity_of([n for n, _ in kept], keys)
    there = points["collective"].notna().to_numpy()
    points = points[there].reset_index(drop=True)
    return Series(
        tuple(n for n, _ in kept), points, log_mean[there], launches_of[there], variances[there], (*skipped, *more)
    )


def _identity_of(nights: Sequence[Night], keys: NDArray[np.uint64]) -> tuple[pd.DataFrame, list[str]]:
    """What each point is, from the last night that tells (NA where none does), a row per key; and unreadable files."""
    import pandas as pd

    columns = ("key", *IDENTITY, "picked", "how")
    wanted = set(keys.tolist())
    parts, skipped = [], []
    for night in reversed(nights):
        if not wanted:
            break
        try:
            frame = night.table(columns).to_pandas()
        except StoreError as error:
            skipped.append(str(error))
            continue
        frame = frame[frame["key"].isin(wanted)]
        parts.append(frame)
        wanted -= set(frame["key"].tolist())
    known = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(columns))
    return known.set_index("key").reindex(keys).reset_index(drop=True), skipped


_WORDS = re.compile(r"[^\s\[\],]+")


def find_points(points: pd.DataFrame, labels: Sequence[str], wanted: str) -> list[int]:
    """Rows that ``wanted`` names: by the start of the point_id, the whole label, its words in any order, or parts.

    Raises UsageError when there is none.
    """
    ids = points["point_id"].astype(str)
    if re.fullmatch(r"[0-9a-f]{4,16}", wanted):
        hits = [i for i, point_id in enumerate(ids) if point_id.startswith(wanted)]
        if hits:
            return hits
    exact = [i for i, text in enumerate(labels) if text == wanted]
    if exact:
        return exact
    words = set(_WORDS.findall(wanted.lower()))
    hits = [i for i, text in enumerate(labels) if words <= set(_WORDS.findall(text.lower()))]
    if not hits:
        hits = [i for i, text in enumerate(labels) if all(w in text.lower() for w in words)]
    if not hits:
        raise UsageError(f"the history has no point {wanted!r}; `commbench history show` without a point lists them")
    return hits
