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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NewType, Protocol, get_type_hints

from commbench.types import CallSignature, Platform
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
    def values(self) -> Mapping[str, Value]:
        """The policy's parameters after the environment variables that change them."""

    def standing(self, route: str) -> str | None:
        """None if that route's constructor gates hold here, else the first reason."""

    def refusal(self, route: str, call: CallSignature) -> str | None:
        """None if that route would take the call, else why not."""

    def look_up(self, table: str, **overrides: Value) -> Value | None:
        """A table's value for this group and dtype, with some of its keys replaced; None where it has no row."""


class Edge(enum.Enum):
    """How a gate's ``limit`` divides the sizes."""

    BELOW = "<"
    AT_MOST = "<="
    AT_LEAST = ">="
    ABOVE = ">"


@dataclass(frozen=True)
class Gate:
    """A named predicate. says: the condition in words, with the arguments' names in braces."""

    name: str
    check: Callable[..., str | None]
    says: str
    per_call: bool
    edge: Edge | None

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Argument name → its type; the evaluator's own arguments (call, site) left out."""
        hints = get_type_hints(self.check)
        return {n: t for n, t in hints.items() if n not in ("call", "site", "return")}

    @cached_property
    def required(self) -> frozenset[str]:
        parameters = inspect.signature(self.check).parameters
        return frozenset(n for n in self.arguments if parameters[n].default is inspect.Parameter.empty)

    @cached_property
    def doc(self) -> str:
        return inspect.getdoc(self.check) or ""

    def describe(self, arguments: Mapping[str, Any]) -> str:
        """The condition in words, e.g. ``size < 8 MiB``."""
        defaults = {
            n: p.default
            for n, p in inspect.signature(self.check).parameters.items()
            if p.default is not inspect.Parameter.empty
        }
        shown = {n: _show(v, self.arguments.get(n)) for n, v in (defaults | dict(arguments)).items()}
        return self.says.format(**shown)


def _show(value: Any, kind: Any) -> str:
    if kind is Size and isinstance(value, int):
        return format_size(value)
    if isinstance(value, tuple | list):
        return ", ".join(str(v) for v in value)
    return str(value)


def _standing(says: str) -> Callable[[Callable[..., str | None]], Gate]:
    return lambda check: Gate(check.__name__, check, says, False, None)


def _call(says: str, edge: Edge | None = None) -> Callable[[Callable[..., str | None]], Gate]:
    return lambda check: Gate(check.__name__, check, says, True, edge)


# ---- standing gates: asked once per group -------------------------------------------------------


@_standing("device is one of {devices}")
def device_in(site: Site, devices: Words) -> str | None:
    """The group's device is one of cpu, cuda, hip, hpu, xpu, npu."""
    device = site.platform.device
    return None if device in devices else f"{device} is not one of {', '.join(devices)}"


@_standing("world size is one of {sizes}")
def world_size_in(site: Site, sizes: Numbers) -> str | None:
    """The number of ranks is in the list."""
    n = site.platform.world_size
    return None if n in sizes else f"world size {n} is not one of {', '.join(map(str, sizes))}"


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
    return f"compute capability {have[0]}.{have[1]} is not one of {', '.join(capabilities)}"


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
    return None if group in groups else f"group {group} is not one of {', '.join(groups)}"


@_standing("{parameter} is one of {values}")
def parameter_in(site: Site, parameter: str, values: Words) -> str | None:
    """A parameter's value, as text, is in the list. Booleans are ``true`` and ``false``."""
    have = as_word(site.values[parameter])
    return None if have in values else f"{parameter} is {have}, not one of {', '.join(values)}"


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


@_standing("never")
def never(site: Site, why: str) -> str | None:
    """Never holds: for a route that an engine names and cannot reach."""
    return why


# ---- call gates ---------------------------------------------------------------------------------


@_call("dtype is one of {dtypes}")
def dtype_in(call: CallSignature, site: Site, dtypes: Words) -> str | None:
    """The element type is in the list (torch names)."""
    return None if call.dtype in dtypes else f"{call.dtype} is not one of {', '.join(dtypes)}"


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


@_call("mode is one of {modes}")
def mode_in(call: CallSignature, site: Site, modes: Words) -> str | None:
    """eager; graph: inside graph capture; pcg: in a piecewise graph; compile: under torch.compile."""
    return None if call.mode in modes else f"the mode is {call.mode}, not {' or '.join(modes)}"


@_call("op is one of {ops}")
def op_in(call: CallSignature, site: Site, ops: Words) -> str | None:
    """The reduction is in the list."""
    return None if call.op in ops else f"{call.op or 'no op'} is not one of {', '.join(ops)}"


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
        never,
        dtype_in,
        multiple_of,
        not_empty,
        contiguous,
        weakly_contiguous,
        size_below,
        size_at_most,
        size_at_least,
        size_above,
        mode_in,
        op_in,
        registered,
        unless_taken_by,
    )
}
