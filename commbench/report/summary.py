"""What a run says: facts, points merged over launches, counts, problems. Every output is made from this."""

from __future__ import annotations

import datetime
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from commbench.analysis.launches import EXTRA_COLUMNS, MILD, SEVERITY, common_texts, merge_launches
from commbench.errors import StoreError
from commbench.store.run import PLAN, Plan, Run
from commbench.store.schema import POINT_COLUMNS, SCHEMA_VERSION
from commbench.types import AUTO, COLLECTIVES, DTYPES, NO_DTYPE, Point
from commbench.units import format_size

if TYPE_CHECKING:
    import pandas as pd

_SIZE = re.compile(r" [0-9.]+ (?:B|KiB|MiB|GiB)(?= )")

# How a run ended or stands, where that is not as it should be.
_ENDINGS = {
    "running": "; the run is not over",
    "interrupted": "; the run was interrupted",
    "failed": "; the run could not go on",
}

# What a point is, apart from collective, dtype, size, policy and backend: named only where it varies.
QUANTISED_MARK = "≈"  # after the name of a backend whose results are rounded more coarsely than their dtype
VARIANTS: tuple[str, ...] = ("op", "layout", "mode", "cache", "placement", "world_size", "group", "sync")


@dataclass(frozen=True, slots=True)
class Problem:
    """Points that are not ok for one and the same reason. ``labels`` names each of them."""

    status: str
    reason: str
    labels: tuple[str, ...]
    point_ids: tuple[str, ...]

    @property
    def said(self) -> str:
        return self.reason or "no reason was recorded"

    @property
    def points(self) -> str:
        """Every point, those that differ only in size together: ``all_reduce float32 [auto] 8 B, 16 B``."""
        return gather_sizes(self.labels)

    @property
    def line(self) -> str:
        """``wrong: all_reduce float32 [auto] 8 B — 3 of 8 elements differ``."""
        return f"{self.status}: {self.points} — {self.said}"


@dataclass
class Summary:
    """A run as the outputs need it. ``points`` is merged over launches and sorted by what a point is."""

    run: Run
    points: pd.DataFrame
    per_launch: pd.DataFrame
    planned: int | None  # points that the run set out to measure; None where the plan is not there
    unmeasured: tuple[str, ...]  # labels of planned points without any result
    damaged: list[str] = field(default_factory=list)  # lines of points.jsonl that could not be read

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def manifest(self) -> dict[str, Any]:
        return self.run.manifest

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The environment that the run recorded; empty where it recorded none."""
        found = self.manifest.get("fingerprint")
        return found if isinstance(found, dict) else {}

    @property
    def settings(self) -> dict[str, Any]:
        found = self.manifest.get("settings")
        return found if isinstance(found, dict) else {}

    @property
    def launch_records(self) -> list[dict[str, Any]]:
        """What each launch wrote into the manifest."""
        found = self.manifest.get("launches")
        return [r for r in found if isinstance(r, dict)] if isinstance(found, list) else []

    @property
    def host(self) -> str:
        host = self.fingerprint.get("host")
        return str((host.get("name") if isinstance(host, dict) else host) or "unknown host")

    @property
    def device(self) -> str:
        return str(self.settings.get("device") or "cpu")

    @property
    def cores(self) -> int | None:
        """Cores that the ranks could use; None where no launch came far enough to say."""
        found = [r["cores"] for r in self.launch_records if isinstance(r.get("cores"), int)]
        return found[-1] if found else None

    @cached_property
    def ranks(self) -> list[int]:
        """World sizes of the points, ascending; from the manifest where there is no point yet."""
        found = sorted({int(n) for n in self.points["world_size"].dropna()})
        spec = self.manifest.get("spec")
        asked = spec.get("tp") if isinstance(spec, dict) else None
        return found or ([asked] if isinstance(asked, int) else [])

    @property
    def ranks_text(self) -> str:
        if not self.ranks:
            return "no ranks"
        text = " and ".join(str(n) for n in self.ranks) if len(self.ranks) < 3 else f"{self.ranks[0]}–{self.ranks[-1]}"
        return f"{text} rank" if self.ranks == [1] else f"{text} ranks"

    @cached_property
    def launches(self) -> int:
        """Launches that gave at least one result."""
        return int(self.per_launch["launch"].nunique())

    @property
    def launches_text(self) -> str:
        return f"{self.launches} launch" if self.launches == 1 else f"{self.launches} launches"

    @property
    def outcome(self) -> str:
        """How the run ended, in the manifest's word: complete, interrupted, failed, or running."""
        return str(self.manifest.get("outcome") or "unknown")

    @property
    def command(self) -> str:
        """The command that made the run, as one types it; "" where it was not recorded."""
        argv = self.manifest.get("argv")
        if not isinstance(argv, list) or not argv:
            return ""
        return shlex.join(["commbench", *(str(part) for part in argv[1:])])

    @property
    def started(self) -> str:
        """Start of the run in UTC, to the second; "" where it was not recorded."""
        seconds = self.manifest.get("started_s")
        if not isinstance(seconds, int | float):
            return ""
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    @cached_property
    def imprecise(self) -> int:
        """Points that are ok but did not reach the interval asked for in the time given."""
        return int(((self.points["status"] == "ok") & ~self.points["target_reached"].fillna(True).astype(bool)).sum())

    @cached_property
    def noisy(self) -> int:
        """Points with a launch that was measured in noise, as its counters tell."""
        pairs = zip(self.per_launch["point_id"], self.per_launch["noise"], strict=True)
        return len({point_id for point_id, noise in pairs if noise_marks(noise)})

    @cached_property
    def counts(self) -> dict[str, int]:
        """Points per status, ok first; statuses without a point are left out."""
        found = self.points["status"].value_counts()
        return {s: int(found[s]) for s in ("ok", *SEVERITY[:-1]) if s in found.index}

    @cached_property
    def problems(self) -> list[Problem]:
        """Every point that is not ok, worst status first; points with one status and reason stand together, also where
        the reasons of a mild status differ only in numbers."""
        grouped: dict[tuple[str, str], list[Any]] = {}
        bad = self.points[self.points["status"] != "ok"]
        for place, row in enumerate(records(bad)):
            row["place"] = place
            grouped.setdefault((row["status"], row["reason"] or _default_reason(row)), []).append(row)
        for status in MILD:
            reasons = [reason for s, reason in grouped if s == status]
            for text, places in common_texts(reasons).items():
                rows = [row for place in places for row in grouped.pop((status, reasons[place]))]
                grouped[status, text] = sorted(rows, key=lambda row: row["place"])
        found = [
            Problem(s, r, tuple(label(row) for row in rows), tuple(row["point_id"] for row in rows))
            for (s, r), rows in grouped.items()
        ]
        return sorted(found, key=lambda p: SEVERITY.index(p.status))

    @property
    def oversubscribed_text(self) -> str:
        """``8 ranks on 2 cores: oversubscribed``, or "" where no point is."""
        marked = self.points[self.points["oversubscribed"].fillna(False).astype(bool)]
        if marked.empty:
            return ""
        sizes = sorted({int(n) for n in marked["world_size"].dropna()})
        ranks = f"{sizes[-1]} ranks" if len(sizes) == 1 else f"up to {sizes[-1]} ranks"
        where = f" on {self.cores} core{'s' if self.cores != 1 else ''}" if self.device == "cpu" and self.cores else ""
        return f"{ranks}{where}: oversubscribed"

    @property
    def shared_device_text(self) -> str:
        """A line where ranks shared a device, else ""."""
        shared = self.points["shared_device"].fillna(False).astype(bool).any()
        return "ranks share a device: not comparable with one rank per device" if shared else ""

    @property
    def quantised_text(self) -> str:
        """``qr quantises to int8 (marked ≈): not as exact as the others``, or "" where no backend does."""
        rows = records(self.points[["backend_picked", "quantised"]])
        found = sorted({(str(r["backend_picked"]), str(r["quantised"])) for r in rows if r["quantised"]})
        if not found:
            return ""
        who = ", ".join(f"{backend} to {level}" for backend, level in found)
        return f"quantised ({QUANTISED_MARK}): {who}; not as exact as the others, so no rival of theirs"

    @property
    def marks(self) -> list[str]:
        """What a reader must know before comparing any number of this run."""
        return [text for text in (self.oversubscribed_text, self.shared_device_text, self.quantised_text) if text]

    @property
    def policies(self) -> list[str]:
        return sorted({str(p) for p in self.points["policy"].dropna()})

    @property
    def verdict(self) -> str:
        """One line: ``24 points: 23 ok, 1 wrong; 4 of 28 planned not measured``, and how the run ended if not well."""
        total = len(self.points)
        noun = "point" if total == 1 else "points"
        if not total:
            text = "no point was measured"
        elif self.counts == {"ok": total}:
            text = f"{total} {noun}: all ok" if total > 1 else "1 point: ok"
        else:
            text = f"{total} {noun}: " + ", ".join(f"{n} {status}" for status, n in self.counts.items())
        if self.unmeasured:
            text += f"; {len(self.unmeasured)} of {self.planned} planned not measured"
        return text + _ENDINGS.get(self.outcome, "")

    @property
    def level(self) -> str:
        """good, bad (something wrong, failed, timed out or missing) or note (all else that is not ok)."""
        if self.good:
            return "good"
        mild = len(self.points) and not self.unmeasured and set(self.counts) <= {"ok", *MILD}
        return "note" if mild else "bad"

    @property
    def good(self) -> bool:
        """Whether nothing needs a look: the run ended as it should, every planned point has a result, ok or skipped."""
        measured = bool(len(self.points)) and not self.unmeasured and self.outcome not in _ENDINGS
        return measured and set(self.counts) <= {"ok", "skipped"}


def noise_marks(text: Any) -> list[str]:
    """What disturbed a point, in words, from its ``noise`` column."""
    found = _parsed(text)
    marks = found.get("marks") if isinstance(found, dict) else None
    return [str(mark) for mark in marks] if isinstance(marks, list) else []


def summarise(run: Run) -> Summary:
    """Read a run (finished or not) and merge its launches."""
    per_launch = run.points()
    damaged = list(run.problems)
    points = sort_points(merge_launches(per_launch))
    planned, unmeasured = _plan(run, set(points["point_id"]))
    return Summary(run, points, per_launch, planned, unmeasured, damaged)


def _plan(run: Run, measured: set[str]) -> tuple[int | None, tuple[str, ...]]:
    if not (run.directory / PLAN).is_file():
        return None, ()
    try:
        plan = Plan.load(run.directory)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{run.directory / PLAN} is not a readable plan: {error}") from error
    return len(plan.points), tuple(p.label() for p in plan.points if p.point_id not in measured)


def sort_points(points: pd.DataFrame) -> pd.DataFrame:
    """Collectives and dtypes in their customary order, then what else a point is, then size and backend."""
    collectives, dtypes = list(COLLECTIVES), [*DTYPES, NO_DTYPE]

    def place(column: pd.Series) -> pd.Series:
        if column.name == "collective":
            return column.map({name: i for i, name in enumerate(collectives)}).fillna(len(collectives))
        if column.name == "dtype":
            return column.map({name: i for i, name in enumerate(dtypes)}).fillna(len(dtypes))
        if column.name == "backend_requested":
            return column.where(column != AUTO, "")
        return column

    by = ["collective", "dtype", *VARIANTS, "size_bytes", "policy", "backend_requested"]
    return points.sort_values(by, key=place, kind="stable").reset_index(drop=True)


def label(row: Mapping[str, Any]) -> str:
    """The readable name of a point from its row."""
    values = {name: row[name] for name in ("collective", "op", "dtype", "layout", "group", "policy", "mode", "cache")}
    point = Point(
        **values,
        placement=row["placement"],
        backend=row["backend_requested"],
        size_bytes=int(row["size_bytes"]),
        world_size=int(row["world_size"]),
    )
    return point.label() if row["collective"] in COLLECTIVES else f"{row['collective']} {format_size(point.size_bytes)}"


def gather_sizes(labels: Iterable[str]) -> str:
    """Labels of points in one text, sizes of otherwise equal ones together."""
    sizes: dict[str, list[str]] = {}
    for text in labels:
        found = _SIZE.search(text)
        family = text if found is None else text[: found.start()] + text[found.end() :]
        sizes.setdefault(family, []).extend([] if found is None else [found[0].strip()])
    return "; ".join(f"{family} {', '.join(own)}".rstrip() for family, own in sizes.items())


def _default_reason(row: Mapping[str, Any]) -> str:
    return f"{row['wrong_count']} wrong elements" if row["status"] == "wrong" and row["wrong_count"] else ""


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as plain values; None where there is none (a point whose ranks died has little but its name)."""
    names = [str(name) for name in frame.columns]
    columns = [_values(frame[name]) for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: pd.Series) -> list[Any]:
    missing = column.isna().to_numpy()
    values = column.to_numpy(dtype=object)
    return [None if m else v for m, v in zip(missing, values, strict=True)]


def number(value: float | None) -> float:
    """The value, NaN where there is none."""
    return math.nan if value is None else float(value)


def took_text(row: Mapping[str, Any]) -> str:
    """What was taken, with a mark where it quantises: ``qr≈int8``; "" where nothing was."""
    picked, level = row["backend_picked"] or "", row["quantised"]
    return f"{picked}{QUANTISED_MARK}{level}" if picked and level else str(picked)


def checked_text(row: Mapping[str, Any]) -> str:
    """``✓`` for checked results, ``3 wrong`` for wrong ones, ``no`` where nothing was compared."""
    if row["wrong_count"]:
        return f"{row['wrong_count']} wrong"
    if row["status"] == "wrong":
        return "wrong"
    return "✓" if row["checked"] else "no"


def decision_of(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The recorded decision of a point, or None where none was made or it cannot be read."""
    text = row.get("decision")
    if not isinstance(text, str) or not text:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def to_json(run: Run) -> dict[str, Any]:
    """The document of ``sweep --json``: the run's facts, counts, problems and merged points.

    Plain JSON values only: bytes, seconds and GB/s (1e9 bytes) as the names say, null for what is not there,
    decision and noise as objects.
    """
    summary = summarise(run)
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": summary.run_id,
        "directory": str(run.directory),
        "outcome": summary.outcome,
        "verdict": summary.verdict,
        "good": summary.good,
        "host": summary.host,
        "world_sizes": summary.ranks,
        "launches": summary.launches,
        "oversubscribed": bool(summary.oversubscribed_text),
        "planned": summary.planned,
        "counts": summary.counts,
        "target_not_reached": summary.imprecise,
        "noisy": summary.noisy,
        "problems": [
            {"status": p.status, "reason": p.reason, "points": list(p.labels), "point_ids": list(p.point_ids)}
            for p in summary.problems
        ],
        "unmeasured": list(summary.unmeasured),
        "damaged": summary.damaged,
        "manifest": summary.manifest,
        "points": [_plain(row) for row in records(summary.points)],
    }


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """A point's row as JSON values."""
    kinds = POINT_COLUMNS | EXTRA_COLUMNS
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("decision", "noise"):
            plain[name] = _parsed(value)
        elif value is None or (isinstance(value, float) and not math.isfinite(value)):
            plain[name] = None
        else:
            kind = kinds[name]
            plain[name] = (
                bool(value)
                if kind == "boolean"
                else int(value)
                if kind == "Int64"
                else float(value)
                if kind == "Float64"
                else str(value)
            )
    return plain


def _parsed(text: Any) -> Any:
    if not isinstance(text, str) or not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
