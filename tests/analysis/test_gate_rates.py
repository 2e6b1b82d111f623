"""How often the gate is wrong, by simulation on its own code; all figures: ``python -m tests.perf.gate_simulation``."""

from __future__ import annotations

import numpy as np

from tests.perf.gate_simulation import World, nights_of, power, red_share, series


def test_nights_of_the_same_speed_stay_green() -> None:
    """500 series, loud launches (cv 5 %): at most one red night in thirty."""
    points = series()
    red, inconclusive = red_share(nights_of("ab", 30, World(0.05), np.zeros(len(points)), 10, points, seed=3))
    assert red <= 1 / 30
    assert inconclusive == 0


def test_a_slowdown_of_the_margin_and_two_launch_cvs_is_found_and_nothing_else_is_accused() -> None:
    """Ten launches a side, one family of 500 series slower: the goal is 80 % power."""
    found, wrong = power("ab", 20, World(0.05, shared=0.0), 2.0, 10, series(), whole=True, seed=4)
    assert found >= 0.8
    assert wrong <= 0.1


def test_stored_runs_find_one_slow_point_of_hundreds_and_accuse_no_other() -> None:
    found, wrong = power("stored", 20, World(0.05, shared=0.0), 2.0, 10, series(), whole=False, seed=5)
    assert found >= 0.7  # the goal, 80 %, is measured over more nights in docs/gate.md
    assert wrong <= 0.1
