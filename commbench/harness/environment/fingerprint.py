"""The environment fingerprint of a run: what machine, software and settings its numbers belong to.

``fingerprint`` runs in the process that launches and imports no torch; ``rank_facts`` runs in a rank and adds what
only torch knows. ``differences`` names what makes two fingerprints poor neighbours. Reading is by /proc, /sys
and the GPU vendors' own tools; what a machine does not offer is None or empty.
"""

from __future__ import annotations

import csv
import io
import math
import os
import platform
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REDACTED = "<redacted>"

# Variables that change what is measured, by the start of their name.
ENV_PREFIXES: tuple[str, ...] = (
    "NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "SGLANG_", "VLLM_", "OMP_", "GLOO_", "CUDA_", "HIP_", "COMMBENCH_", "MKL_",
    "KMP_", "GOMP_", "OPENBLAS_", "ROCR_", "HSA_", "MSCCLPP_", "NVSHMEM_", "UCX_", "FI_", "MALLOC_", "GLIBC_TUNABLES",
    "LD_PRELOAD", "NVIDIA_VISIBLE_DEVICES", "ZE_", "CCL_", "SYCL_", "ONEAPI_", "HABANA_", "HCCL_", "HCL_", "PT_HPU_",
    "ASCEND_",
)  # fmt: skip
PACKAGES: tuple[str, ...] = ("commbench", "torch", "numpy", "pandas", "pyarrow", "nanobind", "triton", "sglang", "vllm")
# Distributions that carry a communication library beside torch: nvidia-nccl-cu12, mpi4py, …
PACKAGE_PATTERN = re.compile(
    r"(nvidia-(nccl|nvshmem)|mscclpp|mpi4py|cupy|flashinfer|sgl-kernel|torch[-_]npu|habana[-_]torch|oneccl)",
    re.IGNORECASE,
)

_TOOL_TIMEOUT_S = 10.0
# CPU features that the shared-memory collectives and the clock can depend on.
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "f16c", "constant_tsc", "nonstop_tsc")
_NVIDIA_FIELDS = (
    "index", "name", "uuid", "driver_version", "vbios_version", "compute_mode", "persistence_mode", "mig.mode.current",
    "ecc.mode.current", "memory.total", "power.limit", "clocks.current.sm", "clocks.current.memory", "clocks.max.sm",
    "clocks.max.memory", "clocks.applications.graphics", "pcie.link.gen.current", "pcie.link.width.current",
)  # fmt: skip


def fingerprint(device: str, *, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What this machine and process are, ready for JSON. ``device`` is the run's: cpu, cuda, …

    env: the environment to report (the process's own by default). Sections: taken_at, device, host, cpu, memory,
    accelerators, versions, env, load, clock. Sizes are bytes, frequencies hertz, unless the name says otherwise.
    Values that look like secrets are replaced by ``<redacted>``. The topology of GPUs is read for a GPU run only, since
    it can take seconds.
    """
    return {
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": device,
        "host": _host(),
        "cpu": _cpu(),
        "memory": _memory(),
        "accelerators": _accelerators(topology=device != "cpu", device=device),
        "versions": _versions(),
        "env": relevant_env(os.environ if env is None else env),
        "load": _load(),
        "clock": _clock(),
    }


def rank_facts(device: str = "cpu") -> dict[str, Any]:
    """What only torch knows, asked in a rank: it imports torch, and asks the GPUs only if torch was built for them.

    device: the run's; devices of a kind that torch does not call cuda are asked for when it is theirs.
    """
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": None,
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "devices": [],
    }
    if torch.cuda.is_available():
        if torch.distributed.is_nccl_available():
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            facts["nccl"] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
        for index in range(torch.cuda.device_count()):
            props = torch.cuda.get_device_properties(index)
            capability = f"{props.major}.{props.minor}"
            facts["devices"].append({"name": props.name, "capability": capability, "memory_bytes": props.total_memory})
    elif device not in ("cpu", "cuda"):
        from commbench.backends.accelerators import device_module

        facts["devices"] = _other_devices(device_module(device))
    return facts


def _other_devices(module: Any) -> list[dict[str, Any]]:
    """Name and memory of each device of a torch device module; what it does not tell is None."""
    found = []
    for index in range(module.device_count()):
        props = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        name = getattr(props, "name", None) or module.get_device_name(index)
        found.append({"name": name, "memory_bytes": getattr(props, "total_memory", None)})
    return found


# ---- secrets --------------------------------------------------------------------------------------------

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_SECRET_ASSIGNMENT = re.compile(r"(token|secret|passw\w*|key|credentials?)[\"']?\s*[=:]\s*\S", re.IGNORECASE)
_USERINFO = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/@\s]+@")
_LONG_WORD = re.compile(r"[A-Za-z0-9+]{20,}")


def redact(name: str, value: str) -> str:
    """``value`` of variable ``name``, or ``<redacted>`` if it looks like a secret; of a URL, only the user part goes.

    A secret is told by the variable's name, by a ``password=`` inside the value, or by a word of 20 or more letters and
    digits that is as mixed as random ones.
    """
    if "TOKENS" in name.upper() and value.isdigit():
        return value  # a number of tokens, which engines are full of
    if _SECRET_NAME.search(name) or _SECRET_ASSIGNMENT.search(value):
        return REDACTED
    value = _USERINFO.sub(rf"\1{REDACTED}@", value)
    return REDACTED if any(_looks_random(word) for word in _LONG_WORD.findall(value)) else value


def _looks_random(word: str) -> bool:
    """By the entropy of the word's own letters, in bits each.

    Simulated: 99 % of random words of 20 hexadecimal digits have 2.9 or more, as have all longer ones. Words without
    digits are mostly names, so those must be longer and near the top (4.2) of what text reaches.
    """
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in Counter(word).values())
    has_both = any(c.isdigit() for c in word) and any(c.isalpha() for c in word)
    return entropy >= 2.9 if has_both else len(word) >= 32 and entropy >= 4.2


def relevant_env(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what is measured, sorted by name, secrets redacted."""
    return {name: redact(name, env[name]) for name in sorted(env) if name.startswith(ENV_PREFIXES)}


# ---- host -----------------------------------------------------------------------------------------------


def _host() -> dict[str, Any]:
    release = {}
    for line in (_text("/etc/os-release") or "").splitlines():
        key, _, value = line.partition("=")
        release[key] = value.strip('"')
    return {
        "name": socket.gethostname(),
        "kernel": platform.release(),
        "kernel_version": platform.version(),
        "os": release.get("PRETTY_NAME") or platform.system(),
        "arch": platform.machine(),
        "virtual_machine": _virtual_machine(),
        "container": _container(),
        "product": _text("/sys/class/dmi/id/product_name"),
    }


def _virtual_machine() -> str | None:
    """The hypervisor, ``yes`` if only its presence is known, None on bare metal (as far as one can tell inside)."""
    flags = _cpuinfo().get("flags")  # x86 only
    if flags is not None and "hypervisor" not in flags.split():
        return None
    for path in ("/sys/hypervisor/type", "/sys/class/dmi/id/sys_vendor"):
        text = _text(path) or ""
        for word in ("xen", "QEMU", "VMware", "Microsoft", "Amazon EC2", "Google", "innotek", "Parallels"):
            if word.lower() in text.lower():
                return text
    return None if flags is None else "yes"


def _container() -> str | None:
    for path, kind in (("/run/.containerenv", "podman"), ("/.dockerenv", "docker")):
        if Path(path).exists():
            return kind
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    groups = _text("/proc/1/cgroup") or ""
    return next((kind for kind in ("docker", "kubepods", "lxc", "containerd") if kind in groups), None)


# ---- CPU and memory -------------------------------------------------------------------------------------


def _cpuinfo() -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo; the whole file is slow to make on large machines."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            block = file.read(8192).split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu() -> dict[str, Any]:
    info = _cpuinfo()
    base = Path("/sys/devices/system/cpu")
    online = parse_cpu_list(_text(base / "online") or "") or list(range(os.cpu_count() or 1))
    sockets, cores = set(), set()
    for cpu in online:
        package = _text(base / f"cpu{cpu}/topology/physical_package_id")
        core = _text(base / f"cpu{cpu}/topology/core_id")
        if package is not None and core is not None:
            sockets.add(package)
            cores.add((package, core))
    flags = (info.get("flags") or info.get("Features") or "").split()
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    first = base / f"cpu{affinity[0]}"
    return {
        "model": info.get("model name") or info.get("Processor") or platform.processor() or platform.machine(),
        "vendor": info.get("vendor_id") or info.get("CPU implementer"),
        "family_model_stepping": "/".join(info.get(k, "?") for k in ("cpu family", "model", "stepping")),
        "microcode": info.get("microcode"),
        "features": [f for f in _CPU_FEATURES if f in flags],
        "logical_cpus": len(online),
        "cores": len(cores) or None,
        "sockets": len(sockets) or None,
        "threads_per_core": len(online) // len(cores) if cores else None,
        "numa_nodes": _numa_nodes(),
        "caches": _caches(first / "cache"),
        "affinity": format_cpu_list(affinity),
        "quota_cpus": _quota(),
        "governor": _text(first / "cpufreq/scaling_governor"),
        "frequency_driver": _text(first / "cpufreq/scaling_driver"),
        "frequency_max_hz": _hertz(_text(first / "cpufreq/cpuinfo_max_freq")),
        "boost": _text(base / "cpufreq/boost"),
        "isolated": _text(base / "isolated") or None,
    }


def _numa_nodes() -> dict[str, str]:
    nodes = Path("/sys/devices/system/node").glob("node[0-9]*")
    found = {node.name[4:]: _text(node / "cpulist") or "" for node in nodes}
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def _caches(folder: Path) -> list[dict[str, Any]]:
    found = []
    for index in sorted(folder.glob("index[0-9]*"), key=lambda path: int(path.name[5:])):
        size = re.fullmatch(r"(\d+)([KM]?)", _text(index / "size") or "")
        if size:
            found.append(
                {
                    "level": int(_text(index / "level") or 0),
                    "type": _text(index / "type"),
                    "size_bytes": int(size[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[size[2]],
                    "shared_by": _text(index / "shared_cpu_list"),
                }
            )
    return found


def _quota() -> float | None:
    """CPUs' worth of time that the control group may use, None without a limit."""
    text = _text("/sys/fs/cgroup/cpu.max")
    quota, period = (
        text.split()
        if text
        else (
            _text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") or "-1",
            _text("/sys/fs/cgroup/cpu/cpu.cfs_period_us") or "100000",
        )
    )
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _memory() -> dict[str, Any]:
    info = {}
    for line in (_text("/proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        info[key] = int(value.split()[0]) * 1024 if value.split()[1:] == ["kB"] else None
    limit = _text("/sys/fs/cgroup/memory.max")
    facts: dict[str, Any] = {
        "total_bytes": info.get("MemTotal"),
        "available_bytes": info.get("MemAvailable"),
        "swap_bytes": info.get("SwapTotal"),
        "limit_bytes": int(limit) if limit and limit.isdigit() else None,
        "transparent_hugepages": _chosen(_text("/sys/kernel/mm/transparent_hugepage/enabled")),
        "shm_bytes": None,
        "shm_free_bytes": None,
    }
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return facts
    return facts | {"shm_bytes": shm.f_blocks * shm.f_frsize, "shm_free_bytes": shm.f_bavail * shm.f_frsize}


def _chosen(text: str | None) -> str | None:
    """``madvise`` of ``always [madvise] never``."""
    match = re.search(r"\[(\S+)\]", text or "")
    return match[1] if match else None


def parse_cpu_list(text: str) -> list[int]:
    """[0, 1, 2, 5] of the kernel's ``0-2,5``; empty of an empty text."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def format_cpu_list(cpus: Iterable[int]) -> str:
    """``0-2,5`` of [0, 1, 2, 5]."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _hertz(khz: str | None) -> float | None:
    return float(khz) * 1e3 if khz else None


# ---- accelerators ---------------------------------------------------------------------------------------


# Where the drivers of devices without a tool that is asked here tell their version.
_DRIVER_FILES: Mapping[str, tuple[str, ...]] = {
    "hpu": ("/sys/module/habanalabs/version",),
    "npu": ("/usr/local/Ascend/driver/version.info",),
    "xpu": ("/sys/module/xe/version", "/sys/module/i915/version"),
}


def _accelerators(topology: bool, device: str = "cpu") -> dict[str, Any]:
    """kind (``cuda``, ``hip``, the run's own device or None), driver, devices (a dict each) and, if asked for, the
    topology as text. Of other devices than GPUs of NVIDIA and AMD the ranks tell name and memory.

    ``notes`` holds what a vendor's tool that is there failed to tell.
    """
    found: dict[str, Any] = {"kind": None, "driver": None, "devices": [], "topology": None, "notes": []}
    query = None
    for names in (_NVIDIA_FIELDS, _NVIDIA_FIELDS[:4]):  # a driver that does not know one of the fields refuses them all
        query = query or _run(["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,nounits"], found["notes"])
    if query:
        devices = parse_nvidia_csv(query)
        found |= {"kind": "cuda", "driver": devices[0].get("driver_version") if devices else None, "devices": devices}
        if topology:
            found["topology"] = _run(["nvidia-smi", "topo", "-m"], found["notes"])
        return found
    query = _run(["rocm-smi", "--showproductname", "--showuniqueid", "--showclocks", "--csv"], found["notes"])
    if query:
        found |= {"kind": "hip", "driver": _text("/sys/module/amdgpu/version"), "devices": parse_rocm_csv(query)}
        if topology:
            found["topology"] = _run(["rocm-smi", "--showtopo"], found["notes"])
    elif device in _DRIVER_FILES:
        found |= {"kind": device, "driver": next(filter(None, map(_text, _DRIVER_FILES[device])), None)}
    return found


def accelerator_names() -> list[str]:
    """The names of this host's GPUs, as the vendors' tools tell them."""
    return [str(device.get("name") or "unnamed") for device in _accelerators(topology=False)["devices"]]


def parse_nvidia_csv(text: str) -> list[dict[str, str | None]]:
    """A dict per GPU from ``nvidia-smi --query-gpu=… --format=csv,nounits``; a value that is not available is None.

    The header gives a unit in brackets (``memory.total [MiB]``); it stays in the key.
    """
    header, *rows = csv.reader(io.StringIO(text.strip()), skipinitialspace=True)
    keys = [re.sub(r" \[(.+)\]$", r"_\1", key) for key in header]
    return [dict(zip(keys, map(_available, row), strict=True)) for row in rows if row]


def parse_rocm_csv(text: str) -> list[dict[str, str | None]]:
    """A dict per GPU from ``rocm-smi … --csv``, which may have warnings and empty lines around its table."""
    lines = [line for line in text.splitlines() if "," in line]
    return [{str(k): _available(v or "") for k, v in row.items()} for row in csv.DictReader(lines) if row.get("device")]


def _available(value: str) -> str | None:
    value = value.strip()
    return None if value in ("", "N/A") or value.startswith("[") else value  # [Not Supported], [Deprecated], …


def _run(command: Sequence[str], notes: list[str]) -> str | None:
    """Its output, or None if the tool is absent or fails; a failure of one that is there goes to ``notes``."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TOOL_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired) as problem:
        notes.append(f"{command[0]}: {problem}")
        return None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        notes.append(f"{command[0]} exited {done.returncode}" + (f": {said[-1]}" if said else ""))
        return None
    return done.stdout


# ---- versions, load, clock ------------------------------------------------------------------------------


def _versions() -> dict[str, Any]:
    from importlib import metadata  # with email and zipfile behind it: nothing for a dry run to wait for

    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    for distribution in metadata.distributions():
        name = distribution.name
        if name and PACKAGE_PATTERN.match(name):
            packages[name] = distribution.version
    import commbench

    packages["commbench"] = commbench.__version__
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        **packages,
        **git_state(Path(commbench.__file__).resolve().parent.parent),
    }


def git_state(root: Path) -> dict[str, Any]:
    """git_sha and git_dirty of the checkout at ``root``; both None if commbench does not run from one.

    Dirty: a source file of commbench differs from the commit or is unknown to it. Results and notes do not count.
    """
    unknown = {"git_sha": None, "git_dirty": None}
    # An installed commbench can lie inside the environment folder of some other project's checkout.
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return unknown
    command = ["git", "--no-optional-locks", "-C", str(root), "status", "--porcelain=v2", "--branch"]
    text = _run([*command, "--", "commbench", "pyproject.toml", "CMakeLists.txt"], [])
    if text is None:
        return unknown
    commit = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", text, re.MULTILINE)
    dirty = any(line and not line.startswith("#") for line in text.splitlines())
    return {"git_sha": commit[1] if commit else None, "git_dirty": dirty}


def _load() -> dict[str, Any]:
    average = os.getloadavg()
    words = (_text("/proc/loadavg") or "").split()
    running = words[3].split("/")[0] if len(words) > 3 else ""
    return {
        "load_1m": average[0],
        "load_5m": average[1],
        "load_15m": average[2],
        "running_tasks": int(running) if running.isdigit() else None,
        "uptime_s": float((_text("/proc/uptime") or "nan").split()[0]) if _text("/proc/uptime") else None,
    }


def _clock() -> dict[str, Any]:
    info = time.get_clock_info("perf_counter")
    base = "/sys/devices/system/clocksource/clocksource0"
    return {
        "source": _text(f"{base}/current_clocksource"),
        "available": (_text(f"{base}/available_clocksource") or "").split(),
        "perf_counter": info.implementation,
        "resolution_s": info.resolution,
    }


def _text(path: str | Path) -> str | None:
    """The file's text without the ends' white space, or None if it cannot be read here."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


# ---- comparing ------------------------------------------------------------------------------------------

# What two runs must share for their times to be comparable, by dotted name; "*" stands for every key there.
_COMPARED: tuple[str, ...] = (
    "device", "host.name", "host.kernel", "host.arch", "host.virtual_machine", "host.container", "cpu.model",
    "cpu.family_model_stepping", "cpu.microcode", "cpu.features", "cpu.logical_cpus", "cpu.cores", "cpu.sockets",
    "cpu.threads_per_core", "cpu.numa_nodes", "cpu.caches", "cpu.affinity", "cpu.quota_cpus", "cpu.governor",
    "cpu.frequency_driver", "cpu.frequency_max_hz", "cpu.boost", "cpu.isolated", "memory.total_bytes",
    "memory.limit_bytes", "memory.transparent_hugepages", "memory.shm_bytes", "accelerators.kind",
    "accelerators.driver", "accelerators.devices", "accelerators.topology", "versions.*", "env.*", "clock.source",
    "rank.*",
)  # fmt: skip
# Readings of a moment inside the list of GPUs.
_MOMENTARY = re.compile(r"clocks\.current|pcie\.link\.(gen|width)\.current|clock (speed|level)", re.IGNORECASE)
# The kernel keeps a little for itself, and not the same after every boot.
_MEMORY_TOLERANCE = 0.01


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What differs between two fingerprints in a way that can change times: ``cpu.governor: powersave → performance``.

    Load, free memory, dates and current clocks are not compared. A field that one of the two does not have (it was made
    by another version of commbench) is not either, but for environment variables and packages, where absence means
    something: ``env.NCCL_ALGO: not set → Ring``. Facts of the ranks are compared if both have them under ``rank``.
    """
    found = []
    for name in _COMPARED:
        section, _, key = name.partition(".")
        if section not in a or section not in b:
            continue
        if not key:
            pairs = [(name, a[section], b[section])]
        elif key == "*":
            keys = sorted({*a[section], *b[section]})
            pairs = [(f"{section}.{k}", a[section].get(k), b[section].get(k)) for k in keys]
        elif key in a[section] and key in b[section]:
            pairs = [(name, a[section][key], b[section][key])]
        else:
            continue
        for full_name, x, y in pairs:
            found += _difference(full_name, x, y)
    return found


def _difference(name: str, x: Any, y: Any) -> list[str]:
    if name in ("memory.total_bytes", "memory.shm_bytes") and x and y and abs(x - y) <= _MEMORY_TOLERANCE * max(x, y):
        return []
    if name in ("accelerators.devices", "rank.devices"):
        first, second = [_lasting(d) for d in x or []], [_lasting(d) for d in y or []]
        if len(first) == len(second):
            return [
                f"{name}[{i}].{key}: {_shown(name, d[key])} → {_shown(name, e[key])}"
                for i, (d, e) in enumerate(zip(first, second, strict=True))
                for key in d
                if key in e and d[key] != e[key]
            ]
    if x == y:
        return []
    if name == "accelerators.topology" and x and y:
        return [f"{name}: not the same"]
    return [f"{name}: {_shown(name, x)} → {_shown(name, y)}"]


def _lasting(device: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in device.items() if not _MOMENTARY.search(key)}


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "not set" if name.startswith("env.") else "none"
    if name.endswith(".devices") and isinstance(value, list):
        return f"{len(value)} devices"
    text = str(value)
    return text if len(text) <= 80 else text[:79] + "…"
