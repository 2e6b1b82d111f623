"""Raw samples: a cheap binary log while ranks measure, Parquet when a launch is over.

The log (``samples/launch-<k>.bin``) is a sequence of records, one per point and visit: a JSON header line
``{"point_id", "ranks", "iterations", "first"}`` and then, little-endian and rank by rank, int64 start[iterations],
int64 end[iterations], uint8 valid[iterations]. ``first`` is the number of the first iteration. A record cut short
by a crash is dropped when the log is read; all before it is kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from commbench.store import schema

if TYPE_CHECKING:
    import pandas as pd

_BYTES_PER_ITERATION = 8 + 8 + 1


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


def _blocks(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    with path.open("rb") as stream:
        while line := stream.readline():
            try:
                header = json.loads(line)
            except ValueError:
                return  # cut short by a crash
            wanted = header["ranks"] * header["iterations"] * _BYTES_PER_ITERATION
            body = stream.read(wanted)
            if len(body) < wanted:
                return
            yield header, body


def _whole_length(path: Path) -> int:
    """Bytes of a log up to the end of its last whole record."""
    end = 0
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        while line := stream.readline():
            try:
                header = json.loads(line)
            except ValueError:
                break
            here = stream.seek(header["ranks"] * header["iterations"] * _BYTES_PER_ITERATION, os.SEEK_CUR)
            if here > size:
                break
            end = here
    return end


def _columns(header: dict[str, Any], body: bytes, launch: int) -> dict[str, Any]:
    ranks, n = header["ranks"], header["iterations"]
    raw = np.frombuffer(body, dtype=np.uint8).reshape(ranks, n * _BYTES_PER_ITERATION)
    start = np.ascontiguousarray(raw[:, : 8 * n]).view("<i8").reshape(-1)
    end = np.ascontiguousarray(raw[:, 8 * n : 16 * n]).view("<i8").reshape(-1)
    valid = raw[:, 16 * n :].reshape(-1).astype(bool)
    return {
        "launch": np.full(ranks * n, launch, dtype=np.int32),
        "point_id": [header["point_id"]] * (ranks * n),
        "rank": np.repeat(np.arange(ranks, dtype=np.int32), n),
        "iteration": np.tile(np.arange(header["first"], header["first"] + n, dtype=np.int32), ranks),
        "start_ns": start,
        "end_ns": end,
        "valid": valid,
        "block": np.full(ranks * n, header["first"], dtype=np.int32),
    }


def to_parquet(directory: Path, launch: int) -> None:
    """Turn a launch's log into ``samples/launch-<k>.parquet``, a block at a time, then remove the log."""
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
    with pq.ParquetWriter(temporary, arrow_schema, compression="zstd") as writer:
        pending: list[Any] = []
        rows = 0
        for header, body in _blocks(log):
            columns = _columns(header, body, launch)
            names = pa.DictionaryArray.from_arrays(
                pa.array(np.zeros(len(columns["rank"]), dtype=np.int32)), pa.array([header["point_id"]])
            )
            columns["point_id"] = names
            pending.append(pa.table({n: pa.array(c) if n != "point_id" else c for n, c in columns.items()}))
            rows += len(columns["rank"])
            if rows >= 1 << 18:
                writer.write_table(pa.concat_tables(pending).unify_dictionaries().cast(arrow_schema))
                pending, rows = [], 0
        if pending:
            writer.write_table(pa.concat_tables(pending).unify_dictionaries().cast(arrow_schema))
    temporary.replace(target)
    log.unlink()


def _arrow_type(kind: str) -> Any:
    import pyarrow as pa

    return {"int32": pa.int32(), "int64": pa.int64(), "bool": pa.bool_()}[kind]


def read_samples(directory: Path, point_id: str | Collection[str] | None = None) -> pd.DataFrame:
    """The samples of one point, of several, or of all, from Parquet and from logs that are still open."""
    import pandas as pd
    import pyarrow.parquet as pq

    folder = directory / schema.SAMPLES_DIR
    frames = []
    wanted = {point_id} if isinstance(point_id, str) else None if point_id is None else set(point_id)
    for path in sorted(folder.glob("launch-*.parquet")):
        filters = None if wanted is None else [("point_id", "in", wanted)]
        frame = pq.read_table(path, filters=filters).to_pandas()
        if "block" not in frame:  # a run of an earlier commbench
            frame["block"] = -1
        frames.append(frame)
    for path in sorted(folder.glob("launch-*.bin")):
        launch = int(path.stem.partition("-")[2])
        frames += [
            pd.DataFrame(_columns(header, body, launch))
            for header, body in _blocks(path)
            if wanted is None or header["point_id"] in wanted
        ]
    if not frames:
        return pd.DataFrame({n: pd.Series(dtype=k) for n, k in schema.SAMPLE_COLUMNS.items()})
    everything: pd.DataFrame = pd.concat(frames, ignore_index=True).astype(schema.SAMPLE_COLUMNS)
    return everything
