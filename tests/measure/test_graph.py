"""Timing of graphs on a scripted device: the slope, its voids, and results inside replays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.measure.buffers import Buffers
from commbench.measure.graph import GraphBuffers, capture_calls, check_replays, measure_slope, slope_of
from commbench.types import Point
from tests.measure.scripted_device import ReplayingDevice, ScriptedDevice, ScriptedRanks

ONE = ScriptedRanks()


def test_the_slope_is_one_calls_time_without_launch_and_event_cost() -> None:
    device = ScriptedDevice(launch_ns=9_000, event_ns=700)
    slope = measure_slope(device, ONE, [device.op(2500)], 10, kind="chained")
    assert slope.samples_s == pytest.approx(np.full(10, 2.5e-6))
    assert slope.interval.median == pytest.approx(2.5e-6)
    assert slope.short_s == pytest.approx(np.full(10, 9e-6 + 0.7e-6 + 8 * 2.5e-6))
    assert slope.long_s == pytest.approx(np.full(10, 9e-6 + 0.7e-6 + 32 * 2.5e-6))
    assert slope.void == ""
    assert (slope.kind, slope.calls) == ("chained", (8, 32))


@settings(deadline=None)
@given(latency=st.integers(1, 10**6), launch=st.integers(0, 10**6), short=st.integers(2, 20), more=st.integers(1, 50))
def test_any_latency_is_found_whatever_a_launch_costs(latency: int, launch: int, short: int, more: int) -> None:
    device = ScriptedDevice(launch_ns=launch)
    slope = measure_slope(device, ONE, [device.op(latency)], 6, kind="chained", lengths=(short, short + more))
    assert slope.void == ""
    assert slope.interval.median == pytest.approx(latency * 1e-9)


def test_isolated_calls_stand_behind_barriers_whose_own_slope_is_taken_off() -> None:
    device = ScriptedDevice()
    slope = measure_slope(device, ONE, [device.op(2500)], 8, kind="isolated", lengths=(2, 4))
    assert slope.samples_s == pytest.approx(np.full(8, 2.5e-6))
    # four graphs: barriers with calls, and barriers alone
    replays = [entry for entry in device.log if entry.startswith("replay")]
    assert replays[:4] == ["replay 4", "replay 8", "replay 2", "replay 4"]
    captures = device.log[: device.log.index("hold")]
    assert captures[:5] == ["capture", "barrier", "op", "barrier", "op"]
    assert captures.count("op") == 2 + 4
    assert captures.count("barrier") == 2 * (2 + 4)


def test_isolated_and_chained_differ_where_ranks_run_ahead_of_each_other() -> None:
    """A call that costs less right after another: chained shows the saving, isolated does not."""
    device = ScriptedDevice()

    def call(duration: Callable[[bool], int]) -> Callable[[], None]:
        follows = device.log and device.log[-1] == "op"
        return device.op(duration(bool(follows)))

    dependent = lambda: call(lambda follows: 1000 if follows else 3000)()  # noqa: E731
    chained = measure_slope(device, ONE, [dependent], 8, kind="chained")
    isolated = measure_slope(device, ONE, [dependent], 8, kind="isolated")
    assert chained.interval.median == pytest.approx(1e-6)
    assert isolated.interval.median == pytest.approx(3e-6)


def test_graphs_take_turns_so_that_a_drift_falls_on_both() -> None:
    device = ScriptedDevice()
    log = device.log
    measure_slope(device, ScriptedRanks(log=log), [device.op(1000)], 5, kind="chained", lengths=(2, 3))
    replays = [entry for entry in log if entry.startswith("replay")]
    assert replays == ["replay 2", "replay 3"] * 7  # the first launches and the first turn are not counted
    assert [entry for entry in log[: log.index("hold")] if entry.startswith("replay")] == ["replay 2", "replay 3"]
    assert log.index("meet") > max(i for i, entry in enumerate(log) if entry == "capture")


def test_a_replay_starts_at_a_device_barrier_between_two_events_behind_a_held_stream() -> None:
    device = ScriptedDevice()
    measure_slope(device, ONE, [device.op(1000)], 1, kind="chained", lengths=(2, 3))
    first = device.log.index("hold")
    assert device.log[first : first + 5] == ["hold", "barrier", "record", "replay 2", "record"]


def test_times_are_maxima_over_ranks_before_the_slope() -> None:
    device = ScriptedDevice(launch_ns=0)
    slope = measure_slope(device, ScriptedRanks((1.0, 3.0)), [device.op(1000)], 6, kind="chained")
    assert slope.interval.median == pytest.approx(3e-6)


def test_the_hosts_part_is_one_launch_of_a_graph_per_replay() -> None:
    device = ScriptedDevice(queue_ns=6_000)
    slope = measure_slope(device, ScriptedRanks((1.0, 2.0)), [device.op(1000)], 5, kind="isolated")
    assert slope.enqueue_s.shape == (2, 10)
    assert slope.enqueue_s[0] == pytest.approx(np.full(10, 6e-6))


def test_a_slope_that_is_not_positive_is_void() -> None:
    device = ScriptedDevice()
    slope = measure_slope(device, ONE, [device.op(0)], 10, kind="chained")
    assert slope.void.startswith("the slope is not positive: ")
    assert "8 and 32 calls; capture more calls" in slope.void


def test_noise_larger_than_the_slope_is_void() -> None:
    rng = np.random.default_rng(2)
    times = 20e-6 + rng.normal(0, 3e-6, (60, 2)) + np.array([8, 32]) * 1e-9
    assert "not positive" in slope_of("chained", (8, 32), times, np.zeros((60, 2)), np.zeros((1, 120))).void


def test_graphs_that_disagree_are_void() -> None:
    """As on a device that slows down in a long graph: 8 quick calls of the short one, 32 slow ones of the long one."""
    device = ScriptedDevice(launch_ns=1000)
    made = itertools.count()

    def duration() -> int:
        return 20_000 if next(made) % 40 >= 8 else 5_000

    slope = measure_slope(device, ONE, [device.op(duration)], 10, kind="chained")
    assert slope.void == "the two graphs disagree: 32 calls take 20.0 µs each, 8 calls only 5.12 µs"


def test_a_launch_that_costs_nothing_is_no_disagreement() -> None:
    rng = np.random.default_rng(3)
    times = np.array([8, 32]) * 5e-6 * (1 + 0.01 * rng.normal(size=(200, 2)))
    assert slope_of("chained", (8, 32), times, np.zeros((200, 2)), np.zeros((1, 400))).void == ""


@pytest.mark.parametrize("lengths", [(1, 8), (8, 8), (9, 8)])
def test_lengths_that_give_no_slope_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"graphs of {lengths[0]} and {lengths[1]} calls"):
        measure_slope(ScriptedDevice(), ONE, [], 1, kind="chained", lengths=lengths)


def test_an_unknown_kind_and_no_replays_are_refused() -> None:
    with pytest.raises(ValueError, match="'looped' is none of isolated, chained"):
        measure_slope(ScriptedDevice(), ONE, [], 1, kind="looped")
    with pytest.raises(ValueError, match="0 replays"):
        measure_slope(ScriptedDevice(), ONE, [], 0, kind="chained")


def test_every_capture_happens_inside_what_the_coordinator_sets_up_and_leaves_it_after_an_error() -> None:
    device = ScriptedDevice()

    @contextmanager
    def around() -> Iterator[None]:
        device.log.append("enter")
        try:
            yield
        finally:
            device.log.append("leave")

    capture_calls(device, [device.op(1, "a"), device.op(1, "b")], 3, barriers=False, around=around)
    assert device.log == ["enter", "capture", "a", "b", "a", "leave"]

    def broken() -> None:
        raise RuntimeError("cannot be captured")

    with pytest.raises(RuntimeError, match="cannot be captured"):
        measure_slope(device, ONE, [broken], 1, kind="chained", around=around)
    assert device.log[-1] == "leave"
    assert not device.held
    device.op(5)()  # is queued again, not captured
    device.synchronize()


def test_a_failed_replay_leaves_the_stream_free() -> None:
    device = ScriptedDevice()

    class Broken(ScriptedDevice):
        def capture(self, *args: Any) -> Any:
            class Graph:
                @staticmethod
                def replay() -> None:
                    if device.held:
                        raise RuntimeError("launch failed")

            return Graph()

    device = Broken()
    with pytest.raises(RuntimeError, match="launch failed"):
        measure_slope(device, ONE, [], 2, kind="chained")
    assert not device.held
    assert device.abandoned


# ---- results inside replays ---------------------------------------------------------------------------------


def point(world_size: int = 1, placement: str = "in", layout: str = "contiguous") -> Point:
    return Point("all_reduce", "sum", "float32", 4096, world_size, layout, mode="graph", placement=placement)


def reduced(buffers: Buffers) -> Callable[[], object]:
    """What an all-reduce among one rank does: the input is the sum."""
    assert buffers.input is not None
    assert buffers.output is not None
    x, y = buffers.input, buffers.output
    return lambda: y.copy_(x)


SEEDS = (11, 12, 13)
LENGTHS = (2, 5)


@pytest.mark.parametrize("placement", ["in", "out"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("exact", [False, True])
def test_right_results_pass_although_inputs_are_overwritten_after_each_call(
    placement: str, layout: str, exact: bool
) -> None:
    buffers = Buffers(point(placement=placement, layout=layout), 0, torch.device("cpu"))
    subject = GraphBuffers(buffers, reduced(buffers), exact)
    assert check_replays(ReplayingDevice(), ONE, subject, SEEDS, lengths=LENGTHS).wrong_count == 0


def test_a_call_that_reads_its_input_late_is_found_out() -> None:
    """As a backend does that reads on a stream of its own and is not waited for."""
    buffers = Buffers(point(placement="out"), 0, torch.device("cpu"))
    x, y = buffers.input, buffers.output
    assert x is not None
    assert y is not None

    class Late(GraphBuffers):
        def overwrite(self) -> None:
            super().overwrite()
            y.copy_(x)  # only now, of poisoned input
            assert self._kept is not None
            self._kept.copy_(y)

    found = check_replays(ReplayingDevice(), ONE, Late(buffers, lambda: None), SEEDS, lengths=LENGTHS)
    assert found.wrong_count == len(SEEDS) * len(LENGTHS) * x.numel()


def test_a_graph_that_kept_the_data_of_its_capture_is_found_out() -> None:
    buffers = Buffers(point(placement="out"), 0, torch.device("cpu"))
    call = reduced(buffers)
    assert buffers.output is not None
    first: list[torch.Tensor] = []

    def remembering() -> None:
        call()
        assert buffers.output is not None
        first.append(buffers.output.clone())
        buffers.output.copy_(first[0])

    found = check_replays(ReplayingDevice(), ONE, GraphBuffers(buffers, remembering), SEEDS, lengths=(2, 3))
    assert found.wrong_count > 0
    assert found.max_abs_error > 0.01


def test_a_call_that_does_nothing_is_found_out_in_both_placements() -> None:
    for placement in ("in", "out"):
        buffers = Buffers(point(world_size=2, placement=placement), 0, torch.device("cpu"))
        found = check_replays(ReplayingDevice(), ONE, GraphBuffers(buffers, lambda: None), SEEDS[:1], lengths=LENGTHS)
        assert found.wrong_count > 0


def test_all_ranks_meet_before_each_checked_replay() -> None:
    device = ReplayingDevice()
    buffers = Buffers(point(), 0, torch.device("cpu"))
    subject = GraphBuffers(buffers, lambda: device.log.append("call"))
    check_replays(device, ScriptedRanks(log=device.log), subject, SEEDS[:2], lengths=(2, 3))
    replay = ["synchronize", "meet"]
    expected = [*replay, "call", "call", "synchronize"] * 2 + [*replay, "call", "call", "call", "synchronize"] * 2
    assert device.log == expected


def test_no_seeds_check_nothing_and_are_refused() -> None:
    buffers = Buffers(point(), 0, torch.device("cpu"))
    with pytest.raises(ValueError, match="no seeds"):
        check_replays(ReplayingDevice(), ONE, GraphBuffers(buffers, lambda: None), [])
