"""Compare our all-reduce with its peers, all in one run on the same cores, and print Markdown tables.

    compare.py PEERS_FOLDER [--what c,python,large,oversubscribed] [--rounds 7] [--prefix "chrt -f 10"]

PEERS_FOLDER holds one virtual environment per MPI library (docs/shared-memory.md tells how they are made): ``ompi``,
``impi`` and ``mpich``; what is not there is left out and said. Each round launches every contender once, in random
order; a launch gives the median of its blocks per size. A ratio is peer / ours, its interval the 95 % t interval over
the rounds on logarithms. ``best MPI`` is, per size, the MPI library with the lowest median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SMALLEST, LARGEST = 2, 26  # 4 B to 64 MiB
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


@dataclass
class Contender:
    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)


def mpi(folder: Path, ranks: int, program: list[str], kind: str) -> Contender | None:
    """One MPI library's launcher around a program, pinned to cores (yielding where ranks share them)."""
    home = folder / kind
    yields = ranks > (os.cpu_count() or 1)
    if kind == "ompi" and (home / "bin/mpirun").exists():
        options = ["--allow-run-as-root", "-n", str(ranks)]
        options += (
            ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
            if yields
            else ["--bind-to", "core"]
        )
        return Contender(kind, [str(home / "bin/mpirun"), *options, *program])
    if kind == "impi" and (home / "bin/mpiexec.hydra").exists():
        env = {"I_MPI_ROOT": str(home), "LD_LIBRARY_PATH": str(home / "lib"), "I_MPI_FABRICS": "shm"}
        if yields:
            env["I_MPI_THREAD_YIELD"] = "2"
        return Contender(kind, [str(home / "bin/mpiexec.hydra"), "-host", "localhost", "-n", str(ranks), *program], env)
    if kind == "mpich" and home.exists():
        bind = [] if yields else ["-bind-to", "core"]
        env = {"LD_LIBRARY_PATH": str(home / "lib")}
        return Contender(kind, ["mpiexec.mpich", *bind, "-n", str(ranks), *program], env)
    return None


def ours(mode: str, ranks: int) -> list[str]:
    return [sys.executable, str(HERE / "shm_loop.py"), mode, str(ranks)]


def contenders(what: str, folder: Path, ranks: int) -> list[Contender]:
    kinds = ["ompi", "impi", "mpich"]
    if what in ("c", "oversubscribed"):
        peers = [mpi(folder, ranks, [str(folder / k / "loop")], k) for k in kinds]
        return [Contender("shm", ours("c", ranks)), *[p for p in peers if p is not None]]
    if what == "python":
        peers = [mpi(folder, ranks, [str(folder / k / "bin/python"), str(HERE / "mpi_loop.py")], k) for k in kinds]
        return [
            Contender("shm", ours("python", ranks)),
            Contender("gloo", ours("gloo", ranks)),
            *[p for p in peers if p is not None],
        ]
    return [
        Contender("shm", ours("registered", ranks)),
        Contender("copy", ours("copy", ranks)),
        Contender("add", ours("add", ranks)),
    ]


def measure(
    contender: Contender, block_ns: float, blocks: int, sizes: list[int], prefix: list[str]
) -> dict[int, float]:
    """Median ns per call by size, of one launch."""
    command = [*prefix, *contender.command, str(block_ns), str(blocks), *map(str, sizes)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[2]), **contender.env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{contender.name} failed ({done.returncode}): {' '.join(command)}\n{done.stderr[-2000:]}")
    answer = json.loads(lines[-1].replace("\x00", ""), strict=False)  # versions hold tabs and zeros
    return {int(size): statistics.median(values) for size, values in answer["ns"].items()}


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Geometric mean and its 95 % interval."""
    logs = [math.log(r) for r in ratios]
    mean = statistics.mean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    half = T95[min(len(logs), 10)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def table(results: dict[str, list[dict[int, float]]], sizes: list[int], against: list[str], best: str) -> None:
    names = list(results)
    print("| bytes |" + "".join(f" {n} µs |" for n in names) + f" {best} | ratio | 95 % interval |")
    print("|---" * (len(names) + 4) + "|")
    means = []
    below = []
    for size in sizes:
        medians = {n: statistics.median(r[size] for r in rounds) for n, rounds in results.items()}
        peer = min(against, key=lambda n: medians[n])
        ratio, low, high = interval([p[size] / o[size] for p, o in zip(results[peer], results["shm"], strict=True)])
        means.append(ratio)
        if high < 1:
            below.append(size)
        cells = "".join(f" {medians[n] / 1e3:.3g} |" for n in names)
        print(f"| {size} |{cells} {peer} | {ratio:.2f} | {low:.2f}–{high:.2f} |")
    print(f"\nGeometric mean of the ratios: {statistics.geometric_mean(means):.2f}; least {min(means):.2f}; ", end="")
    print(f"intervals wholly below 1: {', '.join(map(str, below)) or 'none'}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--what", default="c,python,large,oversubscribed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prefix", default="", help="put before every command, for all contenders alike")
    parser.add_argument("--block-ms", type=float, default=2.0)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder, prefix = options.folder.resolve(), shlex.split(options.prefix)
    for kind in ("ompi", "impi", "mpich"):
        if not (folder / kind).exists():
            print(f"{kind} is not in {folder}: left out\n")
    shuffler = random.Random(options.seed)
    for what in options.what.split(","):
        for ranks in (4, 8) if what == "oversubscribed" else (2,):
            sizes = [1 << k for k in range(SMALLEST, LARGEST + 1)]
            if what == "python":
                sizes = sizes[1:]
            if what == "large":
                sizes = sizes[-7:]
            if what == "oversubscribed":
                sizes = sizes[1:23:3]
            field_of = contenders(what, folder, ranks)
            results: dict[str, list[dict[int, float]]] = {c.name: [] for c in field_of}
            for _ in range(options.rounds):
                for c in shuffler.sample(field_of, len(field_of)):
                    results[c.name].append(measure(c, options.block_ms * 1e6, options.blocks, sizes, prefix))
            print(f"{what}, {ranks} ranks, {options.rounds} rounds\n")
            if what == "large":
                table(results, sizes, ["copy"], "against")
            else:
                libraries = [n for n in results if n not in ("shm", "gloo")]
                table(results, sizes, libraries or ["gloo"], "best MPI")


if __name__ == "__main__":
    main()
