"""The plain data that every layer speaks: dtypes, collectives, points, calls and decisions.

No torch here: reading and judging results never needs it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class DType:
    """An element type by its torch name. ``kind`` is float, int or uint; ``mantissa_bits`` counts
    the stored fraction bits of a float (unit roundoff = 2^-(mantissa_bits + 1))."""

    name: str
    itemsize: int
    kind: str
    mantissa_bits: int = 0

    @property
    def is_float(self) -> bool:
        return self.kind == "float"


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("float32", 4, "float", 23),
        DType("float16", 2, "float", 10),
        DType("bfloat16", 2, "float", 7),
        DType("float64", 8, "float", 52),
        DType("int8", 1, "int"),
        DType("uint8", 1, "uint"),
        DType("int32", 4, "int"),
        DType("int64", 8, "int"),
        DType("float8_e4m3fn", 1, "float", 3),
        DType("float8_e5m2", 1, "float", 2),
    )
}
NO_DTYPE = "none"  # the dtype of a barrier

OPS: tuple[str, ...] = ("sum", "prod", "min", "max", "avg")

# Levels of quantised all-reduces: the largest error of one element on one way, over the largest magnitude of its block.
# An integer level of b bits maps the largest magnitude of a block to −2^(b−1), so a step is 2^−(b−1) of it; a value of
# the opposite sign and the same magnitude is one step off, since +2^(b−1) does not exist. fp8 (e4m3) has three fraction
# bits: rounding is off by 2^−4 of the value.
QUANTISED: dict[str, float] = {"fp8": 2.0**-4, "int8": 2.0**-7, "int6": 2.0**-5, "int4": 2.0**-3}


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective is, for the parts of the program that never call it.

    reduces: takes an op. splits: the message is the sum over ranks, so its size is a multiple of
    itemsize × ranks. synchronising: no rank can leave before the last has entered, so the headline
    latency is t_last; otherwise it is t_win. placements: those that exist, the customary one first.
    dispatched: a policy picks its backend; otherwise the coordinator has one way to do it. carries: tensors of any
    dtype, or bytes (objects). multiple: the group's ranks are a multiple of it (2: they work in pairs; 4: in halves
    of two and more).
    """

    name: str
    reduces: bool
    splits: bool
    synchronising: bool
    placements: tuple[str, ...]
    has_data: bool = True
    dispatched: bool = True
    carries: str = "tensors"
    multiple: int = 1


COLLECTIVES: dict[str, Collective] = {
    c.name: c
    for c in (
        Collective("all_reduce", True, False, True, ("in", "out")),
        Collective("all_gather", False, True, True, ("out", "in")),
        Collective("reduce_scatter", True, True, True, ("out", "in")),
        Collective("broadcast", False, False, False, ("in",)),
        Collective("all_to_all", False, True, True, ("out",)),
        Collective("reduce", True, False, False, ("in", "out")),
        Collective("gather", False, True, False, ("out",)),
        Collective("scatter", False, True, False, ("out",)),
        Collective("send_recv", False, False, False, ("out",)),
        Collective("barrier", False, False, True, ("in",), has_data=False),
        # rank i has its own number of rows: about equal, or (skewed) half as many as the rank before
        Collective("all_gatherv", False, True, True, ("out",)),
        Collective("all_gatherv_skewed", False, True, True, ("out",)),
        Collective("reduce_scatterv", True, True, True, ("out",)),
        Collective("reduce_scatterv_skewed", True, True, True, ("out",)),
        # objects and dictionaries of tensors; in pairs each even rank sends to the next
        Collective("send_object", False, False, False, ("out",), dispatched=False, carries="bytes", multiple=2),
        Collective("broadcast_object", False, False, False, ("out",), dispatched=False, carries="bytes"),
        Collective("queue_broadcast", False, False, False, ("out",), dispatched=False, carries="bytes"),
        Collective("send_tensor_dict", False, False, False, ("out",), dispatched=False, multiple=2),
        Collective("send_tensor_dict_async", False, False, False, ("out",), dispatched=False, multiple=2),
        # the first half sends to the second; each rank of a half sends one part, and the receivers gather
        Collective("send_tensor_dict_split", False, False, False, ("out",), dispatched=False, multiple=4),
        Collective("broadcast_tensor_dict", False, False, False, ("out",), dispatched=False),
        # make a group, broadcast a model's tensors in buckets, end the group
        Collective("weight_update", False, False, True, ("out",), dispatched=False),
    )
}

LAYOUTS: tuple[str, ...] = ("contiguous", "strided")
MODES: tuple[str, ...] = ("eager", "graph", "compile")
CACHES: tuple[str, ...] = ("hot", "cold")
PLACEMENTS: tuple[str, ...] = ("in", "out")
STATUSES: tuple[str, ...] = ("ok", "wrong", "failed", "timeout", "refused", "unsteady", "skipped")
AUTO = "auto"  # the requested backend that lets the policy pick


def ops_of(dtype: str) -> tuple[str, ...]:
    """The ops a dtype has: integers have no average (torch and NCCL define none that is exact)."""
    return OPS if DTYPES[dtype].is_float else OPS[:-1]


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to measure. Everything that makes two measurements different questions is here;
    how well it was measured (launches, target interval) is not.

    size_bytes is the total array S (see bandwidth.py); op is "" where the collective has none.
    """

    collective: str
    op: str
    dtype: str
    size_bytes: int
    world_size: int
    layout: str = "contiguous"
    group: str = "world"
    backend: str = AUTO
    policy: str = "commbench"
    mode: str = "eager"
    cache: str = "hot"
    placement: str = "in"

    @property
    def numel(self) -> int:
        """Elements of the total array."""
        return 0 if self.dtype == NO_DTYPE else self.size_bytes // DTYPES[self.dtype].itemsize

    @property
    def point_id(self) -> str:
        """Stable hash of the whole point: comparisons of two builds line up on it."""
        return _digest(self.to_dict())

    @property
    def point_key(self) -> str:
        """The same without policy and requested backend: comparisons of those line up on it."""
        record = self.to_dict()
        del record["policy"], record["backend"]
        return _digest(record)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}  # asdict copies, and runs have 10,000 points

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Point:
        return cls(**{f.name: record[f.name] for f in fields(cls)})

    def label(self) -> str:
        """One readable line, for progress and messages."""
        from commbench.units import format_size

        parts = [self.collective]
        if self.op and self.op != "sum":
            parts.append(self.op)
        if self.dtype != NO_DTYPE:
            parts += [self.dtype, format_size(self.size_bytes)]
        if self.group != "world":
            parts.append(f"in {self.group}")
        parts += [
            v for v, usual in ((self.layout, "contiguous"), (self.mode, "eager"), (self.cache, "hot")) if v != usual
        ]
        if self.placement != COLLECTIVES[self.collective].placements[0]:
            parts.append(f"{self.placement}-place")
        return " ".join(parts) + f" [{self.backend}]"


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class CallSignature:
    """What a policy may look at when it picks a backend for one call.

    size_bytes and numel are of the tensor that the caller passes in. layout: contiguous, strided (gaps between
    elements) or dense_t (transposed: dense, not contiguous). registered: the tensor lives in memory
    that its backend allocated (symmetric or shared). mode: eager, graph, pcg (piecewise graph) or compile.
    shape: the tensor's own shape; () where only numel is known (backends that fuse with a norm want two dimensions).
    """

    collective: str
    op: str
    dtype: str
    size_bytes: int
    numel: int
    layout: str = "contiguous"
    mode: str = "eager"
    placement: str = "in"
    registered: bool = False
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Platform:
    """The facts about a group and its devices that dispatch depends on.

    device: cpu, cuda, hip, hpu, xpu, npu. capability: (major, minor) of CUDA, (9, 4) for gfx942.
    one_host: proven by a shared-memory handshake, not by counts (None: not examined).
    usable: backend name → None when it is set up on every rank, else the reason it is not. A backend
    that is absent was never asked for. env: the environment variables that policies read.
    """

    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    world_size: int = 1
    nnodes: int = 1
    one_host: bool | None = None
    nvlink: bool = False
    multicast: bool = False
    consecutive_ranks: bool = True
    group: str = "tp"
    cpu_flags: frozenset[str] = frozenset()
    usable: Mapping[str, str | None] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    requested: frozenset[str] | None = None
    p2p: bool = True
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Declined:
    """A backend that stood ahead in the order, and why it was not taken."""

    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The backend picked, and for every backend ahead of it in the order, why it declined.

    picked is a backend name of the registry. route is the engine's own word for the step taken
    (``inplace`` covers pynccl and torch_dist); "" where it is the same. reason says why picked accepted.
    """

    picked: str
    declined: tuple[Declined, ...] = ()
    policy: str = ""
    route: str = ""
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "picked": self.picked,
            "route": self.route or self.picked,
            "policy": self.policy,
            "reason": self.reason,
            "declined": [{"backend": d.backend, "reason": d.reason} for d in self.declined],
        }
