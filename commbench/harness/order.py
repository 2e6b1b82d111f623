"""The random order of a launch's points: seeded, so that it can be recorded, repeated and resumed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from commbench.types import Point


def shuffled(points: Sequence[Point], seed: int, launch: int) -> list[tuple[int, Point]]:
    """The launch's points in its own random order, each with its place in it."""
    order = list(points)
    random.Random(f"{seed}/{launch}").shuffle(order)
    return list(enumerate(order))
