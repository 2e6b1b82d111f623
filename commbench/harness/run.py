"""One execution of a sweep: its launches, its manifest, and what came of it."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from commbench import __version__
from commbench.errors import Interrupted, LaunchError, SpecError, StoreError, UsageError
from commbench.harness.environment import devices
from commbench.harness.environment.devices import ACCELERATORS
from commbench.harness.environment.fingerprint import fingerprint, redact
from commbench.harness.launch import NOTHING_AGAIN, Again, Event, refuse_external, run_launch
from commbench.harness.launchers import binding
from commbench.harness.launchers.commands import Nodes, OtherHosts, Program, launch_command
from commbench.harness.launchers.mpirun import binds, find_mpirun
from commbench.harness.ranks.work import remove_work
from commbench.harness.resume import (
    Unfinished,
    differences,
    held,
    kept_after,
    record_of,
    remove_temporaries,
    settle_samples,
)
from commbench.harness.supervision.scratch import remove_stale_folders
from commbench.harness.supervision.supervisor import Limits, StopAtOnce, interruptible, stopping
from commbench.harness.views.tracing import launch_span
from commbench.measure.settings import Settings
from commbench.native.segment import remove_stale
from commbench.policy import load_policy
from commbench.store import schema
from commbench.store.run import Plan, Run, check_writable, create, finish, open_run, update_manifest
from commbench.sweep import Expansion, SweepSpec, expand, parse_skew
from commbench.types import AUTO, Platform

FAILING = ("wrong", "failed", "timeout")


def new_run_id(name: str) -> str:
    """Sortable by time, readable, and unique also when two runs start in one second."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return f"{now}-{name}-{secrets.token_hex(2)}"


NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
# what hides GPUs from a process, by maker: comma-separated, "" and -1 for none
_VISIBLE = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}


def gpu_count() -> int:
    """GPUs that the operating system shows and the environment does not hide, without loading any library."""
    if NVIDIA_GPUS.is_dir():
        return min(sum(1 for _ in NVIDIA_GPUS.iterdir()), _visible("nvidia"))
    if AMD_NODES.is_dir():  # CPU nodes have no SIMD units
        nodes = AMD_NODES.iterdir()
        return min(sum("simd_count 0\n" not in (n / "properties").read_text() for n in nodes), _visible("amd"))
    return 0


def _visible(maker: str) -> int:
    """How many GPUs the environment lets a process see; very many where it says nothing."""
    given = [os.environ[name] for name in _VISIBLE[maker] if name in os.environ]
    counts = [len([part for part in text.split(",") if part.strip() not in ("", "-1")]) for text in given]
    return min(counts, default=sys.maxsize)


def torch_is_for_cpu() -> bool:
    """Whether the installed torch was built without GPU support, as its version file says (importing it is slow)."""
    found = importlib.util.find_spec("torch")
    version = Path(found.origin).with_name("version.py") if found is not None and found.origin else None
    if version is None or not version.is_file():
        return False
    return not re.search(r"^(cuda|hip)\b[^=\n]*= *['\"]", version.read_text(), re.MULTILINE)


def resolve_device(spec: SweepSpec, ranks_here: int | None = None) -> str:
    """cpu, cuda, or another that is asked for by name. ranks_here: on this host, the spec's own number if None. Raises
    SpecError when the device is not there, or there are fewer than ranks."""
    ranks = spec.ranks_per_node if ranks_here is None else ranks_here
    if spec.device in ACCELERATORS:
        found = devices.ask(spec.device)
        if not found.count:
            raise SpecError(f"--device {spec.device}: {found.reason}; {found.remedy}")
        if found.count < ranks:
            raise SpecError(
                f"--device {spec.device} with {ranks} ranks here: torch sees {found.count}, one is needed for each rank"
            )
        return spec.device
    gpus = gpu_count()
    if spec.device == "cuda" and not gpus:
        raise SpecError("--device cuda: this machine shows no GPU; use --device cpu")
    if spec.device == "cuda" and torch_is_for_cpu():
        raise SpecError("--device cuda: this torch is built for the CPU; install one for this machine's GPUs")
    if spec.device == "cuda" and gpus < ranks and not spec.share_device:
        raise SpecError(
            f"--device cuda with {ranks} ranks here: this machine has {gpus} GPUs, one is needed for each rank; "
            "--share-device lets ranks share them, for correctness: such times are compared with nothing else"
        )
    if spec.device == "auto":
        return "cuda" if gpus >= ranks and not torch_is_for_cpu() else "cpu"
    return spec.device


def _check_device(spec: SweepSpec, device: str) -> None:
    """Raise SpecError for what this device cannot do in any point; where modes are listed, its points are skipped."""
    if device == "cpu" and spec.mode == ("graph",):
        raise SpecError("--mode graph: the CPU has no graphs to capture; take --mode eager, or a machine with a GPU")
    if device == "cpu" and spec.share_device:
        raise SpecError("--share-device: the ranks are on the CPU; it is for --device cuda with fewer GPUs than ranks")
    if device in ACCELERATORS and spec.mode == ("graph",):
        raise SpecError(f"--mode graph: commbench captures no graphs on {device}; take --mode eager")
    if device in ACCELERATORS and spec.share_device:
        raise SpecError(f"--share-device: it is for --device cuda; on {device} each rank has a device of its own")
    if device != "cpu" and spec.sync == "none":
        raise SpecError(
            f"--sync none on {device}: streams meet before every call there; for calls that follow each other at once "
            "take --mode graph --graph-timing chained"
        )


def prepare(spec: SweepSpec, ranks_here: int | None = None) -> tuple[Expansion, Settings]:
    """Check a spec against this machine and unfold it. ranks_here: on this host, the spec's own number if None. Raises
    SpecError, UnknownName or PolicyError."""
    policies = {name: load_policy(name) for name in spec.policy}
    device = resolve_device(spec, ranks_here)
    _check_device(spec, device)

    def probes(policy: str, collective: str, dtype: str, ranks: int) -> list[int]:
        from commbench.policy.boundaries import probe_sizes

        platform = Platform(device=device, world_size=ranks, one_host=spec.nnodes == 1, group="world")
        return probe_sizes(policies[policy], collective, dtype, platform)

    skew_rank, skew_s = parse_skew(spec.skew) if spec.skew else (None, 0.0)
    if skew_rank is not None and skew_rank >= spec.ranks:
        raise SpecError(f"--skew {spec.skew}: there is no rank {skew_rank} among {spec.ranks}; ranks start at 0")
    if skew_rank is not None and spec.loop == "native":
        raise SpecError("--skew delays the Python loop; take --loop python")
    binding.check(spec.bind, spec.ranks_per_node if ranks_here is None else ranks_here)
    if spec.launcher == "mpirun":
        find_mpirun()
        if redact("", spec.mpirun_options) != spec.mpirun_options:
            raise SpecError(
                "--mpirun-options hold what looks like a secret, and a run records its options: set the variable in "
                "the environment and name it only, such as -x NAME"
            )
        if spec.bind and binds(spec.mpirun_options):
            raise SpecError(f"--bind {spec.bind} and --mpirun-options both say how ranks are bound; give one of them")
    elif spec.mpirun_options:
        raise SpecError("--mpirun-options: torchrun starts the ranks; add --launcher mpirun")
    expansion = expand(spec, psutil.virtual_memory().total, probes)
    settings = Settings(
        seed=spec.seed,
        target_ci=spec.target_ci,
        max_time_per_point_s=spec.max_time_per_point,
        budget_s=None if spec.budget is None else spec.budget / spec.launches,
        sync=spec.sync,
        loop=spec.loop,
        skew_rank=skew_rank,
        skew_s=skew_s,
        device=device,
        graph_timing=spec.graph_timing,
        share_device=spec.share_device,
        backends=tuple(b for b in spec.backends if b != AUTO),
        tp=spec.tp,
        pp=spec.pp,
        ep=spec.ep,
        ca_provider=spec.ca_provider,
        patience_s=limits_of(spec).patience_s(expansion.points, spec.max_time_per_point),
    )
    return expansion, settings


def program_of(spec: SweepSpec) -> Program:
    """What a spec's ranks run, and what starts them."""
    return Program(
        launcher=spec.launcher, mpirun_options=spec.mpirun_options, bind=spec.bind, nodes=Nodes(count=spec.nnodes)
    )


def limits_of(spec: SweepSpec) -> Limits:
    """How long a spec lets points and launches take."""
    return Limits(spec.point_timeout, spec.launch_timeout)


def estimate_s(expansion: Expansion, spec: SweepSpec) -> float:
    """About how long a run takes: what was seen on two cores, bounded by the budget. For people, not for decisions."""
    per_launch = 6.0
    for point in expansion.points:
        # preparing and checking go over every rank's buffers a few times, at about 1 GB/s and rank
        handling = 0.02 + 6 * point.size_bytes * point.world_size / 2e9
        per_launch += 0.8 * spec.max_time_per_point + handling
    total = per_launch * spec.launches
    return min(total, spec.budget + 10 * spec.launches) if spec.budget else total


def dry_run(expansion: Expansion, spec: SweepSpec, out: Path) -> dict[str, Any]:
    """What a sweep would do: points, time, command."""
    return {
        "points": [p.to_dict() for p in expansion.points],
        "skipped_combinations": dict(expansion.skipped),
        "launches": spec.launches,
        "estimated_s": round(estimate_s(expansion, spec), 1),
        "command": launch_command(out, 0, spec.ranks, program_of(spec)),
    }


def new_manifest(
    spec: SweepSpec,
    expansion: Expansion,
    settings: Settings,
    out: Path,
    argv: Sequence[str] = (),
    machine: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the manifest of a run in ``out`` says when it begins. machine: its fingerprint, taken here without it."""
    return {
        "run_id": out.name,
        "commbench": __version__,
        "argv": ["commbench", *(redact("", word) for word in (list(argv) or sys.argv)[1:])],
        "started_s": time.time(),
        "outcome": "running",
        "spec": spec.to_dict(),
        "settings": settings.to_dict(),
        "points_planned": len(expansion.points) * spec.launches,
        "skipped_combinations": dict(expansion.skipped),
        "fingerprint": fingerprint(settings.device) if machine is None else dict(machine),
        "launches": [],
    }


def close_run(out: Path, outcome: str) -> None:
    """Write what a run that ends leaves: Parquet, its outcome, and how many points ended in which way."""
    finish(out)
    statuses = Counter(str(row["status"]) for row in open_run(out).rows())
    update_manifest(out, outcome=outcome, ended_s=time.time(), statuses=dict(statuses))


def execute(
    spec: SweepSpec,
    expansion: Expansion,
    settings: Settings,
    out: Path,
    on_event: Callable[[Event], None],
    argv: Sequence[str] = (),
    others: OtherHosts | None = None,
) -> Run:
    """Run all launches and close the run directory; gives it opened. others: the other hosts, where there are some.

    On KeyboardInterrupt the ranks are stopped and every finished point is kept; the manifest's outcome then is
    ``interrupted``, and the exception goes on (as StopAtOnce when the user asked twice). Raises StoreError before
    anything runs when ``out`` cannot be used, and when results cannot be written any more; LaunchError when a launch
    cannot start.
    """
    check_writable(out)
    plan = Plan(expansion.points, settings.to_dict())
    manifest = new_manifest(spec, expansion, settings, out, argv)
    create(out, manifest, plan)
    with interruptible(), held(out):
        _measure(out, spec, range(spec.launches), on_event, limits_of(spec), others=others)
    return open_run(out)


def refuse_another(work: Unfinished, spec: SweepSpec | None = None, *, force: bool = False) -> list[str]:
    """What is not as it was when the run began: the spec (one that the user gives again), the versions, the machine.

    Raises UsageError naming every difference, unless ``force``.
    """
    changed = differences(work, spec, fingerprint(str(work.plan.settings.get("device", "cpu"))))
    if changed and not force:
        raise UsageError(
            f"--resume {work.directory}: not the same measurement: {'; '.join(changed)}; "
            "start a new run, or add --force to go on all the same, with the run's own spec"
        )
    return changed


def resume(
    work: Unfinished,
    on_event: Callable[[Event], None],
    *,
    retry: Sequence[str] = (),
    changed: Sequence[str] = (),
    limits: Limits | None = None,
    argv: Sequence[str] = (),
    others: OtherHosts | None = None,
) -> Run:
    """Measure what a run has left, with its own spec, seed and order; gives it opened.

    retry, changed: for the record, which statuses are repeated, and what of ``refuse_another`` was overridden. Raises
    StoreError when another process measures into the run or it cannot be written, SpecError for a run inside ranks of
    an outside launcher, and what ``execute`` raises.
    """
    out = work.directory
    refuse_external(program_of(work.spec))
    with interruptible(), held(out):
        try:
            remove_temporaries(out)
            settle_samples(work)
            record = record_of(changed, retry, list(argv) or sys.argv, work.again)
            history = [*work.manifest.get("resumed", []), record]
            update_manifest(out, outcome="running", resumed=history, error=None)
        except OSError as error:
            raise kept_after(error, out) from error
        _measure(out, work.spec, work.left, on_event, limits or limits_of(work.spec), work.again, others)
    return open_run(out)


def conclude(work: Unfinished) -> None:
    """Close a run that has nothing left to measure, where its command was ended before it could. Raises StoreError."""
    out = work.directory
    if work.manifest.get("outcome") == "complete":
        return
    try:
        with held(out):
            remove_temporaries(out)
            remove_work(out)
            settle_samples(work)
            update_manifest(out, error=None)
            close_run(out, "complete")
    except OSError as error:
        raise kept_after(error, out) from error


@contextlib.contextmanager
def interruptible_in(directory: Path, runs: Sequence[str], without: str) -> Iterator[None]:
    """``interruptible`` for a command that makes several runs, in these folders of ``directory``: being asked to stop
    raises Interrupted, which says how many finished points they keep, and ``without`` what the command ends."""
    with interruptible():
        try:
            yield
        except StopAtOnce as error:
            raise Interrupted(f"interrupted twice; finished points are kept in {directory}") from error
        except KeyboardInterrupt as error:
            begun = [directory / name for name in runs if (directory / name / schema.POINTS_JSONL).exists()]
            count = sum(len(open_run(run).rows()) for run in begun)
            kept = f"{count} finished points are kept in {directory}" if begun else "nothing was measured"
            raise Interrupted(f"interrupted, without {without}; {kept}") from error


def _measure(
    out: Path,
    spec: SweepSpec,
    launches: Iterable[int],
    on_event: Callable[[Event], None],
    limits: Limits,
    again: Again = NOTHING_AGAIN,
    others: OtherHosts | None = None,
) -> None:
    """Run launches and close the run, whatever happens. Raises StoreError when it cannot be written any more."""
    outcome = "failed"
    program = program_of(spec)
    if others is not None:
        program = replace(program, nodes=others.nodes, others=others)
        update_manifest(out, **others.record())
    remove_stale()  # the memory that killed runs left may be what this one needs
    remove_stale_folders()
    try:
        try:
            for launch in launches:
                with launch_span(launch, spec.ranks):
                    run_launch(out, launch, spec.ranks, on_event, program, limits=limits, again=again)
            outcome = "complete"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        except LaunchError as error:
            update_manifest(out, error=str(error))
            raise
        finally:
            if stopping.hurried:
                update_manifest(out, outcome=outcome, ended_s=time.time())
            else:
                close_run(out, outcome)
    except (OSError, StoreError) as error:
        raise kept_after(error, out) from error
