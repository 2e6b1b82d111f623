"""Timing of captured graphs: the slope over graphs of different length, and results checked inside replays.

A graph with K calls takes T(K) = launch and events + K · latency, so (T(K₂) − T(K₁)) / (K₂ − K₁) is the latency without
what launching costs. There are two latencies, and every result says which it is:

chained    the calls follow each other at once, as in a model's graph. Ranks may run ahead of each other from call to
           call, so this is the time that one more call adds.
isolated   a device barrier stands before each call. The same graphs with the barriers alone are measured in turn with
           those, and their slope is taken off: the time of a call that all ranks enter together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from commbench.measure import eager_gpu
from commbench.measure.device import Device, Graph
from commbench.measure.eager_gpu import Ranks
from commbench.measure.loop import Call
from commbench.statistics import NOTABLE, Array, Interval, median_interval
from commbench.units import format_time

if TYPE_CHECKING:
    import torch

    from commbench.measure.buffers import Buffers
    from commbench.measure.correctness import Check

KINDS = ("isolated", "chained")
SHORT, LONG = 8, 32  # calls in the two graphs
FEWEST_CALLS = 2  # a captured barrier needs a second one (device.CudaDevice)
Around = Callable[[], AbstractContextManager[Any]]  # makes what a capture happens in


@dataclass(frozen=True, slots=True)
class Slope:
    """Latency of one call in a graph, in seconds.

    samples_s (n,): one slope for each pair of replays, from maxima over ranks. short_s, long_s (n,): those maxima,
    T(K₁) and T(K₂). enqueue_s (ranks, 2n): the host in each launch of a graph. ranks_s (ranks, n, 2): each rank's own
    T(K₁) and T(K₂), what its barriers take taken off. ``void`` says why it means nothing ("" where it does); it is then
    not to be reported as one.
    """

    kind: str
    calls: tuple[int, int]
    samples_s: Array
    short_s: Array
    long_s: Array
    enqueue_s: Array
    interval: Interval
    void: str
    ranks_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Graphs:
    """What ``replay_graphs`` measures: the short and the long graph, and if isolated the same with barriers alone."""

    kind: str
    lengths: tuple[int, int]
    graphs: tuple[Graph, ...]


def capture_calls(
    device: Device, calls: Sequence[Call], length: int, *, barriers: bool, around: Around | None = None
) -> Graph:
    """``length`` calls in a graph, ``calls`` in turn (none: barriers alone), each after a device barrier if asked for.

    Calls must have run before, outside a capture: connecting and allocating cannot be captured.
    """

    def body() -> None:
        for i in range(length):
            if barriers:
                device.barrier()
            if calls:
                calls[i % len(calls)]()

    return device.capture(body, None if around is None else around())


def measure_slope(
    device: Device,
    ranks: Ranks,
    calls: Sequence[Call],
    n: int,
    *,
    kind: str,
    lengths: tuple[int, int] = (SHORT, LONG),
    around: Around | None = None,
) -> Slope:
    """``capture_graphs``, then ``replay_graphs``."""
    if n < 1:
        raise ValueError(f"{n} replays of each graph: one at least")
    graphs = capture_graphs(device, ranks, calls, kind=kind, lengths=lengths, around=around)
    return replay_graphs(device, ranks, graphs, n)


def capture_graphs(
    device: Device,
    ranks: Ranks,
    calls: Sequence[Call],
    *,
    kind: str,
    lengths: tuple[int, int] = (SHORT, LONG),
    around: Around | None = None,
) -> Graphs:
    """Capture graphs of both lengths. Collective; call ``eager_gpu.warm_up`` before.

    Raises ValueError for lengths that are not 2 ≤ K₁ < K₂ and for a kind that is none of KINDS.
    """
    short, long = lengths
    if not FEWEST_CALLS <= short < long:
        raise ValueError(f"graphs of {short} and {long} calls: two lengths are needed, {FEWEST_CALLS} ≤ K1 < K2")
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    isolated = kind == "isolated"
    bodies: list[Sequence[Call]] = [calls, ()] if isolated else [calls]
    graphs = [
        capture_calls(device, body, length, barriers=isolated, around=around if body else None)
        for body in bodies
        for length in lengths
    ]
    ranks.barrier()  # all have captured: a rank that could not has said so, before any stream waits for its barriers
    for graph in graphs:  # a first launch puts the graph on the device: that may wait, so no stream may be held
        graph.replay()
    device.synchronize()
    return Graphs(kind, lengths, tuple(graphs))


def replay_graphs(device: Device, ranks: Ranks, graphs: Graphs, n: int) -> Slope:
    """Replay the graphs in turn, n times each. Collective.

    Each replay starts at a device barrier and lies between two events, queued behind a held stream. Graphs take turns,
    so that drift falls on all of them alike; the first turn is not counted.
    """
    isolated, turn = graphs.kind == "isolated", len(graphs.graphs)
    block = eager_gpu.take(device, ranks, [g.replay for g in graphs.graphs], turn * (n + 1), depth=1)
    size = block.device_s.shape[0]
    by_rank = block.device_s[:, turn:].reshape(size, n, turn)
    times = by_rank.max(0)
    with_calls = times[:, :2]
    barriers = times[:, 2:] if isolated else np.zeros((n, 2))
    enqueue = block.enqueue_s[:, turn:].reshape(size, n, turn)[:, :, :2]
    own = by_rank[:, :, :2] - (by_rank[:, :, 2:] if isolated else 0.0)
    return slope_of(graphs.kind, graphs.lengths, with_calls, barriers, enqueue.reshape(size, -1), own)


def slope_of(
    kind: str,
    lengths: tuple[int, int],
    times: Array,
    barriers: Array,
    enqueue_s: Array,
    ranks_s: NDArray[np.float64] | None = None,
) -> Slope:
    """The slope from times (n, 2) of the short and the long graph, and of the same with barriers alone (or zeros).

    ranks_s: as in ``Slope``; without it, one rank that has those times.
    Void if the interval of the slope reaches down to zero, and if the graphs disagree: if the long graph takes longer
    per call than the short one by more than 5 %, although more calls share its launch. No straight line with a launch
    cost of zero or more does that: a queue is full, or the device slowed down.
    """
    short, long = lengths
    gross = (times[:, 1] - times[:, 0]) / (long - short)
    samples = np.asarray(gross - (barriers[:, 1] - barriers[:, 0]) / (long - short))
    interval = median_interval(samples)
    launch = median_interval(np.asarray(times[:, 0] - short * gross))
    typical = [float(np.median(times[:, i])) for i in (0, 1)]
    void = ""
    if not interval.low > 0:
        void = (
            f"the slope is not positive: {format_time(interval.low)} to {format_time(interval.high)} per call between "
            f"graphs of {short} and {long} calls; capture more calls"
        )
    elif launch.high < 0 and launch.median < -NOTABLE * typical[0]:
        void = (
            f"the two graphs disagree: {long} calls take {format_time(typical[1] / long)} each, {short} calls only "
            f"{format_time(typical[0] / short)}"
        )
    own = (times - barriers)[None] if ranks_s is None else ranks_s
    return Slope(kind, lengths, samples, times[:, 0], times[:, 1], enqueue_s, interval, void, own)


# ---- results inside replays -----------------------------------------------------------------------------------


class Subject(Protocol):
    """A call whose results can be checked inside a graph. All but stage and check are captured."""

    def stage(self, seed: int) -> None:
        """Put fresh input aside and poison what the call sees."""
        ...

    def load(self) -> None:
        """Give the call the input that was put aside."""
        ...

    def call(self) -> object: ...

    def overwrite(self) -> None:
        """Put the result aside and poison the input, right after the call."""
        ...

    def check(self, seed: int) -> Check:
        """Hold the result that was put aside against the right answer for the input of ``seed``."""
        ...


def check_replays(
    device: Device,
    ranks: Ranks,
    subject: Subject,
    seeds: Sequence[int],
    *,
    lengths: tuple[int, int] = (SHORT, LONG),
    around: Around | None = None,
) -> Check:
    """Replay graphs of both lengths with new inputs each time, and check the last call's result. Collective.

    Inputs are overwritten on the stream right after each call, so a call that still reads its input on another stream
    is found out; they change between replays, so a graph that kept the data of its capture is, too.
    """
    if not seeds:
        raise ValueError("no seeds: at least one replay must be checked")

    def body(length: int) -> None:
        for _ in range(length):
            subject.load()
            subject.call()
            subject.overwrite()

    checks = []
    for length in lengths:
        subject.stage(seeds[0])
        graph = device.capture(lambda length=length: body(length), None if around is None else around())  # type: ignore[misc]
        for seed in seeds:
            subject.stage(seed)
            device.synchronize()
            ranks.barrier()
            graph.replay()
            device.synchronize()
            checks.append(subject.check(seed))
    total = checks[0]
    for check in checks[1:]:
        total.add(check)
    return total


class GraphBuffers:
    """The ``Subject`` of a point's buffers and their bound call."""

    def __init__(self, buffers: Buffers, call: Call, exact: bool = False) -> None:
        self._buffers, self._call, self._exact = buffers, call, exact
        self._staged = _like(buffers.input)
        self._kept = _like(buffers.output)

    def stage(self, seed: int) -> None:
        from commbench.measure.correctness import poison

        buffers = self._buffers
        buffers.refill(seed, self._exact)
        if self._staged is not None and buffers.input is not None:
            self._staged.copy_(buffers.input)
        for tensor in (buffers.input, buffers.output, self._kept):
            if tensor is not None:
                poison(tensor)

    def load(self) -> None:
        if self._staged is not None and self._buffers.input is not None:
            self._buffers.input.copy_(self._staged)

    def call(self) -> object:
        return self._call()

    def overwrite(self) -> None:
        from commbench.measure.correctness import poison

        buffers = self._buffers
        in_place = buffers.point.placement == "in"
        if in_place and self._kept is not None and buffers.output is not None:
            self._kept.copy_(buffers.output)  # in place, poisoning the input would take the result with it
        if buffers.input is not None:
            poison(buffers.input)
        if not in_place and self._kept is not None and buffers.output is not None:
            self._kept.copy_(buffers.output)

    def check(self, seed: int) -> Check:
        if self._kept is not None and self._buffers.output is not None:
            self._buffers.output.copy_(self._kept)
        return self._buffers.check(seed, self._exact)


def _like(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of the same elements in dense memory of its own."""
    return None if tensor is None else tensor.detach().clone()
