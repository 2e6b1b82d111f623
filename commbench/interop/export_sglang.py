"""A policy's thresholds as SGLang reads them: a Python module that puts them into the release's own tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commbench.interop.export import (
    Caps,
    ExportError,
    Group,
    Picks,
    caps_of,
    check,
    exclusive,
    groups_text,
    one_value,
    overlaid,
    size_code,
)
from commbench.policy import Policy
from commbench.policy.model import Row

WORLD_SIZES = (2, 4, 6, 8)
CAPABILITIES = ((9, 0), (10, 0))


@dataclass(frozen=True, slots=True)
class Release:
    """How one SGLang release names and compares its thresholds.

    symm_table: the table of torch symmetric memory's caps, in ``all_reduce_utils``; by capability major and world size,
    compared with ``<``. custom_strict: whether custom all-reduce compares with ``<`` (else ``<=``). environment: what
    must be set for its first custom all-reduce to be the one that is taken.
    """

    policy: str
    symm_table: str
    custom_strict: bool
    environment: tuple[tuple[str, str], ...] = ()


RELEASES = {
    "sglang-0.5.3": Release("sglang-0.5.3", "SYMM_MEM_ALL_REDUCE_MAX_SIZES", custom_strict=True),
    "sglang-0.5.23": Release(
        "sglang-0.5.23",
        "TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES",
        custom_strict=False,
        # the second one has no cap that can be set: its reach is compiled in, by group
        environment=(("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", "0"),),
    ),
}
REQUESTED = frozenset({"ca_v1", "symm_mem", "pynccl"})  # what the engine is to be started with


def export(policy: Policy, release: str, groups: Sequence[Group], requested: frozenset[str] | None = None) -> str:
    """The module's text. requested: the policy's switches that are on (None: its defaults).

    Raises ExportError for what the release cannot express: another cap of custom all-reduce on another group, caps
    that differ between capabilities of one major version, or any pick that would come out different.
    """
    how = RELEASES[release]
    wanted = [Picks(policy, group, requested) for group in groups]
    caps = {p.group: caps_of(p) for p in wanted}
    custom = one_value({g: c.custom for g, c in caps.items()}, "cap of custom all-reduce", release)
    if not custom:
        raise ExportError(
            f"policy {policy.name} never takes custom all-reduce: start SGLang with --disable-custom-all-reduce"
        )
    max_size = exclusive(custom, 16) if how.custom_strict else custom
    rows = _symmetric(caps, release)
    switches = REQUESTED if any(rows.values()) else REQUESTED - {"symm_mem"}
    engine = overlaid(
        how.policy,
        {
            "symm_mem_max_bytes": [
                Row({"capability": (f"{major}.x",), "world_size": (str(n),)}, cap)
                for major, own in rows.items()
                for n, cap in own.items()
            ]
            or [Row({"capability": ("0.x",), "world_size": ("0",)}, 0)],
            "ca_max_bytes": [Row({"device": ("cuda",)}, max_size)],
        },
    )
    check(wanted, engine, switches, release)
    return _module(policy, release, how, max_size, rows, groups)


def _symmetric(caps: dict[Group, Caps], release: str) -> dict[int, dict[int, int]]:
    """Capability major → world size → the strict bound; groups that never take symmetric memory are left out."""
    rows: dict[int, dict[int, int]] = {}
    seen: dict[tuple[int, int], Group] = {}
    for group, own in sorted(caps.items(), key=lambda item: (item[0].capability, item[0].world_size)):
        key = (group.capability[0], group.world_size)
        cap = exclusive(own.symmetric, 4)
        table = rows.setdefault(key[0], {})
        if key in seen and table.get(key[1], 0) != cap:
            raise ExportError(
                f"{release} has one cap of symmetric memory for compute capability {key[0]}.x; the policy has several, "
                f"on {seen[key]} and on {group}; export one with --capability"
            )
        seen[key] = group
        if cap:
            table[key[1]] = cap
    return rows


def _module(
    policy: Policy, release: str, how: Release, max_size: int, rows: dict[int, dict[int, int]], groups: Sequence[Group]
) -> str:
    sign = "<" if how.custom_strict else "<="
    lines = [
        f'"""All-reduce thresholds of policy {policy.name} for {release}, written by commbench.',
        "",
        "For groups on one node, fully linked by NVLink:",
        *(f"  {line}" for line in groups_text(groups)),
        "",
        "Import this module and call apply() in every process before SGLang makes its groups.",
        "Start SGLang with --enable-torch-symm-mem." if any(rows.values()) else "Leave --enable-torch-symm-mem off.",
        *(f"Set {name}={value}." for name, value in how.environment),
        '"""',
        "",
        "KiB = 1 << 10",
        "MiB = 1 << 20",
        "",
        f"# custom all-reduce takes sizes {sign} this",
        f"CUSTOM_ALL_REDUCE_MAX_SIZE = {size_code(max_size)}",
        "",
        "# torch symmetric memory takes sizes < these: compute capability major -> world size -> bytes",
        f"{how.symm_table} = {{",
    ]
    for major, own in rows.items():
        lines.append(f"    {major}: {{{', '.join(f'{n}: {size_code(cap)}' for n, cap in own.items())}}},")
    lines += ["}", "", f"ENVIRONMENT = {dict(how.environment)!r}".replace("'", '"'), "", ""]
    lines += [
        "def apply():",
        '    """Put the thresholds into SGLang."""',
        "    import os",
        "",
        "    os.environ.update(ENVIRONMENT)",
        "    from sglang.srt.distributed.device_communicators import all_reduce_utils",
        "    from sglang.srt.distributed.device_communicators.custom_all_reduce import CustomAllreduce",
        "",
        f"    all_reduce_utils.{how.symm_table}.clear()",
        f"    all_reduce_utils.{how.symm_table}.update({how.symm_table})",
        "    # max_size is the constructor's last default",
        "    *others, _ = CustomAllreduce.__init__.__defaults__",
        "    CustomAllreduce.__init__.__defaults__ = (*others, CUSTOM_ALL_REDUCE_MAX_SIZE)",
    ]
    return "\n".join(lines) + "\n"
