"""Gaudi (``hpu``), Intel GPUs (``xpu``) and Ascend NPUs (``npu``): their own collective libraries, through torch.

Each is a torch device module and a torch.distributed library that a package of the vendor's brings (Intel's is part of
torch). What they lack is made from what they have, as engines do: XCCL's gather is an all_gather. NOT RUN ON HARDWARE.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from commbench.backends.base import Availability, Group
from commbench.backends.device import WORDS
from commbench.backends.torch_dist import TorchDistBackend
from commbench.types import CallSignature


@dataclass(frozen=True, slots=True)
class Vendor:
    """library: the torch.distributed backend's name. packages: what is imported, in this order, to make torch know the
    device and the library; install: how one gets them. dtypes: what the library reduces. mask: the variable that says
    which of the host's devices a process sees. exclusive: a device belongs to one process, which sees it alone and as
    number 0; the vendor's package chooses it by LOCAL_RANK."""

    library: str
    packages: tuple[str, ...]
    install: str
    dtypes: frozenset[str]
    mask: str
    exclusive: bool = False


_FLOATS = frozenset({"float32", "float16", "bfloat16"})
VENDORS = {
    "hpu": Vendor("hccl", ("habana_frameworks.torch", "habana_frameworks.torch.distributed.hccl"),
                  "install Gaudi's torch bridge (habana-torch-plugin)",
                  frozenset({"float32", "bfloat16", "float16", "int32"}), "HABANA_VISIBLE_MODULES", exclusive=True),
    "xpu": Vendor("xccl", (), "install a torch with XPU support, 2.8 or newer",
                  _FLOATS | {"float64", "int8", "uint8", "int32", "int64"}, "ZE_AFFINITY_MASK"),
    "npu": Vendor("hccl", ("torch_npu",), "pip install torch-npu, and CANN", _FLOATS | {"int8", "int32", "int64"},
                  "ASCEND_RT_VISIBLE_DEVICES"),
}  # fmt: skip


def device_module(device: str) -> Any:
    """torch's module of that device (torch.hpu, torch.xpu, torch.npu), its library registered with torch.distributed.

    Raises ImportError, OSError or RuntimeError, whichever the vendor's package does where it cannot work.
    """
    for package in VENDORS[device].packages:
        importlib.import_module(package)
    return torch.get_device_module(device)


def missing(device: str) -> tuple[str, str] | None:
    """Why this process can use no device of that kind, and what helps; None where it can."""
    vendor = VENDORS[device]
    try:
        module = device_module(device)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed", vendor.install
    except (ImportError, OSError, RuntimeError) as error:
        text = str(error).strip().splitlines() or [type(error).__name__]
        return f"torch cannot use {device}: {text[0]}", vendor.install
    if not module.is_available():
        if device == "xpu" and getattr(torch.version, "xpu", None) is None:
            return f"this torch ({torch.__version__}) is built without XPU support", vendor.install
        return f"torch.{device} finds no device", f"check the vendor's driver, and {vendor.mask}"
    if not dist.is_backend_available(vendor.library):
        return f"torch.distributed has no {vendor.library}", vendor.install
    return None


def number_on_host(device: str, index: int, environment: Mapping[str, str] | None = None) -> str:
    """Which of the host's devices a process sees as number ``index``, as the vendor's variables tell it."""
    environment = os.environ if environment is None else environment
    vendor = VENDORS[device]
    if vendor.exclusive:
        return environment.get("LOCAL_RANK", str(index))
    seen = [part.strip() for part in environment.get(vendor.mask, "").split(",") if part.strip()]
    return seen[index] if index < len(seen) else str(index)


class _AcceleratorBackend(TorchDistBackend):
    """One vendor's library. The group's device_group must be one of it."""

    device: ClassVar[str]

    @classmethod
    def availability(cls, device: str) -> Availability:
        if device != cls.device:
            word = WORDS[cls.device]
            how = f"run it on a machine with {word} (--device {cls.device})"
            return Availability(False, f"it is for {word}, the group is on {device}", how)
        problem = missing(device)
        if problem is not None:
            return Availability(False, *problem)
        return Availability(True, provider=f"torch {torch.__version__} {VENDORS[device].library}")

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

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._send_off = importlib.import_module("habana_frameworks.torch.core").mark_step

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self._send_off()
        super().all_reduce(input, output, op)

    def all_gather(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self._send_off()
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
