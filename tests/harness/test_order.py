"""The random order of a launch, and which points' visits alternate."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest

from commbench.harness.order import shuffled
from commbench.measure import session
from commbench.types import Point

ONE = Point("all_reduce", "sum", "float32", 64, 2, backend="auto")
BACKENDS = ("auto", "shm", "torch_dist")
POINTS = [replace(ONE, backend=b, size_bytes=64 << k) for b in BACKENDS for k in range(9)]


def test_every_launch_has_an_order_of_its_own_that_can_be_repeated() -> None:
    orders = [[point for _, point in shuffled(POINTS, 7, launch)] for launch in (0, 1)]
    assert orders[0] != orders[1]
    assert [point for _, point in shuffled(POINTS, 7, 0)] == orders[0]
    assert sorted(p.point_id for p in orders[0]) == sorted(p.point_id for p in POINTS)
    assert [place for place, _ in shuffled(POINTS, 7, 0)] == list(range(len(POINTS)))


def test_what_differs_in_backend_and_policy_only_stands_together_in_random_order() -> None:
    points = [*POINTS, *(replace(p, policy="sglang-0.5.3") for p in POINTS if p.backend == "auto")]
    firsts: Counter[str] = Counter()
    for launch in range(50):
        blocks = [list(b) for _, b in groupby(shuffled(points, 7, launch), key=lambda pair: pair[1].size_bytes)]
        assert [len(b) for b in blocks] == [4] * 9
        firsts.update(block[0][1].backend for block in blocks)
    assert firsts["shm"] == pytest.approx(450 / 4, rel=0.25)


def test_points_without_rivals_are_all_shuffled() -> None:
    alone = [p for p in POINTS if p.backend == "shm"]
    places = Counter(next(i for i, p in shuffled(alone, 7, launch) if p.size_bytes == 64) for launch in range(900))
    assert len(places) == 9
    assert min(places.values()) > 60


def test_rivals_alternate_with_each_other_and_are_not_torn_apart() -> None:
    groups = [[p for _, p in group] for group in session._groups(shuffled(POINTS, 7, 0))]
    assert [len(g) for g in groups] == [6, 6, 6, 6, 3]
    assert all(set(Counter(p.size_bytes for p in group).values()) == {3} for group in groups)


def test_more_rivals_than_alternate_at_once_and_large_ones_are_split() -> None:
    many = list(enumerate(replace(ONE, policy=str(k)) for k in range(11)))
    assert [len(g) for g in session._groups(many)] == [8, 3]
    large = list(enumerate(replace(ONE, backend=b, size_bytes=100 << 20) for b in BACKENDS))
    assert [len(g) for g in session._groups(large)] == [2, 1]
