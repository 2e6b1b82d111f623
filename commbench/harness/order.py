"""The random order of a launch's points: seeded, so that it can be recorded, repeated and resumed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from commbench.types import Point


def shuffled(points: Sequence[Point], seed: int, launch: int) -> list[tuple[int, Point]]:
    """The launch's points in its own random order, each with its place in it.

    Points that differ in backend and policy only stand together, in random order too: they are what is compared, and
    what changes within a launch (a host that moves its virtual cores) then meets them alike. In the design of
    experiments these are randomised blocks.
    """
    blocks: dict[str, list[Point]] = {}
    for point in points:
        blocks.setdefault(point.point_key, []).append(point)
    rng = random.Random(f"{seed}/{launch}")
    order = list(blocks.values())
    rng.shuffle(order)
    for block in order:
        rng.shuffle(block)
    return list(enumerate(point for block in order for point in block))
