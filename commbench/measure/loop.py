"""The timed loop: the only code that runs while the clock does.

It allocates no tensor, grows no list, does no I/O and takes no lock; the garbage collector is off.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice, repeat
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from commbench.measure.clock import Clock, now_ns
from commbench.measure.gate import Gate, NativeGate, OpenGate
from commbench.native import load

if TYPE_CHECKING:
    from commbench.native._shm import BoundCall

Call = Callable[[], object]


class Block:
    """Room for the timestamps of up to ``capacity`` samples of one rank, allocated once per launch.

    room: memory to use, of 17 bytes for each sample (int64 starts, int64 ends, uint8 flags), which others may read.
    """

    def __init__(self, capacity: int, room: memoryview | None = None) -> None:
        memory = np.zeros(17 * capacity, dtype=np.uint8) if room is None else np.frombuffer(room, dtype=np.uint8)
        self.starts: NDArray[np.int64] = memory[: 8 * capacity].view(np.int64)
        self.ends: NDArray[np.int64] = memory[8 * capacity : 16 * capacity].view(np.int64)
        self.late: NDArray[np.uint8] = memory[16 * capacity : 17 * capacity]


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside; the state before comes back."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def run_block(calls: Sequence[Call], gate: Gate, n: int, block: Block, batch: int = 1, clock: Clock = now_ns) -> None:
    """Take n samples of ``batch`` iterations each into the first n places of ``block``.

    ``calls`` holds one bound collective per set of buffers and is walked through in turn.
    """
    starts, ends, late = block.starts.data, block.ends.data, block.late.data
    with no_collection():
        if batch == 1:
            for i, call in zip(range(n), cycle(calls), strict=False):
                late[i] = gate()
                start = clock()
                call()
                end = clock()
                starts[i] = start
                ends[i] = end
        else:
            endless = cycle(calls) if len(calls) > 1 else repeat(calls[0])
            for i in range(n):
                late[i] = gate()
                some = islice(endless, batch)
                start = clock()
                for call in some:
                    call()
                end = clock()
                starts[i] = start
                ends[i] = end


def run_native_block(
    calls: Sequence[BoundCall], gate: Gate, n: int, block: Block, batch: int = 1, first: int = 0
) -> None:
    """The same in compiled code, with no Python between the timestamps. ``first``: which of ``calls`` comes first.

    A gate in Python (across hosts) is entered between the samples.
    """
    native = gate if isinstance(gate, NativeGate) else None
    if native is None and not isinstance(gate, OpenGate):
        with no_collection():
            for i in range(n):
                late = gate()
                part = slice(i, i + 1)
                load().timed_loop(
                    calls, None, block.starts[part], block.ends[part], block.late[part], 0, batch, first + i * batch
                )
                block.late[i] = late
        return
    with no_collection():
        load().timed_loop(
            calls,
            None if native is None else native.native,
            block.starts[:n],
            block.ends[:n],
            block.late[:n],
            0 if native is None else native.delta_ns,
            batch,
            first,
        )


def nothing() -> None:
    """The empty call, for measuring what the loop itself costs."""
