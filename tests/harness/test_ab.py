"""Interleaving of A/B launches, and their sides."""

from __future__ import annotations

from collections import Counter

import pytest

from commbench.errors import UsageError
from commbench.harness.ab import launch_order
from commbench.harness.ab_sides import BASE, CAND, make_side
from commbench.harness.launchers.commands import Program, environment_of


@pytest.mark.parametrize("pairs", [1, 5, 10])
def test_every_pair_has_one_launch_of_each_side_next_to_each_other(pairs: int) -> None:
    order = launch_order(pairs, seed=3)
    assert len(order) == 2 * pairs
    for k in range(pairs):
        (first, one), (second, other) = order[2 * k : 2 * k + 2]
        assert (first, second) == (k, k)
        assert {one, other} == {BASE, CAND}


def test_pairs_come_as_abba_so_that_a_steady_drift_cancels() -> None:
    order = launch_order(10, seed=1)
    place = {side: sum(i for i, (_, s) in enumerate(order) if s == side) for side in (BASE, CAND)}
    assert place[BASE] == place[CAND]


def test_which_side_starts_is_chance_and_repeatable() -> None:
    first = Counter(launch_order(2, seed)[0][1] for seed in range(200))
    assert 70 <= first[BASE] <= 130
    assert launch_order(10, 5) == launch_order(10, 5)


def test_variables_of_a_side_reach_its_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMBENCH_FAKE", "{}")
    side = make_side(CAND, None, ["COMMBENCH_FAKE=x=y", "OMP_NUM_THREADS=2"], None)
    own = environment_of(side.program)
    assert (own["COMMBENCH_FAKE"], own["OMP_NUM_THREADS"]) == ("x=y", "2")
    assert environment_of(Program())["COMMBENCH_FAKE"] == "{}"


def test_a_variable_can_be_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMBENCH_FAKE", "{}")
    assert "COMMBENCH_FAKE" not in environment_of(Program(variables={"COMMBENCH_FAKE": None}))


@pytest.mark.parametrize("text", ["novalue", "=x"])
def test_a_malformed_variable_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write NAME=value"):
        make_side(BASE, None, [text], None)


def test_a_python_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="--base-python /bin/false does not"):
        make_side(BASE, "/bin/false", [], None)
