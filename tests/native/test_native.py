"""The native module's start gate and timed loop. (The collectives: tests/backends/test_shm.py and driver.cpp.)"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch.utils.dlpack

from commbench import native
from commbench.errors import CollectiveError, PeerLost
from commbench.native import segment as segments

pytestmark = pytest.mark.skipif(bool(native.why_unavailable()), reason=native.why_unavailable())


@pytest.fixture
def shm() -> Any:
    return native.load()


@pytest.fixture
def segment(shm: Any) -> Iterator[Any]:
    fd, path = segments.create_file(4096)
    piece = segments.map_file(fd, 4096)
    segments.unlink(path)
    yield piece
    piece.release()


def arrays(n: int) -> tuple[Any, Any, Any]:
    return np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.uint8)


def in_threads(*works: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_the_clock_is_that_of_perf_counter(shm: Any) -> None:
    before = time.perf_counter_ns()
    now = shm.now_ns()
    assert before <= now <= time.perf_counter_ns()


def test_a_busy_wait_takes_its_scripted_times_in_turn(shm: Any) -> None:
    starts, ends, flags = arrays(9)
    shm.timed_loop(shm.BoundCall.busy_wait([100_000, 300_000, 50_000]), None, starts, ends, flags)
    took = (ends - starts).reshape(3, 3)
    assert (took >= [100_000, 300_000, 50_000]).all()
    # The least of three is undisturbed, on a machine with other work too.
    assert (took.min(axis=0) < [103_000, 303_000, 53_000]).all()
    assert not flags.any()


def test_a_batch_is_one_sample_and_calls_are_taken_in_turn(shm: Any) -> None:
    starts, ends, flags = arrays(4)
    calls = [shm.BoundCall.busy_wait([20_000]), shm.BoundCall.busy_wait([60_000])]
    shm.timed_loop(calls, None, starts, ends, flags, batch=1, first=1)
    took = ends - starts
    assert (took[0::2] >= 60_000).all()
    assert (took[1::2] >= 20_000).all()
    assert took[1::2].min() < 60_000
    shm.timed_loop(calls, None, starts, ends, flags, batch=4)
    assert ((ends - starts) >= 160_000).all()


def test_an_empty_call_costs_less_than_a_microsecond(shm: Any) -> None:
    starts, ends, flags = arrays(1000)
    shm.timed_loop(shm.BoundCall.empty(), None, starts, ends, flags)
    assert 0 <= np.median(ends - starts) < 1000
    assert (starts[1:] >= ends[:-1]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch of at least 1"),
        ({"calls": []}, "needs a call"),
        ({"ends": np.zeros(3, np.int64)}, "differ in length"),
    ],
)
def test_a_loop_that_cannot_be_is_refused(shm: Any, change: dict[str, Any], message: str) -> None:
    starts, ends, flags = arrays(4)
    arguments = {"calls": shm.BoundCall.empty(), "gate": None, "starts": starts, "ends": ends, "flags": flags}
    with pytest.raises(CollectiveError, match=message):
        shm.timed_loop(**{**arguments, **change})


def test_ranks_leave_the_gate_together_when_its_window_opens(shm: Any, segment: Any) -> None:
    n = 20
    times = {rank: arrays(n) for rank in range(2)}

    def rank_of(rank: int) -> Callable[[], None]:
        gate = shm.StartGate(segment.address, 2, rank, True, 20.0)
        return lambda: shm.timed_loop(shm.BoundCall.empty(), gate, *times[rank], delta_ns=2_000_000)

    in_threads(rank_of(0), rank_of(1))
    (first, _, late_first), (second, _, late_second) = times[0], times[1]
    in_time = (late_first == 0) & (late_second == 0)
    assert in_time.any()
    assert np.abs(first - second)[in_time].min() < 100_000
    assert (np.diff(first) >= 2_000_000).all(), "each window is two milliseconds after the last rank came"


def test_a_rank_that_misses_the_window_is_told(shm: Any, segment: Any) -> None:
    first, second = (shm.StartGate(segment.address, 2, rank, True, 20.0) for rank in range(2))
    late: list[bool] = []

    def leader() -> None:
        first.enter(1)  # one nanosecond: over before anybody can see it

    in_threads(leader, lambda: late.append(second.enter(1)))
    assert late == [True]


def test_a_gate_without_a_window_is_a_barrier(shm: Any, segment: Any) -> None:
    first, second = (shm.StartGate(segment.address, 2, rank, True, 20.0) for rank in range(2))
    events: list[str] = []

    def slow() -> None:
        time.sleep(0.05)
        events.append("slow came")
        assert second.enter() is False

    def quick() -> None:
        assert first.enter() is False
        events.append("quick left")

    in_threads(slow, quick)
    assert events == ["slow came", "quick left"]


def test_a_gate_gives_up_on_a_rank_that_never_comes(shm: Any, segment: Any) -> None:
    gate = shm.StartGate(segment.address, 2, 0, True, 0.2)
    with pytest.raises(CollectiveError, match=r"rank 1 did not come to the start gate within 0\.2"):
        gate.enter()


LOCK_RANK_ONE = """
import pathlib, signal, sys
from commbench.native import segment
piece = segment.map_file(segment.open_file(pathlib.Path(sys.argv[1]), 4096), 4096)
piece.lock_rank(1)
print("locked", flush=True)
signal.pause()
"""


def test_a_gate_over_a_locked_segment_names_a_dead_rank(shm: Any) -> None:
    fd, path = segments.create_file(4096)
    piece = segments.map_file(fd, 4096)
    piece.lock_rank(0)
    child = subprocess.Popen([sys.executable, "-c", LOCK_RANK_ONE, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"locked\n"
    segments.unlink(path)
    assert piece.alive(1)
    child.kill()
    child.wait()
    child.stdout.close()
    assert not piece.alive(1)
    assert piece.alive(0)
    with pytest.raises(PeerLost) as lost:
        shm.StartGate(piece.address, 2, 0, True, 20.0, piece).enter()
    assert lost.value.rank == 1
    piece.release()


def test_a_gate_can_be_interrupted(shm: Any, segment: Any) -> None:
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        shm.StartGate(segment.address, 2, 0, True, 20.0).enter()
    timer.join()


def test_a_gate_needs_an_aligned_address_and_a_rank_of_its_group(shm: Any, segment: Any) -> None:
    with pytest.raises(CollectiveError, match="multiple of 64"):
        shm.StartGate(segment.address + 8, 2, 0)
    with pytest.raises(CollectiveError, match="rank 2 of 2"):
        shm.StartGate(segment.address, 2, 2)
    assert shm.gate_bytes(8) <= mmap.PAGESIZE


def test_a_view_keeps_its_segment_mapped_and_stays_inside(shm: Any) -> None:
    fd, path = segments.create_file(4096)
    piece = segments.map_file(fd, 4096, keep_fd=False)
    segments.unlink(path)
    view = torch.utils.dlpack.from_dlpack(piece.bytes_view(100, 16))
    with pytest.raises(CollectiveError, match="beyond the segment"):
        piece.bytes_view(4090, 16)
    del piece
    view[:] = 7
    assert view.sum() == 7 * 16


def test_ranks_that_are_threads_of_one_process_are_alive_to_each_other(shm: Any) -> None:
    fd, path = segments.create_file(4096)
    first, second = segments.map_file(fd, 4096), segments.map_file(segments.open_file(path, 4096), 4096)
    segments.unlink(path)
    first.lock_rank(0)
    second.lock_rank(1)
    assert first.alive(1)
    assert second.alive(0)
    assert not first.alive(2)
    second.release()
    assert not first.alive(1)
    first.release()
