"""What a launch still has to measure: the watching command writes it, rank 0 reads it and tells the others."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from commbench.errors import StoreError
from commbench.store.run import write_json

WORK = "work.json"


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


def remove_work(directory: Path) -> None:
    (directory / WORK).unlink(missing_ok=True)
