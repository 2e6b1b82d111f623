"""A policy's thresholds as vLLM 0.33 reads them: a Python module that puts them into the release's own tables."""

from __future__ import annotations

from collections.abc import Sequence

from commbench.interop.export import (
    Caps,
    ExportError,
    Group,
    Picks,
    caps_of,
    check,
    exclusive,
    groups_text,
    overlaid,
    size_code,
)
from commbench.policy import Policy
from commbench.policy.model import Row
from commbench.units import format_size

WORLD_SIZES = (2, 4, 6, 8)
CAPABILITIES = ((9, 0), (10, 0), (10, 3))
RELEASE = "vllm-0.33"
CUSTOM_CAP = 8 << 20  # custom all-reduce's cap whatever the table says; compared with <, like the table
REQUESTED = frozenset({"ca", "symm_mem"})  # what the engine is to be started with
# FlashInfer stands ahead of both and NCCL's symmetric memory ahead of all; neither has thresholds of ours
ENVIRONMENT = {"VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_USE_NCCL_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "1"}


def export(policy: Policy, groups: Sequence[Group], requested: frozenset[str] | None = None) -> str:
    """The module's text. requested: the policy's switches that are on (None: its defaults).

    Raises ExportError for what the release cannot express: custom all-reduce of 8 MiB or more, or below its fixed cap
    on a group without symmetric memory (the table is read where that came up only), or any pick that would differ.
    """
    wanted = [Picks(policy, group, requested) for group in groups]
    caps = {p.group: caps_of(p) for p in wanted}
    custom: dict[str, dict[int, int]] = {}
    symmetric: dict[str, dict[int, int]] = {}
    for group, own in caps.items():
        _check_reach(policy, group, own)
        key = f"{group.capability[0]}.{group.capability[1]}"
        if own.custom:
            custom.setdefault(key, {})[group.world_size] = exclusive(own.custom, 16)
        if own.symmetric:
            symmetric.setdefault(key, {})[group.world_size] = own.symmetric
    engine = overlaid(RELEASE, {"ca_max_bytes": _rows(custom), "symm_mem_max_bytes": _rows(symmetric)})
    check(wanted, engine, REQUESTED, RELEASE)
    return _module(policy, custom, symmetric, groups)


def _check_reach(policy: Policy, group: Group, caps: Caps) -> None:
    if exclusive(caps.custom, 16) > CUSTOM_CAP:
        raise ExportError(
            f"{RELEASE} never takes custom all-reduce for 8 MiB or more; policy {policy.name} does up to "
            f"{format_size(caps.custom)} on {group}"
        )
    if not caps.symmetric and exclusive(caps.custom, 16) != CUSTOM_CAP:
        raise ExportError(
            f"{RELEASE} reads its table for custom all-reduce only where symmetric memory is on; policy {policy.name} "
            f"caps custom all-reduce at {format_size(caps.custom)} and has no symmetric memory on {group}"
        )


def _rows(table: dict[str, dict[int, int]]) -> list[Row]:
    rows = []
    for key, own in table.items():
        rows += [Row({"capability": (key,), "world_size": (str(n),)}, cap) for n, cap in own.items()]
    return rows or [Row({"capability": ("0.0",), "world_size": ("0",)}, 0)]


def _module(
    policy: Policy, custom: dict[str, dict[int, int]], symmetric: dict[str, dict[int, int]], groups: Sequence[Group]
) -> str:
    lines = [
        f'"""All-reduce thresholds of policy {policy.name} for {RELEASE}, written by commbench.',
        "",
        "For groups on one node, fully linked by NVLink:",
        *(f"  {line}" for line in groups_text(groups)),
        "",
        "Import this module and call apply() in every process before vLLM makes its groups; it sets the environment",
        "variables that keep FlashInfer and NCCL's symmetric memory from standing ahead.",
        '"""',
        "",
        "KiB = 1 << 10",
        "MiB = 1 << 20",
        "",
        "# sizes < these: compute capability -> world size -> bytes; read where symmetric memory is on",
        *_table("CUSTOM_ALL_REDUCE_MAX_SIZES", custom),
        "",
        "# sizes <= these, in bfloat16",
        *_table("SYMM_MEM_ALL_REDUCE_MAX_SIZES", symmetric),
        "",
        "ENVIRONMENT = {",
        *(f'    "{name}": "{value}",' for name, value in ENVIRONMENT.items()),
        "}",
        "",
        "",
        "def apply():",
        '    """Put the thresholds into vLLM."""',
        "    import os",
        "",
        "    os.environ.update(ENVIRONMENT)",
        "    from vllm.distributed.device_communicators import all_reduce_utils",
        "",
        '    for name in ("CUSTOM_ALL_REDUCE_MAX_SIZES", "SYMM_MEM_ALL_REDUCE_MAX_SIZES"):',
        "        table = getattr(all_reduce_utils, name)",
        "        table.clear()",
        "        table.update(globals()[name])",
    ]
    return "\n".join(lines) + "\n"


def _table(name: str, table: dict[str, dict[int, int]]) -> list[str]:
    lines = [f"{name} = {{"]
    for key, own in table.items():
        lines.append(f'    "{key}": {{{", ".join(f"{n}: {size_code(cap)}" for n, cap in own.items())}}},')
    return [*lines, "}"]
