"""The plot of a tuning, where there is little to draw."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from commbench.analysis.tune import Regret, tune
from commbench.report.tune import draw_tuning
from tests.scripted import frame, one_shot_and_two_shot, rows

KIB = 1 << 10


def test_a_tuning_of_one_launch_is_drawn_and_so_is_one_whose_regret_no_launch_tells(tmp_path: Path) -> None:
    sizes = [KIB << k for k in range(6)]
    tuning = tune(frame(rows(one_shot_and_two_shot(8 * KIB), lambda size: "shm_oneshot", sizes=sizes, launches=1)))
    (cell,) = tuning.cells
    assert math.isnan(cell.regret_tuned.low)
    nothing = (math.nan,) * len(sizes)
    unknown = Regret(nothing, math.nan, math.nan, sizes[0], size_low=nothing, size_high=nothing)
    both = replace(tuning, cells=(cell, replace(cell, regret_today=unknown, regret_tuned=unknown)))
    paths = draw_tuning(both, tmp_path, "plot")
    assert [path.name for path in paths] == ["plot-1.png", "plot-2.png"]
    assert all(path.stat().st_size > 1000 for path in paths)
