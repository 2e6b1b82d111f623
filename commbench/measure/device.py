"""What measuring on a device needs of it, as an interface, and that interface over torch.cuda.

``Device`` is everything that eager_gpu.py and graph.py touch. They run on any object with these methods, so their logic
is tested without hardware on a scripted one. Torch is imported by ``CudaDevice`` only.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from commbench.errors import BackendUnavailable, CommbenchError, PeerLost
from commbench.measure.clock import now_ns

Event = Any  # what a device records
Meet = Callable[[], None]  # all ranks meet on the host, such as Team.barrier

FLAG_BYTES = 64  # a rank's flags, a cache line of their own
DRAIN_S = 60.0  # for a stream to finish what was queued


class DeviceError(CommbenchError):
    """A driver call that failed; the message names it and the driver's own word for the failure."""


class Graph(Protocol):
    """Captured work. It refers to the buffers it was captured with."""

    def replay(self) -> None:
        """Queue all of it once on the current stream."""
        ...


class Device(Protocol):
    """One rank's device and its current stream. Everything but ``synchronize`` and ``now_ns`` only queues work.

    Order of calls is order on the stream. While the stream is held nothing that is queued runs, so a host call that
    waits for the stream (an allocation that must free memory, a first collective that connects) would never return:
    hold only after warm-up, and queue at most ``queue_depth`` pieces of work meanwhile.
    """

    queue_depth: int  # work that may be queued behind a held stream
    barrier_depth: int  # pieces of work that one barrier queues

    def event(self) -> Event: ...

    def record(self, event: Event) -> None: ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Device time between two recorded events; the stream must have been synchronised after them."""
        ...

    def hold(self) -> None:
        """Work queued from here on waits for ``release``. Raises DeviceError where the stream is held already."""
        ...

    def release(self) -> None:
        """Let the stream go on. Does nothing where it is not held."""
        ...

    def barrier(self) -> None:
        """Queue a barrier of all ranks' streams, on flags that no tested backend knows. May be captured."""
        ...

    def abandon(self) -> None:
        """Let all ranks' streams pass every barrier that they queue, once this one has come to its last, after a
        failure. ``rejoin`` mends it."""
        ...

    def rejoin(self, meet: Meet) -> None:
        """Barriers work again. Collective, with nothing queued on any rank; ``meet`` is called three times."""
        ...

    def capture(self, body: Callable[[], None], around: AbstractContextManager[Any] | None = None) -> Graph:
        """Run ``body`` once without effect and keep what it queues. ``around``: entered around the capture, such as
        GroupCoordinator.graph_capture(). Nothing stays captured where body raises."""
        ...

    def synchronize(self) -> None:
        """Wait until the stream is empty. Raises PeerLost if it is not within the device's limit."""
        ...

    def now_ns(self) -> int:
        """The host's clock."""
        ...


class Held:
    """A stream held for the length of a ``with`` block.

    It is released on the way out, and after an error barriers are opened for all ranks too: what was queued must not
    leave the others' streams waiting for this one's.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._device.hold()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is not None:
                self._device.abandon()
        finally:
            self._device.release()


class _Driver:
    """The few calls of the CUDA driver that torch does not offer. Raises BackendUnavailable without a driver."""

    GEQ, EQ = 0, 1  # CU_STREAM_WAIT_VALUE_GEQ compares cyclically: (int32)(word − value) >= 0
    DEVICE_MAPPED = 2  # CU_MEMHOSTREGISTER_DEVICEMAP
    ALREADY_REGISTERED = 712

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BackendUnavailable("device timing", f"no CUDA driver: {error}") from error
        word, address, size = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t
        flags, pointer = ctypes.c_uint, ctypes.c_void_p
        # the names with _v2 are those of CUDA 12, whose stream memory operations need no driver option
        self._wait = self._function("cuStreamWaitValue32_v2", pointer, address, word, flags)
        self._write = self._function("cuStreamWriteValue32_v2", pointer, address, word, flags)
        self._register = self._function("cuMemHostRegister_v2", pointer, size, flags)
        self._unregister = self._function("cuMemHostUnregister", pointer)
        self._pointer = self._function("cuMemHostGetDevicePointer_v2", ctypes.POINTER(address), pointer, flags)

    def _function(self, name: str, *types: Any) -> Any:
        try:
            function = getattr(self._cuda, name)
        except AttributeError as error:
            raise BackendUnavailable(
                "device timing", f"the CUDA driver has no {name}", "use CUDA 12 or newer"
            ) from error
        function.argtypes, function.restype = types, ctypes.c_int

        def call(*values: Any) -> None:
            code = function(*values)
            if code:
                text = ctypes.c_char_p()
                self._cuda.cuGetErrorName(code, ctypes.byref(text))
                raise DeviceError(f"{name} failed: {(text.value or b'?').decode()} ({code})")

        return call

    def wait(self, stream: int, word: int, value: int, equal: bool) -> None:
        self._wait(stream, word, value & 0xFFFFFFFF, self.EQ if equal else self.GEQ)

    def write(self, stream: int, word: int, value: int) -> None:
        self._write(stream, word, value & 0xFFFFFFFF, 0)

    def map(self, host: int, size: int) -> int:
        """Let the device see host memory; its address there."""
        self._register(host, size, self.DEVICE_MAPPED)
        device = ctypes.c_uint64()
        self._pointer(ctypes.byref(device), host, 0)
        return int(device.value)

    def unmap(self, host: int) -> None:
        self._unregister(host)


class MemoryOps(Protocol):
    """Work on a stream with one 32-bit word of memory."""

    def write(self, stream: int, word: int, value: int) -> None: ...

    def wait(self, stream: int, word: int, value: int, equal: bool) -> None:
        """Wait until the word is ``value``, or (not equal) until (int32)(word − value) ≥ 0."""
        ...


class FlagBarrier:
    """A barrier of all ranks' streams on flags: three words for each rank, FLAG_BYTES apart, zero at first.

    Outside graphs a barrier writes a number that grows and waits until all ranks' are as large. A graph replays the
    same numbers for ever, so there a barrier has two steps, arrive and leave, that wait for equal numbers: no rank
    writes its next arrival before all have seen the last. Two captured barriers in a row, and the last of one replay
    and the first of the next, must have different numbers: hence a graph holds two barriers or more, or none.
    """

    def __init__(self, ops: MemoryOps, rank: int, size: int, flags: int) -> None:
        self._ops, self._rank, self._size, self._flags = ops, rank, size, flags
        self._epoch = 0
        self.captured = 0  # barriers in the present capture

    def queue(self, stream: int) -> None:
        self._epoch += 1
        self._signal(stream, 0, self._epoch, equal=False)

    def capture(self, stream: int) -> None:
        self.captured += 1
        for word in (1, 2):
            self._signal(stream, word, self.captured, equal=True)

    def open(self, stream: int) -> None:
        """Nobody waits for this rank any more, once its stream is here; for barriers outside graphs."""
        # On the stream, behind the barriers that are queued: from the host, their own writes would undo it. The number
        # is larger than any that is waited for, also in a cyclic comparison.
        self._ops.write(stream, self._flag(self._rank, 0), self._epoch + (1 << 20))

    def restart(self) -> None:
        """Count from the beginning again; all flags must be zero by the next barrier."""
        self._epoch = 0

    def _signal(self, stream: int, word: int, value: int, equal: bool) -> None:
        """Write this rank's word, then wait for everybody's."""
        self._ops.write(stream, self._flag(self._rank, word), value)
        for rank in range(self._size):
            if rank != self._rank:
                self._ops.wait(stream, self._flag(rank, word), value, equal)

    def _flag(self, rank: int, word: int) -> int:
        return self._flags + rank * FLAG_BYTES + 4 * word


class CudaDevice:
    """``Device`` over torch.cuda, on the stream that is current when a method is called. NOT RUN ON HARDWARE.

    The hold and the barrier are stream memory operations of the driver (write a word, wait for a word) on page-locked
    host memory: they take no multiprocessor from the op that is measured, need no compiler, and know nothing of the
    tested backend. Flags lie in memory that all ranks of the host share, FLAG_BYTES for each rank, zero at first;
    ``address`` is where it begins in this process, on a boundary of 4096 bytes.
    """

    queue_depth = 256  # launch queues of present drivers hold 1024

    def __init__(self, device: Any, rank: int, size: int, address: int, limit_s: float = DRAIN_S) -> None:
        import torch

        if address % 4096:
            raise ValueError(f"the flags begin at {address:#x}, which is no boundary of 4096 bytes")
        self._cuda = torch.cuda
        self._new_event: Any = torch.cuda.Event
        self._device = torch.device(device)
        self._rank, self._limit_s = rank, limit_s
        self.barrier_depth = size
        self._driver = _Driver()
        self._host = address
        flags = self._driver.map(address, FLAG_BYTES * size)
        self._barrier = FlagBarrier(self._driver, rank, size, flags)
        self._own = torch.zeros(1, dtype=torch.int32).pin_memory()  # the hold's word, seen by this rank only
        self._held = False
        self._holds = 0

    def close(self) -> None:
        """Release the stream and the flags."""
        self.release()
        self.synchronize()
        self._driver.unmap(self._host)

    def _stream(self) -> int:
        return int(self._cuda.current_stream(self._device).cuda_stream)

    def event(self) -> Event:
        return self._new_event(enable_timing=True)

    def record(self, event: Event) -> None:
        event.record(self._cuda.current_stream(self._device))

    def elapsed_s(self, start: Event, end: Event) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def hold(self) -> None:
        if self._held:
            raise DeviceError("the stream is held already")
        self._holds += 1
        # page-locked memory has one address for host and device under unified addressing
        self._driver.wait(self._stream(), self._own.data_ptr(), self._holds, equal=False)
        self._held = True

    def release(self) -> None:
        self._own[0] = self._holds
        self._held = False

    def barrier(self) -> None:
        if self._cuda.is_current_stream_capturing():
            self._barrier.capture(self._stream())
        else:
            self._barrier.queue(self._stream())

    def abandon(self) -> None:
        # captured barriers cannot be opened: they end in PeerLost
        self._barrier.open(self._stream())

    def rejoin(self, meet: Meet) -> None:
        self.release()
        self.synchronize()
        meet()  # nobody's stream waits for a flag any more
        ctypes.memset(self._host + self._rank * FLAG_BYTES, 0, FLAG_BYTES)
        self._barrier.restart()
        meet()  # all flags are clear
        self.barrier()
        self.synchronize()
        meet()

    def capture(self, body: Callable[[], None], around: AbstractContextManager[Any] | None = None) -> Graph:
        graph = self._cuda.CUDAGraph()
        self._barrier.captured = 0
        with around if around is not None else nullcontext():
            # a backend's own threads may call the driver meanwhile, hence not the mode "global"
            stream = self._cuda.current_stream(self._device)
            on_default = stream == self._cuda.default_stream(self._device)  # which cannot be captured
            with self._cuda.graph(graph, stream=None if on_default else stream, capture_error_mode="thread_local"):
                body()
        if self._barrier.captured == 1:
            raise ValueError("a graph with one barrier cannot be replayed: capture two or more, or none")
        return graph

    def synchronize(self) -> None:
        # not cudaStreamSynchronize: it would wait for ever for a rank that is gone
        done = self._new_event()
        done.record(self._cuda.current_stream(self._device))
        end = time.monotonic() + self._limit_s
        while not done.query():
            if time.monotonic() > end:
                raise PeerLost(f"the device did not finish what was queued within {self._limit_s:g} s")
            time.sleep(20e-6)

    def now_ns(self) -> int:
        return now_ns()
