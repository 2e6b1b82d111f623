"""Timing of eager calls on a scripted device: order of calls, what counts, and what is left after an error."""

from __future__ import annotations

import ctypes
import gc
import itertools
import mmap
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from commbench.errors import BackendUnavailable, PeerLost
from commbench.measure.device import FLAG_BYTES, DeviceError, FlagBarrier, Held
from commbench.measure.eager_gpu import LARGEST_WARMUP, WARMUP_BLOCK, event_facts, iterations_per_hold, take, warm_up
from commbench.measure.torch_device import CudaDevice
from tests.measure.scripted_device import ScriptedDevice, ScriptedRanks

ONE = ScriptedRanks()


def test_an_iteration_is_barrier_event_op_event_behind_a_held_stream() -> None:
    device = ScriptedDevice()
    take(device, ScriptedRanks(log=device.log), [device.op(3000)], 2)
    iteration = ["barrier", "record", "op", "record"]
    assert device.log == ["meet", "hold", *iteration, *iteration, "release", "synchronize", "meet"]


def test_device_time_is_told_and_not_the_hosts_which_is_told_apart() -> None:
    device = ScriptedDevice(queue_ns=20_000)
    block = take(device, ONE, [device.op(3000)], 10)
    assert block.latency_s == pytest.approx(np.full(10, 3e-6))
    assert block.enqueue_s == pytest.approx(np.full((1, 10), 20e-6))


def test_without_the_hold_the_host_would_have_been_measured() -> None:
    """The scripted device can tell the difference: the test above would fail if the stream were not held."""
    device = ScriptedDevice(queue_ns=20_000)
    start, end = device.event(), device.event()
    for queue in (lambda: device.record(start), device.op(3000), lambda: device.record(end)):
        queue()
    device.synchronize()
    assert device.elapsed_s(start, end) == pytest.approx(40e-6)


def test_few_iterations_are_queued_behind_one_hold() -> None:
    device = ScriptedDevice(queue_depth=64)
    assert iterations_per_hold(device) == 64 // (2 + 2 + 8)
    take(device, ONE, [device.op(1000)], 23)
    assert device.log.count("hold") == -(-23 // 5)
    assert device.deepest <= device.queue_depth


def test_a_queue_shorter_than_one_iteration_still_takes_one() -> None:
    assert iterations_per_hold(ScriptedDevice(queue_depth=3)) == 1


def test_an_iterations_latency_is_the_maximum_over_ranks_before_any_average() -> None:
    durations = itertools.cycle([1000, 5000])
    device = ScriptedDevice()

    class Opposite(ScriptedRanks):
        def gather_numbers(self, *values: float) -> np.ndarray:
            return np.array([values, values[::-1]])  # the other rank is slow where this one is fast

    block = take(device, Opposite(), [device.op(lambda: next(durations))], 6)
    assert block.device_s.shape == (2, 6)
    assert block.latency_s == pytest.approx(np.full(6, 5e-6))


def test_buffers_are_walked_through_in_turn_from_where_the_last_block_ended() -> None:
    device = ScriptedDevice()
    calls = [device.op(1000, f"set {i}") for i in range(3)]
    take(device, ONE, calls, 4, first=2)
    assert [entry for entry in device.log if entry.startswith("set")] == ["set 2", "set 0", "set 1", "set 2"]


def test_what_two_events_cost_is_found_and_taken_off() -> None:
    device = ScriptedDevice(event_ns=700)
    facts = event_facts(device, ONE)
    assert facts.overhead_s == pytest.approx(700e-9)
    assert facts.spread_s == pytest.approx(0, abs=1e-12)
    assert facts.uncertainty_s == pytest.approx(0.5e-6)
    block = take(device, ONE, [device.op(3000)], 3, overhead_s=facts.overhead_s)
    assert block.latency_s == pytest.approx(np.full(3, 3e-6))
    assert take(device, ONE, [device.op(10)], 3, overhead_s=1e-3).latency_s.tolist() == [0, 0, 0]


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        take(ScriptedDevice(), ONE, [], 0)


def test_after_an_error_in_a_call_the_stream_is_free_and_nobody_is_left_at_a_barrier() -> None:
    device = ScriptedDevice()
    good = device.op(1000)
    made = itertools.count()

    def call() -> None:
        if next(made) == 2:
            raise RuntimeError("the backend gave up")
        good()

    with pytest.raises(RuntimeError, match="gave up"):
        take(device, ONE, [call], 5)
    assert gc.isenabled()
    assert not device.held
    assert device.log[-2:] == ["abandon", "release"]
    device.synchronize()
    device.rejoin(ONE.barrier)
    assert take(device, ONE, [good], 3).latency_s == pytest.approx(np.full(3, 1e-6))


def test_a_stream_is_released_even_if_barriers_cannot_be_opened() -> None:
    class Broken(ScriptedDevice):
        def abandon(self) -> None:
            raise DeviceError("the context is gone")

    device = Broken()
    with pytest.raises(DeviceError, match="context is gone"), Held(device):
        raise RuntimeError
    assert not device.held


def test_a_stream_cannot_be_held_twice() -> None:
    device = ScriptedDevice()
    with Held(device), pytest.raises(DeviceError, match="held already"):
        device.hold()


def test_a_rank_that_failed_elsewhere_is_heard_before_times_count() -> None:
    class Failing(ScriptedRanks):
        met = 0

        def barrier(self) -> None:
            self.met += 1
            if self.met == 2:
                raise RuntimeError("rank 1: failed")

    device = ScriptedDevice()
    with pytest.raises(RuntimeError, match="rank 1"):
        take(device, Failing(), [device.op(1000)], 2)
    assert not device.held
    assert gc.isenabled()


# ---- warm-up ------------------------------------------------------------------------------------------------


def connecting(device: ScriptedDevice, slow: int) -> Callable[[], None]:
    """A collective whose first ``slow`` calls wait on the host for a connection."""
    made = itertools.count()
    first, later = device.waiting_op(50_000_000, 2000), device.op(2000)
    return lambda: (first if next(made) < slow else later)()


def test_a_call_that_connects_behind_a_held_stream_would_never_return() -> None:
    device = ScriptedDevice()
    with pytest.raises(AssertionError, match="deadlock"):
        take(device, ONE, [connecting(device, 1)], 1)


def test_warm_up_connects_before_anything_is_held_and_goes_on_until_times_are_steady() -> None:
    device = ScriptedDevice()
    call = connecting(device, slow=10)
    found = warm_up(device, ONE, [call])
    assert "hold" not in device.log
    assert found.steady
    assert 10 < found.iterations <= 10 * WARMUP_BLOCK
    assert take(device, ONE, [call], 4).latency_s == pytest.approx(np.full(4, 2e-6))


def test_warm_up_that_never_gets_steady_ends_and_says_so() -> None:
    device = ScriptedDevice()
    slower = itertools.count(1)
    found = warm_up(device, ONE, [device.op(lambda: 100_000 * next(slower))])
    assert not found.steady
    assert found.iterations == LARGEST_WARMUP


def test_warm_up_ends_when_time_is_used_up_on_the_first_rank() -> None:
    device = ScriptedDevice()
    looks = iter([True, False])
    found = warm_up(device, ONE, [device.op(1000)], afford=lambda: next(looks))
    assert found.iterations == 2 * WARMUP_BLOCK


def test_warm_up_looks_at_the_slowest_rank_and_obeys_the_first() -> None:
    class Second(ScriptedRanks):
        """This rank is rank 1: whatever it thinks, rank 0 stops after five blocks."""

        asked = 0

        def from_first(self, *values: int) -> tuple[int, ...]:
            self.asked += 1
            return (int(self.asked == 5), 2)

    device = ScriptedDevice()
    assert warm_up(device, Second((1.0, 3.0)), [device.op(1000)]).iterations == 5 * WARMUP_BLOCK


# ---- the barrier on flags, executed word by word --------------------------------------------------------------


class Streams:
    """Streams of several ranks over one memory; ``run`` picks at random whose next step is done."""

    def __init__(self, ranks: int) -> None:
        self.memory: dict[int, int] = {}
        self.steps: list[list[Callable[[], bool]]] = [[] for _ in range(ranks)]

    def write(self, stream: int, word: int, value: int) -> None:
        self.steps[stream].append(lambda: self.memory.__setitem__(word, value) is None)

    def wait(self, stream: int, word: int, value: int, equal: bool) -> None:
        def met() -> bool:
            word_now = self.memory.get(word, 0)
            return word_now == value if equal else word_now >= value

        self.steps[stream].append(met)

    def mark(self, stream: int, note: Callable[[], None]) -> None:
        self.steps[stream].append(lambda: note() is None)

    def run(self, rng: random.Random) -> None:
        queues = [list(steps) for steps in self.steps]
        while waiting := [q for q in queues if q]:
            rng.shuffle(waiting)
            for queue in waiting:
                if queue[0]():
                    queue.pop(0)
                    break
            else:
                raise AssertionError("every stream waits: a deadlock")


def barriers(size: int) -> tuple[Streams, list[FlagBarrier]]:
    streams = Streams(size)
    return streams, [FlagBarrier(streams, rank, size, 0) for rank in range(size)]


def marks(streams: Streams, order: list[tuple[str, int]], rank: int, i: int) -> tuple[Callable[[], None], ...]:
    return tuple(lambda what=what: order.append((what, i)) for what in ("in", "out"))  # type: ignore[misc]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("captured", [False, True])
def test_no_stream_leaves_a_barrier_before_all_have_come_also_in_replays(size: int, captured: bool) -> None:
    for seed in range(20):
        streams, flags = barriers(size)
        order: list[tuple[str, int]] = []
        for rank, barrier in enumerate(flags):
            for i in range(4):
                come, leave = marks(streams, order, rank, i)
                streams.mark(rank, come)
                (barrier.capture if captured else barrier.queue)(rank)
                streams.mark(rank, leave)
        if captured:  # a second replay of the same graph, on the flags that the first one left
            rng = random.Random(seed)
            streams.steps = [steps + steps for steps in streams.steps]
            streams.run(rng)
        else:
            streams.run(random.Random(seed))
        for i in range(4):
            where = [what for what, j in order if j == i]
            assert where == (["in"] * size + ["out"] * size) * (2 if captured else 1)


def test_one_captured_barrier_would_not_hold_in_its_second_replay() -> None:
    """Why graphs need two of them: the flags still show the last replay's numbers."""
    broken = 0
    for seed in range(50):
        streams, flags = barriers(2)
        order: list[tuple[str, int]] = []
        for rank, barrier in enumerate(flags):
            come, leave = marks(streams, order, rank, 0)
            streams.mark(rank, come)
            barrier.capture(rank)
            streams.mark(rank, leave)
        streams.steps = [steps + steps for steps in streams.steps]
        streams.run(random.Random(seed))
        broken += [what for what, _ in order] != ["in", "in", "out", "out"] * 2
    assert broken


@pytest.mark.parametrize("queued", [(2, 5, 5), (5, 2, 0), (0, 0, 7)])
def test_ranks_that_failed_leave_no_stream_at_a_barrier(queued: tuple[int, ...]) -> None:
    for seed in range(20):
        streams, flags = barriers(3)
        for rank, barrier in enumerate(flags):
            for _ in range(queued[rank]):
                barrier.queue(rank)
            if queued[rank] < max(queued):
                barrier.open(rank)
        streams.run(random.Random(seed))


def test_flags_of_different_ranks_share_no_cache_line() -> None:
    streams, flags = barriers(2)
    for rank, barrier in enumerate(flags):
        barrier.queue(rank)
        barrier.capture(rank)
    streams.run(random.Random(0))
    lines = {word // FLAG_BYTES for word in streams.memory}
    assert lines == {0, 1}


# ---- without hardware ---------------------------------------------------------------------------------------


def test_the_logic_needs_no_torch() -> None:
    code = (
        "import sys, commbench.measure.device, commbench.measure.eager_gpu, commbench.measure.graph; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_machine_without_a_driver_is_told_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA driver")
    with pytest.raises(BackendUnavailable, match="no CUDA driver"):
        CudaDevice("cuda:0", 0, 1, 4096)
    with pytest.raises(ValueError, match="0x1001"):
        CudaDevice("cuda:0", 0, 1, 4097)


class FakeCuda:
    """As much of torch.cuda as CudaDevice touches, on host memory: every piece of work goes into ``log``."""

    def __init__(self, log: list[tuple[object, ...]]) -> None:
        self.log, self.capturing, self.finished = log, False, True
        fake = self

        class Stream:
            cuda_stream = 77

        self.stream = Stream()

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timing = enable_timing

            def record(self, stream: object) -> None:
                fake.log.append(("record", self.timing))

            def query(self) -> bool:
                return fake.finished

            def elapsed_time(self, end: object) -> float:
                return 0.25  # milliseconds

        self.Event = Event
        self.CUDAGraph = lambda: "a graph"

    def get_device_properties(self, number: int) -> object:
        return SimpleNamespace(uuid=f"GPU-{number}")

    def current_stream(self, device: object) -> object:
        return self.stream

    def default_stream(self, device: object) -> object:
        return self.stream

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def graph(self, graph: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert stream is None  # the default stream cannot be captured
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False


class FakeDriver:
    def __init__(self, log: list[tuple[object, ...]]) -> None:
        self.log = log

    def map(self, host: int, size: int) -> int:
        self.log.append(("map", size))
        return host

    def unmap(self, host: int) -> None:
        self.log.append(("unmap",))

    def write(self, stream: int, word: int, value: int) -> None:
        self.log.append(("write", stream, word, value))

    def wait(self, stream: int, word: int, value: int, equal: bool) -> None:
        self.log.append(("wait", stream, word, value, equal))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CudaDevice, FakeCuda, int]]:
    """Rank 1 of 2, over a driver and a torch.cuda that only write down what they are told; and where its flags are."""
    import torch

    from commbench.measure import torch_device as module

    log: list[tuple[object, ...]] = []
    fake = FakeCuda(log)
    page = mmap.mmap(-1, 4096)
    place = ctypes.c_char.from_buffer(page)
    monkeypatch.setattr(module, "_Driver", lambda: FakeDriver(log))
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    address = ctypes.addressof(place)
    yield CudaDevice("cuda:0", 1, 2, address, limit_s=0.05), fake, address
    del place
    page.close()


def test_over_torch_a_hold_is_a_wait_for_a_word_that_release_writes(cuda: tuple[CudaDevice, FakeCuda, int]) -> None:
    device, fake, _ = cuda
    assert fake.log.pop() == ("map", 2 * FLAG_BYTES)
    for turn in (1, 2):
        with Held(device):
            kind, stream, word, value, equal = fake.log.pop()
            assert (kind, stream, value, equal) == ("wait", 77, turn, False)
            assert ctypes.c_int32.from_address(int(str(word))).value == turn - 1
        assert ctypes.c_int32.from_address(int(str(word))).value == turn
    assert fake.log == []


def test_over_torch_barriers_in_graphs_and_outside_use_words_of_their_own(
    cuda: tuple[CudaDevice, FakeCuda, int],
) -> None:
    device, fake, base = cuda
    fake.log.clear()
    mine, other = base + FLAG_BYTES, base
    device.barrier()
    assert fake.log == [("write", 77, mine, 1), ("wait", 77, other, 1, False)]
    fake.log.clear()
    assert device.capture(lambda: [device.barrier() for _ in range(2)]) == "a graph"  # type: ignore[arg-type,return-value]
    assert [entry[:2] for entry in fake.log] == [("write", 77), ("wait", 77)] * 4
    assert [entry[2] for entry in fake.log] == [mine + 4, other + 4, mine + 8, other + 8] * 2
    assert [entry[3] for entry in fake.log] == [1] * 4 + [2] * 4
    with pytest.raises(ValueError, match="one barrier"):
        device.capture(device.barrier)


def test_over_torch_events_tell_seconds_and_a_stream_that_never_ends_is_given_up(
    cuda: tuple[CudaDevice, FakeCuda, int],
) -> None:
    device, fake, _ = cuda
    fake.log.clear()
    start, end = device.event(), device.event()
    device.record(start)
    assert fake.log == [("record", True)]
    assert device.elapsed_s(start, end) == pytest.approx(0.25e-3)
    device.synchronize()
    fake.finished = False
    with pytest.raises(PeerLost, match=r"within 0\.05 s"):
        device.synchronize()


def test_over_torch_flags_start_from_zero_again_after_a_failure(cuda: tuple[CudaDevice, FakeCuda, int]) -> None:
    device, fake, base = cuda
    for _ in range(3):
        device.barrier()
    fake.log.clear()
    device.abandon()
    assert fake.log == [("write", 77, base + FLAG_BYTES, 3 + (1 << 20))]
    ctypes.memset(base, 7, 2 * FLAG_BYTES)
    met: list[int] = []
    device.rejoin(lambda: met.append(ctypes.c_int32.from_address(base + FLAG_BYTES).value))
    assert len(met) == 3
    assert met[1] == 0
    assert ctypes.c_int32.from_address(base).value != 0  # the other rank's flags are its own to clear
    device.close()
    assert fake.log[-1] == ("unmap",)
