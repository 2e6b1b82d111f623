"""The phases of a tuning: what each measures, and how they share the time. Nothing is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commbench.errors import SpecError
from commbench.harness import run as harness
from commbench.harness import tuning
from commbench.harness.tuning import CONFIRM, FEWEST_HELD_OUT, Effort, adaptive, half_octaves, kernels_of
from commbench.measure.settings import Settings
from commbench.store.run import Run
from commbench.sweep import Expansion, make_spec
from commbench.types import Platform, Point

POINT = Point("all_reduce", "sum", "float32", 1024, 2)
GRID = tuple(replace(POINT, backend=b, size_bytes=s) for b in ("auto", "shm", "torch_dist") for s in (1024, 2048, 4096))
FEW = (replace(POINT, backend="shm", size_bytes=3072),)


class Clock:
    """Time that passes only while launches run; each takes ``each_s``, of which ``startup_s`` to start."""

    def __init__(self, each_s: float, startup_s: float) -> None:
        self.now = 0.0
        self.each_s, self.startup_s = each_s, startup_s
        self.executed: list[tuple[str, int, tuple[Point, ...], Settings]] = []

    def monotonic(self) -> float:
        return self.now

    def execute(
        self, spec: Any, expansion: Expansion, settings: Settings, out: Path, on_event: Any, argv: Sequence[str] = ()
    ) -> Run:
        self.now += spec.launches * self.each_s
        self.executed.append((out.name, spec.launches, expansion.points, settings))
        return Run(out, {"launches": [{"startup_s": self.startup_s}] * spec.launches})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Clock]:
    def go(each_s: float = 12.0, startup_s: float = 6.0, refine: Sequence[Point] = FEW, **effort: Any) -> Clock:
        clock = Clock(each_s, startup_s)
        monkeypatch.setattr(harness, "execute", clock.execute)
        monkeypatch.setattr(tuning.time, "monotonic", clock.monotonic)
        spec = make_spec({"tp": 2, "launches": effort.get("launches", 5)}, {})
        adaptive(
            spec, Expansion(GRID, {}), Settings(), tmp_path, Effort(**effort),
            refinement=lambda runs: refine, held_out=lambda runs: FEW, announce=lambda *_: lambda event: None,
        )  # fmt: skip
        return clock

    return go


def test_a_tuning_has_a_grid_a_refinement_and_launches_that_confirm(run: Callable[..., Clock]) -> None:
    clock = run()
    assert [(name, launches) for name, launches, *_ in clock.executed] == [("coarse", 5), ("refine", 5), ("confirm", 5)]
    assert clock.executed[0][2] == GRID
    assert clock.executed[1][2] == FEW


def test_each_phase_sets_up_the_backends_that_it_forces_and_has_a_seed_of_its_own(run: Callable[..., Clock]) -> None:
    clock = run()
    assert [settings.backends for *_, settings in clock.executed] == [("shm", "torch_dist"), ("shm",), ("shm",)]
    assert len({settings.seed for *_, settings in clock.executed}) == 3


def test_launches_share_what_starting_them_leaves(run: Callable[..., Clock]) -> None:
    clock = run(budget_s=300.0)
    budgets = [settings.budget_s for *_, settings in clock.executed]
    assert all(b is not None for b in budgets)
    # the grid: 45 % of 300 s on 5 launches, 8 s each to start
    assert budgets[0] == pytest.approx(0.45 * 300 / 5 - 8)
    # then half of what is left, and all of it; starting was seen to take 6 s, and 2 s to end
    assert budgets[1] == pytest.approx(0.5 * 240 / 5 - 8)
    assert budgets[2] == pytest.approx(180 / 5 - 8)


def test_nothing_to_refine_is_left_out(run: Callable[..., Clock]) -> None:
    assert [name for name, *_ in run(refine=()).executed] == ["coarse", "confirm"]


def test_on_a_busy_machine_refining_gives_way_to_confirming(run: Callable[..., Clock]) -> None:
    clock = run(each_s=45.0, startup_s=30.0)
    assert [(name, n) for name, n, *_ in clock.executed] == [("coarse", 5), (CONFIRM, FEWEST_HELD_OUT)]


def test_a_budget_that_cannot_hold_the_launches_is_refused_before_anything_starts(run: Callable[..., Clock]) -> None:
    with pytest.raises(SpecError, match="--budget 20s is too short: starting 15 launches"):
        run(budget_s=20.0)


def test_half_octaves_are_multiples_of_the_unit_and_hold_both_ends() -> None:
    sizes = half_octaves(1 << 10, 4 << 20)
    assert (sizes[0], sizes[-1], len(sizes)) == (1 << 10, 4 << 20, 25)
    assert all(s % 64 == 0 for s in sizes)


def test_the_kernels_worth_forcing_are_those_that_the_policy_may_take() -> None:
    on_cpu = kernels_of("commbench", Platform(device="cpu", world_size=2))
    assert on_cpu == ("shm_oneshot", "shm_twoshot", "torch_dist")
