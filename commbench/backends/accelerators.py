"""Gaudi (``hpu``), Intel GPUs (``xpu``) and Ascend NPUs (``npu``): their own collective libraries, through torch.

Each is a torch device module and a torch.distributed library that a package of the vendor's brings (Intel's is part of
torch). What they lack is made from what they have, as engines do: XCCL's gather is an all_gather. NOT RUN ON HARDWARE.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from commbench.backends.base import Availability
from commbench.backends.torch_dist import TorchDistBackend
from commbench.types import CallSignature


@dataclass(frozen=True, slots=True)
class Vendor:
    """library: the torch.distributed backend's name. package: what is imported to make torch know the device, "" for
    none; install: how one gets it. dtypes: what the library reduces."""

    library: str
    package: str
    install: str
    dtypes: frozenset[str]


_FLOATS = frozenset({"float32", "float16", "bfloat16"})
VENDORS = {
    "hpu": Vendor("hccl", "habana_frameworks.torch", "install Gaudi's torch bridge (habana-torch-plugin)",
                  frozenset({"float32", "bfloat16", "float16", "int32"})),
    "xpu": Vendor("xccl", "", "install a torch with XPU support, 2.8 or newer",
                  _FLOATS | {"float64", "int8", "uint8", "int32", "int64"}),
    "npu": Vendor("hccl", "torch_npu", "pip install torch-npu, and CANN", _FLOATS | {"int8", "int32", "int64"}),
}  # fmt: skip


def device_module(device: str) -> Any:
    """torch's module of that device (torch.hpu, torch.xpu, torch.npu). Raises ImportError or RuntimeError."""
    package = VENDORS[device].package
    if package:
        importlib.import_module(package)
    return torch.get_device_module(device)


class _AcceleratorBackend(TorchDistBackend):
    """One vendor's library. The group's device_group must be one of it."""

    device: ClassVar[str]

    @classmethod
    def availability(cls, device: str) -> Availability:
        vendor = VENDORS[cls.device]
        if device != cls.device:
            how = f"use it through GroupCoordinator on a machine with {cls.device}; sweeps do not time {cls.device} yet"
            return Availability(False, f"it is for {cls.device}, the group is on {device}", how)
        try:
            module = device_module(cls.device)
        except (ImportError, RuntimeError) as error:
            return Availability(False, f"torch does not know {cls.device}: {error}", vendor.install)
        if not module.is_available():
            return Availability(False, f"torch.{cls.device} finds no device", "check the vendor's driver")
        if not dist.is_backend_available(vendor.library):
            return Availability(False, f"torch.distributed has no {vendor.library}", vendor.install)
        return Availability(True, provider=f"torch {torch.__version__} {vendor.library}")

    def declines(self, call: CallSignature) -> str | None:
        missing = super().declines(call)
        if missing is not None:
            return missing
        vendor = VENDORS[self.device]
        if call.op and call.dtype not in vendor.dtypes:
            return f"{vendor.library} on {self.device} does not reduce {call.dtype}"
        return None

    def barrier(self) -> None:
        self.calls += 1
        dist.barrier(group=self._pg)


class HpuBackend(_AcceleratorBackend):
    """Gaudi. It collects work before it runs any: a mark before the collective sends off what it must wait for."""

    name = "hpu"
    device = "hpu"

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        importlib.import_module("habana_frameworks.torch").core.mark_step()
        super().all_reduce(input, output, op)

    def all_gather(self, input: torch.Tensor, output: torch.Tensor) -> None:
        importlib.import_module("habana_frameworks.torch").core.mark_step()
        super().all_gather(input, output)


class XpuBackend(_AcceleratorBackend):
    """Intel GPUs."""

    name = "xpu"
    device = "xpu"

    def gather(self, input: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        target = output
        if target is None:  # every rank takes part in the all_gather
            target = input.new_empty((self.group.world_size * input.numel(),))
        super().all_gather(input, target)


class NpuBackend(_AcceleratorBackend):
    """Ascend NPUs."""

    name = "npu"
    device = "npu"
