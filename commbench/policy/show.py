"""Policies, their differences and their findings as lines of text and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commbench.policy.check import Finding, Scene
from commbench.policy.compare import MODES_COMPARED, Cell
from commbench.policy.evaluate import Policy, Verdict
from commbench.policy.explain import header, size_words
from commbench.policy.model import Parameter, Route, Row, Table
from commbench.types import Platform
from commbench.units import format_size


def show_text(policy: Policy) -> list[str]:
    """A policy in full."""
    data = policy.data
    lines = [f"{data.name}: {data.title}" if data.title else data.name]
    if data.lineage:
        lines.append(f"extends {' → '.join(data.lineage)}")
    lines += data.notes.strip().splitlines()
    for collective, devices in data.orders.items():
        for device, names in devices.items():
            lines += ["", f"order of {collective} on {device}"]
            if collective == "other":
                lines.append(f"  {' → '.join(names)}")
            else:
                lines += [line for name in names for line in _route_lines(data.routes[name])]
    if data.switches:
        lines += ["", "what --enable turns on"]
        width = max(map(len, data.switches))
        for switch in data.switches.values():
            default = f" (on by default: {', '.join(switch.default_on)})" if switch.default_on else ""
            lines.append(f"  {switch.name:<{width}}  {switch.what}{default}")
    if data.constants:
        lines += ["", "parameters"]
        width = max(map(len, data.constants))
        lines += [f"  {p.name:<{width}}  {_value(p):<8}  {p.what}" for p in data.constants.values()]
    if data.variables:
        lines += ["", "environment variables"]
        width = max(map(len, data.variables))
        for v in data.variables.values():
            lines.append(f"  {v.name:<{width}}  {v.parameter or f'--enable {v.switch}'}: {v.what}")
    for table in data.tables.values():
        lines += ["", f"table {table.name}: {table.what}", *_table_lines(table)]
    if data.faults:
        lines += ["", "the engine's own faults (commbench does not share them)"]
        for fault in data.faults:
            raises = f" [{fault.raises}]" if fault.raises and fault.raises not in fault.effect else ""
            fixed = f" (fixed in {fault.fixed_in})" if fault.fixed_in else ""
            lines.append(f"  {fault.name}: {fault.effect}{raises}{fixed}")
    return lines


def _route_lines(route: Route) -> list[str]:
    title = f": {route.title}" if route.title else ""
    word = f", called {route.word}" if route.word != route.name else ""
    backend = f", backend {route.backend}" if route.backend not in (route.name, route.word) else ""
    lines = [f"  {route.name}{title}{word}{backend}"]
    if route.switches:
        lines.append(f"      enabled by  {', '.join(route.switches)}{f' ({route.turn_on})' if route.turn_on else ''}")
    lines += [f"      comes up if  {c}" for c in route.needs]
    lines += [f"      accepts if   {c}" for c in route.accepts]
    return lines


def _value(parameter: Parameter) -> str:
    if parameter.kind == "size" and isinstance(parameter.value, int):
        return format_size(parameter.value)
    return str(parameter.value).lower() if parameter.kind == "flag" else str(parameter.value) or '""'


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return format_size(value) if isinstance(value, int) and value >= 1024 else str(value)


def _table_lines(table: Table) -> list[str]:
    head = [*table.by, *(table.fields or ("value",))]
    body = [[_pattern(row, key) for key in table.by] + _row_values(table, row) for row in table.rows]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return ["  " + "  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in [head, *body]]


def _pattern(row: Row, key: str) -> str:
    words = row.patterns.get(key, ("any",))
    return f"{words[0]} … {words[-1]}" if len(words) > 8 else ",".join(words)


def _row_values(table: Table, row: Row) -> list[str]:
    if isinstance(row.value, Mapping):
        return [_cell(row.value[f]) for f in table.fields]
    return [_cell(row.value)]


def show_data(policy: Policy) -> dict[str, Any]:
    """A policy as data, ``extends`` already followed."""
    data = policy.data
    return {
        "name": data.name,
        "title": data.title,
        "engine": data.engine,
        "version": data.version,
        "extends": list(data.lineage),
        "notes": data.notes.strip(),
        "order": {c: {d: list(names) for d, names in devices.items()} for c, devices in data.orders.items()},
        "routes": {
            r.name: {
                "backend": r.backend,
                "word": r.word,
                "title": r.title,
                "switches": list(r.switches),
                "turn_on": r.turn_on,
                "fast": r.fast,
                "needs": [str(c) for c in r.needs],
                "accepts": [str(c) for c in r.accepts],
            }
            for r in data.routes.values()
        },
        "switches": {s.name: {"what": s.what, "default_on": list(s.default_on)} for s in data.switches.values()},
        "parameters": {p.name: {"value": p.value, "kind": p.kind, "what": p.what} for p in data.constants.values()},
        "environment": {
            v.name: {"parameter": v.parameter, "switch": v.switch, "unit": v.unit, "what": v.what}
            for v in data.variables.values()
        },
        "tables": {
            t.name: {
                "by": list(t.by),
                "what": t.what,
                "rows": [
                    {
                        **{k: list(w) for k, w in r.patterns.items()},
                        "value": dict(r.value) if isinstance(r.value, Mapping) else r.value,
                    }
                    for r in t.rows
                ],
            }
            for t in data.tables.values()
        },
        "faults": [
            {"name": f.name, "stage": f.stage, "route": f.route, "raises": f.raises, "effect": f.effect,
             "wrong_result": f.wrong_result, "fixed_in": f.fixed_in}
            for f in data.faults
        ],
    }  # fmt: skip


def _pick(verdict: Verdict) -> str:
    if verdict.route is None:
        return verdict.picked
    route = verdict.route
    return route.word if route.word == route.backend else f"{route.word} ({route.backend})"


def diff_text(
    policies: tuple[Policy, Policy],
    platforms: tuple[Platform, Platform],
    place: str,
    cells: Mapping[str, Sequence[Cell]],
) -> list[str]:
    """The differing cells as tables, modes that agree joined. cells: by what was set beyond the request ("" for
    nothing)."""
    lines: list[str] = []
    for policy, platform in zip(policies, platforms, strict=True):
        lines += [x for x in header(policy, platform, place) if not x.startswith("group")]
    lines.append(f"group     {place}")
    for setting, found in cells.items():
        lines += ["", f"with {setting}" if setting else "as described"]
        lines += _cell_table(policies, found) if found else ["  no cell differs"]
    return [*lines, "", "sizes in multiples of 16 bytes, contiguous tensors, sum"]


def _cell_table(policies: tuple[Policy, Policy], cells: Sequence[Cell]) -> list[str]:
    joined: dict[tuple[str, str, str, str, str], list[str]] = {}
    for cell in cells:
        key = (cell.dtype, size_words(cell.first), size_words(cell.last), _pick(cell.left), _pick(cell.right))
        joined.setdefault(key, []).append(cell.mode)
    head = ("dtype", "from", "to", policies[0].name, policies[1].name, "mode")
    every = list(MODES_COMPARED)
    table = [head, *((*key, "every" if modes == every else ", ".join(modes)) for key, modes in joined.items())]
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    return ["  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in table]


def diff_data(cells: Mapping[str, Sequence[Cell]]) -> list[dict[str, Any]]:
    """The differing cells as data."""
    return [
        {
            "with": setting,
            "mode": c.mode,
            "dtype": c.dtype,
            "first_bytes": c.first,
            "last_bytes": c.last,
            "left": {"picked": c.left.picked, "backend": c.left.route.backend if c.left.route else None},
            "right": {"picked": c.right.picked, "backend": c.right.route.backend if c.right.route else None},
        }
        for setting, found in cells.items()
        for c in found
    ]


def check_text(policy: Policy, where: Sequence[Scene], findings: Sequence[Finding]) -> list[str]:
    """Findings by kind, each with the places it was seen in."""
    places = ", ".join(dict.fromkeys(s.place.split(" x ")[1] for s in where))
    sizes = ", ".join(dict.fromkeys(s.place.split(" x ")[0] for s in where))
    lines = [f"{policy.name} on {places} with {sizes} ranks, by default and with each option", ""]
    if not findings:
        return [*lines, "nothing suspect"]
    kind = ""
    for finding in findings:
        title = "WRONG RESULT" if finding.serious else finding.kind
        if title != kind:
            lines += ["", _TITLES.get(title, title)] if kind else [_TITLES.get(title, title)]
            kind = title
        lines.append(f"  - {finding.what}")
        shown = finding.where[:2]
        more = len(finding.where) - len(shown)
        lines += [f"      {place}" for place in shown]
        if more > 0:
            lines.append(f"      and in {more} more")
    return lines


_TITLES = {
    "WRONG RESULT": "WRONG RESULT: this engine gives wrong data without an error",
    "dead zone": "dead zones: every fast backend declines, between sizes that fast backends take",
    "shadowed": "shadowed: a backend that would take the call stands behind one that always does",
    "cap excludes its size": "caps that exclude their own size (a strict <)",
    "never holds": "never up: backends that come up on none of these machines, with none of the options",
    "not monotone": "not monotone: a backend wins, loses and wins again as the size grows",
    "fault": "faults of the engine itself (commbench does not share them)",
}


def check_data(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings as data."""
    return [{"kind": f.kind, "what": f.what, "where": list(f.where), "serious": f.serious} for f in findings]
