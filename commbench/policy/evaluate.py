"""The evaluator: one policy, one group, one call → the backend taken, and why not the others.

The sweep's decisions, the report's map of picks and ``commbench explain`` all come from here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from commbench.errors import PolicyError, SpecError, unknown
from commbench.policy.gates import Edge, Value, as_word
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


class _Bound:
    """A condition with its arguments resolved for one group and dtype: ask it about a call."""

    __slots__ = ("arguments", "check", "condition", "missing", "negate")

    def __init__(self, condition: Condition, arguments: Mapping[str, Any], missing: str) -> None:
        self.condition = condition
        self.check: Callable[..., str | None] = condition.gate.check
        self.arguments = arguments
        self.missing = missing
        self.negate = condition.negate

    def __str__(self) -> str:
        return self.condition.describe(self.arguments)

    def ask(self, site: Bound, *call: CallSignature) -> str | None:
        """None if the condition holds, else why not."""
        if self.missing:
            return self.missing
        reason = self.check(*call, site, **self.arguments)
        if self.negate:
            return None if reason is not None else f"{self.condition.gate.describe(self.arguments)}, which rules it out"
        return reason


_Step = tuple[
    Route, str | None, tuple[_Bound, ...], tuple[Fault, ...], tuple[Fault, ...], tuple[Fault, ...]
]  # route, why it does not stand, its conditions, its faults at gate, take and step


class Bound:
    """A policy bound to one platform, collective and dtype. Everything that does not depend on the call's size,
    layout or mode is settled here once. Satisfies ``gates.Site``."""

    def __init__(self, data: PolicyData, platform: Platform, collective: str, dtype: str) -> None:
        self.data = data
        self.platform = platform
        self.collective = collective
        self.dtype = dtype
        self.values = resolve_parameters(data, platform)
        self.on = switched_on(data, platform)
        self._facts = table_facts(platform, dtype, self.values)
        self._standings: dict[str, str | None] = {}
        self._why: dict[str, str] = {}
        self._accepts: dict[str, tuple[_Bound, ...]] = {}
        self.order = data.order(collective, platform.device)
        self.faults = tuple(f for f in data.faults if self._strikes_here(f))
        self._fault_conditions = {f.name: tuple(self._bind(c) for c in f.when) for f in self.faults}
        self._faults_at: dict[tuple[str, str], tuple[Fault, ...]] = {}
        for fault in self.faults:
            where = (fault.stage, fault.route if fault.stage in ("gate", "take", "step") else "")
            self._faults_at[where] = (*self._faults_at.get(where, ()), fault)

    # -- what gates may ask -------------------------------------------------------------------

    def look_up(self, table: str, **overrides: Value) -> Value | Mapping[str, Value] | None:
        facts: Mapping[str, str] = self._facts
        if overrides:
            facts = self._facts | {k: as_word(v) for k, v in overrides.items()}
        return self.data.tables[table].look_up(facts)

    def standing(self, route: str) -> str | None:
        if route not in self._standings:
            self._standings[route] = f"{route} waits for itself"  # a circle of stands/stands_aside_for ends here
            self._standings[route] = self._ask_standing(self.data.routes[route])
        return self._standings[route]

    def refusal(self, route: str, call: CallSignature) -> str | None:
        reason = self.standing(route)
        return self._refuses(route, call) if reason is None else reason

    # -- decisions ----------------------------------------------------------------------------

    def decide(self, call: CallSignature, declines: Mapping[str, str] = _NO_DECLINES) -> Decision:
        """The backend for our own coordinator: the engine's rules without its faults.

        declines: backend → its own hard limit for this call. Raises PolicyError where nothing accepts.
        """
        declined: list[Declined] = []
        for route, reason, conditions, *_ in self._plan:
            if reason is None:
                reason = declines.get(route.backend)
            if reason is None:
                for bound in conditions:
                    reason = bound.ask(self, call)
                    if reason is not None:
                        break
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
        for fault in self._at("capture", ""):
            if self._strikes(fault, call):
                return Verdict((), None, fault.effect, (fault, *self._construction))
        declined: list[tuple[Route, str]] = []
        for route, reason, conditions, at_gate, at_take, at_step in self._plan:
            for fault in at_gate:
                if self._strikes(fault, call):
                    return Verdict(tuple(declined), None, fault.effect, (fault, *self._construction))
            if reason is None:
                for bound in conditions:
                    reason = bound.ask(self, call)
                    if reason is not None:
                        break
            if reason is not None:
                declined.append((route, reason))
                continue
            for fault in at_take:
                if self._strikes(fault, call):
                    return Verdict(tuple(declined), None, fault.effect, (fault, *self._construction))
            struck = tuple([f for f in at_step if self._strikes(f, call)])
            return Verdict(tuple(declined), route, self.why(route), (*struck, *self._construction))
        return Verdict(tuple(declined), None, "no route accepts", self._construction)

    @cached_property
    def _construction(self) -> tuple[Fault, ...]:
        return self._at("construction", "")

    @cached_property
    def _plan(self) -> tuple[_Step, ...]:
        """The order with everything settled that does not depend on the call."""
        return tuple(
            (
                route,
                self.standing(route.name),
                self._conditions(route.name),
                self._at("gate", route.name),
                self._at("take", route.name),
                self._at("step", route.name),
            )
            for route in self.order
        )

    def why(self, route: Route) -> str:
        """Why a route accepts: its conditions, in words."""
        words = self._why.get(route.name)
        if words is None:
            words = "; ".join(str(b) for b in self._conditions(route.name)) or "it takes every call"
            self._why[route.name] = words
        return words

    def conditions(self, route: str) -> list[str]:
        """A route's conditions for a call on this group, in words."""
        return [str(b) for b in self._conditions(route)]

    @cached_property
    def thresholds(self) -> tuple[Threshold, ...]:
        """Every size at which some standing route's answer, or its kernel, changes; smallest first."""
        found: dict[tuple[str, int, str], Threshold] = {}
        for route in self.order:
            if self.standing(route.name) is not None:
                continue
            for bound in self._conditions(route.name):
                for limit, edge in edges_of(bound.condition, bound.arguments, self):
                    what = f"{route.name} takes sizes {edge.value} {format_size(limit)}"
                    found.setdefault(
                        (route.name, limit, edge.value), Threshold(route.backend, limit, edge.value, what, route.name)
                    )
            for split in route.splits:
                at = self._resolve(split.at)
                if isinstance(at, int):
                    found.setdefault(
                        (route.name, at, split.edge.value),
                        Threshold(route.backend, at, split.edge.value, f"{route.name}: {split.what}", route.name),
                    )
        return tuple(sorted(found.values(), key=lambda t: (t.size_bytes, t.route, t.strictness)))

    # -- inside -------------------------------------------------------------------------------

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Reference):
            if value.kind == "parameter":
                return self.values[value.name]
            found = self.look_up(value.name)
            return found[value.field] if isinstance(found, Mapping) else found
        return value

    def _bind(self, condition: Condition) -> _Bound:
        arguments = {name: self._resolve(value) for name, value in condition.arguments.items()}
        missing = ""
        for name, value in arguments.items():
            if value is None:
                table = condition.arguments[name]
                missing = f"{table} has no row for this group"
        return _Bound(condition, arguments, missing)

    def _ask_standing(self, route: Route) -> str | None:
        if route.switches and not self.on.intersection(route.switches):
            return f"not enabled{f' ({route.turn_on})' if route.turn_on else ''}"
        for condition in route.needs:
            reason = self._bind(condition).ask(self)
            if reason is not None:
                return reason
        usable = self.platform.usable
        if usable:
            return usable.get(route.backend, "not set up for this group")
        return None

    def _conditions(self, route: str) -> tuple[_Bound, ...]:
        bound = self._accepts.get(route)
        if bound is None:
            bound = self._accepts[route] = tuple(self._bind(c) for c in self.data.routes[route].accepts)
        return bound

    def _refuses(self, route: str, call: CallSignature) -> str | None:
        for bound in self._conditions(route):
            reason = bound.ask(self, call)
            if reason is not None:
                return reason
        return None

    def _at(self, stage: str, route: str) -> tuple[Fault, ...]:
        return self._faults_at.get((stage, route), ())

    def _strikes_here(self, fault: Fault) -> bool:
        return all(self._bind(c).ask(self) is None for c in fault.needs)

    def _strikes(self, fault: Fault, call: CallSignature) -> bool:
        return all(b.ask(self, call) is None for b in self._fault_conditions[fault.name])


def edges_of(condition: Condition, arguments: Mapping[str, Any], site: Bound) -> list[tuple[int, Edge]]:
    """The sizes at which a bound condition's answer changes."""
    if condition.gate.edge is None or not isinstance(arguments.get("limit"), int):
        return []
    return [(arguments["limit"], condition.gate.edge)]


class Policy:
    """A policy, ready to be asked. ``load_policy`` makes one."""

    def __init__(self, data: PolicyData) -> None:
        self.data = data
        self._bound: dict[Any, Bound] = {}

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
        facts = table_facts(platform, dtype, values)
        found = dict(values)
        for table in self.data.tables.values():
            value = table.look_up(facts)
            if value is not None:
                found[table.name] = value
        return found

    def bind(self, platform: Platform, collective: str = "all_reduce", dtype: str = "float32") -> Bound:
        """The policy for one group, collective and dtype; kept, so asking again is cheap.

        Raises PolicyError for an environment variable that cannot be read or a switch that does not exist.
        """
        key = (_platform_key(platform), collective, dtype)
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) > 4096:
                self._bound.clear()
            bound = self._bound[key] = Bound(self.data, platform, collective, dtype)
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
        return [(t.backend, t.size_bytes, t.strictness, t.what) for t in bound.thresholds]

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


__all__ = ["Bound", "Policy", "Split", "Threshold", "Verdict", "load_policy", "resolve_parameters"]
