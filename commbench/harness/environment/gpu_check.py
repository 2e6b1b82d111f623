"""``./run_bench.sh gpu-check``: does all work on this machine's GPUs? Three minutes at most, one file, one screen.

The doctor's findings; results of every available backend, eager and in graphs; a short sweep of those that were right.
On one GPU two ranks share it, where the libraries allow that; such times are marked and mean nothing beside others.

Exit status: 0 if every available backend gave right results, 1 if one did not or there is no GPU, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commbench.errors import CommbenchError
from commbench.registry import BACKENDS, HARDWARE_PROVEN
from commbench.units import format_time

LIMIT_S = 180.0
CHECK_SHARE, SWEEP_SHARE = 0.5, 0.35  # of the limit; the rest is for starting and for the doctor
MOST_RANKS = 8
NOT_FOR_GPUS = frozenset({"fake", "mpi", "shm", "shm_oneshot", "shm_twoshot"})
FROM_TORCH = frozenset({"torch_dist", "pynccl", "nccl_symm", "symm_mem", "symm_mem_multimem", "symm_mem_oneshot",
                        "symm_mem_twoshot"})  # fmt: skip
LEAST_S = 15.0  # of time left: less does not even start ranks
NEEDS_NCCL = ("torch_dist", "pynccl", "nccl_symm")

SHARING = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
CHECK_SIZES, SWEEP_SIZES = "1KiB,256KiB,4MiB", "1KiB:16MiB:x16"
MODES = ("eager", "graph")

Row = Mapping[str, Any]
Measure = Callable[[Mapping[str, Any], float], Sequence[Row]]  # (settings of a sweep, seconds) → its points


@dataclass(frozen=True, slots=True)
class Machine:
    """What gpu-check asks of a machine. gpus: names. problem: why there is nothing to check, "" if there is.

    backends: name → None where it is available, else why it is not. nccl: the version that torch brings.
    """

    gpus: tuple[str, ...] = ()
    problem: str = ""
    backends: Mapping[str, str | None] = field(default_factory=dict)
    nccl: tuple[int, ...] = ()
    doctor: tuple[Mapping[str, str], ...] = ()


def look() -> Machine:
    """Examine this machine. Imports torch."""
    from dataclasses import asdict

    from commbench.harness.environment import doctor
    from commbench.harness.run import gpu_count

    found = doctor.look()
    notes = tuple({k: str(v) for k, v in asdict(note).items()} for note in doctor.diagnose(found, os.environ))
    if found.torch is None:
        return Machine(problem=f"torch cannot be imported: {found.torch_error}", doctor=notes)
    import torch

    if not torch.cuda.is_available():
        seen = gpu_count()
        if not seen:
            return Machine(problem="no GPU: the system shows none", doctor=notes)
        build = torch.version.cuda or torch.version.hip
        why = "and torch cannot use them" if build else f"and this torch ({torch.__version__}) is built for the CPU"
        return Machine(problem=f"no GPU that torch can use: the system shows {seen}, {why}", doctor=notes)
    names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    nccl: tuple[int, ...] = ()
    if torch.distributed.is_nccl_available() and not torch.version.hip:
        nccl = tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    backends = {
        name: None if answer.ok else answer.reason
        for name, answer in found.backends.items()
        if name not in NOT_FOR_GPUS
    }
    return Machine(names, "", backends, nccl, notes)


def chosen(machine: Machine) -> tuple[int, bool, dict[str, str]]:
    """(ranks, whether they share a GPU, backend → why it is left out)."""
    gpus = len(machine.gpus)
    from commbench.coordinator.world import MULTI_RANK_NCCL

    ranks = max((n for n in (2, 4, MOST_RANKS) if n <= gpus), default=2)
    shared = gpus < ranks
    left_out = {name: reason for name, reason in machine.backends.items() if reason is not None}
    if shared and machine.nccl[:2] < MULTI_RANK_NCCL:
        version = ".".join(map(str, machine.nccl)) or "none"
        for name in NEEDS_NCCL:
            if machine.backends.get(name, "") is None:
                left_out[name] = f"two ranks on one GPU take NCCL 2.30 or newer, here is {version}"
    return ranks, shared, left_out


def check(machine: Machine, measure: Measure, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Everything that is found, as plain data. ``ok`` false where there is no GPU or a result is not right."""
    document: dict[str, Any] = {
        "ok": False,
        "problem": machine.problem,
        "gpus": list(machine.gpus),
        "nccl": ".".join(map(str, machine.nccl)),
        "doctor": list(machine.doctor),
        "not_proven_on_hardware": sorted(set(BACKENDS) - HARDWARE_PROVEN),
        "backends": [],
        "points": [],
    }
    if machine.problem:
        return document
    ranks, shared, left_out = chosen(machine)
    names = [name for name in machine.backends if name not in left_out]
    document |= {"ranks": ranks, "shared_device": shared, "left_out": left_out}
    if not names:
        return document | {"problem": "no backend is available on this GPU"}
    common = {"tp": ranks, "device": "cuda", "share_device": shared, "mode": list(MODES), "launches": 1}
    problems = []
    points: list[Row] = []

    def run(what: str, settings: Mapping[str, Any], seconds: float) -> list[Row]:
        try:
            found = list(measure({**common, "name": f"gpu-{what}", **settings}, seconds))
        except CommbenchError as error:
            problems.append(f"{what}: {error}")
            return []
        points.extend(found)
        return found

    def check_all(what: str, backends: Sequence[str], seconds: float) -> list[Row]:
        settings = {
            "backends": list(backends),
            "collectives": ["all_reduce"],
            "dtypes": ["bfloat16", "float32"],
            "sizes": CHECK_SIZES,
            "max_time_per_point": "20ms",
        }
        return run(what, settings, seconds)

    started = time.monotonic()
    checked = check_all("check", names, limit_s * CHECK_SHARE)
    if not checked:
        # a provider that ends the process while it is set up must not cost the others their results
        safe = [name for name in names if name in FROM_TORCH]
        groups = [safe, *([name] for name in names if name not in FROM_TORCH)]
        for group in groups if len(names) > 1 else []:
            left = limit_s * (1 - SWEEP_SHARE) - (time.monotonic() - started)
            if group and left > LEAST_S:
                checked += check_all(f"check-{'-'.join(group)}", group, min(left, limit_s * CHECK_SHARE))
    document["backends"] = [summary_of(name, checked) for name in names]
    right = [entry["name"] for entry in document["backends"] if entry["eager"] == "ok" or entry["graph"] == "ok"]
    if right:
        run(
            "sweep",
            {
                "backends": right,
                "collectives": ["all_reduce"],
                "dtypes": ["bfloat16"],
                "sizes": SWEEP_SIZES,
                "max_time_per_point": "100ms",
            },
            limit_s * SWEEP_SHARE,
        )
    accused = [e["name"] for e in document["backends"] if any(e[m] not in ("ok", "skipped") for m in MODES)]
    document["ok"] = bool(right) and not accused and not problems
    document["problem"] = "; ".join(problems)
    document["points"] = [dict(row) for row in points]
    return document


def summary_of(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """One backend: per mode the worst status of its points, or ``not measured``; the first reason; the numbers."""
    own = [row for row in rows if row["backend_requested"] == name]
    entry: dict[str, Any] = {"name": name, "proven": name in HARDWARE_PROVEN, "reason": ""}
    order = ("wrong", "failed", "timeout", "refused", "unsteady", "ok", "skipped")
    for mode in MODES:
        statuses = [str(row["status"]) for row in own if row["mode"] == mode]
        # what cannot be timed steadily in a moment may still be right
        worst = min(statuses, key=order.index, default="not measured")
        entry[mode] = "ok" if worst in ("refused", "unsteady") else worst
    bad = [row for row in own if row["status"] not in ("ok", "refused", "unsteady")]
    if bad:
        first = min(bad, key=lambda row: order.index(str(row["status"])))
        entry["reason"] = str(first["reason"])
    entry["ranks_agree"] = all(row.get("ranks_agree") is not False for row in own)
    entry["repeatable"] = all(row.get("repeatable") is not False for row in own)
    return entry


def lines_of(document: Mapping[str, Any], path: Path) -> list[str]:
    """The summary: one line where there is nothing to check, else a line per backend; fits a screen."""
    if not document["gpus"]:
        return [f"gpu-check: {document['problem']}; written to {path}"]
    gpus, ranks = document["gpus"], document.get("ranks", 0)
    head = f"gpu-check: {len(gpus)} × {gpus[0]}, {ranks} ranks"
    if document.get("shared_device"):
        head += " that share it (times mean nothing beside others)"
    lines = [head, f"{'backend':<20} {'eager':<12} {'graph':<12} {'1 KiB':>10} {'16 MiB':>10}  note"]
    for entry in document["backends"]:
        times = [_time(document["points"], entry["name"], size) for size in (1 << 10, 1 << 24)]
        notes = [] if entry["proven"] else ["first time on hardware"]
        notes += [] if entry["ranks_agree"] else ["ranks' bits differ"]
        notes += [] if entry["repeatable"] else ["bits differ when repeated"]
        notes += [entry["reason"]] if entry["reason"] else []
        cells = f"{entry['name']:<20} {entry['eager']:<12} {entry['graph']:<12} {times[0]:>10} {times[1]:>10}"
        lines.append(f"{cells}  {_short('; '.join(notes))}".rstrip())
    lines += [f"{name:<20} left out: {_short(reason)}" for name, reason in document.get("left_out", {}).items()]
    if document["problem"]:
        lines.append(f"problem: {document['problem']}")
    lines.append(f"{'all right' if document['ok'] else 'NOT all right'}; everything is in {path}")
    return lines


def _short(text: str) -> str:
    return text if len(text) <= 90 else text[:89] + "…"


def _time(points: Sequence[Row], name: str, size_bytes: int) -> str:
    """The latency of the fastest mode at a size, from the sweep's points."""
    found = [
        float(row["latency_median_s"])
        for row in points
        if row["backend_requested"] == name and row["size_bytes"] == size_bytes and row.get("latency_median_s")
    ]
    return format_time(min(found)) if found else "–"


def measure_in(folder: Path) -> Measure:
    """Sweeps of this machine, each in a run directory under ``folder``; their points as plain rows."""

    def measure(settings: Mapping[str, Any], seconds: float) -> Sequence[Row]:
        from commbench.harness.run import execute, new_run_id, prepare
        from commbench.sweep import make_spec

        given = {**settings, "budget": f"{max(10.0, seconds - 30):g}s", "launch_timeout": f"{seconds:g}s"}
        spec = make_spec(given, {})
        expansion, how = prepare(spec)
        out = folder / new_run_id(spec.name)
        return execute(spec, expansion, how, out, lambda event: None, ["commbench", "gpu-check"]).rows()

    return measure


def main(argv: Sequence[str] | None = None) -> int:
    """Check, write the JSON document, print the summary; the exit status."""
    from commbench.store.run import write_json

    parser = argparse.ArgumentParser(
        prog="run_bench.sh gpu-check", description="Check every backend on this machine's GPUs."
    )
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder for everything (default: reports)")
    parser.add_argument("--json", type=Path, help="the document (default: gpu-check.json in that folder)")
    given = parser.parse_args(argv)
    path: Path = given.json or given.out / "gpu-check.json"
    started = time.time()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine = look()
        if chosen(machine)[1]:
            os.environ.update({k: v for k, v in SHARING.items() if k not in os.environ})
        document = check(machine, measure_in(given.out))
        document |= {"started_s": started, "took_s": round(time.time() - started, 1)}
        write_json(path, document)
    except OSError as error:
        sys.stderr.write(f"error: {path} cannot be written: {error.strerror or error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    sys.stdout.write("\n".join(lines_of(document, path)) + "\n")
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
