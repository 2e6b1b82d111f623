"""All-reduce kernels of torch's symmetric memory: memory that every GPU of the group has mapped.

Inputs are copied into a symmetric buffer, the kernel runs there, and the result is copied out. ``symm_mem`` takes what
engines take: the multimem kernel (the NVSwitch adds up) where it is the faster, else two-shot. ``symm_mem_multimem``,
``symm_mem_twoshot`` and ``symm_mem_oneshot`` are the kernels by name. The buffer grows as calls need it, up to
COMMBENCH_SYMM_MEM_MAX_BYTES (128MiB); it has its full size before a graph is captured. NOT RUN ON HARDWARE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from commbench.backends import device as devices
from commbench.backends.base import Availability, Backend, Group, beyond_kernels, beyond_sizes, together
from commbench.backends.staging import Staging, bytes_from_environment
from commbench.errors import BackendUnavailable
from commbench.types import DTYPES, CallSignature

MAX_BYTES_VARIABLE = "COMMBENCH_SYMM_MEM_MAX_BYTES"
DEFAULT_MAX_BYTES = 128 << 20  # the largest of the engines' caps
DTYPE_NAMES = ("float32", "bfloat16")  # what torch's kernels are compiled for
LEAST_ALIGNMENT = 4  # bytes: torch checks max(4, itemsize), for offset and size
MULTIMEM, TWO_SHOT, ONE_SHOT = "multimem", "two-shot", "one-shot"

# Compute capability's major part → world sizes at which engines take multimem; others take two-shot. (SGLang 0.5.3 and
# vLLM 0.33 agree.)
MULTIMEM_WORLD_SIZES = {9: (4, 6, 8), 10: (6, 8)}


def engines_kernel(capability: tuple[int, int], world_size: int, multicast: bool) -> str:
    """The kernel that engines take on such a group."""
    takes = multicast and world_size in MULTIMEM_WORLD_SIZES.get(capability[0], ())
    return MULTIMEM if takes else TWO_SHOT


def _module() -> Any:
    import torch.distributed._symmetric_memory as module

    return module


class SymmMemBackend(Backend):
    """The engines' choice of kernel."""

    name: ClassVar[str] = "symm_mem"
    collectives = frozenset({"all_reduce"})

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.max_bytes = min(together(group, self.name, self._check))
        self._module = _module()
        self._group_name = group.device_group.group_name
        self.multicast = False
        self._buffer = Staging(self.name, self.max_bytes, self._make)
        together(group, self.name, self._choose)
        self._operation = {
            MULTIMEM: torch.ops.symm_mem.multimem_all_reduce_.default,
            TWO_SHOT: torch.ops.symm_mem.two_shot_all_reduce_.default,
            ONE_SHOT: torch.ops.symm_mem.one_shot_all_reduce_out.default,
        }[self.kernel]
        self.provider = f"torch {torch.__version__} symmetric memory, {self.kernel}"

    @classmethod
    def availability(cls, device: str) -> Availability:
        problem = devices.missing(device, "cuda")
        if problem is not None:
            return Availability(False, *problem)
        try:
            _module()
        except ImportError as error:
            return Availability(False, f"this torch has no symmetric memory: {error}", "install torch 2.6 or newer")
        return Availability(True, provider=f"torch {torch.__version__} symmetric memory")

    # ---- set-up -----------------------------------------------------------------------------------------------

    def _check(self) -> int:
        """This rank's cap, after what can be checked without the others."""
        devices.activate(self.group.device)
        if not self.group.one_host:
            raise BackendUnavailable(self.name, "nothing has proven that all ranks share one host")
        return bytes_from_environment(self.name, MAX_BYTES_VARIABLE, DEFAULT_MAX_BYTES)

    def _make(self, size_bytes: int) -> torch.Tensor:
        memory: list[torch.Tensor] = []
        # two steps: a rank without memory must not leave the others in the rendezvous
        together(self.group, self.name, lambda: memory.append(self._allocate(size_bytes)))
        together(self.group, self.name, lambda: self._meet(memory[0]))
        return memory[0]

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        tensor: torch.Tensor = self._module.empty(size_bytes, dtype=torch.uint8, device=self.group.device)
        return tensor

    def _meet(self, memory: torch.Tensor) -> None:
        handle = self._module.rendezvous(memory, self._group_name)
        if handle is None:
            raise BackendUnavailable(self.name, "torch could not map the ranks' memory")
        self.multicast = bool(handle.multicast_ptr)

    def _choose(self) -> None:
        self.kernel = self._kernel()

    def _kernel(self) -> str:
        """The kernel to use. Raises BackendUnavailable where it cannot run here."""
        return engines_kernel(devices.capability(self.group.device), self.group.world_size, self.multicast)

    # ---- calls ------------------------------------------------------------------------------------------------

    def declines(self, call: CallSignature) -> str | None:
        refused = super().declines(call) or beyond_kernels(call, DTYPE_NAMES, "torch's")
        if refused is not None:
            return refused
        alignment = max(LEAST_ALIGNMENT, DTYPES[call.dtype].itemsize)
        return beyond_sizes(call, alignment, self.max_bytes, MAX_BYTES_VARIABLE)

    def bound(self, call: CallSignature) -> Callable[..., None]:
        return self._path(getattr(torch, call.dtype))

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self._path(input.dtype)(input, output, op)

    def _path(self, dtype: torch.dtype) -> Callable[..., None]:
        """all_reduce of one dtype."""
        views, operation, group_name = self._buffer.views(dtype), self._operation, self._group_name

        def all_reduce(input: torch.Tensor, output: torch.Tensor, op: str) -> None:
            self.calls += 1
            shared = views[input.shape]
            shared.copy_(input)
            operation(shared, "sum", group_name)
            # It fits unless the shapes differ by more than ones in front: so many elements cannot spread over more. To
            # ask for both shapes first would cost a tenth of this path.
            try:
                output.copy_(shared)
            except RuntimeError:
                if output.shape == input.shape:
                    raise
                output.copy_(shared.view(output.shape))

        return all_reduce

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._buffer.reserve(self.max_bytes)  # a capture can neither allocate nor meet the other ranks
        yield

    def close(self) -> None:
        self._buffer.release()


class SymmMemMultimemBackend(SymmMemBackend):
    """The multimem kernel at every size."""

    name: ClassVar[str] = "symm_mem_multimem"

    def _kernel(self) -> str:
        if not self.multicast:
            raise BackendUnavailable(
                self.name, "multimem needs NVLink multicast, which is not supported here", "symm_mem_twoshot needs none"
            )
        return MULTIMEM


class SymmMemTwoShotBackend(SymmMemBackend):
    """The two-shot kernel at every size."""

    name: ClassVar[str] = "symm_mem_twoshot"

    def _kernel(self) -> str:
        return TWO_SHOT


class SymmMemOneShotBackend(SymmMemBackend):
    """The one-shot kernel at every size; it writes straight into a dense output."""

    name: ClassVar[str] = "symm_mem_oneshot"

    def _kernel(self) -> str:
        return ONE_SHOT

    def _path(self, dtype: torch.dtype) -> Callable[..., None]:
        views, operation, group_name = self._buffer.views(dtype), self._operation, self._group_name

        def all_reduce(input: torch.Tensor, output: torch.Tensor, op: str) -> None:
            self.calls += 1
            shape = input.shape
            shared = views[shape]
            shared.copy_(input)
            # the kernel stores whole vectors of up to 16 bytes
            if output.is_contiguous() and output.shape == shape and not output.data_ptr() & 15:
                operation(shared, "sum", group_name, output)
                return
            target = torch.empty_like(shared)
            operation(shared, "sum", group_name, target)
            output.copy_(target.view(output.shape))

        return all_reduce
