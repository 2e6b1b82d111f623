"""Write a tuning as a policy file: winner intervals as routes ahead of the order of the policy it extends."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from commbench.analysis.incumbent import PER_RANK
from commbench.analysis.tune import CellTuning, Tuning
from commbench.policy import Policy
from commbench.policy.load import DATA
from commbench.policy.model import Condition, Reference, Route
from commbench.types import CACHES, COLLECTIVES
from commbench.units import format_size


def expressible(tuning: Tuning) -> tuple[list[CellTuning], list[str]]:
    """The cells that a policy can hold, and a line for each that it cannot.

    A policy does not see whether a cache is hot, nor the group; of two cells that it cannot tell apart the hot one
    counts, then the one of the customary placement.
    """
    chosen: dict[tuple[object, ...], CellTuning] = {}
    dropped = []

    def preference(c: CellTuning) -> tuple[int, int]:
        return CACHES.index(c.cell.cache), COLLECTIVES[c.cell.collective].placements.index(c.cell.placement)

    for cell in sorted(tuning.cells, key=preference):
        k = cell.cell
        key = (k.collective, k.op, k.dtype, k.world_size, k.mode, k.layout)
        if key in chosen:
            dropped.append(f"{k.title}: a policy cannot tell it from {chosen[key].cell.title}, which it holds")
        else:
            chosen[key] = cell
    kept = [c for c in tuning.cells if c in chosen.values()]
    return kept, dropped


def to_toml(tuning: Tuning, base: Policy, device: str, name: str, lines: Sequence[str] = ()) -> str:
    """A policy file, as text, that extends ``base`` and takes the tuned picks on ``device``.

    Every changed cell becomes one route per winner interval; sizes outside what was measured, and everything else,
    stay with the base. lines: comments for its head. A cell without a change leaves no trace but a comment.
    """
    kept, dropped = expressible(tuning)
    changed = [c for c in kept if c.changed]
    source = Path(base.data.source)
    parent = base.name if source.parent == DATA.resolve() else str(source)
    head = [*(f"# {line}" for line in lines), *(f"# not held: {line}" for line in dropped)]
    head += [f"# unchanged: {c.cell.title}" for c in kept if not c.changed]
    body = ["format = 1", f"extends = {_text(parent)}", f"name = {_text(name)}"]
    routes: dict[str, list[str]] = {}
    for cell in changed:
        routes.setdefault(cell.cell.collective, []).extend(_route_names(cell))
    for collective, own in routes.items():
        orders = base.data.orders.get(collective) or base.data.orders["other"]
        body += ["", f"[order.{collective}]"]
        listed = dict(orders)
        if device not in listed:
            listed[device] = tuple(r.name for r in base.data.order(collective, device))
        for key, order in listed.items():
            names = [*own, *order] if key == device else list(order)
            body.append(f"{key} = {_texts(names)}")
    for cell in changed:
        body += _routes(cell, base, device)
    return "\n".join([*head, *body]) + "\n"


def _route_names(cell: CellTuning) -> list[str]:
    k = cell.cell
    parts = [k.collective, k.op if k.op not in ("", "sum") else "", k.dtype, f"{k.world_size}ranks"]
    parts += [v for v, usual in ((k.mode, "eager"), (k.layout, "contiguous")) if v != usual]
    stem = "_".join(p for p in parts if p)
    return [f"tuned_{stem}_{i + 1}" for i in range(len(cell.intervals))]


def _routes(cell: CellTuning, base: Policy, device: str) -> Iterable[str]:
    k = cell.cell
    scale = k.world_size if k.collective in PER_RANK else 1
    first = cell.intervals[0].first_bytes // scale
    for place, (name, interval) in enumerate(zip(_route_names(cell), cell.intervals, strict=True)):
        gain = ""
        if interval.gain is not None:
            took = " and ".join(t for t in interval.today if t != interval.backend)
            gain = f"; {took} takes {math.expm1(interval.gain.mean):.1%} longer where it was taken"
        above = f"above {format_size(interval.first_bytes - 1)}" if place else format_size(interval.first_bytes)
        title = f"measured fastest, {above} to {format_size(interval.last_bytes)}{gain}"
        parent = _parent(base, interval.backend)
        needs = [f'{{ gate = "device_in", devices = [{_text(device)}] }}']
        needs += [f'{{ gate = "world_size_in", sizes = [{k.world_size}] }}']
        needs += [_condition(c) for c in (parent.needs if parent else ()) if c.gate.name != "device_in"]
        accepts = [f'{{ gate = "dtype_in", dtypes = [{_text(k.dtype)}] }}']
        if k.op:
            accepts.append(f'{{ gate = "op_in", ops = [{_text(k.op)}] }}')
        accepts += [
            f'{{ gate = "mode_in", modes = [{_text(k.mode)}] }}',
            f'{{ gate = "layout_in", layouts = [{_text(k.layout)}] }}',
            f'{{ gate = "size_at_least", limit = {_size(first)} }}',
            f'{{ gate = "size_at_most", limit = {_size(interval.last_bytes // scale)} }}',
        ]
        # what the base asks of the same backend beside sizes, as far as the lines above do not say it
        accepts += [_condition(c) for c in (parent.accepts if parent else ()) if c.gate.name in _KEPT_GATES]
        yield from ("", f"[routes.{name}]", f"backend = {_text(interval.backend)}", f"title = {_text(title)}")
        if parent is not None and parent.switches:
            yield f"switches = {_texts(parent.switches)}"
        for key, conditions in (("needs", needs), ("accepts", accepts)):
            yield f"{key} = ["
            yield from (f"  {condition}," for condition in conditions)
            yield "]"


# Call gates of the base that a tuned route keeps; sizes, dtypes, ops, modes and layouts are the tuning's own.
_KEPT_GATES = frozenset({"multiple_of", "registered"})


def _parent(base: Policy, backend: str) -> Route | None:
    """The base's route that takes this backend, or whose kernel it is."""
    for route in base.data.routes.values():
        if backend == route.backend or any(backend in (s.below, s.above) for s in route.splits):
            return route
    return None


def _condition(condition: Condition) -> str:
    parts = [f"gate = {_text(condition.gate.name)}"]
    for name, value in condition.arguments.items():
        parts.append(f"{name} = {_value(value)}")
    if condition.negate:
        parts.append("negate = true")
    return "{ " + ", ".join(parts) + " }"


def _value(value: Any) -> str:
    if isinstance(value, Reference):
        field = f", field = {_text(value.field)}" if value.field else ""
        return f"{{ {value.kind} = {_text(value.name)}{field} }}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _size(size_bytes: int) -> str:
    text = format_size(size_bytes).replace(" ", "")
    return _text(text) if not text.endswith("B") or "iB" in text else str(size_bytes)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _texts(values: Iterable[str]) -> str:
    return "[" + ", ".join(_text(v) for v in values) + "]"
