"""The gates that policy files name: typed predicates that answer with a reason in words.

A gate answers None when it holds, else the reason why not, in words a user can act on. There are two
kinds. A *standing* gate looks at the platform only and is asked once per group: an engine's constructor
asks the same thing once, at start-up. A *call* gate looks at one call.

Arguments come from the policy file and are checked against the predicate's own annotations: ``Size`` is
a number of bytes (also ``"8MiB"``), ``Words`` and ``Numbers`` are lists. Any of them may be written as
``{ parameter = "…" }`` or ``{ table = "…" }`` in the file; a gate always sees the value.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NewType, Protocol, get_type_hints

from commbench.types import COLLECTIVES, DTYPES, CallSignature, Platform
from commbench.units import format_size

Size = NewType("Size", int)
Words = tuple[str, ...]
Numbers = tuple[int, ...]
Value = int | str | bool


class Site(Protocol):
    """What a gate may look at beside the call: one group's facts under one policy."""

    @property
    def platform(self) -> Platform: ...

    @property
    def dtype(self) -> str: ...

    @property
    def on(self) -> frozenset[str]:
        """The switches that configuration turned on."""

    @property
    def values(self) -> Mapping[str, Value]:
        """The policy's parameters after the environment variables that change them."""

    def standing(self, route: str) -> str | None:
        """None if that route's constructor gates hold here, else the first reason."""

    def refusal(self, route: str, call: CallSignature) -> str | None:
        """None if that route would take the call, else why not."""

    def look_up(self, table: str, **overrides: Value) -> Value | Mapping[str, Value] | None:
        """A table's value (or values by field) for this group and dtype, with some of its keys replaced or given;
        None where it has no row."""


class Edge(enum.Enum):
    """How a gate's ``limit`` divides the sizes."""

    BELOW = "<"
    AT_MOST = "<="
    AT_LEAST = ">="
    ABOVE = ">"


@dataclass(frozen=True)
class Gate:
    """A named predicate. says: the condition in words, with the arguments' names in braces. edge: how the argument
    ``limit`` divides the sizes; edges: the same for gates whose limits take working out (mode, site, arguments)."""

    name: str
    check: Callable[..., str | None]
    says: str
    per_call: bool
    edge: Edge | None
    edges: Callable[..., list[tuple[int, Edge]]] | None = None

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Argument name → its type; the evaluator's own arguments (call, site) left out."""
        hints = get_type_hints(self.check)
        return {n: t for n, t in hints.items() if n not in ("call", "site", "return")}

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(n for n in self.arguments if n not in self.defaults)

    @cached_property
    def doc(self) -> str:
        return inspect.getdoc(self.check) or ""

    def describe(self, arguments: Mapping[str, Any]) -> str:
        """The condition in words, e.g. ``size < 8 MiB``."""
        shown = {n: _show(v, self.arguments.get(n)) for n, v in (self.defaults | dict(arguments)).items()}
        return re.sub(r"\bone of ([^,]+)$", r"\1", self.says.format(**shown))

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Argument name → the value it has where the file gives none."""
        parameters = inspect.signature(self.check).parameters
        return {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}


def _show(value: Any, kind: Any) -> str:
    if kind is Size and isinstance(value, int):
        return format_size(value)
    if isinstance(value, tuple | list):
        return ", ".join(str(v) for v in value)
    return str(value)


def _among(items: Words | Numbers) -> str:
    """``float16`` or ``one of float16, bfloat16``."""
    words = ", ".join(str(i) for i in items)
    return words if len(items) == 1 else f"one of {words}"


def _standing(says: str) -> Callable[[Callable[..., str | None]], Gate]:
    return lambda check: Gate(check.__name__, check, says, False, None)


def _call(
    says: str, edge: Edge | None = None, edges: Callable[..., list[tuple[int, Edge]]] | None = None
) -> Callable[[Callable[..., str | None]], Gate]:
    return lambda check: Gate(check.__name__, check, says, True, edge, edges)


# ---- standing gates: asked once per group -------------------------------------------------------


@_standing("device is one of {devices}")
def device_in(site: Site, devices: Words) -> str | None:
    """The group's device is one of cpu, cuda, hip, hpu, xpu, npu."""
    device = site.platform.device
    return None if device in devices else f"{device} is not {_among(devices)}"


@_standing("world size is one of {sizes}")
def world_size_in(site: Site, sizes: Numbers) -> str | None:
    """The number of ranks is in the list."""
    n = site.platform.world_size
    return None if n in sizes else f"world size {n} is not {_among(sizes)}"


@_standing("world size is {least} to {most}")
def world_size_between(site: Site, least: int, most: int) -> str | None:
    """least ≤ number of ranks ≤ most."""
    n = site.platform.world_size
    return None if least <= n <= most else f"world size {n} is not in {least} to {most}"


@_standing("all ranks on one node")
def one_node(site: Site) -> str | None:
    """The group does not span nodes, by count."""
    n = site.platform.nnodes
    return None if n == 1 else f"the group spans {n} nodes"


@_standing("all ranks proven to share one host")
def one_host(site: Site) -> str | None:
    """A shared-memory handshake reached every rank; counts are not trusted."""
    proven = site.platform.one_host
    if proven:
        return None
    return "the ranks are on different hosts" if proven is False else "nothing has proven that all ranks share one host"


@_standing("GPUs fully connected by NVLink or XGMI (not asked of {unless_world_size} ranks)")
def fully_connected(site: Site, unless_world_size: int = 0) -> str | None:
    """Every pair is linked by NVLink or XGMI, or the group has just unless_world_size ranks."""
    p = site.platform
    if p.nvlink or p.world_size == unless_world_size:
        return None
    return f"{p.world_size} GPUs are not all linked by NVLink or XGMI"


@_standing("peer-to-peer access works")
def peer_access(site: Site) -> str | None:
    """Each GPU can read every other's memory."""
    return None if site.platform.p2p else "peer-to-peer access between the GPUs does not work"


@_standing("NVLink multicast works")
def multicast(site: Site) -> str | None:
    """NVSwitch multicast (NVLS) is there."""
    return None if site.platform.multicast else "NVLink multicast is not supported here"


@_standing("compute capability ≥ {major}")
def capability_at_least(site: Site, major: int) -> str | None:
    """Compute capability's major part; minor parts are not compared."""
    have = site.platform.capability
    return None if have[0] >= major else f"compute capability {have[0]}.{have[1]} is below {major}.0"


@_standing("compute capability is one of {capabilities}")
def capability_in(site: Site, capabilities: Words) -> str | None:
    """Compute capability matches one pattern: ``9.0``, or ``9.x`` for any minor part."""
    have = site.platform.capability
    if any(capability_matches(pattern, have) for pattern in capabilities):
        return None
    return f"compute capability {have[0]}.{have[1]} is not {_among(capabilities)}"


@_standing("consecutive ranks")
def consecutive_ranks(site: Site) -> str | None:
    """The group's global ranks have no gap."""
    return None if site.platform.consecutive_ranks else "the group's ranks are not consecutive"


@_standing("CPU has {flag}")
def cpu_has(site: Site, flag: str) -> str | None:
    """The CPU reports that instruction-set flag."""
    return None if flag in site.platform.cpu_flags else f"the CPU has no {flag}"


@_standing("group is one of {groups}")
def group_in(site: Site, groups: Words) -> str | None:
    """The group's tag (tp, ep, pp, …) is in the list."""
    group = site.platform.group
    return None if group in groups else f"group {group} is not {_among(groups)}"


@_standing("{parameter} is one of {values}")
def parameter_in(site: Site, parameter: str, values: Words) -> str | None:
    """A parameter's value, as text, is in the list. Booleans are ``true`` and ``false``."""
    have = as_word(site.values[parameter])
    return None if have in values else f"{parameter} is {have}, not {_among(values)}"


@_standing("{table} has a row for this group")
def table_has(site: Site, table: str) -> str | None:
    """The table has a value for this group (capability, world size, …)."""
    p = site.platform
    if site.look_up(table) is not None:
        return None
    return f"{table} has no row for {describe_group(p)}"


@_standing("{routes} stands")
def stands(site: Site, routes: Words) -> str | None:
    """Each of those routes came up."""
    for route in routes:
        reason = site.standing(route)
        if reason is not None:
            return f"{route} did not come up: {reason}"
    return None


@_standing("{routes} did not come up")
def stands_aside_for(site: Site, routes: Words) -> str | None:
    """None of those routes came up."""
    for route in routes:
        if site.standing(route) is None:
            return f"{route} came up and takes its place"
    return None


@_standing("{switches} is switched on")
def switched_on(site: Site, switches: Words) -> str | None:
    """Configuration turned one of those switches on."""
    return None if site.on.intersection(switches) else f"{' and '.join(switches)} is off"


@_standing("never")
def never(site: Site, why: str) -> str | None:
    """Never holds: for a route that an engine names and cannot reach."""
    return why


# ---- call gates ---------------------------------------------------------------------------------


@_call("dtype is one of {dtypes}")
def dtype_in(call: CallSignature, site: Site, dtypes: Words) -> str | None:
    """The element type is in the list (torch names)."""
    return None if call.dtype in dtypes else f"{call.dtype} is not {_among(dtypes)}"


@_call("size is a multiple of {bytes} bytes")
def multiple_of(call: CallSignature, site: Site, bytes: int) -> str | None:
    """The size in bytes is a multiple."""
    rest = call.size_bytes % bytes
    return None if rest == 0 else f"{call.size_bytes} bytes is not a multiple of {bytes} ({rest} over)"


@_call("size > 0")
def not_empty(call: CallSignature, site: Site) -> str | None:
    """The tensor has elements."""
    return None if call.size_bytes > 0 else "the tensor is empty"


@_call("tensor is contiguous")
def contiguous(call: CallSignature, site: Site) -> str | None:
    """Row-major and dense."""
    return None if call.layout == "contiguous" else f"the tensor is {_LAYOUT_WORDS[call.layout]}"


@_call("tensor is dense")
def weakly_contiguous(call: CallSignature, site: Site) -> str | None:
    """Without gaps: contiguous, or a transposed tensor that fills its storage."""
    return None if call.layout != "strided" else f"the tensor is {_LAYOUT_WORDS[call.layout]}"


@_call("more elements than {bytes} hold at {itemsize} bytes each")
def elements_above(call: CallSignature, site: Site, bytes: Size, itemsize: int) -> str | None:
    """number of elements × itemsize > bytes: a buffer of another dtype is too short."""
    if call.numel * itemsize > bytes:
        return None
    return f"{call.numel} elements fit a buffer of {format_size(bytes)}"


@_call("layout is one of {layouts}")
def layout_in(call: CallSignature, site: Site, layouts: Words) -> str | None:
    """contiguous, strided (gaps between elements) or dense_t (transposed: dense, not contiguous)."""
    return None if call.layout in layouts else f"the tensor is {_LAYOUT_WORDS[call.layout]}"


@_call("size < {limit}", Edge.BELOW)
def size_below(call: CallSignature, site: Site, limit: Size) -> str | None:
    """size in bytes < limit."""
    if call.size_bytes < limit:
        return None
    return f"{format_size(call.size_bytes)} is not < {format_size(limit)}"


@_call("size ≤ {limit}", Edge.AT_MOST)
def size_at_most(call: CallSignature, site: Site, limit: Size) -> str | None:
    """size in bytes ≤ limit."""
    if call.size_bytes <= limit:
        return None
    return f"{format_size(call.size_bytes)} is not ≤ {format_size(limit)}"


@_call("size ≥ {limit}", Edge.AT_LEAST)
def size_at_least(call: CallSignature, site: Site, limit: Size) -> str | None:
    """size in bytes ≥ limit."""
    if call.size_bytes >= limit:
        return None
    return f"{format_size(call.size_bytes)} is not ≥ {format_size(limit)}"


@_call("size > {limit}", Edge.ABOVE)
def size_above(call: CallSignature, site: Site, limit: Size) -> str | None:
    """size in bytes > limit."""
    if call.size_bytes > limit:
        return None
    return f"{format_size(call.size_bytes)} is not > {format_size(limit)}"


@_call("size > the largest power of two ≤ {limit}")
def above_power_of_two(call: CallSignature, site: Site, limit: Size) -> str | None:
    """size in bytes > the largest power of two that is ≤ limit."""
    power = 1 << (limit.bit_length() - 1) if limit > 0 else 0
    return None if call.size_bytes > power else f"{format_size(call.size_bytes)} is not > {format_size(power)}"


@_call("mode is one of {modes}")
def mode_in(call: CallSignature, site: Site, modes: Words) -> str | None:
    """eager; graph: inside graph capture; pcg: in a piecewise graph; compile: under torch.compile."""
    return None if call.mode in modes else f"the mode is {call.mode}, not {' or '.join(modes)}"


@_call("op is one of {ops}")
def op_in(call: CallSignature, site: Site, ops: Words) -> str | None:
    """The reduction is in the list."""
    return None if call.op in ops else f"{call.op or 'no op'} is not {_among(ops)}"


@_call("dtype is one of {dtypes}, if the collective reduces")
def reduces_in(call: CallSignature, site: Site, dtypes: Words) -> str | None:
    """A collective that reduces has the element type in the list; one that only moves data may have any."""
    kind = COLLECTIVES.get(call.collective.removesuffix("v"))  # all_gatherv moves data as all_gather does
    if (kind is not None and not kind.reduces) or call.dtype in dtypes:
        return None
    return f"{call.dtype} is not {_among(dtypes)}"


@_call("tensor lives in symmetric memory")
def registered(call: CallSignature, site: Site) -> str | None:
    """The caller's tensor was allocated by (and registered with) the backend."""
    return None if call.registered else "the tensor is not in memory that the backend registered"


@_call("{routes} declines")
def unless_taken_by(call: CallSignature, site: Site, routes: Words) -> str | None:
    """None of those routes would take this call: they come first without standing first in the order."""
    for route in routes:
        if site.refusal(route, call) is None:
            return f"{route} takes this call"
    return None


def _quick_minimum(site: Site, table: str, cast: bool) -> int | None:
    """The minimum of quick all-reduce for this group: a bfloat16 tensor that is cast uses the float16 row."""
    dtype = "float16" if cast else site.dtype
    value = site.look_up(table, dtype=dtype)
    return value if isinstance(value, int) else None


def _quick_edges(mode: str, site: Site, table: str, cast: bool) -> list[tuple[int, Edge]]:
    minimum = _quick_minimum(site, table, cast)
    return [] if minimum is None else [(minimum, Edge.AT_LEAST)]


@_call("size is at least {table}'s value for this dtype", edges=_quick_edges)
def quick_reduce_minimum(call: CallSignature, site: Site, table: str, cast: bool) -> str | None:
    """Quick all-reduce's minimum size by dtype, world size and level; cast: bfloat16 uses the float16 row."""
    minimum = _quick_minimum(site, table, cast)
    if minimum is None:
        return f"{table} has no row for {call.dtype} in {describe_group(site.platform)}"
    if call.size_bytes >= minimum:
        return None
    return f"{format_size(call.size_bytes)} is not ≥ {format_size(minimum)}"


def _v2_reach(mode: str, site: Site, table: str, max_size: int) -> tuple[int, tuple[int, int] | None]:
    """How far custom all-reduce v2 reaches: (largest size without multicast, multicast's range or None).

    One set of thresholds in a graph, another elsewhere; each is clipped to the buffers, which are as large as the
    larger set wants, but no larger than max_size. A two-shot push slot of b bytes holds tensors of up to
    16 × n × (b // 32) bytes on n ranks.
    """
    n = site.platform.world_size
    sets = {context: site.look_up(table, context=context) for context in ("graph", "eager")}
    here = sets["graph" if mode == "graph" and site.platform.nnodes == 1 else "eager"]
    wanted = [s for s in sets.values() if isinstance(s, Mapping)]
    if not isinstance(here, Mapping):
        return 0, None
    slot = max(max(int(s["one_shot_push"]), 32 * -(-int(s["two_shot_push"]) // (16 * n))) for s in wanted)
    pull = max(max(int(s["one_shot_pull"]), int(s["two_shot_pull"]), int(s["multicast_to"])) for s in wanted)
    slot = -(-max(min(slot, max_size), 1024) // 1024) * 1024
    pull = -(-max(min(pull, max_size), 1024) // 1024) * 1024 if max_size > 0 else 0
    reach = max(
        min(int(here["one_shot_push"]), slot),
        min(int(here["two_shot_push"]), 16 * n * (slot // 32)),
        min(int(here["one_shot_pull"]), pull),
        min(int(here["two_shot_pull"]), pull),
    )
    low, high = min(int(here["multicast_from"]), pull), min(int(here["multicast_to"]), pull)
    return reach, (low, high) if site.platform.multicast and high > 0 else None


def _v2_edges(mode: str, site: Site, table: str, max_size: int) -> list[tuple[int, Edge]]:
    reach, multicast_range = _v2_reach(mode, site, table, max_size)
    edges = [(reach, Edge.AT_MOST)]
    if multicast_range and multicast_range[1] > reach:
        edges += [(multicast_range[0], Edge.AT_LEAST)] if multicast_range[0] > reach else []
        edges.append((multicast_range[1], Edge.AT_MOST))
    return edges


@_call("size is within reach of {table}, buffers up to {max_size}", edges=_v2_edges)
def custom_v2_reach(call: CallSignature, site: Site, table: str, max_size: Size) -> str | None:
    """Custom all-reduce v2 has a kernel for the size: one- or two-shot push or pull, or multicast."""
    reach, multicast_range = _v2_reach(call.mode, site, table, max_size)
    size = call.size_bytes
    if size <= reach or (multicast_range and multicast_range[0] <= size <= multicast_range[1]):
        return None
    if multicast_range and multicast_range[1] > reach:
        low, high = (format_size(b) for b in multicast_range)
        return f"{format_size(size)} is neither ≤ {format_size(reach)} nor in multicast's {low} to {high}"
    return f"{format_size(size)} is not ≤ {format_size(reach)}"


@_call(
    "size is outside {low} to {high}, both excluded",
    edges=lambda mode, site, low, high: [(low, Edge.AT_MOST), (high, Edge.AT_LEAST)],
)
def size_outside(call: CallSignature, site: Site, low: Size, high: Size) -> str | None:
    """size ≤ low or size ≥ high."""
    if call.size_bytes <= low or call.size_bytes >= high:
        return None
    return f"{format_size(call.size_bytes)} lies between {format_size(low)} and {format_size(high)}"


@_call("tensor has {least} dimensions or more")
def dimensions_at_least(call: CallSignature, site: Site, least: int) -> str | None:
    """The tensor's own shape; a call without one counts as one dimension."""
    have = max(len(call.shape), 1)
    return None if have >= least else f"the tensor has {have} dimension{'s' if have > 1 else ''}, not {least} or more"


@_call("tensor has {count} dimensions")
def dimensions(call: CallSignature, site: Site, count: int) -> str | None:
    """Exactly that many dimensions; a call without a shape counts as one."""
    have = max(len(call.shape), 1)
    return None if have == count else f"the tensor has {have} dimension{'s' if have > 1 else ''}, not {count}"


@dataclass(frozen=True, slots=True)
class Workspace:
    """A FlashInfer workspace: which kernels it serves and the problem that it was sized for."""

    backend: str
    tokens: int
    hidden: int
    dtype: str


# FlashInfer, trtllm_mnnvl_ar: one-shot while tokens × hidden × ranks × itemsize is at most this.
_MNNVL_ONE_SHOT_BYTES = 64 * 1024 * 8 * 2


def parse_workspace(text: str) -> Workspace | None:
    """``backend:tokens:hidden:dtype``, or None for anything else."""
    parts = text.split(":")
    if len(parts) != 4 or not (parts[1].isdigit() and parts[2].isdigit()) or parts[3] not in DTYPES:
        return None
    return Workspace(parts[0], int(parts[1]), int(parts[2]), parts[3])


def _mnnvl_bytes(one_shot: bool, n: int, tokens: int, hidden: int, itemsize: int) -> int:
    if one_shot:
        return tokens * hidden * n * itemsize
    return 2 * -(-tokens // n) * n * hidden * itemsize


def workspace_shortfall(workspace: Workspace, n: int, tokens: int, hidden: int, dtype: str) -> str | None:
    """Why a FlashInfer workspace cannot take tokens × hidden elements on n ranks, or None.

    trtllm: element capacity, and float32 exactly if the workspace is for float32. mnnvl: bytes of the strategy that
    FlashInfer would take, against a buffer sized for its own problem (rounded up to 32 bytes).
    """
    itemsize = DTYPES[dtype].itemsize
    if workspace.backend == "trtllm":
        if (workspace.dtype == "float32") != (dtype == "float32"):
            return f"the workspace was made for {workspace.dtype}, not {dtype}"
        if tokens * hidden > workspace.tokens * workspace.hidden:
            return f"{tokens} × {hidden} elements exceed the workspace's {workspace.tokens} × {workspace.hidden}"
        return None
    own = DTYPES[workspace.dtype].itemsize
    one_shot_tokens = min(_MNNVL_ONE_SHOT_BYTES // (n * own * workspace.hidden), workspace.tokens)
    have = max(
        _mnnvl_bytes(True, n, one_shot_tokens, workspace.hidden, own),
        _mnnvl_bytes(False, n, workspace.tokens, workspace.hidden, own),
    )
    have = -(-have // 32) * 32
    need = _mnnvl_bytes(tokens * hidden * n * itemsize <= _MNNVL_ONE_SHOT_BYTES, n, tokens, hidden, itemsize)
    if need <= have:
        return None
    return f"{tokens} × {hidden} needs {need} bytes of workspace buffer, there are {have}"


@_standing("FlashInfer workspace {workspace} stands")
def has_workspace(site: Site, workspace: str) -> str | None:
    """A fused-kernel workspace was made before (the parameter reads backend:tokens:hidden:dtype)."""
    if not workspace:
        return "no FlashInfer workspace has been made"
    return None if parse_workspace(workspace) else f"workspace {workspace!r} is not backend:tokens:hidden:dtype"


@_call("the problem fits FlashInfer's workspace {workspace}")
def fits_workspace(call: CallSignature, site: Site, workspace: str) -> str | None:
    """A tensor of tokens × hidden that the workspace has room for. Under torch.compile the engine asks instead that
    both stay within what the workspace was made for, in the same dtype."""
    made = parse_workspace(workspace)
    if made is None:
        return f"workspace {workspace!r} is not backend:tokens:hidden:dtype"
    tokens, hidden = call.shape
    if made.backend == "mnnvl" and hidden % (16 // DTYPES[call.dtype].itemsize):
        return f"a row of {hidden} {call.dtype} is not a multiple of 16 bytes"
    if call.mode == "compile":
        if tokens <= made.tokens and hidden <= made.hidden and call.dtype == made.dtype:
            return None
        return (
            f"{tokens} × {hidden} {call.dtype} is not within the workspace's {made.tokens} × {made.hidden} {made.dtype}"
        )
    return workspace_shortfall(made, site.platform.world_size, tokens, hidden, call.dtype)


@_call("at least 16 bytes for each rank, in multiples of 16")
def pcie_packs(call: CallSignature, site: Site) -> str | None:
    """FlashInfer's PCIe-IPC kernels: whole packs of 16 bytes, one or more for each rank."""
    n = site.platform.world_size
    if call.size_bytes % 16:
        return f"{call.size_bytes} bytes is not a multiple of 16 ({call.size_bytes % 16} over)"
    if call.size_bytes < 16 * n:
        return f"{call.size_bytes} bytes is less than 16 for each of {n} ranks"
    return None


@_call(
    "at most {limit} elements",
    edges=lambda mode, site, limit: [(limit * DTYPES[site.dtype].itemsize, Edge.AT_MOST)],
)
def elements_at_most(call: CallSignature, site: Site, limit: int) -> str | None:
    """Number of elements ≤ limit."""
    return None if call.numel <= limit else f"{call.numel} elements exceed {limit}"


def _standing_cap(mode: str, site: Site, limit: int, table: str, beside: str, lifted: bool) -> int | None:
    """The smaller of limit and the table's value, which counts only where the route ``beside`` came up."""
    if lifted:
        return None
    value = site.look_up(table) if site.standing(beside) is None else None
    return min(limit, value) if isinstance(value, int) else limit


def _standing_cap_edges(mode: str, site: Site, **arguments: Any) -> list[tuple[int, Edge]]:
    cap = _standing_cap(mode, site, **arguments)
    return [] if cap is None else [(cap, Edge.BELOW)]


@_call("size < {limit}, or less by {table} where {beside} came up (no cap if {lifted})", edges=_standing_cap_edges)
def size_below_beside(
    call: CallSignature, site: Site, limit: Size, table: str, beside: str, lifted: bool = False
) -> str | None:
    """size < limit; where another route came up, also < the table's value. lifted: no cap at all."""
    cap = _standing_cap(call.mode, site, limit, table, beside, lifted)
    if cap is None or call.size_bytes < cap:
        return None
    return f"{format_size(call.size_bytes)} is not < {format_size(cap)}"


@_standing("FlashInfer backend {backend} can serve this group")
def flashinfer_backend(site: Site, backend: str) -> str | None:
    """vLLM's choice of FlashInfer kernels: auto takes mnnvl (and on one node falls back to trtllm); mnnvl needs
    multicast; across nodes auto needs compute capability 10."""
    p = site.platform
    if backend == "auto" and p.nnodes > 1 and p.capability < (10, 0):
        return "across nodes FlashInfer needs compute capability 10 or newer"
    if backend == "mnnvl" and not p.multicast:
        return "mnnvl needs NVLink multicast, which is not supported here"
    if backend == "auto" and p.nnodes > 1 and not p.multicast:
        return "across nodes FlashInfer takes mnnvl, which needs NVLink multicast"
    return None


def _flashinfer_budget(site: Site, backend: str, table: str, tuned: str) -> int | None:
    """Bytes that vLLM sizes a FlashInfer workspace for: a tuned value where mnnvl is asked for, else the table's."""
    value = site.look_up(table)
    if isinstance(value, int) and backend != "trtllm":
        better = site.look_up(tuned)
        value = better if isinstance(better, int) else value
    return value if isinstance(value, int) else None


_FIRST_TENSOR = re.compile(r"(?:pcie:)?(\d+)x(\d+):(\w+)")


def first_tensor(text: str) -> tuple[int, str] | None:
    """(hidden, dtype) of the first tensor that sized a workspace, from ``tokens x hidden:dtype``; None for other text.

    A PCIe workspace (``pcie:…``) is made for the model's hidden size and dtype, which that tensor has too.
    """
    match = _FIRST_TENSOR.fullmatch(text)
    return (int(match[2]), match[3]) if match and match[3] in DTYPES else None


def _budget_edges(mode: str, site: Site, backend: str, table: str, tuned: str, first: str) -> list[tuple[int, Edge]]:
    budget = _flashinfer_budget(site, backend, table, tuned)
    return [] if budget is None else [(budget, Edge.AT_MOST)]


@_call("size and tokens within FlashInfer's budget ({table}, {tuned})", edges=_budget_edges)
def flashinfer_budget(call: CallSignature, site: Site, backend: str, table: str, tuned: str, first: str) -> str | None:
    """vLLM's bound on a tensor for FlashInfer: bytes ≤ budget, and tokens ≤ budget / the size of one token of the
    first tensor seen (this one, if none was seen before)."""
    budget = _flashinfer_budget(site, backend, table, tuned)
    if budget is None:
        return f"{table} has no row for {describe_group(site.platform)}"
    if call.size_bytes > budget:
        return f"{format_size(call.size_bytes)} is not ≤ {format_size(budget)}"
    tokens, hidden = call.shape
    seen_hidden, seen_dtype = first_tensor(first) or (hidden, call.dtype)
    most = budget // (seen_hidden * DTYPES[seen_dtype].itemsize) if seen_hidden else 0
    return None if tokens <= most else f"{tokens} tokens exceed the {most} that the first tensor seen left room for"


@_call("FlashInfer's workspace has room")
def flashinfer_room(call: CallSignature, site: Site, backend: str, table: str, tuned: str, first: str) -> str | None:
    """The workspace that vLLM made for the first tensor seen (this one, if none was seen before) is large enough."""
    p = site.platform
    kernels = backend
    if backend == "auto":
        kernels = "mnnvl" if p.multicast else "trtllm"
    budget = _flashinfer_budget(site, backend, table, tuned)
    if budget is None:
        return f"{table} has no row for {describe_group(p)}"
    tokens, hidden = call.shape
    seen_hidden, seen_dtype = first_tensor(first) or (hidden, call.dtype)
    if not seen_hidden:
        return "the tensor is empty"
    most = budget // (seen_hidden * DTYPES[seen_dtype].itemsize)
    return workspace_shortfall(
        Workspace(kernels, most, seen_hidden, seen_dtype), p.world_size, tokens, hidden, call.dtype
    )


_PCIE_WORKSPACE = re.compile(r"pcie:(\d+)x(\d+):(\w+)")


@_standing("PCIe workspace {workspace} stands")
def has_pcie_workspace(site: Site, workspace: str) -> str | None:
    """vLLM's PCIe-IPC workspace was set up (the parameter reads pcie:tokens x hidden:dtype)."""
    return None if _PCIE_WORKSPACE.fullmatch(workspace) else "no PCIe-IPC workspace has been set up"


@_call("tensor has the PCIe workspace's width and dtype, and fits ({workspace})")
def fits_pcie_workspace(call: CallSignature, site: Site, workspace: str) -> str | None:
    """Two dimensions, the second and the dtype exactly those of the workspace, and no more tokens than it holds."""
    match = _PCIE_WORKSPACE.fullmatch(workspace)
    if match is None:
        return "no PCIe-IPC workspace has been set up"
    tokens, hidden, dtype = int(match[1]), int(match[2]), match[3]
    if call.dtype != dtype:
        return f"the workspace was made for {dtype}, not {call.dtype}"
    if call.shape[1] != hidden:
        return f"a row of {call.shape[1]} is not the workspace's {hidden}"
    return None if call.numel <= tokens * hidden else f"{call.shape[0]} tokens exceed the workspace's {tokens}"


@_call("dtype is a floating-point type")
def floating(call: CallSignature, site: Site) -> str | None:
    """Floating-point elements."""
    return None if DTYPES[call.dtype].is_float else f"{call.dtype} is not floating point"


_LAYOUT_WORDS = {"contiguous": "contiguous", "strided": "strided (gaps between elements)", "dense_t": "transposed"}


def as_word(value: Value) -> str:
    """A value as policy files write it in lists: booleans are ``true`` and ``false``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def capability_matches(pattern: str, capability: tuple[int, int]) -> bool:
    """Whether ``9.0`` or ``9.x`` covers a compute capability."""
    major, _, minor = pattern.partition(".")
    return major == str(capability[0]) and minor in ("x", str(capability[1]))


def describe_group(platform: Platform) -> str:
    """The group in a few words: ``cuda 9.0, world size 8``, with nodes where there are several."""
    parts = [
        platform.device if platform.device == "cpu" else f"{platform.device} {'.'.join(map(str, platform.capability))}"
    ]
    parts.append(f"world size {platform.world_size}")
    if platform.nnodes > 1:
        parts.append(f"{platform.nnodes} nodes")
    return ", ".join(parts)


GATES: dict[str, Gate] = {
    gate.name: gate
    for gate in (
        device_in,
        world_size_in,
        world_size_between,
        one_node,
        one_host,
        fully_connected,
        peer_access,
        multicast,
        capability_at_least,
        capability_in,
        consecutive_ranks,
        cpu_has,
        group_in,
        parameter_in,
        table_has,
        stands,
        stands_aside_for,
        switched_on,
        never,
        dtype_in,
        multiple_of,
        not_empty,
        contiguous,
        weakly_contiguous,
        layout_in,
        elements_above,
        size_below,
        size_at_most,
        size_at_least,
        size_above,
        above_power_of_two,
        mode_in,
        op_in,
        reduces_in,
        registered,
        unless_taken_by,
        quick_reduce_minimum,
        custom_v2_reach,
        size_outside,
        dimensions_at_least,
        dimensions,
        has_workspace,
        fits_workspace,
        pcie_packs,
        elements_at_most,
        size_below_beside,
        flashinfer_backend,
        flashinfer_budget,
        flashinfer_room,
        has_pcie_workspace,
        fits_pcie_workspace,
        floating,
    )
}
