"""Workload files: a model's ``config.json``, its parallelism, and how many tokens its steps have."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from commbench.analysis.workload import PHASES, Workload, model_of, workload_of
from commbench.errors import UsageError

_KEYS = ("model", "tp", "ep", "exchange", "dtype", *PHASES)


def read_workload(path: Path) -> Workload:
    """The workload in a TOML file.

    ``model``: path of a Hugging Face config.json, relative to the file. ``tp``, ``ep``: ranks. ``exchange``: all_reduce
    or all_to_all. ``dtype``: default the model's. ``[decode]`` and ``[prefill]``: ``tokens = { 1 = 0.5, 64 = 0.5 }``,
    tokens in a step → how often. Raises UsageError naming file and key.
    """
    document = _toml(path)
    for key in document.keys() - set(_KEYS):
        raise UsageError(f"{path}: unknown key {key!r}; known: {', '.join(_KEYS)}")
    if not isinstance(document.get("model"), str):
        raise UsageError(f'{path}: model is missing; write model = "config.json", the path of a Hugging Face config')
    source = path.parent / document["model"]
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: model {source} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: model {source} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path}: model {source} holds no object")
    model = model_of(config, str(source))
    return workload_of(
        model,
        {phase: _tokens(path, phase, document[phase]) for phase in PHASES if phase in document},
        name=str(path),
        tp=_whole(path, document, "tp"),
        dtype=_word(path, document, "dtype", ""),
        ep=_whole(path, document, "ep", 1),
        exchange=_word(path, document, "exchange", "all_reduce"),
    )


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"workload {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # of TOML or of UTF-8
        raise UsageError(f"workload {path} is not valid TOML: {error}") from error


def _tokens(path: Path, phase: str, table: Any) -> dict[int, float]:
    tokens = table.get("tokens") if isinstance(table, dict) else None
    if not isinstance(tokens, dict):
        raise UsageError(f"{path}: [{phase}] has no tokens; write tokens = {{ 1 = 0.5, 64 = 0.5 }}")
    found = {}
    for key, weight in tokens.items():
        if not key.isdigit() or isinstance(weight, bool) or not isinstance(weight, int | float):
            raise UsageError(f"{path}: [{phase}] tokens: {key} = {weight!r} is not a whole number of tokens = a weight")
        found[int(key)] = float(weight)
    return found


def _whole(path: Path, document: dict[str, Any], key: str, default: int | None = None) -> int:
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{path}: {key} is {value!r}; write a whole number, such as {key} = 2")
    return value


def _word(path: Path, document: dict[str, Any], key: str, default: str) -> str:
    value = document.get(key, default)
    if not isinstance(value, str):
        raise UsageError(f"{path}: {key} is {value!r}; it must be text")
    return value
