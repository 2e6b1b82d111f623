"""torch.distributed on the group's device: gloo on CPU, NCCL (or RCCL) on CUDA and HIP, else the vendor's library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commbench.backends.base import Availability, Backend, Group
from commbench.errors import BackendUnavailable
from commbench.types import CallSignature

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}

# torch 2.13 renamed these two; the old names warn there and are the only ones before
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _bytes_if_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """gloo and older NCCL move no fp8; a collective that only moves data can move bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point else tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Dense, in one dimension (gloo compares shapes, and ours agree in the number of elements only)."""
    dense = _bytes_if_fp8(tensor.contiguous())
    return dense if dense.dim() == 1 else dense.view(-1)


def _parts(tensor: torch.Tensor, n: int) -> list[torch.Tensor]:
    """The n equal parts of a tensor, in one dimension each."""
    return list(_flat(tensor).view(n, tensor.numel() // n))


def _writable(output: torch.Tensor) -> torch.Tensor:
    """Dense memory to write the output to: its own, or a staging copy's for a strided one."""
    return output if output.is_contiguous() else output.new_empty(output.shape)


def _write_back(output: torch.Tensor, dense: torch.Tensor) -> None:
    if dense is not output:
        output.copy_(dense)


def _options(code: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = code
    if hasattr(options, "asyncOp"):  # torch 2.7 on: NCCL then runs on the current stream
        options.asyncOp = False
    return options


class TorchDistBackend(Backend):
    """Every collective through the public torch.distributed API; strided tensors are staged."""

    name = "torch_dist"
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
            "all_gatherv",
            "reduce_scatterv",
        }
    )

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._pg = group.device_group
        self._library = dist.get_backend(self._pg)
        self.provider = f"torch {torch.__version__} {self._library}"
        # what dist.all_reduce calls after checks that the coordinator has made; they cost more than the whole dispatch
        self._all_reduce = self._pg.allreduce
        self._all_reduce_options = {op: _options(code) for op, code in _REDUCE_OPS.items()}
        self._no_average = ""
        try:
            dist.all_reduce(torch.zeros(1, device=group.device), op=dist.ReduceOp.AVG, group=self._pg)
        except (RuntimeError, ValueError) as error:  # which libraries have AVG depends on the torch version
            self._no_average = str(error).splitlines()[0]

    @classmethod
    def availability(cls, device: str) -> Availability:
        if not dist.is_available():
            return Availability(False, "this torch is built without torch.distributed", "install a torch that has it")
        if device in ("cuda", "hip") and not dist.is_nccl_available():
            return Availability(False, "this torch is built without NCCL", "install a CUDA or ROCm build of torch")
        library = dist.Backend.default_device_backend_map.get("cuda" if device == "hip" else device)
        if library is None:
            return Availability(False, f"torch.distributed has no library for {device}", "install the vendor's package")
        return Availability(True, provider=f"torch {torch.__version__} {library}")

    def declines(self, call: CallSignature) -> str | None:
        missing = super().declines(call)
        if missing is not None:
            return missing
        if call.op == "avg" and self._no_average:
            return f"{self._library} has no average here ({self._no_average})"
        if call.op and call.dtype.startswith("float8") and self._library == "gloo":
            return f"gloo does not reduce {call.dtype}"
        return None

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self.calls += 1
        if output is not input:
            output.copy_(input)
        dense = output if output.is_contiguous() else output.contiguous()
        work = self._all_reduce([dense], self._all_reduce_options[op])
        if work is not None:
            work.wait()
        if dense is not output:
            output.copy_(dense)

    def all_gather(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self.calls += 1
        dense = _writable(output)
        _all_gather(_flat(dense), _flat(input), group=self._pg)
        _write_back(output, dense)

    def reduce_scatter(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self.calls += 1
        dense = _writable(output)
        _reduce_scatter(_flat(dense), _flat(input), op=_REDUCE_OPS[op], group=self._pg)
        _write_back(output, dense)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.calls += 1
        source = self.group.ranks[src]
        if tensor.is_contiguous():
            dist.broadcast(_bytes_if_fp8(tensor), source, group=self._pg)
        else:
            staged = tensor.contiguous()
            dist.broadcast(_bytes_if_fp8(staged), source, group=self._pg)
            tensor.copy_(staged)

    def all_to_all(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self.calls += 1
        dense = _writable(output)
        dist.all_to_all_single(_flat(dense), _flat(input), group=self._pg)
        _write_back(output, dense)

    def reduce(self, input: torch.Tensor, output: torch.Tensor, dst: int, op: str) -> None:
        self.calls += 1
        if output is not input:
            output.copy_(input)
        staged = output.contiguous()
        dist.reduce(staged, self.group.ranks[dst], op=_REDUCE_OPS[op], group=self._pg)
        if staged is not output:
            output.copy_(staged)

    def gather(self, input: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        self.calls += 1
        if output is None:
            dist.gather(_flat(input), None, self.group.ranks[dst], group=self._pg)
            return
        dense = _writable(output)
        dist.gather(_flat(input), _parts(dense, self.group.world_size), self.group.ranks[dst], group=self._pg)
        _write_back(output, dense)

    def scatter(self, input: torch.Tensor | None, output: torch.Tensor, src: int) -> None:
        self.calls += 1
        parts = None if input is None else _parts(input, self.group.world_size)
        dense = _writable(output)
        dist.scatter(_flat(dense), parts, self.group.ranks[src], group=self._pg)
        _write_back(output, dense)

    def send_recv(self, input: torch.Tensor, output: torch.Tensor, dst: int, src: int) -> None:
        self.calls += 1
        dense = _writable(output)
        operations = [
            dist.P2POp(dist.isend, _flat(input), self.group.ranks[dst], group=self._pg),
            dist.P2POp(dist.irecv, _flat(dense), self.group.ranks[src], group=self._pg),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        _write_back(output, dense)

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.calls += 1
        dist.send(_bytes_if_fp8(tensor.contiguous()), self.group.ranks[dst], group=self._pg)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self.calls += 1
        if not tensor.is_contiguous():
            raise BackendUnavailable(self.name, "recv into a strided tensor", "receive into a contiguous one")
        dist.recv(_bytes_if_fp8(tensor), self.group.ranks[src], group=self._pg)

    def all_gatherv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int]) -> None:
        self.calls += 1
        # gloo's and NCCL's all_gather need equal parts: gather padded rows, then keep each rank's own
        longest = max(sizes)
        padded = output.new_zeros((longest, *input.shape[1:]))
        padded[: input.shape[0]].copy_(input)
        gathered = output.new_empty((len(sizes), *padded.shape))
        _all_gather(_flat(gathered), _flat(padded), group=self._pg)
        first = 0
        for part, rows in zip(gathered, sizes, strict=True):
            output[first : first + rows].copy_(part[:rows])
            first += rows

    def reduce_scatterv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int], op: str) -> None:
        self.calls += 1
        reduced = input.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, op=_REDUCE_OPS[op], group=self._pg)
        first = sum(sizes[: self.group.rank])
        output.copy_(reduced[first : first + sizes[self.group.rank]])

    def barrier(self) -> None:
        self.calls += 1
        if self.group.device.type == "cpu":
            dist.barrier(group=self._pg)
        else:
            dist.barrier(group=self._pg, device_ids=[self.group.device.index or 0])
