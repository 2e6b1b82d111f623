"""Quick all-reduce (ROCm): a two-shot kernel that can quantise what it sends.

Providers (COMMBENCH_QR_PROVIDER; else the first that is installed): ``sgl_kernel``, ``aiter``. The level is that of the
engines' variable ROCM_QUICK_REDUCE_QUANTIZATION: FP sends the values as they are; INT8, INT6, INT4 (aiter: FP8 in place
of INT8) lose precision. ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 (default 1) runs bfloat16 in float16, which overflows to
inf above 65504. ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB is the largest message in MiB. NOT RUN ON HARDWARE.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from commbench.backends import device as devices
from commbench.backends.base import Availability, Backend, Group, beyond_kernels, beyond_sizes, together
from commbench.errors import BackendUnavailable
from commbench.types import CallSignature

PROVIDER_VARIABLE = "COMMBENCH_QR_PROVIDER"
LEVEL_VARIABLE = "ROCM_QUICK_REDUCE_QUANTIZATION"
CAST_VARIABLE = "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16"
MAX_MB_VARIABLE = "ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB"
WORLD_SIZES = (2, 4, 8)
DTYPE_NAMES = ("float16", "bfloat16")
PACK = 16
# A level's number in the provider's kernels. INT8 is where they differ: aiter has FP8 there.
LEVELS = {
    "sgl_kernel": {"FP": 0, "INT8": 1, "INT6": 2, "INT4": 3},
    "aiter": {"FP": 0, "FP8": 1, "INT6": 2, "INT4": 3},
}
EXACT_LEVEL = "FP"


@dataclass(frozen=True, slots=True)
class Functions:
    """A provider's functions, called alike. fa: the handle that ``init`` gives."""

    init: Callable[[int, int, int | None], int]  # (rank, world size, largest message or None for its own limit) → fa
    handle: Callable[[int], torch.Tensor]  # (fa) → IPC handle, bytes on the CPU
    open_handles: Callable[[int, list[torch.Tensor]], None]
    all_reduce: Callable[..., None]  # (fa, input, output, level, cast bfloat16 to float16)
    max_size: Callable[[], int]
    destroy: Callable[[int], None]


def _sgl_kernel() -> Functions:
    m = importlib.import_module("sgl_kernel.allreduce")

    def init(rank: int, world_size: int, max_bytes: int | None) -> int:
        # its wrapper hands the first two arguments on in the other order, so they go in that way round
        handle: int = m.init_custom_qr(world_size, rank, max_bytes)
        return handle

    return Functions(init, m.qr_get_handle, m.qr_open_handles, m.qr_all_reduce, m.qr_max_size, m.qr_destroy)


def _aiter() -> Functions:
    m = importlib.import_module("aiter.ops.quick_all_reduce")
    return Functions(m.init_custom_qr, m.qr_get_handle, m.qr_open_handles, m.qr_all_reduce, m.qr_max_size, m.qr_destroy)


PROVIDERS: dict[str, Callable[[], Functions]] = {"sgl_kernel": _sgl_kernel, "aiter": _aiter}


def choose_provider() -> str:
    """The provider asked for, or the first installed. Raises BackendUnavailable."""
    asked = os.environ.get(PROVIDER_VARIABLE, "")
    known = ", ".join(PROVIDERS)
    if asked and asked not in PROVIDERS:
        raise BackendUnavailable("qr", f"{PROVIDER_VARIABLE}={asked} is no provider", f"choose one of {known}")
    for name in [asked] if asked else PROVIDERS:
        if importlib.util.find_spec(name) is not None:
            return name
    raise BackendUnavailable("qr", f"{asked or 'no provider'} is not installed", f"install one of {known} for ROCm")


def choose_level(provider: str) -> str:
    """The level asked for, FP where none is: exact. Raises BackendUnavailable for one that the provider lacks."""
    level = os.environ.get(LEVEL_VARIABLE, "").upper()
    if level in ("", "NONE"):  # engines do not use quick all-reduce then; asked for by name, it runs exactly
        return EXACT_LEVEL
    if level not in LEVELS[provider]:
        known = ", ".join(LEVELS[provider])
        raise BackendUnavailable(
            "qr", f"{LEVEL_VARIABLE}={level}: {provider} has no such level", f"choose one of {known}"
        )
    return level


class QuickReduceBackend(Backend):
    """See the module's text."""

    name = "qr"
    collectives = frozenset({"all_reduce"})

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        facts = together(group, self.name, self._facts)
        if len(set(facts)) > 1:
            raise BackendUnavailable(self.name, f"the ranks differ in provider, level, cast or cap: {facts}")
        provider, self.level, self._cast, cap = facts[0]
        loaded: list[Functions] = []
        together(group, self.name, lambda: loaded.append(PROVIDERS[provider]()))
        self._functions = loaded[0]
        self._handle = 0
        try:
            handles = together(group, self.name, lambda: self._start(cap))
            together(group, self.name, lambda: self._functions.open_handles(self._handle, handles))
        except BackendUnavailable:
            self.close()
            raise
        self.max_bytes = cap or self._functions.max_size()
        self._level = LEVELS[provider][self.level]
        self.quantised = "" if self.level == EXACT_LEVEL else self.level.lower()
        self._all_reduce = self._functions.all_reduce
        self.provider = f"{provider} quick all-reduce {self.level}"

    @classmethod
    def availability(cls, device: str) -> Availability:
        problem = devices.missing(device, "hip")
        if problem is not None:
            return Availability(False, *problem)
        try:
            provider = choose_provider()
            return Availability(True, provider=f"{provider} quick all-reduce {choose_level(provider)}")
        except BackendUnavailable as error:
            return Availability(False, error.reason, error.remedy)

    def _facts(self) -> tuple[str, str, bool, int]:
        """(provider, level, cast, cap in bytes or 0) of this rank, after what can be checked without the others."""
        group = self.group
        if group.world_size not in WORLD_SIZES:
            raise BackendUnavailable(
                self.name, f"world size {group.world_size} is none of {', '.join(map(str, WORLD_SIZES))}", "use pynccl"
            )
        if not group.one_host:
            raise BackendUnavailable(self.name, "nothing has proven that all ranks share one host", "use pynccl")
        devices.activate(group.device)
        architecture = devices.architecture(group.device)
        if not architecture.startswith(devices.XGMI_ARCHITECTURES):
            raise BackendUnavailable(
                self.name, f"{architecture or 'this GPU'} is none of gfx94x and gfx95x", "use pynccl"
            )
        text = os.environ.get(MAX_MB_VARIABLE, "")
        if text and not text.isdigit():
            raise BackendUnavailable(
                self.name, f"{MAX_MB_VARIABLE}={text} is no number of MiB", "set it to one, such as 64"
            )
        provider = choose_provider()
        return provider, choose_level(provider), os.environ.get(CAST_VARIABLE, "1") != "0", int(text or 0) << 20

    def _start(self, cap: int) -> torch.Tensor:
        self._handle = self._functions.init(self.group.rank, self.group.world_size, cap or None)
        return self._functions.handle(self._handle)

    def declines(self, call: CallSignature) -> str | None:
        refused = super().declines(call) or beyond_kernels(call, DTYPE_NAMES)
        return refused or beyond_sizes(call, PACK, self.max_bytes, MAX_MB_VARIABLE)

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self.calls += 1
        if not output.is_contiguous() or (input.data_ptr() | output.data_ptr()) % PACK:
            source, target = input.clone(), torch.empty_like(input)
            self._all_reduce(self._handle, source, target, self._level, self._cast)
            output.copy_(target.view(output.shape))
        else:
            self._all_reduce(self._handle, input, output, self._level, self._cast)

    def close(self) -> None:
        if self._handle:
            self._functions.destroy(self._handle)
            self._handle = 0
