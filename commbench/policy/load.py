"""Read and check a policy file. Every mistake is one line that names the file, the place and the way out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from commbench.errors import PolicyError, SpecError, UnknownName, unknown
from commbench.policy.gates import GATES, Edge, Numbers, Size, Value, Words
from commbench.policy.model import (
    TABLE_KEYS,
    Condition,
    Fault,
    Parameter,
    PolicyData,
    Reference,
    Route,
    Row,
    Split,
    Switch,
    Table,
    Variable,
)
from commbench.types import COLLECTIVES, DTYPES
from commbench.units import parse_size

DATA = Path(__file__).parent / "data"
DEVICES = ("cpu", "cuda", "hip", "hpu", "xpu", "npu")
_KINDS = ("size", "count", "flag", "word")
STAGES = ("construction", "capture", "gate", "take", "step")
_UNITS = ("", "bytes", "KiB", "MiB", "text")
_TOP = {
    "format", "name", "title", "engine", "version", "notes", "extends", "order", "routes", "switches", "parameters",
    "environment", "tables", "faults",
}  # fmt: skip


def shipped() -> tuple[str, ...]:
    """The names of the policies that come with commbench, in the order of their versions."""
    return tuple(sorted((p.stem for p in DATA.glob("*.toml")), key=_version_order))


def _version_order(name: str) -> tuple[Any, ...]:
    engine, _, version = name.partition("-")
    return (engine, version_key(version))


def version_key(version: str) -> tuple[list[int], int, int]:
    """Orders versions: 0.5.2rc2 < 0.5.2 < 0.5.10."""
    numbers = [int(n) for n in re.findall(r"\d+", version.split("rc")[0])]
    candidate = re.search(r"rc(\d+)", version)
    return (numbers, 0, int(candidate[1])) if candidate else (numbers, 1, 0)


def read_policy(name: str) -> PolicyData:
    """The policy of that shipped name, or in that TOML file.

    Raises UnknownName for a name that is neither, PolicyError for a file that is malformed, contradicts itself or
    extends itself.
    """
    path = _locate(name, None)
    stat = path.stat()
    return _read(str(path), stat.st_mtime_ns, stat.st_size)


def _locate(name: str, relative_to: Path | None) -> Path:
    if name.endswith(".toml") or "/" in name:
        path = Path(name) if relative_to is None or Path(name).is_absolute() else relative_to / name
        if path.is_dir():
            raise PolicyError(f"policy {str(path)!r} is a folder; name a .toml file in it")
        if not path.is_file():
            raise PolicyError(f"policy file {str(path)!r} does not exist")
        return path.resolve()
    path = DATA / f"{name}.toml"
    if name not in shipped():
        known = ", ".join(sorted(shipped()))
        raise UnknownName(f"unknown policy {name!r}; available: {known}, or a path ending in .toml")
    return path


@lru_cache(maxsize=64)
def _read(path: str, mtime_ns: int, size: int) -> PolicyData:
    document, lineage = _gather(Path(path), ())
    return _Reader(path).policy(document, tuple(lineage))


def _gather(path: Path, seen: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """The file's document merged over those it extends, and the names on the way, nearest first."""
    if str(path) in seen:
        circle = " → ".join(Path(p).stem for p in (*seen[seen.index(str(path)) :], str(path)))
        raise PolicyError(f"{path}: extends goes in a circle: {circle}")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path}: not UTF-8 text: {error}") from error
    for key in document.keys() - _TOP:
        raise PolicyError(f"{path}: unknown key {key!r}; known: {', '.join(sorted(_TOP))}")
    parent = document.pop("extends", None)
    if parent is None:
        return document, []
    if not isinstance(parent, str):
        raise PolicyError(f"{path}: extends is {parent!r}; write the name of one policy or a path to a file")
    base, lineage = _gather(_locate(parent, path.parent), (*seen, str(path)))
    return _merge(base, document), [parent, *lineage]


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """over's keys on top of base's. Routes, parameters, tables, … merge by name, and a route field by field;
    lists are replaced whole, except that ``faults`` are replaced by name: a list cannot be half inherited."""
    merged = dict(base)
    for key, value in over.items():
        if key == "faults" and isinstance(value, list):
            names = {f.get("name") for f in value if isinstance(f, dict)}
            merged[key] = [f for f in base.get(key, []) if f.get("name") not in names] + value
        elif key == "environment" and isinstance(value, dict):
            merged[key] = {**base.get(key, {}), **value}
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


class _Reader:
    """Turns a merged document into PolicyData; keeps the file's name for messages."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.constants: dict[str, Parameter] = {}
        self.tables: dict[str, Table] = {}
        self.switches: dict[str, Switch] = {}
        self.route_names: frozenset[str] = frozenset()

    def fail(self, where: str, problem: str) -> PolicyError:
        return PolicyError(f"{self.path}: {where}: {problem}")

    def policy(self, document: Mapping[str, Any], lineage: tuple[str, ...]) -> PolicyData:
        if document.get("format") != 1:
            raise self.fail(
                "format", f"{document.get('format')!r} is not 1, the only format there is; write format = 1"
            )
        for key, entry in document.items():
            wanted: type = list if key == "faults" else int if key == "format" else dict
            if key in ("name", "title", "engine", "version", "notes"):
                wanted = str
            if not isinstance(entry, wanted):
                raise self.fail(key, f"{entry!r} is not a {_TYPE_WORDS[wanted]}")
        self.route_names = frozenset(document.get("routes", {}))
        self.constants = {n: self.parameter(n, v) for n, v in document.get("parameters", {}).items()}
        self.tables = {n: self.table(n, v) for n, v in document.get("tables", {}).items()}
        self.switches = {n: self.switch(n, v) for n, v in document.get("switches", {}).items()}
        routes = {n: self.route(n, v) for n, v in document.get("routes", {}).items()}
        return PolicyData(
            name=document.get("name") or Path(self.path).stem,
            title=document.get("title", ""),
            engine=document.get("engine", ""),
            version=document.get("version", ""),
            orders=self.orders(document.get("order")),
            routes=routes,
            switches=self.switches,
            constants=self.constants,
            variables={n: self.variable(n, v) for n, v in document.get("environment", {}).items()},
            tables=self.tables,
            faults=self.faults(document),
            notes=document.get("notes", ""),
            source=self.path,
            lineage=lineage,
        )

    def fields(self, where: str, entry: Any, known: str) -> dict[str, Any]:
        if not isinstance(entry, dict):
            raise self.fail(where, f"{entry!r} is not a table")
        names = known.split()
        for key in entry:
            if key not in names:
                raise self.fail(where, f"unknown field {key!r}; known: {', '.join(names)}")
        return entry

    def text(self, where: str, entry: Mapping[str, Any], key: str, default: str | None = "") -> str:
        value = entry.get(key, default)
        if not isinstance(value, str):
            raise self.fail(where, f"{key} is {value!r}; it must be text" if key in entry else f"{key} is missing")
        return value

    def words(self, where: str, entry: Mapping[str, Any], key: str) -> tuple[str, ...]:
        value = entry.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.fail(where, f"{key} is {value!r}; it must be a list of words")
        return tuple(value)

    def orders(self, entry: Any) -> dict[str, dict[str, tuple[str, ...]]]:
        if not entry:
            raise self.fail("order", 'there is none; write [order.all_reduce] with gpu = ["…"] and cpu = ["…"]')
        orders: dict[str, dict[str, tuple[str, ...]]] = {}
        for collective, devices in entry.items():
            where = f"order.{collective}"
            if collective not in COLLECTIVES and collective != "other":
                raise self.fail(where, f"unknown collective; known: {', '.join(COLLECTIVES)}, other")
            self.fields(where, devices, " ".join(("gpu", *DEVICES)))
            orders[collective] = {}
            for device in devices:
                names = self.words(where, devices, device)
                for name in names:
                    if name not in self.route_names:
                        raise self.fail(f"{where}.{device}", str(unknown("route", name, self.route_names)))
                if len(set(names)) < len(names):
                    raise self.fail(f"{where}.{device}", "a route stands twice")
                orders[collective][device] = names
        return orders

    def switch(self, name: str, entry: Any) -> Switch:
        where = f"switches.{name}"
        self.fields(where, entry, "what default_on")
        devices = self.words(where, entry, "default_on")
        for device in devices:
            if device not in DEVICES:
                raise self.fail(where, str(unknown("device", device, DEVICES)))
        return Switch(name, self.text(where, entry, "what"), devices)

    def parameter(self, name: str, entry: Any) -> Parameter:
        where = f"parameters.{name}"
        self.fields(where, entry, "value kind what choices column")
        kind = self.text(where, entry, "kind", None)
        if kind not in _KINDS:
            raise self.fail(where, f"kind {kind!r} is not one of {', '.join(_KINDS)}")
        choices = self.words(where, entry, "choices")
        if "value" not in entry:
            raise self.fail(where, "value is missing")
        value = self.value(where, entry["value"], kind, choices)
        return Parameter(name, value, kind, self.text(where, entry, "what"), choices, self.text(where, entry, "column"))

    def value(self, where: str, value: Any, kind: str, choices: tuple[str, ...] = ()) -> Value:
        if kind == "size":
            try:
                return parse_size(value)
            except SpecError as error:
                raise self.fail(where, str(error)) from error
        if kind == "flag":
            checked: Value | None = value if isinstance(value, bool) else None
        elif kind == "count":
            checked = value if isinstance(value, int) and not isinstance(value, bool) else None
        else:
            checked = value if isinstance(value, str) else None
        if checked is None:
            raise self.fail(where, f"{value!r} is not a {kind}")
        if choices and checked not in choices:
            raise self.fail(where, f"{value!r} is not one of {', '.join(choices)}")
        return checked

    def variable(self, name: str, entry: Any) -> Variable:
        where = f"environment.{name}"
        self.fields(where, entry, "parameter switch unit what")
        parameter, switch = self.text(where, entry, "parameter"), self.text(where, entry, "switch")
        if bool(parameter) == bool(switch):
            raise self.fail(where, "it needs either a parameter or a switch")
        if parameter and parameter not in self.constants:
            raise self.fail(where, str(unknown("parameter", parameter, self.constants)))
        if switch and switch not in self.switches:
            raise self.fail(where, str(unknown("switch", switch, self.switches)))
        unit = self.text(where, entry, "unit")
        if unit not in _UNITS:
            raise self.fail(where, f"unit {unit!r} is not one of bytes, KiB, MiB, text")
        return Variable(name, parameter, unit, self.text(where, entry, "what"), switch)

    def table(self, name: str, entry: Any) -> Table:
        where = f"tables.{name}"
        self.fields(where, entry, "by kind what fields rows")
        names = self.words(where, entry, "fields")
        by = self.words(where, entry, "by")
        known = (*TABLE_KEYS, *self.constants)
        for key in by:
            if key not in known:
                raise self.fail(where, str(unknown("table key", key, known)))
        kind = self.text(where, entry, "kind", "size")
        if kind not in _KINDS:
            raise self.fail(where, f"kind {kind!r} is not one of {', '.join(_KINDS)}")
        entries = entry.get("rows")
        if not isinstance(entries, list) or not entries:
            raise self.fail(where, "rows is missing; write rows = [ { …, value = … }, … ]")
        rows = [self.row(f"{where}, row {i + 1}", by, names, kind, e) for i, e in enumerate(entries)]
        for i, row in enumerate(rows):
            for j in range(i):
                if row.overlaps(rows[j]):
                    raise self.fail(where, f"rows {j + 1} and {i + 1} overlap: {entries[j]} and {entries[i]}")
        return Table(name, by, tuple(rows), self.text(where, entry, "what"), names)

    def row(self, where: str, by: tuple[str, ...], names: tuple[str, ...], kind: str, entry: Any) -> Row:
        wanted = names or ("value",)
        self.fields(where, entry, " ".join((*by, *wanted)))
        for name in wanted:
            if name not in entry:
                raise self.fail(where, f"{name} is missing")
        patterns: dict[str, tuple[str, ...]] = {}
        for key in by:
            if key not in entry:
                continue
            items = entry[key] if isinstance(entry[key], list) else [entry[key]]
            patterns[key] = tuple(str(i).lower() if isinstance(i, bool) else str(i) for i in items)
            for item in patterns[key]:
                if key == "capability" and not re.fullmatch(r"\d+\.(\d+|x)", item):
                    raise self.fail(where, f"capability {item!r} is not like 9.0 or 9.x")
                if key == "dtype" and item not in DTYPES:
                    raise self.fail(where, str(unknown("dtype", item, DTYPES)))
                if key == "device" and item not in DEVICES:
                    raise self.fail(where, str(unknown("device", item, DEVICES)))
        if names:
            return Row(patterns, {name: self.value(f"{where}, {name}", entry[name], kind) for name in names})
        return Row(patterns, self.value(where, entry["value"], kind))

    def route(self, name: str, entry: Any) -> Route:
        where = f"routes.{name}"
        self.fields(where, entry, "backend word title switches turn_on fast needs accepts splits")
        words = self.words(where, entry, "switches")
        for word in words:
            if word not in self.switches:
                raise self.fail(where, str(unknown("switch", word, self.switches)))
        fast = entry.get("fast", True)
        if not isinstance(fast, bool):
            raise self.fail(where, f"fast is {fast!r}; write true or false")
        backend = self.text(where, entry, "backend", name)
        return Route(
            name=name,
            backend=backend,
            word=self.text(where, entry, "word", name),
            title=self.text(where, entry, "title"),
            switches=words,
            turn_on=self.text(where, entry, "turn_on"),
            fast=fast,
            needs=self.conditions(f"{where}.needs", entry.get("needs", []), per_call=False),
            accepts=self.conditions(f"{where}.accepts", entry.get("accepts", []), per_call=True),
            splits=tuple(self.split(f"{where}.splits", s) for s in entry.get("splits", [])),
        )

    def split(self, where: str, entry: Any) -> Split:
        self.fields(where, entry, "at edge what below above")
        edge = self.text(where, entry, "edge", "<=")
        if edge not in [e.value for e in Edge]:
            raise self.fail(where, f"edge {edge!r} is not one of {', '.join(e.value for e in Edge)}")
        return Split(
            self.argument(where, Size, entry.get("at")),
            Edge(edge),
            self.text(where, entry, "what", None),
            self.text(where, entry, "below"),
            self.text(where, entry, "above"),
        )

    def conditions(self, where: str, entries: Any, per_call: bool) -> tuple[Condition, ...]:
        if not isinstance(entries, list):
            raise self.fail(where, f"{entries!r} is not a list of gates")
        return tuple(self.condition(f"{where}[{i + 1}]", entry, per_call) for i, entry in enumerate(entries))

    def condition(self, where: str, entry: Any, per_call: bool) -> Condition:
        if not isinstance(entry, dict) or not isinstance(entry.get("gate"), str):
            raise self.fail(where, f'{entry!r} is not a gate; write {{ gate = "…", … }}')
        gate = GATES.get(entry["gate"])
        if gate is None:
            raise self.fail(where, str(unknown("gate", entry["gate"], GATES)))
        if gate.per_call and not per_call:
            raise self.fail(where, f"{gate.name} looks at a call; it belongs in accepts (or a fault's when)")
        if not gate.per_call and per_call:
            raise self.fail(where, f"{gate.name} looks at the group only; it belongs in needs")
        negate = entry.get("negate", False)
        if not isinstance(negate, bool):
            raise self.fail(where, f"negate is {negate!r}; write true or false")
        given = {k: v for k, v in entry.items() if k not in ("gate", "negate")}
        for key in given:
            if key not in gate.arguments:
                takes = ", ".join(gate.arguments) or "no arguments"
                raise self.fail(where, f"{gate.name} takes no {key!r}; it takes {takes}")
        for key in gate.required - given.keys():
            raise self.fail(where, f"{gate.name} needs {key!r}")
        arguments = {k: self.argument(f"{where}.{k}", gate.arguments[k], v) for k, v in given.items()}
        for key, value in arguments.items():
            self.check_name(f"{where}.{key}", key, value)
        return Condition(gate, arguments, negate)

    def check_name(self, where: str, key: str, value: Any) -> None:
        """Arguments called routes, parameter or table name things of this file."""
        known: Mapping[str, Any] | frozenset[str] | None = None
        if key == "routes":
            known = self.route_names
        elif key == "parameter":
            known = self.constants
        elif key in ("table", "tuned"):
            known = self.tables
        elif key == "beside":
            known = self.route_names
        if known is None:
            return
        for name in value if isinstance(value, tuple) else (value,):
            if name not in known:
                raise self.fail(where, str(unknown(key.removesuffix("s"), name, known)))

    def argument(self, where: str, kind: Any, value: Any) -> Any:
        if isinstance(value, dict):
            return self.reference(where, value)
        if kind is Size:
            return self.value(where, value, "size")
        if kind in (Words, Numbers):
            wanted = str if kind == Words else int
            if not isinstance(value, list) or not all(type(v) is wanted for v in value):
                raise self.fail(where, f"{value!r} is not a list of {'words' if kind == Words else 'whole numbers'}")
            return tuple(value)
        if type(value) is not kind:
            raise self.fail(where, f"{value!r} is not {_TYPE_WORDS.get(kind, kind)}")
        return value

    def reference(self, where: str, value: Mapping[str, Any]) -> Reference:
        kind = "parameter" if "parameter" in value else "table"
        if not {kind} <= value.keys() <= {kind, "field"}:
            raise self.fail(where, f'{dict(value)!r} is not {{ parameter = "…" }} or {{ table = "…" }}')
        name, field = value[kind], value.get("field", "")
        known: Mapping[str, Any] = self.constants if kind == "parameter" else self.tables
        if name not in known:
            raise self.fail(where, str(unknown(kind, str(name), known)))
        fields = self.tables[name].fields if kind == "table" else ()
        if field and field not in fields:
            raise self.fail(where, str(unknown(f"field of {name}", str(field), fields)))
        if fields and not field:
            raise self.fail(where, f"{name} has several values in a row; add field = one of {', '.join(fields)}")
        return Reference(kind, name, field)

    def faults(self, document: Mapping[str, Any]) -> tuple[Fault, ...]:
        """The faults of this version: one that a file inherits is gone from the version that fixed it."""
        found = [self.fault(i, f) for i, f in enumerate(document.get("faults", []))]
        version = version_key(document.get("version", ""))
        return tuple(f for f in found if not f.fixed_in or version < version_key(f.fixed_in))

    def fault(self, index: int, entry: Any) -> Fault:
        where = f"faults[{index + 1}]"
        self.fields(where, entry, "name stage effect route raises wrong_result fixed_in needs when")
        stage = self.text(where, entry, "stage", None)
        if stage not in STAGES:
            raise self.fail(where, f"stage {stage!r} is not one of {', '.join(STAGES)}")
        route = self.text(where, entry, "route")
        if route and route not in self.route_names:
            raise self.fail(where, str(unknown("route", route, self.route_names)))
        if not route and stage not in ("construction", "capture"):
            raise self.fail(where, f"a fault at stage {stage} needs its route")
        wrong = entry.get("wrong_result", False)
        if not isinstance(wrong, bool):
            raise self.fail(where, f"wrong_result is {wrong!r}; write true or false")
        return Fault(
            name=self.text(where, entry, "name", None),
            stage=stage,
            effect=self.text(where, entry, "effect", None),
            route=route,
            raises=self.text(where, entry, "raises"),
            wrong_result=wrong,
            fixed_in=self.text(where, entry, "fixed_in"),
            needs=self.conditions(f"{where}.needs", entry.get("needs", []), per_call=False),
            when=self.conditions(f"{where}.when", entry.get("when", []), per_call=True),
        )


_TYPE_WORDS: dict[Any, str] = {list: "list", int: "whole number", dict: "table", str: "text", bool: "true or false"}
