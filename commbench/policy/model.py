"""A policy as data: what a policy file holds after it was read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from commbench.errors import PolicyError
from commbench.policy.gates import Edge, Gate, Value, as_word, capability_matches
from commbench.types import Platform

# What a table's rows may be chosen by; a parameter's name is one too. context: a gate says it when it looks up.
TABLE_KEYS = ("device", "capability", "world_size", "nnodes", "dtype", "context")


@dataclass(frozen=True, slots=True)
class Reference:
    """An argument that the file leaves to a parameter or a table."""

    kind: str
    name: str
    field: str = ""

    def __str__(self) -> str:
        return f"{self.name}.{self.field}" if self.field else self.name


@dataclass(frozen=True, slots=True)
class Condition:
    """One use of a gate, with its arguments (values or references). negate: it must not hold."""

    gate: Gate
    arguments: Mapping[str, Any]
    negate: bool = False

    @property
    def constant(self) -> bool:
        """Whether every argument is a value: nothing to resolve for a group."""
        return not any(isinstance(value, Reference) for value in self.arguments.values())

    def describe(self, arguments: Mapping[str, Any]) -> str:
        """The condition in words, with these arguments."""
        words = self.gate.describe(arguments)
        return f"not: {words}" if self.negate else words

    def __str__(self) -> str:
        return self.describe(self.arguments)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A named value. kind: size (bytes), count, flag or word; choices: the words allowed (() for any).
    column: the column of a batch file that sets it ("" if none)."""

    name: str
    value: Value
    kind: str
    what: str = ""
    choices: tuple[str, ...] = ()
    column: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that changes a parameter, or turns a switch on or off. unit: how its number is read
    (bytes, KiB, MiB or a text such as ``1MB`` that the engine reads in powers of two)."""

    name: str
    parameter: str = ""
    unit: str = ""
    what: str = ""
    switch: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table: patterns by key (absent: any), and the value."""

    patterns: Mapping[str, tuple[str, ...]]
    value: Value | Mapping[str, Value]

    def covers(self, facts: Mapping[str, str]) -> bool:
        """Whether the facts match every pattern; a fact that is not there matches none."""
        for key, wanted in self.patterns.items():
            have = facts.get(key)
            if have is None:
                return False
            if key == "capability":
                major, _, minor = have.partition(".")
                if not any(capability_matches(w, (int(major), int(minor))) for w in wanted):
                    return False
            elif have not in wanted:
                return False
        return True

    def overlaps(self, other: Row) -> bool:
        """Whether some group is covered by both."""
        for key in self.patterns.keys() & other.patterns.keys():
            mine, theirs = self.patterns[key], other.patterns[key]
            if key == "capability":
                if not any(_capabilities_meet(a, b) for a in mine for b in theirs):
                    return False
            elif not set(mine) & set(theirs):
                return False
        return True


def _capabilities_meet(a: str, b: str) -> bool:
    a_major, _, a_minor = a.partition(".")
    b_major, _, b_minor = b.partition(".")
    return a_major == b_major and ("x" in (a_minor, b_minor) or a_minor == b_minor)


@dataclass(frozen=True, slots=True)
class Table:
    """Values by capability × world size × dtype (and other facts). fields: the names of a row's values where it has
    several."""

    name: str
    by: tuple[str, ...]
    rows: tuple[Row, ...]
    what: str = ""
    fields: tuple[str, ...] = ()
    _found: dict[tuple[str | None, ...], Value | Mapping[str, Value] | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    def look_up(self, facts: Mapping[str, str]) -> Value | Mapping[str, Value] | None:
        """The value of the row that covers the facts, None if there is none."""
        key = tuple([facts.get(name) for name in self.by])
        if key not in self._found:
            self._found[key] = self._search(facts)
        return self._found[key]

    def _search(self, facts: Mapping[str, str]) -> Value | Mapping[str, Value] | None:
        for row in self.rows:
            if row.covers(facts):
                return row.value
        return None


@dataclass(frozen=True, slots=True)
class Split:
    """A size inside one route where its kernel changes: it moves no pick but is worth probing.

    below, above: the backends that run the same kernel as the route does on either side, "" where there are none."""

    at: Any
    edge: Edge
    what: str
    below: str = ""
    above: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """One step of an engine's order.

    name: unique in the file. backend: its name in the registry. word: what the engine calls the step
    (several routes may share one: ``inplace``). switches: the words of configuration that turn it on; none
    means always on. turn_on: how, in the engine's own terms. needs: standing gates; accepts: call gates.
    """

    name: str
    backend: str
    word: str
    title: str = ""
    switches: tuple[str, ...] = ()
    turn_on: str = ""
    fast: bool = True
    needs: tuple[Condition, ...] = ()
    accepts: tuple[Condition, ...] = ()
    splits: tuple[Split, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the engine itself, kept apart from its rules: our coordinator does not share it.

    stage: ``construction`` (a communicator's constructor raises: a group that has it never comes up; picks are
    given as if it were absent), ``capture`` (entering graph capture raises), ``gate`` (asking the route raises),
    ``take`` (the route accepts and dispatch itself raises) or ``step`` (the route is taken, then the step fails or
    gives a wrong result). raises: the exception, "" where none is raised. wrong_result: the call returns and the
    data are wrong.
    """

    name: str
    stage: str
    effect: str
    route: str = ""
    raises: str = ""
    wrong_result: bool = False
    fixed_in: str = ""
    needs: tuple[Condition, ...] = ()
    when: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class Switch:
    """A word of configuration (``--enable ca``)."""

    name: str
    what: str = ""
    default_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyData:
    """Everything a policy file says, ``extends`` already followed."""

    name: str
    title: str
    engine: str
    version: str
    orders: Mapping[str, Mapping[str, tuple[str, ...]]]
    routes: Mapping[str, Route]
    switches: Mapping[str, Switch]
    constants: Mapping[str, Parameter]
    variables: Mapping[str, Variable]
    tables: Mapping[str, Table]
    faults: tuple[Fault, ...] = ()
    notes: str = ""
    source: str = ""
    lineage: tuple[str, ...] = field(default=())

    def order(self, collective: str, device: str) -> tuple[Route, ...]:
        """The routes asked for a collective on a device, in order. Raises PolicyError where the file has none."""
        orders = self.orders.get(collective) or self.orders.get("other") or {}
        names = orders.get(device) or orders.get("cpu" if device == "cpu" else "gpu")
        if not names:
            raise PolicyError(f"policy {self.name} has no order for {collective} on {device}")
        return tuple(self.routes[name] for name in names)


def table_facts(platform: Platform, values: Mapping[str, Value]) -> dict[str, str]:
    """A group's facts under the keys that tables may use, as text; ``dtype`` and ``context`` are added by whoever
    knows them."""
    facts = {name: as_word(value) for name, value in values.items()}
    facts["device"] = platform.device
    facts["capability"] = f"{platform.capability[0]}.{platform.capability[1]}"
    facts["world_size"] = str(platform.world_size)
    facts["nnodes"] = str(platform.nnodes)
    return facts
