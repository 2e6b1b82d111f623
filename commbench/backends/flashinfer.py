"""FlashInfer's all-reduce: the kernels that it fuses with a norm, here without one.

COMMBENCH_FLASHINFER_BACKEND chooses its kernels: ``trtllm`` (the default), ``mnnvl`` (NVLink multicast) or ``auto``. A
workspace is made for each kind of dtype, for messages up to COMMBENCH_FLASHINFER_MAX_BYTES (8MiB). The kernels see a
message as rows; one that does not divide into rows is declined. NOT RUN ON HARDWARE.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from commbench.backends import device as devices
from commbench.backends.base import Availability, Backend, Group, beyond_cap, beyond_kernels, together
from commbench.backends.staging import bytes_from_environment
from commbench.errors import BackendUnavailable
from commbench.types import DTYPES, CallSignature

KERNELS_VARIABLE = "COMMBENCH_FLASHINFER_BACKEND"
MAX_BYTES_VARIABLE = "COMMBENCH_FLASHINFER_MAX_BYTES"
DEFAULT_MAX_BYTES = 8 << 20
KERNELS = ("trtllm", "mnnvl", "auto")
MOST_RANKS = 16
MEETING_S = 45.0  # for all ranks to make a workspace; less than they wait for each other's notes on it
DTYPE_NAMES = ("float32", "float16", "bfloat16")
ROW = 1024  # elements; a shorter message is one row
PACK = 16  # bytes that a thread moves at once: rows are multiples of it
_WIDE, _NARROW = torch.float32, torch.bfloat16  # a workspace for float32 differs from one for 16-bit types


def _rows(numel: int, itemsize: int) -> tuple[int, int]:
    """(rows, elements of a row) for a message of so many elements; (0, 0) where it does not divide."""
    if numel and numel % ROW == 0:
        return numel // ROW, ROW
    if 0 < numel < ROW and numel * itemsize % PACK == 0:
        return 1, numel
    return 0, 0


class FlashInferBackend(Backend):
    """See the module's text."""

    name = "flashinfer"
    collectives = frozenset({"all_reduce"})

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        facts = together(group, self.name, self._facts)
        if len({kernels for kernels, _ in facts}) > 1:
            raise BackendUnavailable(self.name, f"the ranks ask for different kernels: {[f[0] for f in facts]}")
        self.kernels, self.max_bytes = facts[0][0], min(size for _, size in facts)
        comm: list[Any] = []
        together(group, self.name, lambda: comm.append(importlib.import_module("flashinfer.comm")))
        self._comm = comm[0]
        self._workspaces: dict[torch.dtype, Any] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)
        # not the group's own: a rank that fails would meet the others there, who still talk about the workspace
        self._meeting = dist.new_group(
            list(group.ranks), timeout=datetime.timedelta(seconds=MEETING_S), backend="gloo",
            use_local_synchronization=True,
        )  # fmt: skip
        try:
            for dtype in (_NARROW, _WIDE):
                # FlashInfer's ranks meet in here, over a process group with a timeout
                together(group, self.name, lambda dtype=dtype: self._make(dtype))  # type: ignore[misc]
            together(group, self.name, self._allocate)
        except BackendUnavailable:
            self.close()
            raise
        self._by_dtype = {
            torch.float32: self._workspaces[_WIDE],
            torch.bfloat16: self._workspaces[_NARROW],
            torch.float16: self._workspaces[_NARROW],
        }
        self._all_reduce = self._comm.allreduce_fusion
        self._pattern = self._comm.AllReduceFusionPattern.kAllReduce
        self.provider = f"{_version()} {getattr(self._workspaces[_NARROW], 'backend', self.kernels)}"

    @classmethod
    def availability(cls, device: str) -> Availability:
        problem = devices.missing(device, "cuda")
        if problem is not None:
            return Availability(False, *problem)
        if importlib.util.find_spec("flashinfer") is None:
            return Availability(False, "flashinfer is not installed", "pip install flashinfer-python")
        return Availability(True, provider=_version())

    # ---- set-up -----------------------------------------------------------------------------------------------

    def _facts(self) -> tuple[str, int]:
        """(kernels, largest message) of this rank, after what can be checked without the others."""
        group = self.group
        if group.world_size > MOST_RANKS:
            raise BackendUnavailable(self.name, f"world size {group.world_size} is above {MOST_RANKS}", "use pynccl")
        kernels = os.environ.get(KERNELS_VARIABLE, KERNELS[0])
        if kernels not in KERNELS:
            raise BackendUnavailable(
                self.name, f"{KERNELS_VARIABLE}={kernels} is unknown", f"choose one of {', '.join(KERNELS)}"
            )
        if kernels == "trtllm" and not group.one_host:
            raise BackendUnavailable(
                self.name, "nothing has proven that all ranks share one host", f"set {KERNELS_VARIABLE}=mnnvl"
            )
        devices.activate(group.device)
        return kernels, bytes_from_environment(self.name, MAX_BYTES_VARIABLE, DEFAULT_MAX_BYTES)

    def _make(self, dtype: torch.dtype) -> None:
        talk = importlib.import_module("flashinfer.comm.comm_backend").TorchDistBackend(group=self._meeting)
        try:
            self._workspaces[dtype] = self._create(dtype, talk)
        except RuntimeError as error:
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise TimeoutError(f"another rank did not come within {MEETING_S:g} s") from error
            raise

    def _create(self, dtype: torch.dtype, talk: Any) -> Any:
        group = self.group
        return self._comm.create_allreduce_fusion_workspace(
            backend=self.kernels, world_size=group.world_size, rank=group.rank,
            max_token_num=-(-self.max_bytes // (ROW * dtype.itemsize)), hidden_dim=ROW, dtype=dtype,
            gpus_per_node=group.world_size if group.one_host else None, comm_backend=talk, group=group.device_group,
        )  # fmt: skip

    def _allocate(self) -> None:
        self._staging = torch.empty(self.max_bytes, dtype=torch.uint8, device=self.group.device)

    # ---- calls ------------------------------------------------------------------------------------------------

    def declines(self, call: CallSignature) -> str | None:
        refused = super().declines(call) or beyond_kernels(call, DTYPE_NAMES)
        if refused is not None:
            return refused
        refused = beyond_cap(call, self.max_bytes, MAX_BYTES_VARIABLE)
        if refused is not None:
            return refused
        rows, length = _rows(call.numel, DTYPES[call.dtype].itemsize)
        if not rows:
            return (
                f"{call.numel} elements do not divide into rows of {ROW}, nor make one short row of {PACK}-byte packs"
            )
        workspace = self._by_dtype[getattr(torch, call.dtype)]
        if not workspace.is_buffer_size_sufficient(
            self.group.world_size, rows, length, getattr(torch, call.dtype)
        ):  # fmt: skip
            return f"its workspace has no room for {rows} × {length} {call.dtype}"
        return None

    def bound(self, call: CallSignature) -> Callable[..., None]:
        return self._path(getattr(torch, call.dtype), call.numel)

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self._path(input.dtype, input.numel())(input, output, op)

    def _path(self, dtype: torch.dtype, numel: int) -> Callable[..., None]:
        """all_reduce of so many elements of one dtype."""
        operation, pattern, workspace = self._all_reduce, self._pattern, self._by_dtype[dtype]
        rows, length = _rows(numel, dtype.itemsize)
        staged = self._staging[: numel * dtype.itemsize].view(dtype).view(rows, length)

        def all_reduce(input: torch.Tensor, output: torch.Tensor, op: str) -> None:
            self.calls += 1
            source = input.view(rows, length)
            first, second = input.data_ptr(), output.data_ptr()
            # a result in place of the input could be read by a rank that is late
            if first != second and not (first | second) % PACK and output.is_contiguous():
                operation(source, workspace, pattern, output=output.view(rows, length))
                return
            if first % PACK:
                source = source.clone()
            operation(source, workspace, pattern, output=staged)
            output.copy_(staged.view(output.shape))

        return all_reduce

    def close(self) -> None:
        for workspace in self._workspaces.values():
            workspace.destroy()
        self._workspaces.clear()
        dist.destroy_process_group(self._meeting)


def _version() -> str:
    try:
        return f"flashinfer {metadata.version('flashinfer-python')}"
    except metadata.PackageNotFoundError:
        return "flashinfer"
