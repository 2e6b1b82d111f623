"""The JSON Schema of policy files, for editors; built from the gates, so that it cannot lag behind them.

``python -m commbench.policy.schema`` prints it. The file beside the shipped policies is that text.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from commbench.policy.gates import GATES, Edge, Gate, Numbers, Size, Words
from commbench.policy.load import DEVICES, STAGES
from commbench.types import COLLECTIVES, DTYPES

SIZE = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?\\s*(B|[KMG]i?B?)?$"},
    ],
    "description": 'Bytes: 8, "64KiB", "1MiB", "10MB".',
}
REFERENCE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"parameter": {"type": "string"}, "table": {"type": "string"}, "field": {"type": "string"}},
    "description": 'A value from elsewhere in the file: { parameter = "…" } or { table = "…" }.',
}
_TEXT = {"type": "string"}
_WORDS = {"type": "array", "items": _TEXT}
_FLAG = {"type": "boolean"}


def _argument(kind: Any) -> dict[str, Any]:
    plain: dict[Any, dict[str, Any]] = {
        Size: SIZE,
        Words: _WORDS,
        Numbers: {"type": "array", "items": {"type": "integer"}},
        int: {"type": "integer"},
        str: _TEXT,
        bool: _FLAG,
    }
    return {"anyOf": [plain[kind], REFERENCE]}


def _gate(gate: Gate) -> dict[str, Any]:
    return {
        "type": "object",
        "description": f"{gate.says}. {gate.doc}",
        "additionalProperties": False,
        "required": ["gate", *sorted(gate.required)],
        "properties": {
            "gate": {"const": gate.name},
            "negate": {"type": "boolean", "description": "It must not hold."},
            **{name: _argument(kind) for name, kind in gate.arguments.items()},
        },
    }


def _object(properties: dict[str, Any], required: tuple[str, ...] = (), description: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    if required:
        found["required"] = list(required)
    if description:
        found["description"] = description
    return found


def _named(value: dict[str, Any], description: str) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": value, "description": description}


def build() -> dict[str, Any]:
    """The schema."""
    order = {device: {**_WORDS, "description": "Routes, first asked first."} for device in ("gpu", *DEVICES)}
    split = _object(
        {
            "at": {"anyOf": [SIZE, REFERENCE]},
            "edge": {"enum": [e.value for e in Edge]},
            "what": _TEXT,
            "below": {**_TEXT, "description": "The backend that, forced, runs the kernel of the smaller sizes."},
            "above": {**_TEXT, "description": "The same for the larger sizes."},
        },
        ("at", "what"),
    )
    route = _object(
        {
            "backend": {**_TEXT, "description": "Its name in commbench; default: the route's."},
            "word": {**_TEXT, "description": "What the engine calls the step; default: the route's name."},
            "title": {**_TEXT, "description": "In a few words, for people."},
            "switches": {**_WORDS, "description": "On if any of these is on; always on without."},
            "turn_on": {**_TEXT, "description": "How a user of the engine turns it on."},
            "fast": {**_FLAG, "description": "false: a fallback that `policies check` does not count as fast."},
            "needs": {"type": "array", "items": {"$ref": "#/$defs/standing"}, "description": "Asked once for a group."},
            "accepts": {"type": "array", "items": {"$ref": "#/$defs/call"}, "description": "Asked for every call."},
            "splits": {"type": "array", "items": split, "description": "Sizes where its kernel changes."},
        }
    )
    fault = _object(
        {
            "name": _TEXT,
            "stage": {"enum": list(STAGES)},
            "route": _TEXT,
            "effect": _TEXT,
            "raises": {**_TEXT, "description": "The exception, if one is raised."},
            "wrong_result": {**_FLAG, "description": "The call returns and the data are wrong."},
            "fixed_in": {
                **_TEXT,
                "description": "The version from which a file that inherits the fault is free of it.",
            },
            "needs": {"type": "array", "items": {"$ref": "#/$defs/standing"}},
            "when": {"type": "array", "items": {"$ref": "#/$defs/call"}},
        },
        ("name", "stage", "effect"),
    )
    table = _object(
        {
            "by": {**_WORDS, "description": "device, capability, world_size, nnodes, dtype, context, or parameters."},
            "kind": {"enum": ["size", "count", "flag", "word"], "default": "size"},
            "what": _TEXT,
            "fields": {**_WORDS, "description": "The names of a row's values, where it has several."},
            "rows": {"type": "array", "items": {"type": "object"}, "minItems": 1},
        }
    )
    parameter = _object(
        {
            "value": {"type": ["string", "integer", "boolean"]},
            "kind": {"enum": ["size", "count", "flag", "word"]},
            "what": _TEXT,
            "choices": _WORDS,
            "column": {**_TEXT, "description": "The column of a batch file that sets it."},
        },
    )
    variable = _object(
        {
            "parameter": _TEXT,
            "switch": _TEXT,
            "unit": {"enum": ["", "bytes", "KiB", "MiB", "text"]},
            "what": _TEXT,
        }
    )
    switch = _object({"what": _TEXT, "default_on": {"type": "array", "items": {"enum": list(DEVICES)}}})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "commbench policy",
        "description": "How an engine picks a backend for a collective. docs/policies.md tells it field by field.",
        "type": "object",
        "additionalProperties": False,
        "required": ["format"],
        "properties": {
            "format": {"const": 1},
            "name": _TEXT,
            "title": _TEXT,
            "engine": _TEXT,
            "version": _TEXT,
            "notes": _TEXT,
            "extends": {**_TEXT, "description": "A shipped policy or the path of a file; this file's entries win."},
            "order": {
                "type": "object",
                "additionalProperties": False,
                "properties": {name: _object(order) for name in (*COLLECTIVES, "other")},
            },
            "switches": _named(switch, "What configuration can turn on."),
            "parameters": _named(parameter, "Named values."),
            "environment": _named(variable, "Environment variables that change a parameter or a switch."),
            "tables": _named(table, "Values by capability, world size, dtype and other facts."),
            "routes": _named(route, "The steps of the order."),
            "faults": {"type": "array", "items": fault, "description": "The engine's own faults."},
        },
        "$defs": {
            "standing": {"oneOf": [_gate(g) for g in GATES.values() if not g.per_call]},
            "call": {"oneOf": [_gate(g) for g in GATES.values() if g.per_call]},
            "dtype": {"enum": list(DTYPES)},
        },
    }


def text() -> str:
    """The schema as it is stored."""
    return json.dumps(build(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
