"""A tuning in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commbench.analysis.confirm import confirm
from commbench.analysis.tune import Regret, tune
from commbench.report.tune_text import facts, ratio, regret_text
from tests.scripted import frame, one_shot_and_two_shot, rows

KIB = 1 << 10


def test_what_fresh_launches_said_is_told() -> None:
    def older(size: int) -> str:
        return "shm_oneshot" if size <= 16 * KIB else "shm_twoshot"

    tuning = tune(frame(rows(one_shot_and_two_shot(128 * KIB), older)))
    assert not any("fresh launches" in name for name, _ in facts(tuning.cells[0]))
    for truth, said in ((128 * KIB, "5 fresh launches, gain"), (16 * KIB, "taken back")):
        fresh = rows(one_shot_and_two_shot(truth), older, seed=9, picked_by={"tuned.toml": tuning.cells[0].pick})
        (cell,) = confirm(tuning, frame(fresh), "commbench", "tuned.toml").cells
        told = dict(facts(cell))
        assert said in told
        assert told["5 fresh launches, tuned"].startswith("regret mean ")


def test_a_regret_is_told_with_its_intervals_where_there_are_some() -> None:
    regret = Regret((0.0, 0.14), 0.025, 0.14, 4 * KIB, 0.003, 0.047, (0.0, -0.03), (0.0, 0.33))
    assert regret_text(regret) == "mean 2.5 % (0.3 % to 4.7 %), worst 14 % at 4 KiB (-3.0 % to 33 %)"
    nothing = float("nan")
    one_launch = replace(regret, low=nothing, high=nothing, size_low=(nothing,) * 2, size_high=(nothing,) * 2)
    assert regret_text(one_launch) == "mean 2.5 %, worst 14 % at 4 KiB"


@pytest.mark.parametrize(("value", "text"), [(0.0123, "1.2 %"), (0.5, "50 %"), (11.0, "12×"), (1e5, "> 1000×")])
def test_ratios_have_the_digits_that_matter(value: float, text: str) -> None:
    assert ratio(value) == text
