"""What is available on this machine, why the rest is not, and what the user can do about it.

``look`` gathers facts and ``diagnose`` judges them, so that every judgement can be tested with facts made up. Nothing
here changes anything: no variable is set, no file is left behind.
"""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from commbench.backends.base import Availability
from commbench.errors import CommbenchError, PolicyError
from commbench.harness.environment import devices
from commbench.harness.environment.fingerprint import fingerprint, rank_facts, redact
from commbench.native.segment import directories, stale
from commbench.policy import list_policies, load_policy
from commbench.policy.evaluate import read_variable
from commbench.policy.load import version_key
from commbench.policy.model import Parameter
from commbench.registry import BACKENDS, HARDWARE_PROVEN, load_backend
from commbench.units import format_size

OK, OFF, NOTE, WARNING, PROBLEM = "ok", "off", "note", "warning", "problem"

SKIP_VERSION_CHECK = "COMMBENCH_SKIP_VERSION_CHECK"
TORCH_AT_LEAST = "2.6"
SHM_AT_LEAST = 64 << 20  # bytes: a group's segments and the page of its start gate, with room
OPEN_FILES_AT_LEAST = 1024

# The kernel packages that an engine's release asserts at start-up: distribution → version.
ENGINE_NEEDS: Mapping[str, Mapping[str, str]] = {
    "SGLang 0.5.3": {"flashinfer-python": "0.4.0rc3", "sgl-kernel": "0.3.14"},
}

# Variables of libraries and of commbench itself, and what they change. Engines' own variables stand in the policies.
KNOWN_VARIABLES: Mapping[str, str] = {
    "COMMBENCH_SHM_DIR": "where shared-memory segments are made, in place of /dev/shm",
    "COMMBENCH_SHM_TIMEOUT": "seconds that a rank waits for the others in shared memory",
    "COMMBENCH_SHM_DEBUG": "shared-memory collectives compare their arguments on every call: slow, finds mismatches",
    "COMMBENCH_FAKE": "the fake backend's script",
    SKIP_VERSION_CHECK: "1: the versions that engines ask for are not checked",
    "CUDA_VISIBLE_DEVICES": "which GPUs a process sees, and their numbers",
    "HIP_VISIBLE_DEVICES": "which GPUs a process sees, and their numbers",
    "ROCR_VISIBLE_DEVICES": "which GPUs a process sees, and their numbers",
    "PYTORCH_CUDA_ALLOC_CONF": "how torch allocates GPU memory",
    "PYTORCH_ALLOC_CONF": "how torch allocates device memory",
    "OMP_NUM_THREADS": "threads of torch in each rank; commbench sets 1 for its ranks where you set nothing",
    "CUDA_DEVICE_MAX_CONNECTIONS": "hardware queues of a GPU: order and overlap of kernels",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1: ranks may share one GPU in symmetric memory (no multicast then)",
    "TORCH_NCCL_BLOCKING_WAIT": "torch waits for NCCL on the host: eager times grow",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1: several ranks on one GPU (NCCL 2.30 or newer)",
    "NCCL_P2P_DISABLE": "1: NCCL does without direct access between GPUs; custom all-reduce is told there is none",
    "NCCL_SHM_DISABLE": "1: NCCL does without shared memory",
    "NCCL_IB_DISABLE": "1: NCCL does without InfiniBand",
    "NCCL_ALGO": "NCCL's algorithm is fixed",
    "NCCL_PROTO": "NCCL's protocol is fixed",
    "NCCL_NVLS_ENABLE": "whether NCCL uses NVLink multicast",
    "NCCL_DEBUG": "NCCL prints; INFO and TRACE slow calls down",
    "GLOO_SOCKET_IFNAME": "the network interface of gloo",
    "LOCAL_SIZE": "SGLang: ranks on this host, for its CPU shared memory",
    "TRTLLM_ENABLE_PDL": "FlashInfer and TensorRT-LLM kernels: programmatic dependent launch",
}


@dataclass(frozen=True, slots=True)
class Note:
    """One thing found. state: ok; off (not here, nothing wrong); note (a setting that matters); warning (something will
    not work or will mislead); problem (the main job cannot run). remedy: what to do, "" if nothing."""

    section: str
    subject: str
    state: str
    what: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory for shared segments. error: why nothing can be made there, "" if it can. leftovers: files that
    killed runs left (a living run unlinks its segments as soon as every rank has mapped them)."""

    path: str
    error: str = ""
    free_bytes: int = 0
    leftovers: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that ``diagnose`` judges."""

    facts: Mapping[str, Any]
    torch: Mapping[str, Any] | None = None
    torch_error: str = ""
    gloo: bool = False
    nccl: bool = False
    backends: Mapping[str, Availability] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    directories: tuple[Directory, ...] = ()
    folder: str = "reports"
    folder_error: str = ""
    open_files: int = 1 << 20
    locked_bytes: int = -1
    closed_devices: tuple[str, ...] = ()
    peers: tuple[tuple[int, int], ...] = ()
    accelerators: Mapping[str, devices.Found] = field(default_factory=dict)  # xpu, …: those whose packages are here


# ---- looking --------------------------------------------------------------------------------------------


def look(folder: Path = Path("reports")) -> Machine:
    """Examine this machine and process. Imports torch."""
    torch_facts: Mapping[str, Any] | None = None
    torch_error, gloo, nccl, device = "", False, False, "cpu"
    peers: tuple[tuple[int, int], ...] = ()
    others: dict[str, devices.Found] = {}
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        torch_error = str(error).splitlines()[0]
    else:
        if dist.is_available():
            gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
        if torch.cuda.is_available():
            device = "hip" if torch.version.hip else "cuda"
            peers = _blocked_peers(torch.cuda.device_count(), torch.cuda.can_device_access_peer)
        else:
            others = {kind: devices.ask(kind) for kind in devices.ACCELERATORS if _is_installed(kind)}
            device = next((kind for kind, found in others.items() if found.count), "cpu")
        torch_facts = rank_facts("cuda" if device == "hip" else device)
    wanted = {name for needs in ENGINE_NEEDS.values() for name in needs}
    where = "cuda" if device == "hip" else device  # torch calls both kinds of GPU cuda
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Machine(
        facts=fingerprint(device),
        torch=torch_facts,
        torch_error=torch_error,
        gloo=gloo,
        nccl=nccl,
        backends={name: _availability(name, where) for name in BACKENDS} if torch_facts else {},
        packages={name: version for name in sorted(wanted | {"sglang", "vllm"}) if (version := _version(name))},
        directories=tuple(_directory(path) for path in directories()),
        folder=str(folder),
        folder_error=_cannot_write(folder),
        open_files=limits[0],
        locked_bytes=limits[1],
        closed_devices=tuple(_closed_devices()),
        peers=peers,
        accelerators=others,
    )  # fmt: skip


def _is_installed(kind: str) -> bool:
    """Whether what makes torch know a device is here, without importing a vendor's package."""
    import torch

    from commbench.backends.accelerators import VENDORS

    roots = {package.partition(".")[0] for package in VENDORS[kind].packages}
    if not roots:
        return getattr(torch.version, kind, None) is not None
    return all(importlib.util.find_spec(root) is not None for root in roots)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _availability(name: str, device: str) -> Availability:
    try:
        answer: Availability = load_backend(name).availability(device)
    except (CommbenchError, ImportError, OSError, RuntimeError) as error:
        # a backend that fails to answer is what the user came here to learn about
        return Availability(False, f"asking it failed: {type(error).__name__}: {error}".splitlines()[0])
    return answer


def _blocked_peers(count: int, can_access: Any) -> tuple[tuple[int, int], ...]:
    return tuple((a, b) for a in range(count) for b in range(a + 1, count) if not can_access(a, b))


def _directory(path: Path) -> Directory:
    if not path.is_dir():
        return Directory(str(path), "it does not exist")
    error = "" if os.access(path, os.W_OK | os.X_OK) else "no permission to write"
    space = os.statvfs(path)
    leftovers = len(stale(path))
    return Directory(str(path), error, space.f_bavail * space.f_frsize, leftovers)


def _cannot_write(folder: Path) -> str:
    """Why results cannot be written there, "" if they can. Nothing is made."""
    nearest = folder.resolve()
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is not a directory"
    return "" if os.access(nearest, os.W_OK | os.X_OK) else f"no permission to write in {nearest}"


def _closed_devices() -> list[str]:
    """Device files of GPUs that are there and may not be opened."""
    found = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("nvidiactl"), *Path("/dev").glob("kfd")]
    return [str(path) for path in found if not os.access(path, os.R_OK | os.W_OK)]


# ---- judging --------------------------------------------------------------------------------------------


def diagnose(machine: Machine, env: Mapping[str, str]) -> list[Note]:
    """Everything worth saying about the machine and the environment, section by section."""
    return [
        *_main_job(machine),
        *_backends(machine),
        *_versions(machine, env),
        *_topology(machine),
        *_memory(machine),
        *_devices(machine, env),
        *_environment(env),
    ]


def can_run(notes: list[Note]) -> bool:
    """Whether the main job, a sweep on this machine's CPUs or GPUs, can run."""
    return not any(note.state == PROBLEM for note in notes)


def _main_job(machine: Machine) -> list[Note]:
    section = "main job"
    if machine.torch is None:
        how = "pip install torch (2.6 or newer), from the CPU index on a machine without a GPU"
        return [Note(section, "torch", PROBLEM, f"cannot be imported: {machine.torch_error}", how)]
    notes = []
    version = str(machine.torch["torch"])
    if version_key(version.split("+")[0]) < version_key(TORCH_AT_LEAST):
        notes.append(
            Note(section, "torch", PROBLEM, f"{version} is older than {TORCH_AT_LEAST}", "pip install -U torch")
        )
    if not machine.gloo:
        what = "this torch was built without gloo, which every rank needs to set up its group"
        notes.append(Note(section, "gloo", PROBLEM, what, "install a torch from its own wheels"))
    if machine.folder_error:
        notes.append(
            Note(
                section, machine.folder, PROBLEM, f"results cannot be written: {machine.folder_error}", "give --out DIR"
            )
        )
    if not notes:
        notes.append(
            Note(section, "commbench sweep", OK, f"can run: torch {version}, gloo, results in {machine.folder}/")
        )
    return notes


def _backends(machine: Machine) -> list[Note]:
    notes = []
    for name, answer in machine.backends.items():
        if answer.ok:
            notes.append(Note("backends", name, OK, answer.provider or "available"))
        else:
            notes.append(Note("backends", name, OFF, answer.reason, answer.remedy))
    unproven = [name for name in machine.backends if name not in HARDWARE_PROVEN]
    if unproven:
        what = f"not run on hardware yet, tested through their call paths: {', '.join(unproven)}"
        how = "on a machine with NVIDIA or AMD GPUs: ./run_bench.sh gpu-check, which tries those for them"
        notes.append(Note("backends", "proof", NOTE, what, how))
    return notes


def _versions(machine: Machine, env: Mapping[str, str]) -> list[Note]:
    """Versions here, against those that engines assert at start-up."""
    section = "versions"
    notes = []
    shown = {k: v for k, v in machine.facts["versions"].items() if v and k in ("python", "torch", "numpy", "pandas")}
    if machine.torch:
        shown |= {k: str(v) for k, v in machine.torch.items() if k in ("cuda", "hip", "nccl") and v}
    notes.append(Note(section, "here", OK, ", ".join(f"{k} {v}" for k, v in shown.items())))
    if env.get(SKIP_VERSION_CHECK) == "1":
        return [*notes, Note(section, "engines", NOTE, f"not checked, since {SKIP_VERSION_CHECK}=1")]
    for engine, needs in ENGINE_NEEDS.items():
        for package, needed in needs.items():
            found = machine.packages.get(package)
            how = f'pip install "{package}=={needed}", or {SKIP_VERSION_CHECK}=1 to skip this check'
            if found is None:
                notes.append(Note(section, package, OFF, f"not installed; {engine} asks for {needed}", how))
            elif version_key(found) < version_key(needed):
                notes.append(Note(section, package, WARNING, f"{found} is older than the {needed} of {engine}", how))
            else:
                notes.append(Note(section, package, OK, f"{found}; {engine} asks for {needed}"))
    for engine in ("sglang", "vllm"):
        if engine in machine.packages:
            notes.append(Note(section, engine, OK, machine.packages[engine]))
    return notes


def _topology(machine: Machine) -> list[Note]:
    section = "topology"
    cpu, gpus = machine.facts["cpu"], machine.facts["accelerators"]
    usable = cpu.get("quota_cpus") or cpu["logical_cpus"]
    nodes = cpu.get("numa_nodes") or {}
    what = (
        f"{cpu['model']}, {_count(cpu['sockets'], 'socket')}, {_count(cpu['cores'], 'core')}, "
        f"{_count(cpu['logical_cpus'], 'hardware thread')}, {_count(len(nodes) or 1, 'NUMA node')}"
    )
    notes = [Note(section, "CPU", OK, what)]
    if usable < cpu["logical_cpus"]:
        notes.append(
            Note(section, "quota", NOTE, f"this container may use {usable:g} CPUs", "keep --tp at or below that")
        )
    limit = int(min(usable, cpu["cores"] or usable))
    advice = f"up to --tp {limit} every rank has a core of its own; beyond that results are marked oversubscribed"
    notes.append(Note(section, "ranks", NOTE, advice))
    for number, gpu in enumerate(gpus["devices"]):
        notes.append(Note(section, f"GPU {number}", OK, str(gpu.get("name") or gpu)))
    for kind, found in machine.accelerators.items():
        if found.count:
            notes.append(Note(section, kind, OK, _count(found.count, "device")))
        else:
            notes.append(Note(section, kind, WARNING, found.reason, found.remedy))
    if not gpus["devices"] and not any(found.count for found in machine.accelerators.values()):
        why = "no GPU is here, so only CPU backends are measured; explain and policies answer for any GPU all the same"
        notes.append(Note(section, "GPU", OFF, why))
    if machine.peers:
        pairs = ", ".join(f"{a}–{b}" for a, b in machine.peers[:6])
        more = " …" if len(machine.peers) > 6 else ""
        what = f"no direct access between GPUs {pairs}{more}: custom all-reduce stays off"
        notes.append(Note(section, "peer access", WARNING, what))
    notes += [Note(section, "tools", NOTE, str(text)) for text in gpus.get("notes", ())]
    return notes


def _memory(machine: Machine) -> list[Note]:
    section = "shared memory"
    notes = []
    for place in machine.directories:
        if place.error:
            how = "make it, or set COMMBENCH_SHM_DIR to a directory in memory that you may write in"
            notes.append(Note(section, place.path, WARNING, place.error, how))
            continue
        free = _about(place.free_bytes)
        if place.free_bytes < SHM_AT_LEAST:
            how = "start the container with --shm-size=1g (or --ipc=host), or set COMMBENCH_SHM_DIR"
            notes.append(Note(section, place.path, WARNING, f"only {free} free", how))
        else:
            notes.append(Note(section, place.path, OK, f"writable, {free} free"))
        if place.leftovers:
            what = f"{_count(place.leftovers, 'segment')} of runs that were killed"
            notes.append(Note(section, place.path, NOTE, what, "the next sweep removes them"))
    return notes


def _devices(machine: Machine, env: Mapping[str, str]) -> list[Note]:
    """Limits, permissions, and the settings of GPU memory that break sharing it."""
    section = "permissions"
    notes = []
    for path in machine.closed_devices:
        how = "join the group that owns it (video or render), or start the container with the GPUs"
        notes.append(Note(section, path, WARNING, "the GPU's device file may not be opened", how))
    if 0 <= machine.open_files < OPEN_FILES_AT_LEAST:
        what = f"{machine.open_files} open files at most; many ranks need more"
        notes.append(Note(section, "open files", WARNING, what, f"ulimit -n {OPEN_FILES_AT_LEAST}"))
    has_gpu = bool(machine.facts["accelerators"]["devices"])
    if has_gpu and 0 <= machine.locked_bytes < SHM_AT_LEAST:
        what = f"{format_size(machine.locked_bytes)} of locked memory at most; NCCL over InfiniBand needs more"
        notes.append(Note(section, "locked memory", WARNING, what, "ulimit -l unlimited"))
    if not notes:
        notes.append(Note(section, "limits", OK, "device files, open files and locked memory suffice"))
    return [*notes, *_gpu_memory(env), *_masks(env)]


def _gpu_memory(env: Mapping[str, str]) -> list[Note]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in env.get(name, "").replace(" ", "").lower():
            what = "expandable_segments:True: CUDA IPC cannot share such memory, so custom all-reduce fails in graphs"
            return [Note("GPU memory", name, WARNING, what, f"unset it or write {name}=expandable_segments:False")]
    return [Note("GPU memory", "expandable_segments", OK, "not set, so CUDA IPC can share torch's memory")]


def _masks(env: Mapping[str, str]) -> list[Note]:
    notes = []
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        shown = [d.strip() for d in env.get(name, "").split(",") if d.strip()]
        if len(shown) == 1:
            what = (
                f"{name}={shown[0]} shows this process one GPU: with a mask of its own on every rank, torch symmetric "
                "memory takes all ranks for sharing one GPU and refuses (overlapping devices)"
            )
            how = "show every rank the same list and let LOCAL_RANK choose"
            notes.append(Note("GPU memory", name, WARNING, what, how))
        if any(not d.isdigit() for d in shown):
            what = "it names GPUs by more than numbers, and SGLang's custom all-reduce reads numbers only"
            notes.append(Note("GPU memory", name, WARNING, what, "write the numbers that nvidia-smi shows"))
    return notes


def _environment(env: Mapping[str, str]) -> list[Note]:
    """Variables that are set and what they change; those that a policy reads are read here as it would."""
    section = "environment"
    readers: dict[str, list[str]] = {}
    meaning: dict[str, str] = dict(KNOWN_VARIABLES)
    errors: dict[str, str] = {}
    for name in list_policies():
        data = load_policy(name).data
        for variable in data.variables.values():
            readers.setdefault(variable.name, []).append(name)
            meaning[variable.name] = variable.what
            if variable.name in env and variable.name not in errors:
                parameter = data.constants.get(variable.parameter) or Parameter(variable.switch, False, "flag")
                try:
                    read_variable(variable, parameter, env[variable.name])
                except PolicyError as error:
                    errors[variable.name] = str(error)
    notes = []
    for name in sorted(n for n in env if n in meaning):
        shown = f"{redact(name, env[name])}: {meaning[name]}"
        by = f" (read by {_listed(readers[name])})" if name in readers else ""
        if name in errors:
            notes.append(Note(section, name, WARNING, errors[name], "correct or unset it"))
        else:
            notes.append(Note(section, name, NOTE, f"{shown}{by}"))
    others = sorted(n for n in env if n.startswith("NCCL_") and n not in meaning)
    if others:
        notes.append(Note(section, "NCCL", NOTE, f"also set, read by NCCL itself: {', '.join(others)}"))
    if not notes:
        notes.append(Note(section, "variables", OK, "none set that changes what is measured"))
    notes.append(Note(section, "overrides", OK, "commbench overrides nothing that you set"))
    return notes


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _about(size_bytes: int) -> str:
    """A size to one digit after the point: free space is no exact number."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f} {unit}"
    return f"{size_bytes} B"
