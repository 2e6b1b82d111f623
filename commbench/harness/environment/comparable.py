"""Whether two runs may be compared: same machine, same spec, same schema. What differs is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commbench.harness.environment.fingerprint import differences

# What makes a machine another one. The rest of a fingerprint (versions, variables, governor) may be what is compared.
_MACHINE: tuple[str, ...] = (
    "device", "host.name", "host.arch", "cpu.model", "cpu.family_model_stepping", "cpu.logical_cpus", "cpu.cores",
    "cpu.sockets", "cpu.threads_per_core", "cpu.numa_nodes", "cpu.affinity", "cpu.quota_cpus", "memory.total_bytes",
    "accelerators.kind", "accelerators.devices",
)  # fmt: skip
_HOST_NAME = "host.name"
# What a sweep measures and how; the rest of a spec says how often and how long.
_SPEC: tuple[str, ...] = (
    "collectives", "dtypes", "ops", "sizes", "layout", "placement", "cache", "mode", "backends", "policy", "group",
    "tp", "device", "sync", "loop", "skew", "ca_provider", "graph_timing", "share_device",
)  # fmt: skip
# Of a weight update, which no spec describes: the tensors of the model, and how many bytes travel at once.
_MODEL: tuple[str, ...] = ("weight_numels", "bucket_bytes")
_SHOWN = 90


@dataclass(frozen=True, slots=True)
class Differences:
    """refusals: why the numbers do not belong together. notes: what else differs, and may be what is compared."""

    refusals: tuple[str, ...]
    notes: tuple[str, ...]


def compare_manifests(
    base: Mapping[str, Any],
    cand: Mapping[str, Any],
    *,
    may_differ: tuple[str, ...] = (),
    same_hardware: bool = False,
) -> Differences:
    """What differs between two runs' manifests.

    may_differ: fields of the spec that are the very thing compared (``policy``, ``backends``). same_hardware: another
    host name is no other machine, for machines that are handed out anew every night.
    """
    refusals, notes = [], []
    versions = base.get("schema_version"), cand.get("schema_version")
    if versions[0] != versions[1]:
        refusals.append(f"schema_version: {versions[0]} → {versions[1]}")
    spec_base, spec_cand = base.get("spec") or {}, cand.get("spec") or {}
    for name in _SPEC:
        if name in spec_base and name in spec_cand and name not in may_differ:
            x, y = _plain(spec_base[name]), _plain(spec_cand[name])
            if x != y:
                refusals.append(f"spec.{name}: {_shown(x)} → {_shown(y)}")
    settings_base, settings_cand = base.get("settings") or {}, cand.get("settings") or {}
    for name in _MODEL:
        if name in settings_base and name in settings_cand:
            x, y = _plain(settings_base[name]), _plain(settings_cand[name])
            if x != y:
                refusals.append(f"settings.{name}: {_shown(x)} → {_shown(y)}")
    profiled = [bool(_environment(m).get("COMMBENCH_PROFILE")) for m in (base, cand)]
    if profiled[0] != profiled[1]:
        refusals.append(f"--profile: {' → '.join('on' if p else 'off' for p in profiled)}")
    prints = base.get("fingerprint"), cand.get("fingerprint")
    if not isinstance(prints[0], Mapping) or not isinstance(prints[1], Mapping):
        who = " and ".join(
            n for n, p in zip(("baseline", "candidate"), prints, strict=True) if not isinstance(p, Mapping)
        )
        refusals.append(f"the {who} records no machine")
    else:
        for text in differences(prints[0], prints[1]):
            name = text.split(":", 1)[0]
            machine = any(name == m or name.startswith((m + "[", m + ".")) for m in _MACHINE)
            if machine and not (name == _HOST_NAME and same_hardware):
                refusals.append(text)
            else:
                notes.append(text)
    return Differences(tuple(refusals), tuple(notes))


def _environment(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    found = (manifest.get("fingerprint") or {}).get("env")
    return found if isinstance(found, Mapping) else {}


def is_shared(fingerprint: Mapping[str, Any] | None) -> bool:
    """Whether the machine is a virtual one or a container: neighbours may take its time."""
    host = (fingerprint or {}).get("host") or {}
    return bool(host.get("virtual_machine") or host.get("container"))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | list) else value


def _shown(value: Any) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
