"""``Device`` over torch: with holds and barriers of streams on CUDA, without them elsewhere.

Everything that depends on a driver stands here; nothing here is imported where there is no device.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from commbench.backends.accelerators import VENDORS, number_on_host
from commbench.errors import BackendUnavailable, CommbenchError, PeerLost
from commbench.measure.clock import now_ns
from commbench.measure.device import FLAG_BYTES, Device, DeviceError, Event, FlagBarrier, Graph, Meet
from commbench.native.segment import create_file

DRAIN_S = 60.0  # for a stream to finish what was queued
HOLD_S = 10.0  # a stream that is held for longer is let go: a call waits for it on the host


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


class _Watch:
    """A thread that lets a stream go when it was held for too long: the rank that holds it may wait for it itself."""

    def __init__(self, let_go: Callable[[], None], limit_s: float = HOLD_S) -> None:
        self._let_go, self._limit_s = let_go, limit_s
        self._since = 0.0
        self._expired = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="held stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # it wakes rarely, so that it takes nothing from what is measured
        while not self._stopped.wait(self._limit_s / 2):
            since = self._since
            if since and not self._expired and time.monotonic() - since > self._limit_s:
                self._expired = True
                self._let_go()

    def begin(self) -> None:
        self._expired = False
        self._since = time.monotonic()

    def end(self) -> bool:
        """Whether the stream had to be let go since ``begin``."""
        self._since = 0.0
        expired, self._expired = self._expired, False
        return expired

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def identity_of(device: Any) -> str:
    """Host and unique id of a torch device; its number on the host where torch tells no id."""
    import torch

    module: Any = torch.get_device_module(device)
    number = device.index if device.index is not None else module.current_device()
    known = module.get_device_properties(number) if hasattr(module, "get_device_properties") else None
    name = getattr(known, "uuid", None)
    if name is None:
        name = number_on_host(device.type, number) if device.type in VENDORS else number
    return f"{os.uname().nodename} {device.type} {name}"


class CudaDevice:
    """``Device`` over torch.cuda, on the stream that is current when a method is called. NOT RUN ON HARDWARE.

    The hold and the barrier are stream memory operations of the driver (write a word, wait for a word) on page-locked
    host memory: they take no multiprocessor from the op that is measured, need no compiler, and know nothing of the
    tested backend. Flags lie in memory that all ranks of the host share, FLAG_BYTES for each rank, zero at first;
    ``address`` is where it begins in this process, on a boundary of 4096 bytes; ``memory`` is what keeps it there.
    """

    queue_depth = 256  # launch queues of present drivers hold 1024
    graphs = isolated = True
    remark = ""

    def __init__(
        self, device: Any, rank: int, size: int, address: int, limit_s: float = DRAIN_S, memory: object = None
    ) -> None:
        import torch

        if address % 4096:
            raise ValueError(f"the flags begin at {address:#x}, which is no boundary of 4096 bytes")
        self._cuda = torch.cuda
        self._new_event: Any = torch.cuda.Event
        self._device = torch.device(device)
        self._rank, self._limit_s, self._memory = rank, limit_s, memory
        self.barrier_depth = size
        self._driver = _Driver()
        self.identity = identity_of(self._device)
        self._host = address
        flags = self._driver.map(address, FLAG_BYTES * size)
        self._barrier = FlagBarrier(self._driver, rank, size, flags)
        self._own = torch.zeros(1, dtype=torch.int32).pin_memory()  # the hold's word, seen by this rank only
        self._held = False
        self._holds = 0
        self._watch = _Watch(self._let_go)

    def close(self) -> None:
        """Release the stream and the flags."""
        self._watch.stop()
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
        self._watch.begin()

    def _let_go(self) -> None:
        self._own[0] = self._holds

    def release(self) -> None:
        self._let_go()
        was_held, self._held = self._held, False
        if self._watch.end() and was_held:
            raise DeviceError(
                f"a call waited on the host for the stream that was held for timing, until {HOLD_S:g} s had gone by: "
                "it cannot be timed eagerly on a device; measure it with --mode graph"
            )

    def barrier(self) -> None:
        if self._cuda.is_current_stream_capturing():
            self._barrier.capture(self._stream())
        else:
            self._barrier.queue(self._stream())

    def abandon(self) -> None:
        # captured barriers cannot be opened: they end in PeerLost
        self._barrier.open(self._stream())

    def rejoin(self, meet: Meet) -> None:
        self._let_go()
        self._held = False
        self._watch.end()
        self.synchronize()
        meet()  # nobody's stream waits for a flag any more
        ctypes.memset(self._host + self._rank * FLAG_BYTES, 0, FLAG_BYTES)
        self._barrier.restart()
        meet()  # all flags are clear
        self.barrier()
        self.synchronize()
        meet()

    def capture(self, body: Callable[[], None], around: AbstractContextManager[Any] | None = None) -> Graph:
        self._barrier.captured = 0
        graph = _captured(self._cuda, self._device, body, around)
        if self._barrier.captured == 1:
            raise ValueError("a graph with one barrier cannot be replayed: capture two or more, or none")
        return graph

    def synchronize(self) -> None:
        _drain(self._cuda, self._device, self._limit_s)

    def now_ns(self) -> int:
        return now_ns()


class HostEvent:
    """What stands for an event where a device module has none that tell times: the host's clock, once the device has
    done all that was queued before."""

    at_ns = 0


class StreamDevice:
    """``Device`` over any torch device module (ROCm, XPU, NPU, HPU). NOT RUN ON HARDWARE.

    Without a way to hold a stream or to make streams meet, ranks meet on the host and one iteration is queued at a
    time: what the events tell holds the host's time to queue the call too. ``remark`` says so with every point, and
    where the module has no events that tell times, that the host's clock does.
    """

    queue_depth = 1
    barrier_depth = 0
    isolated = False

    def __init__(self, device: Any, limit_s: float = DRAIN_S) -> None:
        import torch

        self._device = torch.device(device)
        self._module: Any = torch.get_device_module(self._device)
        self._limit_s = limit_s
        self.identity = identity_of(self._device)
        self.graphs = hasattr(self._module, "CUDAGraph") and hasattr(self._module, "graph")
        self._timed = _tells_times(self._module)
        self.remark = (
            "ranks met on the host and the stream could not be held: the time holds what the host needs to queue the "
            "call" + ("" if self._timed else f"; {self._device.type} has no events that tell times, so the host timed")
        )

    def close(self) -> None:
        self.synchronize()

    def event(self) -> Event:
        return self._module.Event(enable_timing=True) if self._timed else HostEvent()

    def record(self, event: Event) -> None:
        if self._timed:
            event.record(self._module.current_stream(self._device))
        else:
            self.synchronize()
            event.at_ns = now_ns()

    def elapsed_s(self, start: Event, end: Event) -> float:
        if self._timed:
            return float(start.elapsed_time(end)) * 1e-3
        return float(end.at_ns - start.at_ns) * 1e-9

    def hold(self) -> None:
        pass

    def release(self) -> None:
        pass

    def barrier(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def rejoin(self, meet: Meet) -> None:
        self.synchronize()
        for _ in range(3):
            meet()

    def capture(self, body: Callable[[], None], around: AbstractContextManager[Any] | None = None) -> Graph:
        if not self.graphs:
            raise BackendUnavailable("mode graph", f"torch has no graphs for {self._device.type}", "take --mode eager")
        return _captured(self._module, self._device, body, around)

    def synchronize(self) -> None:
        _drain(self._module, self._device, self._limit_s)

    def now_ns(self) -> int:
        return now_ns()


def _captured(module: Any, device: Any, body: Callable[[], None], around: AbstractContextManager[Any] | None) -> Graph:
    graph: Graph = module.CUDAGraph()
    with around if around is not None else nullcontext():
        stream = module.current_stream(device)
        on_default = stream == module.default_stream(device)  # which cannot be captured
        # a backend's own threads may call the driver meanwhile, hence not the mode "global"
        with module.graph(graph, stream=None if on_default else stream, capture_error_mode="thread_local"):
            body()
    return graph


def _tells_times(module: Any) -> bool:
    """Whether a device module has events that tell the time between two of them."""
    try:
        event = module.Event(enable_timing=True)
    except (AttributeError, NotImplementedError, TypeError):
        return False
    return hasattr(event, "elapsed_time")


def _drain(module: Any, device: Any, limit_s: float) -> None:
    """Wait until the current stream is empty. Raises PeerLost if it is not within the limit."""
    if not hasattr(module, "Event"):
        module.synchronize()  # without a limit: the command that watches has one
        return
    # no synchronisation of the library's: it would wait for ever for a rank that is gone
    done = module.Event()
    done.record(module.current_stream(device))
    end = time.monotonic() + limit_s
    while not done.query():
        if time.monotonic() > end:
            raise PeerLost(f"the device did not finish what was queued within {limit_s:g} s")
        time.sleep(20e-6)


class Texts(Protocol):
    """What opening a device needs of the ranks; ``Team`` is one."""

    rank: int
    size: int

    def gather_texts(self, text: str) -> list[str]: ...


def shared_flags(ranks: Texts) -> mmap.mmap:
    """A page that all ranks of this host map, zero at first. Collective.

    Raises BackendUnavailable on every rank where some rank cannot see rank 0's file (another host).
    """
    size = -(-FLAG_BYTES * ranks.size // mmap.PAGESIZE) * mmap.PAGESIZE
    path, problem, handle = "", "", None
    if ranks.rank == 0:
        try:
            handle, made = create_file(size)
            path = str(made)
        except OSError as error:
            problem = f"no shared memory: {error}"
    path = ranks.gather_texts(path)[0]
    page = None
    try:
        with Path(path).open("r+b") as file:
            page = mmap.mmap(file.fileno(), size)
    except (OSError, ValueError) as error:
        problem = (
            problem or f"rank {ranks.rank} cannot map rank 0's flags ({error}); on devices a launch spans one host"
        )
    problems = [text for text in ranks.gather_texts(problem) if text]
    if handle is not None:
        Path(path).unlink()
        os.close(handle)  # the lock on the name is not needed any more
    if problems or page is None:
        raise BackendUnavailable("device timing", problems[0])
    return page


def open_device(ranks: Texts, device: Any) -> Device:
    """The ``Device`` of this rank's torch device: with holds and stream barriers on CUDA, without them elsewhere.

    Collective. Raises BackendUnavailable on every rank where one rank has no driver that is new enough.
    """
    import torch

    if device.type != "cuda" or torch.version.hip:
        return StreamDevice(device)
    page = shared_flags(ranks)
    opened, problem = None, ""
    first = ctypes.c_char.from_buffer(page)  # holds the page
    try:
        opened = CudaDevice(device, ranks.rank, ranks.size, ctypes.addressof(first), memory=first)
    except (CommbenchError, RuntimeError, ValueError) as error:
        problem = f"rank {ranks.rank}: {error}"
    problems = [text for text in ranks.gather_texts(problem) if text]
    if problems or opened is None:
        raise BackendUnavailable("device timing", problems[0])
    return opened
