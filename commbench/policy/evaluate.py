"""The evaluator: one policy, one group, one call → the backend taken, and why not the others.

The sweep's decisions, the report's map of picks and ``commbench explain`` all come from here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from commbench.errors import PolicyError, SpecError, unknown
from commbench.policy.gates import Edge, Site, Value, as_word
from commbench.policy.load import read_policy
from commbench.policy.model import (
    Condition,
    Fault,
    Parameter,
    PolicyData,
    Reference,
    Route,
    Split,
    Variable,
    table_facts,
)
from commbench.types import CallSignature, Decision, Declined, Platform
from commbench.units import format_size, parse_size

_NO_DECLINES: Mapping[str, str] = {}
_NO_SPLITS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Threshold:
    """A size where a backend's answer changes, in bytes of the tensor that the caller passes in.

    strictness: how sizes are compared with it (``<``, ``<=``, ``>=``, ``>``). what: in words.
    """

    backend: str
    size_bytes: int
    strictness: str
    what: str
    route: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an engine does with one call, its own faults included.

    declined: the routes asked before, each with its reason. route: the one taken, None where the engine raises
    before it takes one. faults: those that strike this call.
    """

    declined: tuple[tuple[Route, str], ...]
    route: Route | None
    reason: str
    faults: tuple[Fault, ...]

    @property
    def raises(self) -> str:
        """The exception that the engine raises before or while it picks; meaningful where route is None."""
        return self.faults[0].raises if self.route is None and self.faults else "nothing accepts"

    @property
    def picked(self) -> str:
        """The engine's word: ``ca``, ``inplace``, … or ``raise X``."""
        return self.route.word if self.route else f"raise {self.raises}"


class BoundCondition:
    """A condition with its arguments resolved: ask it about a group or a call."""

    __slots__ = ("arguments", "check", "condition", "missing", "negate", "words")

    def __init__(self, condition: Condition, arguments: Mapping[str, Any]) -> None:
        self.condition = condition
        self.check: Callable[..., str | None] = condition.gate.check
        self.arguments = arguments
        self.negate = condition.negate
        missing = [name for name, value in arguments.items() if value is None]
        self.missing = f"{condition.arguments[missing[0]]} has no row for this group" if missing else ""
        self.words = ""

    def __str__(self) -> str:
        if not self.words:
            self.words = self.missing or self.condition.describe(self.arguments)
        return self.words

    def ask(self, site: Site, *call: CallSignature) -> str | None:
        """None if the condition holds, else why not."""
        if self.missing:
            return self.missing
        reason = self.check(*call, site, **self.arguments)
        if self.negate:
            return None if reason is not None else f"{self.condition.gate.describe(self.arguments)}, which rules it out"
        return reason

    def edges(self, site: Site, mode: str) -> list[tuple[int, Edge]]:
        """The sizes at which its answer changes."""
        gate = self.condition.gate
        if self.missing or self.negate:
            return []
        if gate.edges is not None:
            return gate.edges(mode, site, **self.arguments)
        return [(self.arguments["limit"], gate.edge)] if gate.edge is not None else []


class _Resolver:
    """Resolves conditions for one group (and dtype), sharing those that need no resolving."""

    def __init__(
        self,
        data: PolicyData,
        values: Mapping[str, Value],
        facts: dict[str, str],
        shared: dict[int, BoundCondition],
    ) -> None:
        self.data = data
        self.values = values
        self.facts = facts
        self.shared = shared

    def look_up(self, table: str, overrides: Mapping[str, Value]) -> Value | Mapping[str, Value] | None:
        facts = self.facts | {k: as_word(v) for k, v in overrides.items()} if overrides else self.facts
        return self.data.tables[table].look_up(facts)

    def resolve(self, value: Any) -> Any:
        if not isinstance(value, Reference):
            return value
        if value.kind == "parameter":
            return self.values[value.name]
        found = self.look_up(value.name, {})
        return found[value.field] if isinstance(found, Mapping) else found

    def bind(self, condition: Condition) -> BoundCondition:
        bound = self.shared.get(id(condition))
        if bound is None:
            bound = BoundCondition(condition, {n: self.resolve(v) for n, v in condition.arguments.items()})
            if condition.constant:
                self.shared[id(condition)] = bound
        return bound


# A route, why it does not stand, and its faults at gate, take and step.
_Step = tuple[Route, str | None, tuple[Fault, ...], tuple[Fault, ...], tuple[Fault, ...]]


class Group:
    """A policy on one group: what its constructors bring up, whatever the call. Satisfies ``gates.Site`` for
    standing gates."""

    def __init__(
        self, data: PolicyData, platform: Platform, collective: str, shared: dict[int, BoundCondition]
    ) -> None:
        self.data = data
        self.platform = platform
        self.dtype = ""  # no standing gate may ask
        self.order = data.order(collective, platform.device)
        self.values = resolve_parameters(data, platform)
        self.on = switched_on(data, platform)
        self.facts = table_facts(platform, self.values)
        self.resolver = _Resolver(data, self.values, self.facts, shared)
        self._standings: dict[str, str | None] = {}
        self._steps: list[_Step] = []
        self.faults: dict[tuple[str, str], tuple[Fault, ...]] = {}
        for fault in data.faults:
            if all(self.resolver.bind(c).ask(self) is None for c in fault.needs):
                at = (fault.stage, fault.route if fault.stage in ("gate", "take", "step") else "")
                self.faults[at] = (*self.faults.get(at, ()), fault)

    def look_up(self, table: str, **overrides: Value) -> Value | Mapping[str, Value] | None:
        return self.resolver.look_up(table, overrides)

    def standing(self, route: str) -> str | None:
        if route not in self._standings:
            self._standings[route] = f"{route} waits for itself"  # where stands and stands_aside_for go in a circle
            self._standings[route] = self._ask_standing(self.data.routes[route])
        return self._standings[route]

    def plan(self) -> Iterator[_Step]:
        """The order with everything settled that does not depend on the call, worked out as far as it is asked for."""
        steps = self._steps
        for index, route in enumerate(self.order):
            if index == len(steps):
                gate, take, step = (self.faults.get((stage, route.name), ()) for stage in ("gate", "take", "step"))
                steps.append((route, self.standing(route.name), gate, take, step))
            yield steps[index]

    def refusal(self, route: str, call: CallSignature) -> str | None:
        raise PolicyError(f"policy {self.data.name}: a standing gate asks whether {route} takes a call")

    def _ask_standing(self, route: Route) -> str | None:
        if route.switches and not self.on.intersection(route.switches):
            return f"not enabled{f' ({route.turn_on})' if route.turn_on else ''}"
        for condition in route.needs:
            reason = self.resolver.bind(condition).ask(self)
            if reason is not None:
                return reason
        usable = self.platform.usable
        return usable.get(route.backend, "not set up for this group") if usable else None


class Bound:
    """A policy bound to one group and dtype. Everything that does not depend on the call's size, layout or mode is
    settled here once. Satisfies ``gates.Site``."""

    def __init__(self, group: Group, dtype: str, shared: dict[int, BoundCondition]) -> None:
        self.group = group
        self.data = group.data
        self.platform = group.platform
        self.dtype = dtype
        self.values = group.values
        self.on = group.on
        self.order = group.order
        self._resolver = _Resolver(group.data, group.values, group.facts | {"dtype": dtype}, shared)
        self._accepts: dict[str, tuple[BoundCondition, ...]] = {}
        self._fault_conditions: dict[str, tuple[BoundCondition, ...]] = {}
        self._why: dict[str, str] = {}
        self._construction = group.faults.get(("construction", ""), ())
        self._capture = group.faults.get(("capture", ""), ())

    # -- what gates may ask -------------------------------------------------------------------

    def look_up(self, table: str, **overrides: Value) -> Value | Mapping[str, Value] | None:
        return self._resolver.look_up(table, overrides)

    def standing(self, route: str) -> str | None:
        """None if the engine's constructor would bring the route up here, else why not."""
        return self.group.standing(route)

    def refusal(self, route: str, call: CallSignature) -> str | None:
        """None if the route would take the call, else why not."""
        reason = self.standing(route)
        return self._refuses(self._conditions(route), call) if reason is None else reason

    # -- decisions ----------------------------------------------------------------------------

    def decide(self, call: CallSignature, declines: Mapping[str, str] = _NO_DECLINES) -> Decision:
        """The backend for our own coordinator: the engine's rules without its faults.

        declines: backend → its own hard limit for this call. Raises PolicyError where nothing accepts.
        """
        declined: list[Declined] = []
        for route, reason, *_ in self.group.plan():
            if reason is None:
                reason = declines.get(route.backend) or self._refuses(self._conditions(route.name), call)
            if reason is None:
                word = "" if route.word == route.backend else route.word
                return Decision(route.backend, tuple(declined), self.data.name, word, self.why(route))
            declined.append(Declined(route.name, reason))
        reasons = "; ".join(f"{d.backend}: {d.reason}" for d in declined)
        raise PolicyError(
            f"policy {self.data.name} has no backend for this {call.collective} of {call.dtype}: {reasons}"
        )

    def verdict(self, call: CallSignature) -> Verdict:
        """What the engine itself does, faults included."""
        for fault in self._capture:
            if self._strikes(fault, call):
                return self._raised([], fault)
        declined: list[tuple[Route, str]] = []
        for route, reason, at_gate, at_take, at_step in self.group.plan():
            for fault in at_gate:
                if self._strikes(fault, call):
                    return self._raised(declined, fault)
            if reason is None:
                reason = self._refuses(self._conditions(route.name), call)
            if reason is not None:
                declined.append((route, reason))
                continue
            for fault in at_take:
                if self._strikes(fault, call):
                    return self._raised(declined, fault)
            struck = tuple([f for f in at_step if self._strikes(f, call)])
            return Verdict(tuple(declined), route, self.why(route), (*struck, *self._construction))
        return Verdict(tuple(declined), None, "no route accepts", self._construction)

    def why(self, route: Route) -> str:
        """Why a route accepts: its conditions, in words."""
        words = self._why.get(route.name)
        if words is None:
            words = "; ".join([str(b) for b in self._conditions(route.name)]) or "it takes every call"
            self._why[route.name] = words
        return words

    def conditions(self, route: str) -> list[str]:
        """A route's conditions for a call on this group, in words."""
        return [str(b) for b in self._conditions(route)]

    def thresholds(self, mode: str = "eager") -> tuple[Threshold, ...]:
        """Every size at which some standing route's answer, or its kernel, changes; smallest first."""
        found: dict[tuple[str, int, str], Threshold] = {}
        for route, reason, *_ in self.group.plan():
            if reason is not None:
                continue
            edges: list[tuple[int, Edge, str]] = []
            for bound in self._conditions(route.name):
                for limit, edge in bound.edges(self, mode):
                    edges.append((limit, edge, f"{route.name} takes sizes {_EDGE_WORDS[edge]} {format_size(limit)}"))
            for split in route.splits:
                at = self._resolver.resolve(split.at)
                if isinstance(at, int):
                    edges.append((at, split.edge, f"{route.name}: {split.what}"))
            for limit, edge, what in edges:
                threshold = Threshold(route.backend, limit, edge.value, what, route.name)
                found.setdefault((route.name, limit, edge.value), threshold)
        return tuple(sorted(found.values(), key=lambda t: (t.size_bytes, t.route, t.strictness)))

    def kernel(self, backend: str, size_bytes: int, splits: Mapping[str, int] = _NO_SPLITS) -> str:
        """The backend that, asked for by name, runs the kernel that ``backend`` runs for a tensor of that size: itself,
        unless its route has a split that names the backends on either side. splits: sizes in place of the policy's, for
        calls that were made when it had others."""
        for route, split, last in self._splits():
            if route.backend == backend:
                return (split.below if size_bytes <= splits.get(backend, last) else split.above) or backend
        return backend

    def splits(self) -> dict[str, int]:
        """Backend → the largest size of its kernel for small messages, where a route's split says so."""
        return {route.backend: last for route, _, last in self._splits()}

    def _splits(self) -> list[tuple[Route, Split, int]]:
        """The splits between two named kernels, each with the largest size of the lower one; one to a backend."""
        found: dict[str, tuple[Route, Split, int]] = {}
        for route in self.order:
            for split in route.splits:
                at = self._resolver.resolve(split.at)
                if isinstance(at, int) and split.below and split.above:
                    last = at - 1 if split.edge in (Edge.BELOW, Edge.AT_LEAST) else at
                    found.setdefault(route.backend, (route, split, last))
        return list(found.values())

    # -- inside -------------------------------------------------------------------------------

    def _conditions(self, route: str) -> tuple[BoundCondition, ...]:
        bound = self._accepts.get(route)
        if bound is None:
            accepts = self.data.routes[route].accepts
            bound = self._accepts[route] = tuple([self._resolver.bind(c) for c in accepts])
        return bound

    def _refuses(self, conditions: tuple[BoundCondition, ...], call: CallSignature) -> str | None:
        for bound in conditions:
            reason = bound.ask(self, call)
            if reason is not None:
                return reason
        return None

    def _strikes(self, fault: Fault, call: CallSignature) -> bool:
        conditions = self._fault_conditions.get(fault.name)
        if conditions is None:
            conditions = tuple([self._resolver.bind(c) for c in fault.when])
            self._fault_conditions[fault.name] = conditions
        return self._refuses(conditions, call) is None

    def _raised(self, declined: list[tuple[Route, str]], fault: Fault) -> Verdict:
        return Verdict(tuple(declined), None, fault.effect, (fault, *self._construction))


_EDGE_WORDS = {Edge.BELOW: "<", Edge.AT_MOST: "≤", Edge.AT_LEAST: "≥", Edge.ABOVE: ">"}


class Policy:
    """A policy, ready to be asked. ``load_policy`` makes one."""

    def __init__(self, data: PolicyData) -> None:
        self.data = data
        self._groups: dict[Any, tuple[Group, dict[str, Bound]]] = {}
        self._shared: dict[int, BoundCondition] = {}

    def __repr__(self) -> str:
        return f"Policy({self.name!r})"

    @property
    def name(self) -> str:
        return self.data.name

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The file's defaults: parameter → value, and table → {world size: value} where that is all it depends on."""
        found: dict[str, Any] = {p.name: p.value for p in self.data.constants.values()}
        for table in self.data.tables.values():
            if table.by == ("world_size",):
                found[table.name] = {int(n): r.value for r in table.rows for n in r.patterns.get("world_size", ())}
        return found

    def values(self, platform: Platform, dtype: str = "float32") -> dict[str, Value]:
        """Every parameter and table resolved for one group: the environment's word applied, tables without a row
        for it left out. Raises PolicyError for an environment variable that cannot be read."""
        values = resolve_parameters(self.data, platform)
        facts = table_facts(platform, values) | {"dtype": dtype}
        found: dict[str, Value] = dict(values)
        for table in self.data.tables.values():
            value = table.look_up(facts)
            if value is not None and not isinstance(value, Mapping):
                found[table.name] = value
        return found

    def bind(self, platform: Platform, collective: str = "all_reduce", dtype: str = "float32") -> Bound:
        """The policy for one group, collective and dtype; kept, so asking again is cheap.

        Raises PolicyError for an environment variable that cannot be read or a switch that does not exist.
        """
        key = (_platform_key(platform), collective)
        known = self._groups.get(key)
        if known is None:
            if len(self._groups) > 4096:
                self._groups.clear()
            known = self._groups[key] = (Group(self.data, platform, collective, self._shared), {})
        group, by_dtype = known
        bound = by_dtype.get(dtype)
        if bound is None:
            bound = by_dtype[dtype] = Bound(group, dtype, self._shared)
        return bound

    def decide(self, call: CallSignature, platform: Platform, declines: Mapping[str, str] = _NO_DECLINES) -> Decision:
        """The backend that this policy takes for a call in our coordinator, and why not those ahead of it.

        platform.usable: backend → None where it is set up on every rank, else why not (empty: ask the policy what
        the engine's constructors would bring up). declines: backend → its own hard limit for this call.
        Depends on its arguments alone, so that all ranks decide alike. Raises PolicyError where nothing accepts.
        """
        return self.bind(platform, call.collective, call.dtype).decide(call, declines)

    def verdict(self, call: CallSignature, platform: Platform) -> Verdict:
        """What the engine itself does with the call, its own faults included."""
        return self.bind(platform, call.collective, call.dtype).verdict(call)

    def thresholds(self, collective: str, dtype: str, platform: Platform) -> list[tuple[str, int, str, str]]:
        """(backend, size in bytes of the caller's tensor, strictness, what in words), smallest size first."""
        bound = self.bind(platform, collective, dtype)
        return [(t.backend, t.size_bytes, t.strictness, t.what) for t in bound.thresholds()]

    def environment(self) -> Mapping[str, Variable]:
        """The environment variables that this policy reads."""
        return self.data.variables


def load_policy(name: str) -> Policy:
    """A shipped policy by name, or a user's file by its path (ending in ``.toml``).

    Raises UnknownName, or PolicyError for a file that is malformed or contradicts itself.
    """
    return Policy(read_policy(name))


def _platform_key(p: Platform) -> tuple[Any, ...]:
    return (
        p.device, p.capability, p.world_size, p.nnodes, p.one_host, p.nvlink, p.multicast, p.consecutive_ranks, p.group,
        p.cpu_flags, p.requested, p.p2p, tuple(p.usable.items()), tuple(p.env.items()), tuple(p.settings.items()),
    )  # fmt: skip


def switched_on(data: PolicyData, platform: Platform) -> frozenset[str]:
    """The switches that are on: those requested, else the engine's defaults and what the environment says of them.

    Raises PolicyError for an unknown switch and for a variable that is neither true nor false.
    """
    if platform.requested is None:
        on = {s.name for s in data.switches.values() if platform.device in s.default_on}
        for variable in data.variables.values():
            text = platform.env.get(variable.name)
            if variable.switch and text is not None:
                flag = Parameter(variable.switch, False, "flag")
                (on.add if read_variable(variable, flag, text) else on.discard)(variable.switch)
        return frozenset(on)
    for name in platform.requested:
        if name not in data.switches:
            raise PolicyError(f"policy {data.name} has no switch {name!r}; it has {', '.join(data.switches) or 'none'}")
    return platform.requested


def resolve_parameters(data: PolicyData, platform: Platform) -> dict[str, Value]:
    """Parameter → value: the platform's settings, else its environment's word, else the file's.

    Raises PolicyError for a value that cannot be read.
    """
    values = {p.name: p.value for p in data.constants.values()}
    for variable in data.variables.values():
        text = platform.env.get(variable.name)
        if text is not None and variable.parameter:
            values[variable.parameter] = read_variable(variable, data.constants[variable.parameter], text)
    for name, text in platform.settings.items():
        if name not in data.constants:
            raise PolicyError(str(unknown("parameter", name, data.constants)))
        values[name] = read_setting(data.constants[name], text)
    return values


def read_setting(parameter: Parameter, text: str) -> Value:
    """A parameter's value from text as a user writes it: ``8MiB``, ``1``, a word. Raises PolicyError."""
    if parameter.kind == "size":
        try:
            return parse_size(text)
        except SpecError as error:
            raise PolicyError(f"parameter {parameter.name}: {error}") from error
    plain = Variable(parameter.name, parameter.name)
    try:
        return read_variable(plain, parameter, text)
    except PolicyError as error:
        raise PolicyError(str(error).replace("environment variable", "parameter", 1)) from error


_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")
_TEXT_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(b|kb|mb|gb)\s*", re.IGNORECASE)
_SCALE = {"": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def read_variable(variable: Variable, parameter: Parameter, text: str) -> Value:
    """An environment variable's text as its parameter's value. Raises PolicyError that names the variable."""
    problem = f"environment variable {variable.name}={text!r}"
    if parameter.kind == "flag":
        if text.strip().lower() in (*_TRUE, *_FALSE):
            return text.strip().lower() in _TRUE
        raise PolicyError(f"{problem} is neither true nor false; write 1 or 0")
    if parameter.kind == "word":
        if parameter.choices and text not in parameter.choices:
            raise PolicyError(f"{problem} is not one of {', '.join(parameter.choices)}")
        return text
    if variable.unit == "text":
        match = _TEXT_SIZE.fullmatch(text)
        if match is None:
            raise PolicyError(f"{problem} is not a size; write a number with B, KB, MB or GB, e.g. 1MB")
        power = ("b", "kb", "mb", "gb").index(match[2].lower())
        return int(float(match[1]) * 1024**power)
    try:
        number = int(text)
    except ValueError:
        unit = f" of {variable.unit}" if variable.unit else ""
        raise PolicyError(f"{problem} is not a number; write a whole number{unit}") from None
    return number * _SCALE[variable.unit]
