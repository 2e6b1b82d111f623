"""What a launch still has to measure: the watching command writes it, rank 0 reads it and tells the others. And how
long its ranks may wait for each other, where the command lets points take longer than the plan says."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from commbench.errors import StoreError
from commbench.measure.settings import Settings
from commbench.store.run import write_json

WORK = "work.json"
PATIENCE_VARIABLE = "COMMBENCH_PATIENCE_S"


def write_work(directory: Path, launch: int, orders: Iterable[int]) -> None:
    """orders: places in the launch's random order of the points to measure."""
    write_json(directory / WORK, {"launch": launch, "orders": sorted(orders)})


def read_work(directory: Path, launch: int) -> list[int] | None:
    """The places; None where nothing was written, since nobody watches. Raises StoreError when it is another launch's
    or cannot be read."""
    path = directory / WORK
    try:
        if not path.exists():
            return None
        document = json.loads(path.read_text())
        if document["launch"] != launch:
            raise ValueError(f"it is of launch {document['launch']}")
        return [int(order) for order in document["orders"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} does not say what launch {launch} has to measure: {error}") from error


def with_patience(settings: Settings, environment: Mapping[str, str]) -> Settings:
    """The settings with the patience that the watching command asks for, where that is more: a run may go on with a
    longer --point-timeout than the one that it was planned with."""
    asked_s = float(environment.get(PATIENCE_VARIABLE) or 0.0)
    return replace(settings, patience_s=max(settings.patience_s, asked_s))


def remove_work(directory: Path) -> None:
    (directory / WORK).unlink(missing_ok=True)
