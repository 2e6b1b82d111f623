"""Collectives over shared memory for the ranks of one host: ``shm_oneshot``, ``shm_twoshot`` and ``shm``.

One-shot: every rank publishes its array and every rank reduces all of them; least latency. Two-shot: every rank
reduces one part and publishes the result; least work. ``shm`` takes one-shot up to ``twoshot_threshold`` bytes and
two-shot above. Both reduce in rank order, so results are bit-identical on all ranks, from run to run and between
the two. docs/shared-memory.md describes the protocol.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.utils.dlpack

from commbench import native
from commbench.backends.base import Availability, Backend, Group
from commbench.errors import BackendUnavailable, CollectiveError
from commbench.native import segment as segments
from commbench.types import COLLECTIVES, DTYPES, OPS, CallSignature, ops_of
from commbench.units import parse_duration

if TYPE_CHECKING:
    from commbench.native import _shm

MIN_RANKS, MAX_RANKS = 2, 64
TIMEOUT_VARIABLE = "COMMBENCH_SHM_TIMEOUT"
DEBUG_VARIABLE = "COMMBENCH_SHM_DEBUG"
DEFAULT_TIMEOUT_S = 300.0

# Bytes up to which one-shot is the faster, by world size; measured as docs/shared-memory.md tells, on 2 cores (so with
# cores shared from 3 ranks on), and carried on in proportion above 8 ranks. A world size between two entries takes the
# larger one's, which is the lower threshold.
DEFAULT_TWOSHOT_THRESHOLD: Mapping[int, int] = {2: 64 << 10, 4: 64 << 10, 8: 32 << 10, 16: 16 << 10, 64: 4 << 10}

_ALWAYS_ONE_SHOT = sys.maxsize


class _Codes(dict[Any, int]):
    """Codes of the native module; an unknown key is the caller's mistake and says so."""

    def __init__(self, kind: str, codes: Mapping[Any, int]) -> None:
        super().__init__(codes)
        self.kind = kind

    def __missing__(self, key: object) -> int:
        raise CollectiveError(f"shm cannot reduce {self.kind} {key}; it has {', '.join(str(k) for k in self)}")


# The order of enum DType and enum Op in native/src/kernels.hpp.
_DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
_DTYPE_CODES = _Codes("dtype", {getattr(torch, name): code for code, name in enumerate(_DTYPE_NAMES)})
_OP_CODES = _Codes("op", {op: code for code, op in enumerate(OPS)})
_BINDABLE = frozenset(COLLECTIVES) - {"send_recv"}
_REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatterv"})


def default_twoshot_threshold(world_size: int) -> int:
    """The measured default threshold, in bytes, for a group of that size."""
    return DEFAULT_TWOSHOT_THRESHOLD[min(n for n in DEFAULT_TWOSHOT_THRESHOLD if n >= min(world_size, MAX_RANKS))]


# ---- set-up: who is on this host, and a segment that all have mapped -------------------------------------------


def _all_gather(value: Any, cpu_group: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(cpu_group)
    dist.all_gather_object(values, value, group=cpu_group)
    return values


def _from_first(value: Any, cpu_group: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(cpu_group, 0), group=cpu_group)
    return box[0]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def prove_one_host(cpu_group: Any) -> bool:
    """Whether all ranks of the group share memory, proven by reading it. Collective; the same answer on all ranks.

    The first rank writes a random token to a file in shared memory and tells the others its path, a digest of the
    token and the kernel's boot id; every rank reads the token itself. Ranks on other hosts, or in containers with
    another /dev/shm, cannot, and then the answer is False. The boot id is what a shared network directory fails.
    Raises only what the process group raises (a rank that died).
    """
    if dist.get_world_size(cpu_group) == 1:
        return True
    path: Path | None = None
    fd = -1
    proof: tuple[str, str, str] | None = None
    if dist.get_rank(cpu_group) == 0:
        token = secrets.token_bytes(32)
        try:
            fd, path = segments.create_file(len(token))
            os.pwrite(fd, token, 0)
            proof = (str(path), hashlib.sha256(token).hexdigest(), _boot_id())
        except OSError:
            proof = None
    try:
        proof = _from_first(proof, cpu_group)
        return all(_all_gather(_sees(proof), cpu_group))
    finally:
        if path is not None:
            segments.unlink(path)
            os.close(fd)


def _sees(proof: tuple[str, str, str] | None) -> bool:
    if proof is None:
        return False
    path, digest, boot_id = proof
    try:
        token = Path(path).read_bytes()
    except OSError:
        return False
    return hashlib.sha256(token).hexdigest() == digest and boot_id == _boot_id()


def share_segment(cpu_group: Any, size_bytes: int, *, keep_fd: bool = True) -> _shm.Segment:
    """Zeroed memory that all ranks of the group have mapped and that has no name any more. Collective.

    With keep_fd every rank holds a record lock on it, by which the others see it die. Raises BackendUnavailable on
    all ranks alike when one of them cannot make or map it.
    """
    rank = dist.get_rank(cpu_group)
    fd, path, problem = -1, None, ""
    if rank == 0:
        try:
            fd, path = segments.create_file(size_bytes)
        except OSError as error:
            problem = str(error)
    try:
        place, problem = _from_first((None if path is None else str(path), problem), cpu_group)
        segment = None
        if place is not None:
            try:
                if rank != 0:
                    fd = segments.open_file(Path(place), size_bytes)
                segment = segments.map_file(fd, size_bytes, keep_fd=keep_fd)
                if keep_fd:
                    segment.lock_rank(rank)
            except OSError as error:
                problem = f"rank {rank} cannot map it: {error}"
        problems = _all_gather(problem, cpu_group)
    finally:
        if path is not None:
            segments.unlink(path)
    failed = next((p for p in problems if p), "")
    if failed or segment is None:
        if segment is not None:
            segment.release()
        remedy = f"enlarge /dev/shm (docker run --shm-size) or set {segments.DIR_VARIABLE} to a directory with room"
        raise BackendUnavailable("shared memory", failed, remedy)
    return segment


def oversubscribed(affinities: Sequence[frozenset[int]], cpu_quota: float = math.inf) -> bool:
    """Whether ranks must share cores: no assignment gives each rank a CPU of its own, out of those it may run on,
    or the container's quota (in CPUs) is less than one for each."""
    if len(affinities) > cpu_quota:
        return True
    owner: dict[int, int] = {}

    def place(rank: int, tried: set[int]) -> bool:  # augmenting path of a bipartite matching
        for cpu in affinities[rank] - tried:
            tried.add(cpu)
            if cpu not in owner or place(owner[cpu], tried):
                owner[cpu] = rank
                return True
        return False

    return not all(place(rank, set()) for rank in range(len(affinities)))


def _cpu_quota() -> float:
    """CPUs that the control group may use at once; inf without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" else float(quota) / float(period)


def chunk_bytes(world_size: int) -> int:
    """Bytes of one rank's chunk: small enough that the chunks in flight stay in a core's L2 cache, large enough that
    each part of a chunk is worth an event."""
    return ((256 << 10) if world_size <= 16 else (128 << 10)) // world_size // 64 * 64 * world_size


class _Communicator:
    """One group's native communicator, which the three backends of that group share. Construction is collective."""

    def __init__(self, group: Group) -> None:
        reason = native.why_unavailable()
        wish = os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
        timeout = os.environ.get(TIMEOUT_VARIABLE)
        timeout_s = parse_duration(timeout) if timeout else DEFAULT_TIMEOUT_S
        mine = (reason, frozenset(os.sched_getaffinity(0)) if not reason else frozenset(), _cpu_quota(), wish)
        all_of_them = _all_gather(mine, group.cpu_group)
        for rank, (problem, *_) in enumerate(all_of_them):
            if problem:
                raise BackendUnavailable("shm", f"on rank {rank}, {problem}", native.REMEDY)
        n = group.world_size
        module = native.load()
        self.cpu_group = group.cpu_group
        self.rank, self.world_size = group.rank, n
        self.oversubscribed = oversubscribed([a for _, a, *_ in all_of_them], min(q for _, _, q, _ in all_of_them))
        self.debug = any(d for *_, d in all_of_them)
        chunk = chunk_bytes(n)
        self.segment = share_segment(group.cpu_group, module.segment_bytes(n, chunk))
        self.comm = module.Comm(self.segment, n, group.rank, chunk, self.oversubscribed, timeout_s, self.debug)
        self.users = 0
        self.n_registered = 0

    @classmethod
    def of(cls, group: Group) -> _Communicator:
        """The group's communicator, made if it has none yet (the same on all ranks, so collective or local alike)."""
        found = _communicators.get(id(group.cpu_group))
        if found is None or found.users == 0:
            found = cls(group)
            _communicators[id(group.cpu_group)] = found
        found.users += 1
        return found

    def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.comm.close()


# By id of the process group, which the communicator keeps alive.
_communicators: weakref.WeakValueDictionary[int, _Communicator] = weakref.WeakValueDictionary()


def empty(shape: Sequence[int] | int, dtype: torch.dtype, group: Any) -> torch.Tensor:
    """A tensor in memory that all ranks of the group have mapped: collectives on it skip the copies. Collective.

    group: a Group, a coordinator or a shm backend of it; it must have one of the shm backends. Every rank passes
    the same shape and dtype, and gets memory of its own. The content is undefined. The memory is freed when the
    last tensor over it is gone, on each rank by itself. Raises CollectiveError when ranks disagree and
    BackendUnavailable when there is no room.
    """
    owner = group.group if isinstance(group, Backend) else group
    communicator = _communicators.get(id(getattr(owner, "cpu_group", None)))
    if communicator is None:
        name = getattr(owner, "name", owner)
        raise CollectiveError(f"group {name!r} has no shm backend; create one before shm.empty")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    wanted = _all_gather((shape, str(dtype)), communicator.cpu_group)
    if any(w != wanted[0] for w in wanted):
        raise CollectiveError(f"ranks ask for different registered tensors: {wanted}")
    size = math.prod(shape) * dtype.itemsize
    stride = max(4096, (size + 4095) // 4096 * 4096)
    segment = share_segment(communicator.cpu_group, stride * communicator.world_size, keep_fd=False)
    communicator.n_registered += 1
    key = communicator.n_registered
    communicator.comm.add_registered(key, segment.address, stride, size)
    weakref.finalize(segment, _forget, weakref.ref(communicator), key)
    raw: torch.Tensor = torch.utils.dlpack.from_dlpack(segment.bytes_view(communicator.rank * stride, stride))
    return raw[:size].view(dtype).view(shape)


def _forget(communicator: weakref.ref[_Communicator], key: int) -> None:
    found = communicator()
    if found is not None:
        found.comm.remove_registered(key)


# ---- the backends ----------------------------------------------------------------------------------------------


class ShmBackend(Backend):
    """One-shot up to ``twoshot_threshold`` bytes, two-shot above.

    A failure inside a collective (PeerLost, a timeout, Ctrl-C) leaves the group unusable: its next call says so.
    """

    name: ClassVar[str] = "shm"
    collectives: ClassVar[frozenset[str]] = frozenset(
        {
            "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "reduce", "gather", "scatter",
            "send_recv", "send", "recv", "all_gatherv", "reduce_scatterv", "barrier",
        }
    )  # fmt: skip

    def __init__(self, group: Group, *, twoshot_threshold: int | None = None) -> None:
        """twoshot_threshold: bytes; None for the default of the world size. Raises BackendUnavailable."""
        self._fast: _shm.FastAllReduce | None = None
        super().__init__(group)
        if group.device.type != "cpu":
            raise BackendUnavailable(self.name, f"it moves CPU tensors, the group's device is {group.device}")
        if not MIN_RANKS <= group.world_size <= MAX_RANKS:
            raise BackendUnavailable(self.name, f"it serves {MIN_RANKS} to {MAX_RANKS} ranks, not {group.world_size}")
        if not group.one_host:
            raise BackendUnavailable(self.name, "its ranks are not proven to share memory (one host, one /dev/shm)")
        self._twoshot_threshold = self._threshold(twoshot_threshold)
        self._communicator = _Communicator.of(group)
        self._comm = self._communicator.comm
        self._all_reduce = self._comm.all_reduce
        self._open = True
        fast = native.load().FastAllReduce(self._comm, torch.Tensor, weakref.ref(self), self._twoshot_threshold)
        if fast.usable:
            self._fast = fast
            # In front of the method, which takes the calls that are not plain.
            self.__dict__["all_reduce"] = fast.function()

    @property
    def twoshot_threshold(self) -> int:
        """Bytes up to which all_reduce and reduce go one-shot. Set it alike on all ranks, between collectives."""
        return self._twoshot_threshold

    @twoshot_threshold.setter
    def twoshot_threshold(self, size_bytes: int) -> None:
        self._twoshot_threshold = size_bytes
        if self._fast is not None:
            self._fast.threshold = size_bytes

    @property
    def calls(self) -> int:
        """Calls made so far."""
        return self._calls + (0 if self._fast is None else self._fast.calls)

    @calls.setter
    def calls(self, value: int) -> None:
        self._calls = value - (0 if self._fast is None else self._fast.calls)

    def _threshold(self, asked: int | None) -> int:
        return default_twoshot_threshold(self.group.world_size) if asked is None else asked

    def split_at(self, size_bytes: int) -> None:
        self.twoshot_threshold = self._threshold(size_bytes)

    @classmethod
    def availability(cls, device: str) -> Availability:
        if device != "cpu":
            return Availability(False, f"it moves CPU tensors, not those of {device}")
        reason = native.why_unavailable()
        if reason:
            return Availability(False, reason, native.REMEDY)
        return Availability(True, provider=f"commbench-shm ({native.load().isa()})")

    def declines(self, call: CallSignature) -> str | None:
        reason = super().declines(call)
        if reason is None and call.collective in _REDUCING:
            if call.dtype not in _DTYPE_NAMES:
                return f"cannot reduce {call.dtype}"
            if call.op not in (ops_of(call.dtype) if call.dtype in DTYPES else OPS):
                return f"has no {call.op} of {call.dtype}"
        return reason

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        if input is output and input.is_contiguous():  # the usual call, at its least cost
            address = input.data_ptr()
            self._all_reduce(
                address, address, input.numel(), _DTYPE_CODES[input.dtype], _OP_CODES[op], self.twoshot_threshold
            )
            self._calls += 1
            return
        self._same(input, output, 1, 1)
        if input.is_contiguous() and output.is_contiguous():
            self._all_reduce(
                input.data_ptr(), output.data_ptr(), input.numel(),
                _DTYPE_CODES[input.dtype], _OP_CODES[op], self.twoshot_threshold,
            )  # fmt: skip
        else:
            dense = _writable(output)
            source = dense.copy_(input) if input is output else input.contiguous()
            self._all_reduce(
                source.data_ptr(), dense.data_ptr(), source.numel(),
                _DTYPE_CODES[input.dtype], _OP_CODES[op], self.twoshot_threshold,
            )  # fmt: skip
            _write_back(output, dense)
        self._calls += 1

    def all_gather(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self._same(input, output, self.group.world_size, 1)
        source, dense = input.contiguous(), _writable(output)
        self._comm.all_gather(source.data_ptr(), dense.data_ptr(), _nbytes(source))
        _write_back(output, dense)
        self._calls += 1

    def reduce_scatter(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self._same(input, output, 1, self.group.world_size)
        source, dense = input.contiguous(), _writable(output)
        self._comm.reduce_scatter(
            source.data_ptr(), dense.data_ptr(), dense.numel(), _DTYPE_CODES[input.dtype], _OP_CODES[op]
        )
        _write_back(output, dense)
        self._calls += 1

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        dense = tensor.contiguous()
        self._comm.broadcast(dense.data_ptr(), _nbytes(dense), src)
        _write_back(tensor, dense)
        self._calls += 1

    def all_to_all(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self._same(input, output, 1, 1)
        n = self.group.world_size
        if input.numel() % n:
            raise CollectiveError(f"all_to_all of {input.numel()} elements does not split among {n} ranks")
        if input.data_ptr() == output.data_ptr() and input.numel():
            raise CollectiveError("all_to_all cannot work in place; give it an output of its own")
        source, dense = input.contiguous(), _writable(output)
        self._comm.all_to_all(source.data_ptr(), dense.data_ptr(), _nbytes(source) // n)
        _write_back(output, dense)
        self._calls += 1

    def reduce(self, input: torch.Tensor, output: torch.Tensor, dst: int, op: str) -> None:
        self._same(input, output, 1, 1)
        source, dense = input.contiguous(), _writable(output)
        self._comm.reduce(
            source.data_ptr(), dense.data_ptr(), source.numel(),
            _DTYPE_CODES[input.dtype], _OP_CODES[op], dst, self.twoshot_threshold,
        )  # fmt: skip
        if self.group.rank == dst:
            _write_back(output, dense)
        self._calls += 1

    def gather(self, input: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        source = input.contiguous()
        if self.group.rank != dst:
            self._comm.gather(source.data_ptr(), 0, _nbytes(source), dst)
        elif output is None:
            raise CollectiveError(f"gather: rank {dst} receives and needs an output")
        else:
            self._same(input, output, self.group.world_size, 1)
            dense = _writable(output)
            self._comm.gather(source.data_ptr(), dense.data_ptr(), _nbytes(source), dst)
            _write_back(output, dense)
        self._calls += 1

    def scatter(self, input: torch.Tensor | None, output: torch.Tensor, src: int) -> None:
        dense = _writable(output)
        if self.group.rank != src:
            self._comm.scatter(0, dense.data_ptr(), _nbytes(dense), src)
        elif input is None:
            raise CollectiveError(f"scatter: rank {src} sends and needs an input")
        else:
            self._same(input, output, 1, self.group.world_size)
            source = input.contiguous()
            self._comm.scatter(source.data_ptr(), dense.data_ptr(), _nbytes(dense), src)
        _write_back(output, dense)
        self._calls += 1

    def send_recv(self, input: torch.Tensor, output: torch.Tensor, dst: int, src: int) -> None:
        source, dense = input.contiguous(), _writable(output)
        self._comm.send_recv(source.data_ptr(), _nbytes(source), dst, dense.data_ptr(), _nbytes(dense), src)
        _write_back(output, dense)
        self._calls += 1

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        source = tensor.contiguous()
        self._comm.send(source.data_ptr(), _nbytes(source), dst)
        self._calls += 1

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        dense = _writable(tensor)
        self._comm.recv(dense.data_ptr(), _nbytes(dense), src)
        _write_back(tensor, dense)
        self._calls += 1

    def all_gatherv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int]) -> None:
        row = self._row_bytes(output, input, sizes, input)
        source, dense = input.contiguous(), _writable(output)
        self._comm.all_gatherv(source.data_ptr(), dense.data_ptr(), [s * row for s in sizes])
        _write_back(output, dense)
        self._calls += 1

    def reduce_scatterv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int], op: str) -> None:
        row = self._row_bytes(input, output, sizes, input) // input.element_size()
        source, dense = input.contiguous(), _writable(output)
        self._comm.reduce_scatterv(
            source.data_ptr(), dense.data_ptr(), [s * row for s in sizes], _DTYPE_CODES[input.dtype], _OP_CODES[op]
        )
        _write_back(output, dense)
        self._calls += 1

    def barrier(self) -> None:
        self._comm.barrier()
        self._calls += 1

    def native_call(
        self, collective: str, input: torch.Tensor, output: torch.Tensor | None, op: str = "sum", root: int = 0
    ) -> _shm.BoundCall | None:
        """The call with its addresses bound, for native.timed_loop; None where it cannot be bound (strided tensors,
        point-to-point). It is not counted in ``calls``; whoever runs it adds its iterations. The tensors are kept
        alive; broadcast takes its tensor as input, scatter's part is output, gather's part is input."""
        if collective not in _BINDABLE:
            return None
        target = input if output is None else output
        if not (input.is_contiguous() and target.is_contiguous()):
            return None
        reduces = collective in _REDUCING
        part = {"reduce_scatter": target, "scatter": target, "all_to_all": input}.get(collective, input)
        count = part.numel() // self.group.world_size if collective == "all_to_all" else part.numel()
        if not reduces:  # any element type moves as bytes
            count *= part.element_size()
        bound: _shm.BoundCall = self._comm.bind(
            collective, input.data_ptr(), target.data_ptr(), count,
            _DTYPE_CODES[input.dtype] if reduces else _DTYPE_CODES[torch.uint8], _OP_CODES[op if reduces else "sum"],
            root, self.twoshot_threshold, (input, output),
        )  # fmt: skip
        return bound

    def close(self) -> None:
        if self._open:
            self._open = False
            self._communicator.release()

    def _same(self, input: torch.Tensor, output: torch.Tensor, input_times: int, output_times: int) -> None:
        if input.dtype != output.dtype or input.numel() * input_times != output.numel() * output_times:
            raise CollectiveError(
                f"{self.name}: input {tuple(input.shape)} {input.dtype} does not fit output {tuple(output.shape)} "
                f"{output.dtype} on {self.group.world_size} ranks"
            )

    def _row_bytes(self, whole: torch.Tensor, part: torch.Tensor, sizes: list[int], like: torch.Tensor) -> int:
        """Bytes of a row, after a check that the sizes describe both tensors."""
        rows = whole.shape[0] if whole.dim() else 1
        own = part.shape[0] if part.dim() else 1
        if len(sizes) != self.group.world_size or sum(sizes) != rows or sizes[self.group.rank] != own:
            raise CollectiveError(
                f"{self.name}: sizes {sizes} do not describe {rows} rows on {self.group.world_size} ranks, "
                f"{own} of them on rank {self.group.rank}"
            )
        if whole.dtype != part.dtype or whole.shape[1:] != part.shape[1:]:
            raise CollectiveError(f"{self.name}: rows of {tuple(whole.shape)} and {tuple(part.shape)} differ")
        return math.prod(whole.shape[1:]) * like.element_size()


class ShmOneShotBackend(ShmBackend):
    """All sizes one-shot."""

    name: ClassVar[str] = "shm_oneshot"

    def _threshold(self, asked: int | None) -> int:
        return _ALWAYS_ONE_SHOT


class ShmTwoShotBackend(ShmBackend):
    """All sizes two-shot."""

    name: ClassVar[str] = "shm_twoshot"

    def _threshold(self, asked: int | None) -> int:
        return 0


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _writable(output: torch.Tensor) -> torch.Tensor:
    """Dense memory to write the output to: its own, or a staging copy's for a strided one."""
    return output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)


def _write_back(output: torch.Tensor, dense: torch.Tensor) -> None:
    if dense is not output:
        output.copy_(dense)
