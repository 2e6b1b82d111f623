"""Clock offsets: scripted clocks whose offset and drift are known, links, and two real processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.measure.clock import now_ns
from commbench.measure.offset import (
    ClockAgreement,
    ClockError,
    Exchanges,
    OffsetBounds,
    ProcessGroupLink,
    agreement,
    answer,
    fit_offset,
    ping_pong,
    times_across,
)
from tests.ranks import run_ranks, world

SECOND = 1_000_000_000


def exchanges(
    offset_ns: int, there: list[int], back: list[int], *, start: int = 10**15, pause: int = 1000, drift: float = 0.0
) -> Exchanges:
    """What a rank records whose questions take ``there`` and answers ``back`` nanoseconds, one after another.

    The other clock shows local + offset + drift · (local − 10^15).
    """
    sent, answered, received = [], [], []
    now = start
    for out, home in zip(there, back, strict=True):
        sent.append(now)
        reading = now + out
        answered.append(reading + offset_ns + round(drift * (reading - 10**15)))
        now = reading + home
        received.append(now)
        now += pause
    return Exchanges(*(np.array(times, dtype=np.int64) for times in (sent, answered, received)))


DELAYS = st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=30)


@settings(deadline=None)
@given(offset=st.integers(-(10**17), 10**17), delays=DELAYS)
def test_the_true_offset_lies_within_the_bounds_however_lopsided_the_delays(
    offset: int, delays: list[tuple[int, int]]
) -> None:
    bounds = exchanges(offset, [d[0] for d in delays], [d[1] for d in delays]).bounds()
    assert bounds.low_ns <= offset <= bounds.high_ns
    assert bounds.error_s <= bounds.rtt_min_ns * 0.5e-9
    assert abs(bounds.low_ns + bounds.high_ns - 2 * offset) * 0.5e-9 <= bounds.error_s + 1e-12


def test_bounds_come_from_the_best_question_and_the_best_answer() -> None:
    bounds = exchanges(500, there=[10, 90], back=[80, 20]).bounds()
    assert (bounds.low_ns, bounds.high_ns) == (500 - 20, 500 + 10)
    assert bounds.offset_s == pytest.approx(495e-9)
    assert bounds.error_s == pytest.approx(15e-9)
    assert bounds.rtt_min_ns == 90


def test_offsets_of_a_year_keep_their_nanoseconds() -> None:
    year = 365 * 86400 * SECOND + 1
    bounds = exchanges(-year, there=[3, 3], back=[2, 2]).bounds()
    assert (bounds.low_ns, bounds.high_ns) == (-year - 2, -year + 3)


def test_a_clock_that_jumps_leaves_no_constant_offset() -> None:
    times = exchanges(0, [10] * 6, [10] * 6)
    times.answered[3:] += 5000
    assert not times.bounds().consistent


def test_a_clock_that_goes_back_is_named_with_the_exchange() -> None:
    times = exchanges(0, [10] * 3, [10] * 3)
    sent = times.sent.copy()
    sent[1] -= 5000
    with pytest.raises(ClockError, match="went back by 4000 ns at exchange 0"):
        Exchanges(sent, times.answered, times.received)


def test_exchanges_without_an_answer_are_refused() -> None:
    none = np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError, match="0 sent"):
        Exchanges(none, none, none)


# ---- over time ----------------------------------------------------------------------------------------------


def windows(offset: int, drift: float, delays: list[list[tuple[int, int]]], gap: int = SECOND) -> list[Exchanges]:
    return [
        exchanges(offset, [d[0] for d in part], [d[1] for d in part], start=10**15 + i * gap, drift=drift)
        for i, part in enumerate(delays)
    ]


@settings(deadline=None)
@given(
    offset=st.integers(-(10**14), 10**14),
    drift=st.floats(-1e-4, 1e-4),
    delays=st.lists(
        st.lists(st.tuples(st.integers(100, 10**5), st.integers(100, 10**5)), min_size=1, max_size=5),
        min_size=3,
        max_size=12,
    ),
)
def test_offset_and_drift_are_found_within_the_stated_error(
    offset: int, drift: float, delays: list[list[tuple[int, int]]]
) -> None:
    line = fit_offset(windows(offset, drift, delays))
    assert not line.jumped
    assert abs(line.slope - drift) <= line.slope_error * 1.001 + 1e-9
    for seconds in range(len(delays)):
        local = 10**15 + seconds * SECOND
        true = (offset + drift * seconds * SECOND) * 1e-9
        assert abs(line.offset_s(local) - true) <= line.error_s(local) * 1.001 + 3e-9
        assert line.error_s(local) <= line.error_s() * 1.3 + 1e-9


def test_residuals_are_kept_and_are_those_of_least_squares() -> None:
    rng = np.random.default_rng(4)
    delays = [[tuple(rng.integers(500, 900, 2)) for _ in range(5)] for _ in range(10)]
    line = fit_offset(windows(12_345, 2e-5, delays))
    assert len(line.residuals_s) == 10
    assert line.residuals_s.sum() == pytest.approx(0, abs=1e-12)
    assert float(line.residuals_s @ line.times_s) == pytest.approx(0, abs=1e-9)
    assert np.abs(line.residuals_s).max() > 0
    assert line.slope == pytest.approx(2e-5, abs=line.slope_error)


def test_the_shortest_exchange_of_a_window_decides_its_offset() -> None:
    slow, fast = (90_000, 10_000), (200, 200)
    line = fit_offset(windows(7_000, 0.0, [[slow, fast, slow]] * 4))
    assert line.intercept_s == pytest.approx(7e-6, abs=1e-12)
    assert line.error_s() < 1e-6


def test_a_remote_clock_that_jumps_between_windows_is_seen_in_the_residuals() -> None:
    times = windows(0, 0.0, [[(200, 200)]] * 8)
    for window in times[4:]:
        window.answered[:] += 50_000
    assert fit_offset(times).jumped


@settings(deadline=None)
@given(offset=st.integers(-(10**17), 10**17), drift=st.floats(-1e-4, 1e-4))
def test_remote_readings_are_told_in_local_time(offset: int, drift: float) -> None:
    line = fit_offset(windows(offset, drift, [[(100, 100)]] * 5))
    local = 10**15 + np.arange(0, 4 * SECOND, SECOND // 2)
    remote = local + offset + np.rint(drift * (local - 10**15)).astype(np.int64)
    assert np.abs(line.to_local(remote) - local).max() <= line.error_s() * 1e9 + 3


def test_two_windows_are_too_few_and_windows_in_the_wrong_order_are_refused() -> None:
    times = windows(0, 0.0, [[(100, 100)]] * 3)
    with pytest.raises(ValueError, match="3 windows"):
        fit_offset(times[:2])
    with pytest.raises(ValueError, match="follow one another"):
        fit_offset(times[::-1])


def test_an_error_above_five_percent_of_the_latency_calls_for_local_durations() -> None:
    assert not times_across(0.5e-6, 10e-6).local
    found = times_across(0.6e-6, 10e-6)
    assert found.local
    assert found.reason == (
        "the clocks of the hosts are known to 600 ns, 6% of the latency and more than 5%: "
        "it is the maximum over ranks of local durations"
    )
    assert times_across(1e-6, 0.0).local
    assert times_across(np.inf, 1e-6).local


# ---- exchanging readings ------------------------------------------------------------------------------------


class QueueLink:
    def __init__(self, out: SimpleQueue[int], home: SimpleQueue[int]) -> None:
        self._out, self._home = out, home

    def send(self, value: int) -> None:
        self._out.put(value)

    def receive(self) -> int:
        return self._home.get(timeout=20)


def test_ping_pong_takes_a_reading_before_the_question_and_one_after_the_answer() -> None:
    order: list[str] = []

    class Link:
        def send(self, value: int) -> None:
            order.append(f"send {value}")

        def receive(self) -> int:
            order.append("receive")
            return 77

    readings = iter(range(0, 1000, 10))

    def clock() -> int:
        order.append("clock")
        return next(readings)

    times = ping_pong(Link(), 2, clock)
    assert order == ["clock", "send 0", "receive", "clock", "clock", "send 1", "receive", "clock"]
    assert times.sent.tolist() == [0, 20]
    assert times.answered.tolist() == [77, 77]
    assert times.received.tolist() == [10, 30]


@pytest.mark.parametrize("offset", [0, 3600 * SECOND, -7])
def test_the_offset_of_an_answering_thread_is_found(offset: int) -> None:
    questions: SimpleQueue[int] = SimpleQueue()
    answers: SimpleQueue[int] = SimpleQueue()
    thread = threading.Thread(
        target=answer, args=(QueueLink(answers, questions), 50, lambda: now_ns() + offset), daemon=True
    )
    thread.start()
    bounds = ping_pong(QueueLink(questions, answers), 50).bounds()
    thread.join(20)
    assert bounds.consistent
    assert bounds.low_ns <= offset <= bounds.high_ns


# ---- the ranks of one host ----------------------------------------------------------------------------------


def test_a_rank_in_another_time_namespace_is_named_with_its_distance() -> None:
    same = OffsetBounds(-400, 500, 900)
    found = ClockAgreement((OffsetBounds(0, 0, 0), same, OffsetBounds(3 * SECOND - 300, 3 * SECOND + 300, 600)))
    assert found.differing == (2,)
    assert not found.ok
    assert found.verdict().startswith("rank 2's clock is 3.00 s (± 300 ns) ahead of rank 0's: ")
    assert "time namespace" in found.verdict()
    behind = ClockAgreement((OffsetBounds(0, 0, 0), OffsetBounds(-2000, -1000, 1000)))
    assert "rank 1's clock is 1.50 µs (± 500 ns) behind rank 0's" in behind.verdict()
    jumped = ClockAgreement((OffsetBounds(0, 0, 0), OffsetBounds(2000, 1000, 1000)))
    assert "rank 1's clock jumped against rank 0's by at least 1.00 µs" in jumped.verdict()


def test_agreeing_clocks_are_known_as_well_as_the_worst_rank() -> None:
    found = ClockAgreement((OffsetBounds(0, 0, 0), OffsetBounds(-400, 500, 900), OffsetBounds(-700, 100, 800)))
    assert found.ok
    assert found.verdict() == "the clocks of 3 ranks agree within 700 ns"
    assert found.to_dict()["ranks"][2] == {"rank": 2, "low_ns": -700, "high_ns": 100, "rtt_min_ns": 800}


def compare_clocks(rank: int, size: int) -> list[dict[str, Any]]:
    from commbench.harness.ranks.worker import Objects
    from commbench.measure.team import PageTeam

    team = PageTeam.form(rank, size, Objects(world().cpu_group), oversubscribed=size > (os.cpu_count() or 1))
    ahead: Callable[[], int] = lambda: now_ns() + 2 * SECOND  # noqa: E731 - as in a time namespace
    found = [
        agreement(team, 100),
        agreement(team, 100, ahead if rank == size - 1 else now_ns),
        agreement(team, 101),  # the page's words are clean again, also after an odd number of rounds
        agreement(team, 100),
    ]
    team.close()
    return [f.to_dict() | {"differing": f.differing} for f in found]


@pytest.mark.parametrize("size", [2, 3])
def test_processes_of_one_host_read_one_clock_and_one_that_does_not_is_found(size: int) -> None:
    ranks = run_ranks(compare_clocks, size)
    assert all(found == ranks[0] for found in ranks)
    for same in (0, 2, 3):
        assert ranks[0][same]["ok"], ranks[0][same]["verdict"]
    print(ranks[0][0]["verdict"])
    assert ranks[0][1]["differing"] == (size - 1,)
    last = ranks[0][1]["ranks"][size - 1]
    assert last["low_ns"] <= 2 * SECOND <= last["high_ns"]


def over_a_process_group(rank: int, size: int) -> tuple[int, int] | None:
    link = ProcessGroupLink(world().cpu_group, 1 - rank)
    if rank == 1:
        answer(link, 50, lambda: now_ns() + SECOND)
        return None
    bounds = ping_pong(link, 50).bounds()
    return bounds.low_ns, bounds.high_ns


def test_an_offset_is_found_over_a_process_group_as_between_hosts() -> None:
    bounds, _ = run_ranks(over_a_process_group, 2)
    assert bounds[0] <= SECOND <= bounds[1]
    assert bounds[1] - bounds[0] < SECOND // 10
