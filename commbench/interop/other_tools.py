"""The numbers that other benchmarks define, from our raw samples, in those tools' own table layouts.

What each tool times and averages, read in its source (docs/cross-check.md tells where):

- nccl-tests: a loop of calls without synchronisation between them. Each rank: time of the whole loop / calls. The
  table: the mean over ranks (its flag -a 1, the default).
- OSU: each call is timed, and followed by a barrier outside the timed part. Each rank: mean of its calls. The table:
  mean, least and largest over ranks.
- IMB: the same with a barrier (-sync on, its default) or without one (-sync off). The table: least, largest and mean
  over ranks.
- PARAM: the same with a barrier before each call (blocking, --z 1) or without one (--z 0). The table: percentiles,
  least and largest over ranks, by linear interpolation.

None of them takes the cost of its own loop off, and so the raw samples are used as they were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from commbench.bandwidth import algbw_gb_per_s, busbw_gb_per_s
from commbench.errors import UsageError
from commbench.types import COLLECTIVES

if TYPE_CHECKING:
    import pandas as pd

    from commbench.store.run import Run

MEASURED = ("ok", "unsteady", "wrong")


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool: the ways of starting iterations that it has, its names for collectives, and its table.

    loop_mean: a rank's number is the time of whole loops over their calls, not the mean of timed calls.
    """

    name: str
    syncs: tuple[str, ...]
    collectives: Mapping[str, str]
    render: Callable[[Sequence[_Line], str], list[str]]
    loop_mean: bool = False


@dataclass(frozen=True, slots=True)
class _Line:
    """One point in one launch. per_rank_s: each rank's own number, in seconds per call."""

    row: Mapping[str, Any]
    per_rank_s: NDArray[np.float64]
    n_calls: int

    @property
    def per_rank_us(self) -> NDArray[np.float64]:
        return self.per_rank_s * 1e6

    @property
    def part(self) -> int:
        """Into how many parts the tools that count one rank's part divide the message."""
        return int(self.row["world_size"]) if COLLECTIVES[str(self.row["collective"])].splits else 1

    @property
    def mpi_bytes(self) -> int:
        """The size as OSU and IMB count it: one rank's part of what is split, but the whole of a reduce_scatter."""
        size = int(self.row["size_bytes"])
        return size if self.row["collective"] == "reduce_scatter" else size // self.part


# ---- numbers ---------------------------------------------------------------------------------------------------


def means_of_calls(samples: pd.DataFrame, calls_per_sample: int) -> NDArray[np.float64]:
    """Each rank's mean duration of a call, in seconds and rank order. samples: of one point and launch."""
    durations = (samples["end_ns"] - samples["start_ns"]).groupby(samples["rank"], sort=True).mean()
    means: NDArray[np.float64] = durations.to_numpy(dtype=np.float64) * 1e-9 / calls_per_sample
    return means


def means_of_loops(samples: pd.DataFrame, calls_per_sample: int) -> NDArray[np.float64]:
    """Each rank's time of its uninterrupted loops over the calls in them, in seconds and rank order.

    A loop lasts from the start of its first sample to the end of its last, so what lies between calls counts.
    """
    loops = samples.groupby(["rank", "block"], sort=True).agg(
        start=("start_ns", "min"), end=("end_ns", "max"), n=("iteration", "size")
    )
    loops["time"] = loops["end"] - loops["start"]
    per_rank = loops.groupby("rank", sort=True)[["time", "n"]].sum()
    times = per_rank["time"].to_numpy(dtype=np.float64)
    means: NDArray[np.float64] = times * 1e-9 / (per_rank["n"].to_numpy(dtype=np.float64) * calls_per_sample)
    return means


# ---- tables ----------------------------------------------------------------------------------------------------

_NCCL_TYPES = {
    "float32": "float",
    "float16": "half",
    "float64": "double",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def _fitted(value: float | None, width: int) -> str:
    """As nccl-tests prints numbers: two decimals, fewer where they do not fit, then an exponent."""
    if value is None:
        return "N/A".rjust(width)
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def _nccl_tests(lines: Sequence[_Line], name: str) -> list[str]:
    blank = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
    half = "  {:>7}  {:>6}  {:>6}  {:>6}"
    text = [
        blank.format("", "", "", "", "") + "           out-of-place                       in-place          ",
        blank.format("size", "count", "type", "redop", "root") + half.format("time", "algbw", "busbw", "#wrong") * 2,
        blank.format("(B)", "(elements)", "", "", "") + half.format("(us)", "(GB/s)", "(GB/s)", "") * 2,
    ]
    placed: dict[tuple[Any, ...], dict[str, _Line]] = {}
    for line in lines:
        row = line.row
        placed.setdefault((row["size_bytes"], row["dtype"], row["op"]), {})[str(row["placement"])] = line
    for (size, dtype, op), by_placement in placed.items():
        any_line = next(iter(by_placement.values()))
        row = any_line.row
        root = 0 if row["collective"] in _ROOTED else -1
        count = int(row["numel"]) // any_line.part
        out = f"{size:>12}  {count:>12}  {_NCCL_TYPES.get(dtype, dtype):>8}  {op or 'none':>6}  {root:>6}"
        for placement in ("out", "in"):
            found = by_placement.get(placement)
            if found is None:
                out += half.format("N/A", "N/A", "N/A", "N/A")
                continue
            seconds = float(found.per_rank_s.mean())
            kind, n = str(row["collective"]), int(row["world_size"])
            wrong = found.row["wrong_count"]
            out += half.format(
                _fitted(seconds * 1e6, 7),
                _fitted(algbw_gb_per_s(int(size), seconds), 6),
                _fitted(busbw_gb_per_s(kind, int(size), seconds, n), 6),
                f"{float(wrong):g}" if found.row["checked"] else "N/A",
            )
        text.append(out)
    return text


def _osu(lines: Sequence[_Line], name: str) -> list[str]:
    text = [f"# OSU MPI {name} Latency Test"]
    text.append(
        f"{'# Size':<10}{'Avg Latency(us)':>20}{'Min Latency(us)':>20}{'Max Latency(us)':>20}{'Iterations':>12}"
    )
    for line in lines:
        t = line.per_rank_us
        text.append(f"{line.mpi_bytes:<10}{t.mean():>20.2f}{t.min():>20.2f}{t.max():>20.2f}{line.n_calls:>12}")
    return text


def _imb(lines: Sequence[_Line], name: str) -> list[str]:
    rule = "#" + "-" * (5 * 13 - 1)
    text = [rule, f"# Benchmarking {name} ", f"# #processes = {lines[0].row['world_size']} ", rule]
    text.append("".join(f"{h:>13}" for h in ("#bytes", "#repetitions", "t_min[usec]", "t_max[usec]", "t_avg[usec]")))
    for line in lines:
        t = line.per_rank_us
        text.append(f"{line.mpi_bytes:>13}{line.n_calls:>13}{t.min():>13.2f}{t.max():>13.2f}{t.mean():>13.2f}")
    return text


def _param(lines: Sequence[_Line], name: str) -> list[str]:
    widths = (40, 18, 18, 12, 12, 12, 12, 15, 12, 18)
    heads = (
        "total-size (B)", "nElementsPerRank", "Time(us):p50", "p75", "p95", "Min", "Max", "AlgBW(GB/s)", "BusBW(GB/s)",
        "TotalTime(us):p50",
    )  # fmt: skip
    text = ["\tCOMMS-RES" + "".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True))]
    for line in lines:
        row, t = line.row, line.per_rank_us
        p50, p75, p95 = (float(np.percentile(t, p)) for p in (50, 75, 95))
        size, n = int(row["size_bytes"]), int(row["world_size"])
        algbw = algbw_gb_per_s(size, p50 * 1e-6)
        busbw = busbw_gb_per_s(str(row["collective"]), size, p50 * 1e-6, n)
        cells = [
            f"{size:>18}", f"{int(row['numel']) // line.part:>18}", f"{p50:>18.1f}", f"{p75:>12.1f}", f"{p95:>12.1f}",
            f"{t.min():>12.1f}", f"{t.max():>12.1f}", f"{algbw or 0:>15.3f}", f"{busbw or 0:>12.3f}", f"{0:>20.1f}",
        ]  # fmt: skip
        text.append(f"\tCOMMS-RES-{name}-{row['dtype']}" + "".join(cells))
    return text


_MPI_NAMES = {
    "all_reduce": "Allreduce",
    "all_gather": "Allgather",
    "reduce_scatter": "Reduce_scatter",
    "broadcast": "Bcast",
    "all_to_all": "Alltoall",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
}
TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            "nccl-tests",
            ("none",),
            {c: c for c in (*_MPI_NAMES, "send_recv")} | {"all_to_all": "alltoall", "send_recv": "sendrecv"},
            _nccl_tests,
            loop_mean=True,
        ),
        Tool("osu", ("barrier",), {c: n.replace("Bcast", "Broadcast") for c, n in _MPI_NAMES.items()}, _osu),
        Tool("imb", ("barrier", "none"), _MPI_NAMES, _imb),
        Tool("param", ("barrier", "none"), {c: c for c in _MPI_NAMES}, _param),
    )
}


# ---- from a run ------------------------------------------------------------------------------------------------


def as_tool(run: Run, tool_name: str) -> str:
    """The run's points as ``tool_name`` would print them: one table per launch, collective, backend, policy and sync.

    Points that were timed in batches between barriers are named below the tables. Raises UsageError for a tool that is
    not known, and where the samples cannot give that tool's number, naming the flag with which a sweep can.
    """
    if tool_name not in TOOLS:
        raise UsageError(f"--as {tool_name!r} is no tool; known: {', '.join(TOOLS)}")
    tool = TOOLS[tool_name]
    latest = {(r["point_id"], r["launch"]): r for r in run.rows()}
    rows = [r for r in latest.values() if r["status"] in MEASURED and r["collective"] in tool.collectives]
    if not rows:
        raise UsageError(
            f"{run.directory} has no measured point that {tool.name} has; it has {', '.join(tool.collectives)}"
        )
    _check_start(run, tool, rows)
    left_out = [_no_number(tool, r) for r in rows if _barrier_per_batch(r)]
    rows = [r for r in rows if not _barrier_per_batch(r)]
    if not rows:
        raise UsageError(f"{run.directory}: {left_out[0]}")
    samples = run.samples([str(r["point_id"]) for r in rows])
    samples = samples[samples["valid"]]
    tables: dict[tuple[Any, ...], list[_Line]] = {}
    for row in sorted(rows, key=lambda r: (r["launch"], r["collective"], r["dtype"], r["op"], r["size_bytes"])):
        mine = samples[(samples["point_id"] == row["point_id"]) & (samples["launch"] == row["launch"])]
        shared = ("launch", "collective", "backend_picked", "policy", "group", "layout", "cache", "sync")
        alike = shared if tool.name == "nccl-tests" else (*shared, "dtype", "op", "placement")
        tables.setdefault(tuple(row[name] for name in alike), []).append(_line(run, tool, row, mine))
    blocks = []
    for lines in tables.values():
        first = lines[0].row
        facts = [f"launch {first['launch']}", first["backend_picked"], first["layout"], f"{first['cache']} buffers"]
        if tool.name != "nccl-tests":
            facts += [first["dtype"], first["op"], f"{first['placement']}-place"]
        title = f"# {run.directory.name}: {', '.join(str(f) for f in (*facts, 'sync ' + first['sync']) if f)}"
        blocks.append("\n".join([title, *tool.render(lines, tool.collectives[str(first["collective"])])]))
    blocks += [f"# left out: {why}" for why in left_out]
    return "\n\n".join(blocks) + "\n"


def _check_start(run: Run, tool: Tool, rows: Sequence[Mapping[str, Any]]) -> None:
    flags = " or ".join(f"--sync {sync}" for sync in tool.syncs)
    for row in rows:
        if row["sync"] not in tool.syncs:
            how = {"window": "in a common window", "barrier": "at a barrier", "none": "one after the other"}
            raise UsageError(
                f"{run.directory}: iterations start {how.get(str(row['sync']), row['sync'])} (sync {row['sync']}), "
                f"those of {tool.name} do not; measure with commbench sweep … {flags}"
            )


def _barrier_per_batch(row: Mapping[str, Any]) -> bool:
    return bool(row["sync"] == "barrier" and row["timing"] == "batched")


def _no_number(tool: Tool, row: Mapping[str, Any]) -> str:
    """Why a point that was timed in batches between barriers has none of the tool's numbers, and what to do."""
    if "none" in tool.syncs:
        way = "measure with --sync none"
    elif row["loop"] == "python":
        way = "measure with --loop native, whose timer is finer"
    else:
        way = "take larger --sizes, or a quieter machine"
    return (
        f"{row['collective']} of {row['size_bytes']} bytes, launch {row['launch']}, was timed in batches of "
        f"{row['iters_per_sample']} calls (one is too short for the timer), "
        f"and {tool.name} has a barrier at each; {way}"
    )


def _line(run: Run, tool: Tool, row: Mapping[str, Any], samples: pd.DataFrame) -> _Line:
    what = f"{row['collective']} of {row['size_bytes']} bytes, launch {row['launch']}"
    ranks = int(samples["rank"].nunique())
    if ranks != int(row["world_size"]):
        raise UsageError(
            f"{run.directory}: {what} has raw samples of {ranks} of {row['world_size']} ranks; measure again with "
            f"commbench sweep … --sync {tool.syncs[0]}"
        )
    if tool.loop_mean and bool((samples["block"] < 0).any()):
        raise UsageError(
            f"{run.directory}: the samples of {what} do not tell where loops begin (an earlier commbench wrote them); "
            f"measure again with commbench sweep … --sync {tool.syncs[0]}"
        )
    calls = int(row["iters_per_sample"] or 1)
    per_rank = (means_of_loops if tool.loop_mean else means_of_calls)(samples, calls)
    return _Line(row, per_rank, len(samples) // ranks * calls)
