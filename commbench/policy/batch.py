"""Answer many rows of facts at once: ``commbench explain --batch``.

The columns are those of recorded decisions. ``enabled``, ``picked`` and ``kernel`` are answers, so they are neither
needed nor read.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from commbench.errors import PolicyError, UsageError, unknown
from commbench.policy.evaluate import Bound, Policy, Verdict
from commbench.types import DTYPES, CallSignature, Platform

ESSENTIAL = ("arch", "world_size", "dtype", "size_bytes")
ANSWERS = ("enabled", "picked", "kernel")
_DEFAULTS = {
    "cc_minor": "0",
    "nnodes": "1",
    "nvlink": "1",
    "multicast": "1",
    "group": "tp",
    "mode": "eager",
    "layout": "contig",
    "shape": "",
    "pynccl": "1",
}
_LAYOUTS = {"contig": "contiguous", "contiguous": "contiguous", "strided": "strided", "dense_t": "dense_t"}
_ARCHES = ("cuda", "hip", "cpu")
_MODES = ("eager", "graph", "pcg", "compile")


class RowReader:
    """Turns rows of facts into (bound policy, call). Platforms are built once per combination of facts."""

    def __init__(self, policy: Policy, columns: Iterable[str]) -> None:
        """Raises UsageError for a missing essential column."""
        self.policy = policy
        self.columns = tuple(columns)
        missing = [c for c in ESSENTIAL if c not in self.columns]
        if missing:
            raise UsageError(
                f"the batch has no column {missing[0]!r}; it needs {', '.join(ESSENTIAL)} and cc_major for cuda"
            )
        self._settings = [
            (p.column, p.name) for p in policy.data.constants.values() if p.column and p.column in self.columns
        ]
        # A column that this file has and its policy's own files never had decides nothing.
        facts = (
            "arch",
            "cc_major",
            "cc_minor",
            "world_size",
            "nnodes",
            "nvlink",
            "multicast",
            "group",
            "requested",
            "pynccl",
        )
        self._platform_columns = tuple(c for c in (*facts, *dict(self._settings)) if c in self.columns)
        self._has_pynccl_switch = "pynccl" in policy.data.switches
        self._platforms: dict[tuple[str, ...], tuple[Platform, dict[str, Bound]]] = {}

    def read(self, row: Mapping[str, str], where: str) -> tuple[Bound, CallSignature]:
        """The bound policy and the call of one row. where names the row in errors. Raises UsageError."""
        key = tuple([row[c] for c in self._platform_columns])
        known = self._platforms.get(key)
        if known is None:
            known = self._platforms[key] = (self._platform(row, where), {})
        platform, by_dtype = known
        dtype = row["dtype"]
        bound = by_dtype.get(dtype)
        if bound is None:
            if dtype not in DTYPES:
                raise UsageError(f"{where}: {unknown('dtype', dtype, DTYPES)}")
            try:
                bound = by_dtype[dtype] = self.policy.bind(platform, "all_reduce", dtype)
            except PolicyError as error:
                raise UsageError(f"{where}: {error}") from error
        return bound, self._call(row, dtype, platform, where)

    def _cell(self, row: Mapping[str, str], column: str) -> str:
        return row.get(column) or _DEFAULTS.get(column, "")

    def _number(self, row: Mapping[str, str], column: str, where: str) -> int:
        text = self._cell(row, column)
        try:
            number = int(text)
        except ValueError:
            raise UsageError(f"{where}: {column} {text!r} is not a whole number") from None
        if number < 0:
            raise UsageError(f"{where}: {column} {text!r} is negative")
        return number

    def _flag(self, row: Mapping[str, str], column: str, where: str) -> bool:
        text = self._cell(row, column)
        if text not in ("0", "1"):
            raise UsageError(f"{where}: {column} {text!r} is neither 0 nor 1")
        return text == "1"

    def _word(self, row: Mapping[str, str], column: str, known: Iterable[str], where: str) -> str:
        text = self._cell(row, column)
        if text not in known:
            raise UsageError(f"{where}: {unknown(column, text, known)}")
        return text

    def _platform(self, row: Mapping[str, str], where: str) -> Platform:
        device = self._word(row, "arch", _ARCHES, where)
        if device == "cuda" and not row.get("cc_major"):
            raise UsageError(f"{where}: cuda needs cc_major, the compute capability's major number")
        major = self._number(row, "cc_major", where) if row.get("cc_major") else (9 if device == "hip" else 0)
        requested: frozenset[str] | None = None
        if "requested" in self.columns:
            words = {w for w in row["requested"].split("+") if w}
            for word in words:
                if word not in self.policy.data.switches:
                    raise UsageError(f"{where}: requested: {unknown('switch', word, self.policy.data.switches)}")
            if self._has_pynccl_switch and self._flag(row, "pynccl", where):
                words.add("pynccl")
            requested = frozenset(words)
        platform = Platform(
            device=device,
            capability=(major, self._number(row, "cc_minor", where)),
            world_size=self._number(row, "world_size", where),
            nnodes=self._number(row, "nnodes", where),
            one_host=self._number(row, "nnodes", where) == 1,
            nvlink=self._flag(row, "nvlink", where),
            multicast=self._flag(row, "multicast", where),
            group=self._cell(row, "group"),
            requested=requested,
            settings={name: row[column] for column, name in self._settings if row[column] != ""},
        )
        if platform.world_size < 1:
            raise UsageError(f"{where}: world_size is 0")
        return platform

    def _call(self, row: Mapping[str, str], dtype: str, platform: Platform, where: str) -> CallSignature:
        try:
            size = int(row["size_bytes"])
        except ValueError:
            size = -1
        if size < 0:
            raise UsageError(f"{where}: size_bytes {row['size_bytes']!r} is not a whole number of bytes")
        layout = _LAYOUTS.get(self._cell(row, "layout"))
        if layout is None:
            raise UsageError(f"{where}: {unknown('layout', row['layout'], _LAYOUTS)}")
        dense = row.get("contiguous")
        if dense == "1" or (dense is None and size // DTYPES[dtype].itemsize <= 1):
            layout = "contiguous"  # a single element is, whatever its strides
        elif dense == "0" and layout == "contiguous":
            layout = "strided"
        mode = self._cell(row, "mode")
        if mode not in _MODES:
            raise UsageError(f"{where}: {unknown('mode', mode, _MODES)}")
        itemsize = DTYPES[dtype].itemsize
        if size % itemsize:
            raise UsageError(f"{where}: size_bytes {size} is not a multiple of {dtype}'s {itemsize} bytes")
        shape: tuple[int, ...] = ()
        text = row.get("shape", "")
        if text:
            try:
                shape = tuple([int(n) for n in text.split("x")])
            except ValueError:
                raise UsageError(f"{where}: shape {text!r} is not like 4096 or 16x4096") from None
        registered = platform.requested is not None and "nccl_symm" in platform.requested
        return CallSignature("all_reduce", "sum", dtype, size, size // itemsize, layout, mode, "in", registered, shape)


def reason_of(verdict: Verdict) -> str:
    """One line: every route that declined and why, then why the pick accepted."""
    parts = [f"{route.name}: {why}" for route, why in verdict.declined]
    parts.append(f"{verdict.picked}: {verdict.reason}")
    return "; ".join(parts)


def answer(policy: Policy, rows: Iterable[Mapping[str, str]], columns: Iterable[str], source: str) -> Iterator[Verdict]:
    """What the policy's engine does with each row. source names the file in errors. Raises UsageError."""
    reader = RowReader(policy, columns)
    for number, row in enumerate(rows, start=2):  # line 1 is the header
        if None in row or None in row.values():
            raise UsageError(
                f"{source}, line {number}: it has {'more' if None in row else 'fewer'} cells than the header"
            )
        bound, call = reader.read(row, f"{source}, line {number}")
        yield bound.verdict(call)


def open_text(path: Path, mode: str = "r") -> IO[str]:
    """A text file, compressed if its name ends in .gz. Raises UsageError where it cannot be opened."""
    encoding = "utf-8-sig" if mode == "r" else "utf-8"  # spreadsheets write a mark before the first column's name
    try:
        if path.suffix == ".gz":
            return gzip.open(path, f"{mode}t", encoding=encoding, newline="")  # type: ignore[return-value]
        return path.open(mode, encoding=encoding, newline="")
    except OSError as error:
        raise UsageError(f"cannot open {path}: {error.strerror or error}") from error


def answer_file(policy: Policy, source: Path, target: Path) -> int:
    """Answer every row of a CSV file into another: its columns without the old answers, then picked and reason.

    Returns the number of rows. Raises UsageError, naming the row, for anything it cannot read; nothing is left
    at ``target`` then.
    """
    try:
        with open_text(source) as stream:
            reader = csv.DictReader(stream)
            columns = list(reader.fieldnames or ())
            kept = [c for c in columns if c not in ANSWERS]
            output = io.StringIO(newline="")
            writer = csv.writer(output)
            writer.writerow([*kept, "picked", "reason"])
            rows = list(reader)
            count = 0
            for row, verdict in zip(rows, answer(policy, rows, columns, source.name), strict=True):
                writer.writerow([*(row[c] for c in kept), verdict.picked, reason_of(verdict)])
                count += 1
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{source}: not a readable CSV file: {error}") from error
    with open_text(target, "w") as stream:
        stream.write(output.getvalue())
    return count
