"""What every exporter shares: a policy's picks on GPUs by size, and the proof that an engine would make the same.

An exporter reads the policy's picks, works out the engine's own numbers from them, puts these into our policy of that
engine and version, and compares the two at every size where one of them changes. A difference is refused: what comes
out is what the engine will do, or nothing does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from commbench.errors import PolicyError, UsageError
from commbench.policy import Policy, load_policy
from commbench.policy.evaluate import Bound
from commbench.policy.gates import Value
from commbench.policy.model import Row, Table
from commbench.types import DTYPES, CallSignature, Platform
from commbench.units import format_size

CUSTOM, SYMMETRIC, MSCCLPP = "custom all-reduce", "torch symmetric memory", "MSCCL++"
OTHER = "NCCL or torch.distributed"
_KINDS = {"ca": CUSTOM, "symm_mem": SYMMETRIC, "pymscclpp": MSCCLPP, "pynccl": OTHER, "torch_dist": OTHER}
DTYPES_ASKED = ("bfloat16", "float16", "float32")
MODES_ASKED = ("eager", "graph")
LARGEST = 1 << 30


class ExportError(UsageError):
    """The policy says what the engine's settings cannot."""


@dataclass(frozen=True, slots=True)
class Group:
    """The groups that an export is for: one compute capability and one number of ranks, on one node with NVLink."""

    capability: tuple[int, int]
    world_size: int

    def platform(self, requested: frozenset[str] | None = None) -> Platform:
        return Platform(
            device="cuda", capability=self.capability, world_size=self.world_size, one_host=True, nvlink=True,
            multicast=True, requested=requested,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"compute capability {self.capability[0]}.{self.capability[1]}, {self.world_size} ranks"


@dataclass(frozen=True, slots=True)
class Caps:
    """The largest sizes, in bytes, that one group gives to custom all-reduce and to symmetric memory; 0 for none."""

    custom: int
    symmetric: int


class Picks:
    """One policy's picks for the all-reduces of one group. requested: the switches that are on (None: its defaults)."""

    def __init__(self, policy: Policy, group: Group, requested: frozenset[str] | None = None) -> None:
        self.policy = policy
        self.group = group
        self._platform = group.platform(requested)

    def bound(self, dtype: str) -> Bound:
        return self.policy.bind(self._platform, "all_reduce", dtype)

    def kind(self, dtype: str, size_bytes: int, mode: str) -> str:
        """CUSTOM, SYMMETRIC, MSCCLPP, OTHER, or the name of another backend. A contiguous sum, in place."""
        numel = size_bytes // DTYPES[dtype].itemsize
        call = CallSignature("all_reduce", "sum", dtype, size_bytes, numel, mode=mode, shape=(1, numel))
        try:
            picked = self.bound(dtype).decide(call).picked
        except PolicyError as error:
            return f"nothing ({error})"
        return _KINDS.get(picked, picked)

    def limits(self, dtype: str, mode: str) -> set[int]:
        return {t.size_bytes for t in self.bound(dtype).thresholds(mode) if t.size_bytes <= 4 * LARGEST}


def sizes_to_ask(limits: Iterable[int], itemsize: int) -> list[int]:
    """Sizes at which picks with these limits may differ: around every limit and every power of two, in every alignment
    that an engine looks at (16, 8, 4 and single elements)."""
    found: set[int] = set()
    for limit in {*limits, *(1 << n for n in range(2, LARGEST.bit_length()))}:
        base = limit // 16 * 16
        found.update(base + d for d in (-16, -8, -4, -itemsize, 0, itemsize, 4, 8, 12, 16, 20, 32))
    return sorted(s for s in found if 0 < s <= LARGEST and s % itemsize == 0)


def caps_of(picks: Picks) -> Caps:
    """The largest sizes of the two backends that engines cap by tables, read from bfloat16 in eager mode."""
    largest = {CUSTOM: 0, SYMMETRIC: 0}
    for size in sizes_to_ask(picks.limits("bfloat16", "eager"), 2):
        kind = picks.kind("bfloat16", size, "eager")
        if kind in largest:
            largest[kind] = size
    return Caps(largest[CUSTOM], largest[SYMMETRIC])


def exclusive(cap: int, step: int) -> int:
    """The bound of a strict ``<`` that takes multiples of ``step`` up to and including ``cap``; 0 stays 0."""
    return cap // step * step + step if cap else 0


def one_value(values: Mapping[Group, int], what: str, engine: str) -> int:
    """The value that all groups share. Raises ExportError naming two that differ."""
    distinct = {v: g for g, v in values.items()}
    if len(distinct) > 1:
        said = "; ".join(f"{format_size(v) if v else 'none'} on {g}" for v, g in sorted(distinct.items()))
        raise ExportError(
            f"{engine} has one {what} for all groups, the policy has several ({said}); "
            "export one group with --world-size and --capability"
        )
    return next(iter(distinct))


def overlaid(name: str, tables: Mapping[str, Sequence[Row]] = {}, values: Mapping[str, Value] = {}) -> Policy:
    """The shipped policy of an engine with the rows of some tables, and some parameters, replaced."""
    data = load_policy(name).data
    changed = dict(data.tables)
    for table, rows in tables.items():
        old = changed[table]
        by = tuple(dict.fromkeys(key for row in rows for key in row.patterns)) or old.by
        changed[table] = Table(old.name, by, tuple(rows), old.what, old.fields)
    constants = dict(data.constants)
    for parameter, value in values.items():
        constants[parameter] = replace(constants[parameter], value=value)
    return Policy(replace(data, tables=changed, constants=constants))


def differences(wanted: Picks, engine: Picks) -> Iterator[str]:
    """Every size, dtype and mode, among those worth asking, at which the engine would not do what the policy wants."""
    for dtype in DTYPES_ASKED:
        for mode in MODES_ASKED:
            limits = wanted.limits(dtype, mode) | engine.limits(dtype, mode)
            for size in sizes_to_ask(limits, DTYPES[dtype].itemsize):
                want, have = wanted.kind(dtype, size, mode), engine.kind(dtype, size, mode)
                if want != have:
                    yield (
                        f"{size} bytes ({format_size(size)}) of {dtype}, {mode}, {wanted.group}: the policy takes "
                        f"{want}, the engine would take {have}"
                    )


def check(wanted: Sequence[Picks], engine: Policy, requested: frozenset[str], name: str) -> int:
    """Raise ExportError with the first difference and how many there are; else how many groups were compared."""
    for picks in wanted:
        found = list(differences(picks, Picks(engine, picks.group, requested)))
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ExportError(f"{name} cannot express policy {picks.policy.name}: at {found[0]}{more}")
    return len(wanted)


def groups_text(groups: Sequence[Group]) -> list[str]:
    """A line per compute capability: ``compute capability 9.0: 2, 4, 8 ranks``."""
    ranks: dict[tuple[int, int], list[str]] = {}
    for group in groups:
        ranks.setdefault(group.capability, []).append(str(group.world_size))
    return [f"compute capability {major}.{minor}: {', '.join(n)} ranks" for (major, minor), n in ranks.items()]


def size_code(size_bytes: int) -> str:
    """A size as Python source: ``64 * MiB``, ``8 * MiB + 16``, ``512 * KiB`` or a plain number."""
    for name, unit in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        whole, rest = divmod(size_bytes, unit)
        if whole and rest < 64:
            return f"{whole} * {name}" + (f" + {rest}" if rest else "")
    return str(size_bytes)
