"""Raw samples: a cheap binary log while ranks measure, Parquet when a launch is over.

The log (``samples/launch-<k>.bin``) is a sequence of records, one per point and visit: a JSON header line
``{"point_id", "ranks", "iterations", "first"}`` and then, little-endian and rank by rank, int64 start[iterations],
int64 end[iterations], uint8 valid[iterations]. ``first`` is the number of the first iteration. A record cut short
by a crash is dropped when the log is read; all before it is kept. A record with ``first`` 0 begins its point anew: what
a job that died, or an earlier attempt, had taken of the point does not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from commbench.store import schema

if TYPE_CHECKING:
    import pandas as pd

_BYTES_PER_ITERATION = 8 + 8 + 1
ROWS_AT_ONCE = 1 << 18  # held in memory while a log is turned into Parquet


class SampleLog:
    """Appends blocks of samples; rank 0 of a launch holds one."""

    def __init__(self, directory: Path, launch: int) -> None:
        path = directory / schema.SAMPLES_DIR / f"launch-{launch}.bin"
        # What a killed writer left unfinished would make all that follows unreadable.
        if path.exists():
            os.truncate(path, _whole_length(path))
        self._stream = path.open("ab")

    def append(
        self,
        point_id: str,
        first: int,
        start_ns: NDArray[np.int64],
        end_ns: NDArray[np.int64],
        valid: NDArray[np.bool_],
    ) -> None:
        """Add one block; start_ns and end_ns are (ranks, iterations), valid the same or (iterations,)."""
        ranks, iterations = start_ns.shape
        valid = np.broadcast_to(valid, (ranks, iterations))
        header = {"point_id": point_id, "ranks": ranks, "iterations": iterations, "first": first}
        parts = [json.dumps(header).encode() + b"\n"]
        for rank in range(ranks):
            parts.append(np.ascontiguousarray(start_ns[rank], dtype="<i8").tobytes())
            parts.append(np.ascontiguousarray(end_ns[rank], dtype="<i8").tobytes())
            parts.append(np.ascontiguousarray(valid[rank], dtype="u1").tobytes())
        self._stream.write(b"".join(parts))
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _blocks(path: Path, wanted: Collection[str] | None = None) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Headers and bodies, of ``wanted`` points or of all, without what was measured again later."""
    begins: dict[str, int] = {}
    for at, _, header in _headers(path):
        if header["first"] == 0:
            begins[header["point_id"]] = at
    with path.open("rb") as stream:
        for at, _, header in _headers(path):
            name = header["point_id"]
            if at < begins.get(name, 0) or (wanted is not None and name not in wanted):
                continue
            stream.seek(at)
            stream.readline()
            yield header, stream.read(_body_bytes(header))


def _headers(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Where each whole record begins and ends, and its header; what follows one cut short by a crash is unreadable."""
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        at = stream.seek(0)
        while line := stream.readline():
            try:
                header = json.loads(line)
                end = stream.tell() + _body_bytes(header)
            except (ValueError, KeyError, TypeError):
                return
            if end > size:
                return
            yield at, end, header
            at = stream.seek(end)


def _body_bytes(header: dict[str, Any]) -> int:
    return int(header["ranks"]) * int(header["iterations"]) * _BYTES_PER_ITERATION


def _whole_length(path: Path) -> int:
    """Bytes of a log up to the end of its last whole record."""
    return max((end for _, end, _ in _headers(path)), default=0)


def _table(blocks: Sequence[Mapping[str, Any]]) -> Any:
    """One Arrow table of the columns of several blocks."""
    import pyarrow as pa

    names = list(dict.fromkeys(block["point_id"] for block in blocks))
    codes = {name: code for code, name in enumerate(names)}
    lengths = [len(block["rank"]) for block in blocks]
    indices = np.repeat(np.array([codes[block["point_id"]] for block in blocks], dtype=np.int32), lengths)
    return pa.table(
        {
            name: pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(names))
            if name == "point_id"
            else pa.array(np.concatenate([block[name] for block in blocks]))
            for name in schema.SAMPLE_COLUMNS
        }
    )


def _columns(header: dict[str, Any], body: bytes, launch: int) -> dict[str, Any]:
    ranks, n = header["ranks"], header["iterations"]
    raw = np.frombuffer(body, dtype=np.uint8).reshape(ranks, n * _BYTES_PER_ITERATION)
    start = np.ascontiguousarray(raw[:, : 8 * n]).view("<i8").reshape(-1)
    end = np.ascontiguousarray(raw[:, 8 * n : 16 * n]).view("<i8").reshape(-1)
    valid = raw[:, 16 * n :].reshape(-1).astype(bool)
    return {
        "launch": np.full(ranks * n, launch, dtype=np.int32),
        "point_id": header["point_id"],
        "rank": np.repeat(np.arange(ranks, dtype=np.int32), n),
        "iteration": np.tile(np.arange(header["first"], header["first"] + n, dtype=np.int32), ranks),
        "start_ns": start,
        "end_ns": end,
        "valid": valid,
        "block": np.full(ranks * n, header["first"], dtype=np.int32),
    }


def to_parquet(directory: Path, launch: int, without: Collection[str] = ()) -> None:
    """Turn a launch's log into ``samples/launch-<k>.parquet``, a block at a time, then remove the log.

    Where that file is there already (a run that was resumed), its points stay, but for those in the log. without:
    points of the log that do not count, because their repetition was not finished: what was kept of them stays.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    log = directory / schema.SAMPLES_DIR / f"launch-{launch}.bin"
    if not log.exists():
        return
    target = log.with_suffix(".parquet")
    temporary = log.with_name(f".{target.name}.tmp")
    arrow_schema = pa.schema(
        [
            (name, pa.dictionary(pa.int32(), pa.string()) if name == "point_id" else _arrow_type(kind))
            for name, kind in schema.SAMPLE_COLUMNS.items()
        ]
    )

    def tables() -> Iterator[Any]:
        if target.exists():
            yield from _kept(target, {header["point_id"] for *_, header in _headers(log)} - set(without))
        pending: list[dict[str, Any]] = []
        rows = 0
        for header, body in _blocks(log):
            if header["point_id"] in without:
                continue
            pending.append(_columns(header, body, launch))
            rows += len(pending[-1]["rank"])
            if rows >= ROWS_AT_ONCE:
                yield _table(pending)
                pending, rows = [], 0
        if pending:
            yield _table(pending)

    # times of one loop rise by small steps, which this encoding keeps in a third of the time and half the space
    encodings = dict.fromkeys(("iteration", "start_ns", "end_ns"), "DELTA_BINARY_PACKED")
    repeated = [name for name in schema.SAMPLE_COLUMNS if name not in encodings and name != "valid"]
    try:
        with pq.ParquetWriter(
            temporary, arrow_schema, compression="zstd", use_dictionary=repeated, column_encoding=encodings
        ) as writer:
            for table in tables():
                writer.write_table(table.cast(arrow_schema))
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    log.unlink()


def _kept(path: Path, without: Collection[str]) -> Iterator[Any]:
    """The tables of a Parquet file of samples, a row group at a time, without some points."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    names = pa.array(sorted(without), pa.string())
    for group in range(file.num_row_groups):
        table = file.read_row_group(group)
        if "block" not in table.column_names:  # a run of an earlier commbench
            table = table.append_column("block", pa.array(np.full(table.num_rows, -1, dtype=np.int32)))
        text = table["point_id"].cast(pa.string())
        table = table.set_column(table.column_names.index("point_id"), "point_id", text.dictionary_encode())
        yield table.filter(pc.invert(pc.is_in(text, names)))


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    return {"int32": pa.int32(), "int64": pa.int64(), "bool": pa.bool_()}[kind]


def read_samples(directory: Path, point_id: str | Collection[str] | None = None) -> pd.DataFrame:
    """The samples of one point, of several, or of all, from Parquet and from logs that are still open."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = directory / schema.SAMPLES_DIR
    frames = []
    wanted = {point_id} if isinstance(point_id, str) else None if point_id is None else set(point_id)
    for path in sorted(folder.glob("launch-*.parquet")):
        filters = None if wanted is None else [("point_id", "in", wanted)]
        table = pq.read_table(path, filters=filters)
        place = table.column_names.index("point_id")
        # Arrow turns dictionaries into text much faster than pandas does
        frame = table.set_column(place, "point_id", table["point_id"].cast(pa.large_string())).to_pandas()
        if "block" not in frame:  # a run of an earlier commbench
            frame["block"] = -1
        log = path.with_suffix(".bin")
        if log.exists():  # of a run that goes on: what is measured again counts no more
            again = {header["point_id"] for *_, header in _headers(log)}
            frame = frame[~frame["point_id"].isin(again)]
        frames.append(frame)
    for path in sorted(folder.glob("launch-*.bin")):
        launch = int(path.stem.partition("-")[2])
        frames += [pd.DataFrame(_columns(header, body, launch)) for header, body in _blocks(path, wanted)]
    if not frames:
        return pd.DataFrame({n: pd.Series(dtype=k) for n, k in schema.SAMPLE_COLUMNS.items()})
    everything: pd.DataFrame = pd.concat(frames, ignore_index=True).astype(schema.SAMPLE_COLUMNS)
    return everything
