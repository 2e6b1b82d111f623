"""The measurement protocol on scripted numbers: aggregation, windows, batching, stopping."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from commbench.measure.aggregate import (
    LARGEST_DELTA_NS,
    adapted_delta_ns,
    aggregate,
    batch_for,
    smallest_delta_ns,
)
from commbench.measure.clock import resolution_s, timer_facts
from commbench.measure.loop import Block, no_collection, nothing, run_block
from commbench.measure.stopping import FEWEST_VISITS, FIRST_WARMUP, StoppingRule, WarmUpRule


def block(starts: list[list[int]], ends: list[list[int]], **settings: object) -> object:
    defaults: dict[str, object] = {"synchronising": True, "sync": "window", "batch": 1, "overhead_s": 0.0}
    late = np.zeros((len(starts), len(starts[0])), dtype=np.uint8)
    return aggregate(np.array(starts), np.array(ends), late, **{**defaults, **settings})  # type: ignore[arg-type]


def test_t_last_runs_from_the_last_start_and_t_win_from_the_first() -> None:
    samples = block([[0], [300]], [[1300], [1000]])
    assert samples.latency == pytest.approx([1000e-9])
    assert samples.t_win == pytest.approx([1300e-9])
    assert samples.skew == pytest.approx([300e-9])


def test_a_collective_that_ranks_may_leave_early_reports_t_win() -> None:
    assert block([[0], [300]], [[100], [1000]], synchronising=False).latency == pytest.approx([1000e-9])


@pytest.mark.parametrize("sync", ["barrier", "none"])
def test_without_windows_the_slowest_ranks_own_duration_counts(sync: str) -> None:
    assert block([[0], [300]], [[100], [1000]], sync=sync).latency == pytest.approx([700e-9])


def test_a_batch_is_divided_after_the_overhead_is_taken_off() -> None:
    samples = block([[0], [0]], [[1100], [1000]], batch=10, overhead_s=100e-9)
    assert samples.latency == pytest.approx([100e-9])


def test_a_time_below_the_overhead_is_zero_not_negative() -> None:
    assert block([[0], [0]], [[50], [40]], overhead_s=100e-9).latency == pytest.approx([0.0])


def test_a_sample_is_invalid_when_any_rank_missed_the_window() -> None:
    late = np.array([[0, 1, 0], [0, 0, 0]], dtype=np.uint8)
    zeros = np.zeros((2, 3), dtype=np.int64)
    samples = aggregate(zeros, zeros + 5, late, synchronising=True, sync="window", batch=1, overhead_s=0)
    assert samples.valid.tolist() == [True, False, True]


def test_a_window_is_announced_earlier_when_ranks_miss_it_and_later_when_none_does() -> None:
    shortest = smallest_delta_ns(2)
    assert adapted_delta_ns(shortest, 0.5, 2) == 2 * shortest
    assert adapted_delta_ns(2 * shortest, 0.0, 2) == shortest
    assert adapted_delta_ns(shortest, 0.0, 2) == shortest
    assert adapted_delta_ns(2 * shortest, 0.05, 2) == 2 * shortest
    assert adapted_delta_ns(LARGEST_DELTA_NS, 1.0, 2) == LARGEST_DELTA_NS


class Clock:
    """Moves on by one step at each reading."""

    def __init__(self, step: int) -> None:
        self.now = 0
        self.step = step

    def __call__(self) -> int:
        self.now += self.step
        return self.now


def test_the_loop_reads_the_clock_right_before_and_after_each_call_and_nothing_else() -> None:
    room = Block(8)
    order: list[str] = []
    clock = Clock(10)

    def reading() -> int:
        order.append("clock")
        return clock()

    def gate() -> int:
        order.append("gate")
        return len(order) == 5  # the second iteration is late

    run_block([lambda: order.append("call")], gate, 3, room, clock=reading)
    assert order == ["gate", "clock", "call", "clock"] * 3
    assert (room.ends[:3] - room.starts[:3]).tolist() == [10, 10, 10]
    assert room.late[:3].tolist() == [0, 1, 0]


def test_cold_buffers_are_walked_through_in_turn() -> None:
    seen: list[int] = []
    calls = [lambda k=k: seen.append(k) for k in range(3)]
    run_block(calls, lambda: 0, 5, Block(8))
    assert seen == [0, 1, 2, 0, 1]
    seen.clear()
    run_block(calls, lambda: 0, 2, Block(8), batch=2)
    assert seen == [0, 1, 2, 0]


def test_a_batch_makes_so_many_calls_between_two_readings() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    run_block([call], lambda: 0, 4, Block(8), batch=25)
    assert calls == 100


def test_the_garbage_collector_is_off_inside_and_back_afterwards_even_after_an_error() -> None:
    assert gc.isenabled()
    inside = []

    def failing() -> None:
        with no_collection():
            inside.append(gc.isenabled())
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert inside == [False]
    assert gc.isenabled()
    run_block([nothing], lambda: 0, 1, Block(1))
    assert gc.isenabled()


def test_the_resolution_is_the_smallest_step_of_the_clock() -> None:
    assert resolution_s(Clock(40)) == pytest.approx(40e-9)


def test_a_clock_that_stands_or_goes_back_is_named() -> None:
    with pytest.raises(ValueError, match="did not move"):
        resolution_s(lambda: 7)
    readings = iter([10, 20, 5] + [30] * 3000)
    with pytest.raises(ValueError, match="went back by 15 ns"):
        resolution_s(lambda: next(readings))


def test_the_empty_iterations_median_is_overhead_and_their_spread_is_uncertainty() -> None:
    facts = timer_facts(np.array([100] * 60 + [130] * 40), resolution=1e-9)
    assert facts.overhead_s == pytest.approx(100e-9)
    assert facts.uncertainty_s == pytest.approx(30e-9)


def warmed_up(series: np.ndarray, each_s: float = 1e-4, limit_s: float = 10.0) -> tuple[int, bool]:
    """Iterations that the rule takes of a scripted series, and whether it found it steady."""
    rule, made = WarmUpRule(limit_s), FIRST_WARMUP
    while not rule.look(series[:made], made * each_s):
        made += rule.next_n(made)
    return made, rule.steady


@pytest.mark.parametrize("length", [40, 150, 400, 1000])
def test_a_warm_up_of_scripted_length_is_found(length: int) -> None:
    rng = np.random.default_rng(length)
    falling = np.concatenate([np.linspace(3.0, 1.0, length), np.ones(20 * length)])
    falling *= 1 + 0.02 * rng.random(len(falling))
    falling[rng.random(len(falling)) < 0.02] *= 5  # and a few are held up by something else
    made, steady = warmed_up(falling)
    assert steady
    assert 0.9 * length <= made <= 6 * length
    assert warmed_up(np.ones(1000) + rng.normal(0, 0.02, 1000))[0] <= 48


def test_a_warm_up_that_does_not_end_is_cut_off_and_said_to_be_unsteady() -> None:
    made, steady = warmed_up(np.linspace(3.0, 1.0, 100_000), limit_s=0.1)
    assert not steady
    assert 1000 <= made <= 1600


RULE = StoppingRule(target=0.01, max_time_s=1.0)
NARROW = np.full(50, 1e-6)
WIDE = np.random.default_rng(0).uniform(1e-6, 2e-6, 50)


def test_a_narrow_interval_ends_a_point_after_the_fewest_visits() -> None:
    assert RULE.look(NARROW, FEWEST_VISITS, 0.1).done
    assert not RULE.look(NARROW, FEWEST_VISITS - 1, 0.1).done


def test_a_wide_interval_goes_on_until_the_time_is_used_up_and_says_that_it_missed_its_target() -> None:
    assert not RULE.look(WIDE, 9, 0.9).done
    late = RULE.look(WIDE, 9, 1.0)
    assert late.done
    assert not late.target_reached


def test_six_samples_are_waited_for_but_not_for_ever() -> None:
    assert not RULE.look(NARROW[:5], 5, 1.5).done
    assert RULE.look(NARROW[:5], 5, 3.0).done
    assert RULE.look(np.empty(0), 0, 3.0).done


def test_looks_come_when_n_has_grown_by_two_fifths() -> None:
    assert RULE.look(WIDE, 3, 0.1).next_n == 70


def test_a_batch_is_as_long_as_the_timers_uncertainty_asks_for() -> None:
    assert batch_for(uncertainty_s=10e-9, typical_s=1e-6) == 1
    assert batch_for(uncertainty_s=100e-9, typical_s=1e-6) == 2
    assert batch_for(uncertainty_s=100e-9, typical_s=100e-9) == 20
    assert batch_for(uncertainty_s=1e-3, typical_s=1e-9) == 0  # no batch is long enough: the point is refused
