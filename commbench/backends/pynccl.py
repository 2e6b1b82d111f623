"""NCCL (on ROCm: RCCL) called directly through ctypes, on a communicator of the group's own.

The library is the one that torch's wheel brings, so that no second copy is loaded; COMMBENCH_NCCL_LIBRARY names
another. The host waits for other ranks for COMMBENCH_NCCL_TIMEOUT (45s) at most: at set-up, in the first call of a
kind (from 2.22 on NCCL connects ranks when an algorithm is first used), in barriers and at the end. Later calls do not
wait on the host. The communicator is a blocking one, as in engines: from 2.23 on a non-blocking one starts a thread for
every call, which would be measured. Work goes on the stream that is current when an operation is called, so it can be
captured.
NOT RUN ON HARDWARE beyond what needs no GPU: finding the library, its version, a unique id, a failing set-up.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from commbench.backends import device as devices
from commbench.backends.base import Availability, Backend, Group, together
from commbench.errors import BackendUnavailable, CollectiveError, PeerLost
from commbench.types import CallSignature
from commbench.units import parse_duration

LIBRARY_VARIABLE = "COMMBENCH_NCCL_LIBRARY"
TIMEOUT_VARIABLE = "COMMBENCH_NCCL_TIMEOUT"
DEFAULT_TIMEOUT_S = 45.0  # less than ranks wait for each other's notes on a set-up

# ---- nccl.h: what is used of it -------------------------------------------------------------------------------

UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
_UNDEFINED_INT = -(2**31)
_MAGIC = 0xCAFEBEEF
# The layout that NCCL 2.18 had. Newer libraries read no more than ``size`` bytes and take their defaults for the rest.
_CONFIG_VERSION = 21800


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    ]

    def __init__(self) -> None:
        super().__init__(ctypes.sizeof(Config), _MAGIC, _CONFIG_VERSION)
        self.blocking = 1
        for name in ("cgaClusterSize", "minCTAs", "maxCTAs", "splitShare"):
            setattr(self, name, _UNDEFINED_INT)


_INT, _SIZE, _TEXT = ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
_POINTER = _COMM = _STREAM = ctypes.c_void_p  # memory, ncclComm_t, cudaStream_t
FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "ncclGetVersion": (_INT, (ctypes.POINTER(_INT),)),
    "ncclGetUniqueId": (_INT, (ctypes.POINTER(UniqueId),)),
    "ncclGetErrorString": (_TEXT, (_INT,)),
    "ncclGetLastError": (_TEXT, (_COMM,)),
    "ncclCommInitRankConfig": (_INT, (ctypes.POINTER(_COMM), _INT, UniqueId, _INT, ctypes.POINTER(Config))),
    "ncclCommGetAsyncError": (_INT, (_COMM, ctypes.POINTER(_INT))),
    "ncclCommFinalize": (_INT, (_COMM,)),
    "ncclCommDestroy": (_INT, (_COMM,)),
    "ncclCommAbort": (_INT, (_COMM,)),
    "ncclGroupStart": (_INT, ()),
    "ncclGroupEnd": (_INT, ()),
    "ncclAllReduce": (_INT, (_POINTER, _POINTER, _SIZE, _INT, _INT, _COMM, _STREAM)),
    "ncclAllGather": (_INT, (_POINTER, _POINTER, _SIZE, _INT, _COMM, _STREAM)),
    "ncclReduceScatter": (_INT, (_POINTER, _POINTER, _SIZE, _INT, _INT, _COMM, _STREAM)),
    "ncclBroadcast": (_INT, (_POINTER, _POINTER, _SIZE, _INT, _INT, _COMM, _STREAM)),
    "ncclReduce": (_INT, (_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _COMM, _STREAM)),
    "ncclSend": (_INT, (_POINTER, _SIZE, _INT, _INT, _COMM, _STREAM)),
    "ncclRecv": (_INT, (_POINTER, _SIZE, _INT, _INT, _COMM, _STREAM)),
}
# in libraries that are new enough; nccl_symm needs them
OPTIONAL: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "ncclMemAlloc": (_INT, (ctypes.POINTER(_POINTER), _SIZE)),
    "ncclMemFree": (_INT, (_POINTER,)),
    "ncclCommWindowRegister": (_INT, (_COMM, _POINTER, _SIZE, ctypes.POINTER(_POINTER), _INT)),
    "ncclCommWindowDeregister": (_INT, (_COMM, _POINTER)),
}
DTYPE_CODES: Mapping[torch.dtype, int] = {
    torch.int8: 0, torch.uint8: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
    torch.float64: 8, torch.bfloat16: 9, torch.float8_e4m3fn: 10, torch.float8_e5m2: 11,
}  # fmt: skip
OP_CODES: Mapping[str, int] = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_BYTE = DTYPE_CODES[torch.uint8]
_FP8_VERSION = 22400  # the release whose header first has ncclFloat8e4m3
_FP8_CAPABILITY = (9, 0)


def version_text(code: int) -> str:
    """22703 → 2.27.3; before 2.9 the parts had fewer digits."""
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


# ---- the library ---------------------------------------------------------------------------------------------


def candidates() -> list[str]:
    """Where the library may be, best first: the one asked for, the one of torch's wheels, the system's."""
    asked = os.environ.get(LIBRARY_VARIABLE, "")
    if asked:
        return [asked]
    if torch.version.hip:
        return [str(Path(torch.__file__).parent / "lib" / "librccl.so"), "librccl.so.1"]
    found = []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        library = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
        if library.is_file():
            found.append(str(library))
    return [*found, "libnccl.so.2"]


@functools.cache
def open_library(path: str) -> Any:
    """The shared library with typed functions. Raises OSError where it is not there, BackendUnavailable where it is too
    old for what is called here."""
    library = ctypes.CDLL(path)
    for name, (result, arguments) in {**FUNCTIONS, **OPTIONAL}.items():
        function = getattr(library, name, None)
        if function is None:
            if name in OPTIONAL:
                continue
            raise BackendUnavailable("pynccl", f"{path} has no {name}", "use NCCL 2.18 or newer")
        function.restype, function.argtypes = result, arguments
    return library


def load() -> Any:
    """The first library of ``candidates``. Raises BackendUnavailable."""
    problems = []
    for path in candidates():
        try:
            return open_library(path)
        except OSError as error:
            problems.append(str(error))
    remedy = f"install a CUDA build of torch, or set {LIBRARY_VARIABLE} to a libnccl.so.2"
    raise BackendUnavailable("pynccl", f"no NCCL library: {problems[0]}", remedy)


def version(library: Any) -> int:
    """NCCL_VERSION_CODE of the library, such as 22703."""
    code = ctypes.c_int()
    problem = library.ncclGetVersion(ctypes.byref(code))
    if problem:
        raise BackendUnavailable("pynccl", f"ncclGetVersion failed: {_error_text(library, problem)}")
    return code.value


def unique_id(library: Any) -> bytes:
    """128 bytes that name a new communicator. Needs no GPU."""
    made = UniqueId()
    problem = library.ncclGetUniqueId(ctypes.byref(made))
    if problem:
        text = _error_text(library, problem)
        raise BackendUnavailable(
            "pynccl", f"ncclGetUniqueId failed: {text}", "NCCL_SOCKET_IFNAME names the network interface to use"
        )
    return bytes(made)


def _error_text(library: Any, code: int) -> str:
    words = (library.ncclGetErrorString(code) or b"?").decode()
    last = (library.ncclGetLastError(None) or b"").decode().strip()
    return f"{words} ({code})" + (f": {last.splitlines()[0]}" if last else "")


class Communicator:
    """An ncclComm_t of this rank. Raises CollectiveError (PeerLost where a rank does not answer)."""

    def __init__(
        self,
        library: Any,
        world_size: int,
        rank: int,
        id_bytes: bytes,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        """Collective; raises BackendUnavailable where NCCL cannot make it, at the latest after timeout_s seconds.

        device: where, None for the current one.
        """
        self.library, self.timeout_s, self._device = library, timeout_s, device
        self.handle = ctypes.c_void_p()
        self.address = 0
        self.left = False  # a thread is still in a call of it
        name, made, config = UniqueId.from_buffer_copy(id_bytes), ctypes.c_void_p(), Config()
        what = "ncclCommInitRankConfig"
        try:
            code = self.in_time(
                what,
                lambda: library.ncclCommInitRankConfig(
                    ctypes.byref(made), world_size, name, rank, ctypes.byref(config)
                ),
            )
            self.handle.value = made.value  # not before: a set-up that goes on by itself cannot be aborted
            self.wait(code, what)
        except CollectiveError as error:
            self.abort()
            raise BackendUnavailable(
                "pynccl", str(error), "NCCL_DEBUG=WARN tells more; NCCL needs a GPU of its own for each rank"
            ) from error
        self.address = int(self.handle.value or 0)

    def in_time(self, what: str, call: Callable[[], int]) -> int:
        """What a call gives that waits for other ranks, without a limit of its own. Raises PeerLost after timeout_s.

        It runs on a thread, which stays in it where nobody comes: NCCL has no safe way out of a blocking call.
        """
        codes: list[int] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                if self._device is not None:  # each thread has its own current device
                    devices.activate(self._device)
                codes.append(call())
            except Exception as error:  # noqa: BLE001 - goes on in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if errors:
            raise errors[0]
        if not codes:
            raise PeerLost(f"{what}: another rank did not answer within {self.timeout_s:g} s")
        return codes[0]

    def wait(self, code: int, what: str) -> None:
        """Return once the last call is through; code is what it gave (in progress: NCCL_COMM_BLOCKING=0 is set)."""
        until = time.monotonic() + self.timeout_s
        state = ctypes.c_int(code)
        while state.value == IN_PROGRESS:
            if time.monotonic() > until:
                self.abort()
                raise PeerLost(f"{what}: another rank did not answer within {self.timeout_s:g} s")
            problem = self.library.ncclCommGetAsyncError(self.handle, ctypes.byref(state))
            if problem:
                state.value = problem
            elif state.value == IN_PROGRESS:
                time.sleep(20e-6)
        if state.value != SUCCESS:
            raise CollectiveError(f"{what} failed: {_error_text(self.library, state.value)}")

    def check(self) -> None:
        """Raises CollectiveError, after an abort, if an operation has failed since it was queued."""
        state = ctypes.c_int()
        problem = self.library.ncclCommGetAsyncError(self.handle, ctypes.byref(state)) or state.value
        if problem not in (SUCCESS, IN_PROGRESS):
            text = _error_text(self.library, problem)
            self.abort()
            raise CollectiveError(f"NCCL reports an asynchronous error: {text}")

    def abort(self) -> None:
        """End it at once, whatever is queued; the handle is gone."""
        if self.handle.value:
            self.library.ncclCommAbort(self.handle)
        self.handle.value, self.address = None, 0

    def leave(self) -> None:
        """Give it up without an end: a thread is still in a call of it, which goes with the process."""
        self.handle, self.address, self.left = ctypes.c_void_p(), 0, True

    def close(self) -> None:
        """Finish what is queued and release it; left alone where that takes too long."""
        if not self.handle.value:
            return
        try:
            code = self.in_time("ncclCommFinalize", lambda: self.library.ncclCommFinalize(self.handle))
        except PeerLost:
            self.leave()
            return
        try:
            self.wait(code, "ncclCommFinalize")
        except CollectiveError:
            self.abort()
            return
        self.library.ncclCommDestroy(self.handle)
        self.handle.value, self.address = None, 0


# ---- the backend ---------------------------------------------------------------------------------------------


class PyNcclBackend(Backend):
    """Every collective by NCCL's functions; those that NCCL has not are made of grouped sends and receives."""

    name = "pynccl"
    collectives = frozenset(
        {
            "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "reduce", "gather", "scatter",
            "send_recv", "send", "recv", "barrier", "all_gatherv", "reduce_scatterv",
        }
    )  # fmt: skip

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        library, code = together(group, self.name, lambda: _version_of(self.find()))[group.rank]
        self._library = self.find()
        self.version = code
        self.provider = f"{library} {version_text(code)}"
        first = group.rank == 0
        names = together(group, self.name, lambda: unique_id(self._library) if first else b"")
        timeout_s = parse_duration(os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_S) + "s"))
        devices.activate(group.device)
        # NCCL's ranks meet in here, so it must not be a step of ``together``; a rank that never comes costs the timeout
        self._comm = Communicator(self._library, group.world_size, group.rank, names[0], timeout_s, group.device)
        self._handle = self._comm.address
        self._stream = devices.raw_stream(group.device)
        self._all_reduce = self._library.ncclAllReduce
        self._one = torch.ones(1, device=group.device)
        self._connected: set[Hashable] = set()  # kinds of calls that have been made

    @classmethod
    def find(cls) -> Any:
        """The library with its functions. Raises BackendUnavailable."""
        return load()

    @classmethod
    def availability(cls, device: str) -> Availability:
        problem = devices.missing(device, "cuda", "hip")
        if problem is not None:
            return Availability(False, *problem)
        try:
            library, code = _version_of(cls.find())
        except BackendUnavailable as error:
            return Availability(False, error.reason, error.remedy)
        return Availability(True, provider=f"{library} {version_text(code)}")

    def declines(self, call: CallSignature) -> str | None:
        missing = super().declines(call)
        if missing is not None:
            return missing
        if call.layout != "contiguous":
            return f"NCCL takes contiguous tensors, this one is {call.layout}"
        if call.op == "avg" and "int" in call.dtype:
            return f"the average of {call.dtype} is not exact"
        if call.op and call.dtype.startswith("float8"):
            if self.version < _FP8_VERSION:
                return f"NCCL {version_text(self.version)} does not reduce {call.dtype}, 2.24 does"
            if devices.capability(self.group.device) < _FP8_CAPABILITY:
                return f"NCCL reduces {call.dtype} from compute capability 9.0 on"
        if call.collective == "barrier" and call.mode != "eager":
            return "a barrier waits on the host, which a graph cannot hold"
        return None

    # ---- calls ------------------------------------------------------------------------------------------------

    def _done(self, code: int, what: str) -> None:
        """After a call that did not succeed at once: it is in progress, or failed."""
        self._check_alive()
        try:
            self._comm.wait(code, what)
        finally:
            self._handle = self._comm.address  # 0 after an abort, which NCCL answers with an error

    def _first(self, kind: Hashable, what: str, call: Callable[[], int], held: object) -> int:
        """The first call of a kind (function, size, dtype, op, peer), which may have to connect ranks: NCCL waits for
        them on the host without a limit. Raises PeerLost after the timeout; the communicator is then lost, for its call
        goes on, and so must the tensors (held) that it has the addresses of. During a capture, before which calls are
        made once, it runs as it is."""
        if devices.is_capturing():
            return call()

        def holding() -> int:
            code = call()
            del kept[:]
            return code

        kept = [held]
        try:
            code = self._comm.in_time(what, holding)
        except PeerLost:
            self._comm.leave()
            self._handle = 0
            raise
        if code:
            self._done(code, what)
        self._connected.add(kind)
        return SUCCESS

    def _run(self, kind: Hashable, what: str, call: Callable[[], int], held: object) -> None:
        """Make a call of that kind, whichever it is. held: the tensors that it has the addresses of."""
        code = call() if kind in self._connected else self._first(kind, what, call, held)
        if code:
            self._done(code, what)

    def _grouped(self, kind: tuple[Hashable, ...], calls: Sequence[Callable[[], int]], held: object) -> None:
        """Calls that run as one: none of them waits for another. kind: what they are in words, and what they are alike
        in when they are made again."""
        self._check_alive()

        def group() -> int:  # as a whole on one thread, since a group belongs to the thread that starts it
            self._library.ncclGroupStart()
            problem = 0
            try:
                for call in calls:
                    code = call()
                    problem = problem or (code if code != IN_PROGRESS else 0)
            finally:  # an open group would swallow every later call
                code = self._library.ncclGroupEnd()
            return problem or code

        self._run(kind, str(kind[0]), group, held)

    def _check_alive(self) -> None:
        if not self._comm.address:
            raise CollectiveError(f"{self.name}: the communicator was aborted after an earlier failure")

    def _send(self, part: torch.Tensor, peer: int) -> Callable[[], int]:
        return functools.partial(
            self._library.ncclSend, part.data_ptr(), _bytes(part), _BYTE, peer, self._handle, self._stream()
        )

    def _recv(self, part: torch.Tensor, peer: int) -> Callable[[], int]:
        return functools.partial(
            self._library.ncclRecv, part.data_ptr(), _bytes(part), _BYTE, peer, self._handle, self._stream()
        )

    def _reduce(self, source: torch.Tensor, target: torch.Tensor, count: int, dtype: int, op: int) -> None:
        """ncclAllReduce of dense tensors."""
        facts = count, dtype, op
        call = functools.partial(
            self._all_reduce, source.data_ptr(), target.data_ptr(), *facts, self._handle, self._stream()
        )
        self._run(("ncclAllReduce", *facts), "ncclAllReduce", call, (source, target))

    def bound(self, call: CallSignature) -> Callable[..., None]:
        if call.collective != "all_reduce":
            return super().bound(call)
        return self._path(getattr(torch, call.dtype), call.numel, call.op, in_place=call.placement == "in")

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self._path(input.dtype, input.numel(), op, in_place=False)(input, output, op)

    def _path(self, dtype: torch.dtype, numel: int, op: str, *, in_place: bool) -> Callable[..., None]:
        """all_reduce of so many elements of one dtype. in_place: the output is always the input, which is dense."""
        function, stream, connected = self._all_reduce, self._stream, self._connected
        dtype_code, op_code = DTYPE_CODES[dtype], OP_CODES[op]
        kind = "ncclAllReduce", numel, dtype_code, op_code

        def all_reduce(input: torch.Tensor, output: torch.Tensor, op: str) -> None:
            self.calls += 1
            target = output if in_place or output.is_contiguous() else devices.dense(output)
            if kind in connected:
                code = function(input.data_ptr(), target.data_ptr(), numel, dtype_code, op_code, self._handle, stream())
                if code:
                    self._done(code, "ncclAllReduce")
            else:
                self._reduce(input, target, numel, dtype_code, op_code)
            if target is not output:
                output.copy_(target)

        return all_reduce

    def all_gather(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self.calls += 1
        target = devices.dense(output)
        size = _bytes(input)
        call = functools.partial(
            self._library.ncclAllGather, input.data_ptr(), target.data_ptr(), size, _BYTE, self._handle, self._stream()
        )
        self._run(("ncclAllGather", size), "ncclAllGather", call, (input, target))
        if target is not output:
            output.copy_(target)

    def reduce_scatter(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self.calls += 1
        target = devices.dense(output)
        facts = output.numel(), DTYPE_CODES[input.dtype], OP_CODES[op]
        call = functools.partial(
            self._library.ncclReduceScatter, input.data_ptr(), target.data_ptr(), *facts, self._handle, self._stream()
        )
        self._run(("ncclReduceScatter", *facts), "ncclReduceScatter", call, (input, target))
        if target is not output:
            output.copy_(target)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.calls += 1
        address, facts = tensor.data_ptr(), (_bytes(tensor), _BYTE, src)
        call = functools.partial(self._library.ncclBroadcast, address, address, *facts, self._handle, self._stream())
        self._run(("ncclBroadcast", *facts), "ncclBroadcast", call, tensor)

    def reduce(self, input: torch.Tensor, output: torch.Tensor, dst: int, op: str) -> None:
        self.calls += 1
        target = devices.dense(output)
        facts = input.numel(), DTYPE_CODES[input.dtype], OP_CODES[op], dst
        call = functools.partial(
            self._library.ncclReduce, input.data_ptr(), target.data_ptr(), *facts, self._handle, self._stream()
        )
        self._run(("ncclReduce", *facts), "ncclReduce", call, (input, target))
        if target is not output:
            output.copy_(target)

    def all_to_all(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self.calls += 1
        target = devices.dense(output)
        n = self.group.world_size
        sources, targets = input.view(-1).chunk(n), target.view(-1).chunk(n)
        if input.numel():
            calls = [call for i in range(n) for call in (self._send(sources[i], i), self._recv(targets[i], i))]
            self._grouped(("all_to_all of sends and receives", _bytes(sources[0])), calls, (input, target))
        if target is not output:
            output.copy_(target)

    def gather(self, input: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        self.calls += 1
        calls = [self._send(input, dst)] if input.numel() else []
        target = None if output is None else devices.dense(output)
        if target is not None and input.numel():
            parts = target.view(-1).chunk(self.group.world_size)
            calls += [self._recv(part, i) for i, part in enumerate(parts)]
        self._grouped(("gather of sends and receives", _bytes(input), dst), calls, (input, target))
        if output is not None and target is not None and target is not output:
            output.copy_(target)

    def scatter(self, input: torch.Tensor | None, output: torch.Tensor, src: int) -> None:
        self.calls += 1
        target = devices.dense(output)
        calls = [self._recv(target, src)] if output.numel() else []
        source = None if input is None else input.contiguous()  # of the signature, only the output is known to be dense
        if source is not None and output.numel():
            parts = source.view(-1).chunk(self.group.world_size)
            calls += [self._send(part, i) for i, part in enumerate(parts)]
        self._grouped(("scatter of sends and receives", _bytes(output), src), calls, (source, target))
        if target is not output:
            output.copy_(target)

    def send_recv(self, input: torch.Tensor, output: torch.Tensor, dst: int, src: int) -> None:
        self.calls += 1
        target = devices.dense(output)
        self._grouped(
            ("a send and a receive", _bytes(input), dst, src),
            [self._send(input, dst), self._recv(target, src)],
            (input, target),
        )
        if target is not output:
            output.copy_(target)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.calls += 1
        self._run(("ncclSend", _bytes(tensor), dst), "ncclSend", self._send(tensor, dst), tensor)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self.calls += 1
        target = devices.dense(tensor)
        self._run(("ncclRecv", _bytes(tensor), src), "ncclRecv", self._recv(target, src), target)
        if target is not tensor:
            tensor.copy_(target)

    def all_gatherv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int]) -> None:
        self.calls += 1
        target = devices.dense(output)
        row = math.prod(output.shape[1:]) * output.element_size()
        stream, first, calls = self._stream(), 0, []
        for root, rows in enumerate(sizes):
            part = target.data_ptr() + first * row
            if rows:
                mine = input.data_ptr() if root == self.group.rank else part
                calls.append(
                    functools.partial(
                        self._library.ncclBroadcast, mine, part, rows * row, _BYTE, root, self._handle, stream
                    )
                )
            first += rows
        self._grouped(("all_gatherv of broadcasts", row, *sizes), calls, (input, target))
        if target is not output:
            output.copy_(target)

    def reduce_scatterv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int], op: str) -> None:
        self.calls += 1
        target = devices.dense(output)
        row = math.prod(input.shape[1:])
        stream, first, calls = self._stream(), 0, []
        for root, rows in enumerate(sizes):
            part = input.data_ptr() + first * row * input.element_size()
            if rows:
                into = target.data_ptr() if root == self.group.rank else 0  # only the root's is written
                calls.append(
                    functools.partial(
                        self._library.ncclReduce, part, into, rows * row, DTYPE_CODES[input.dtype], OP_CODES[op], root,
                        self._handle, stream,
                    )
                )  # fmt: skip
            first += rows
        self._grouped(("reduce_scatterv of reductions", row, input.dtype, op, *sizes), calls, (input, target))
        if target is not output:
            output.copy_(target)

    def barrier(self) -> None:
        self.calls += 1
        self._reduce(self._one, self._one, 1, DTYPE_CODES[torch.float32], OP_CODES["max"])
        self.wait()

    def wait(self) -> None:
        """Until the current stream is empty. Raises CollectiveError where NCCL reports a failure meanwhile, PeerLost,
        after an abort, where it takes longer than the timeout."""
        mark = devices.mark(self.group.device)
        until = time.monotonic() + self._comm.timeout_s
        try:
            while not mark.query():
                self._comm.check()
                if time.monotonic() > until:
                    self._comm.abort()
                    raise PeerLost(f"{self.name}: the stream did not finish within {self._comm.timeout_s:g} s")
                time.sleep(20e-6)
            self._comm.check()
        finally:
            self._handle = self._comm.address

    def close(self) -> None:
        self._comm.close()
        self._handle = 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _version_of(library: Any) -> tuple[str, int]:
    return ("RCCL" if torch.version.hip else "NCCL"), version(library)
