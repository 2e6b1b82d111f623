"""What GPU backends ask of the device, in one place: their call paths can then be driven where there is none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_TRIES = 8
WORDS = {"cuda": "an NVIDIA GPU", "hip": "an AMD GPU", "hpu": "a Gaudi", "xpu": "an Intel GPU", "npu": "an Ascend NPU"}


def kind(device: str) -> str:
    """The policies' word for a torch device type: ROCm calls itself cuda in torch, and is hip here."""
    return "hip" if device == "cuda" and torch.version.hip else device


def missing(device: str, *wanted: str) -> tuple[str, str] | None:
    """Why no device of the wanted kinds (cuda, hip) is here, and what helps; None where there is one."""
    words = " or ".join(WORDS[w] for w in wanted)
    have = kind(device)
    if have not in wanted:
        return f"it is for {words}, the group is on {have}", f"run it on a machine with {words} (--device cuda)"
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return "this torch is built without CUDA and ROCm", "install a CUDA or ROCm build of torch"
        return "torch sees no GPU", "check nvidia-smi or rocm-smi, and CUDA_VISIBLE_DEVICES"
    return None


# Boards of these link all of their GPUs by XGMI (AMD's MI300 and MI350 series).
XGMI_ARCHITECTURES = ("gfx94", "gfx95")


def raw_stream(device: torch.device) -> Callable[[], int]:
    """A function that gives the handle of the stream that is current on the device when it is called."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    # what torch.cuda.current_stream(index).cuda_stream reads, without the object around it
    fast: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if fast is not None:
        return partial(fast, index)
    return lambda: int(torch.cuda.current_stream(index).cuda_stream)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    return bool(torch.cuda.is_current_stream_capturing())


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability (major, minor); (9, 4) for gfx942."""
    return torch.cuda.get_device_capability(device)


def architecture(device: torch.device) -> str:
    """ROCm's name of the GPU, such as gfx942; "" on CUDA."""
    return str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", "")).partition(":")[0]


def activate(device: torch.device) -> None:
    """Make it the process's current device: providers allocate there."""
    torch.cuda.set_device(device)


def mark(device: torch.device) -> Any:
    """An event recorded on the current stream; ``query()`` is true when the stream has come there."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def timed(device: torch.device, call: Callable[[], object], iterations: int, limit_s: float) -> float:
    """Seconds of one of ``iterations`` calls on a stream of its own. Raises TimeoutError if they do not end in time.

    A stream of its own: a kernel that waits for a rank that gave up never ends, and would block every later one.
    """
    import time

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    new_event: Any = torch.cuda.Event
    start, end = new_event(enable_timing=True), new_event(enable_timing=True)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        start.record(stream)
        for _ in range(iterations):
            call()
        end.record(stream)
    until = time.monotonic() + limit_s
    while not end.query():
        if time.monotonic() > until:
            raise TimeoutError(f"{iterations} calls did not end within {limit_s:g} s")
        time.sleep(50e-6)
    return float(start.elapsed_time(end)) * 1e-3 / iterations


def has_multicast(device: torch.device) -> bool:
    """Whether the GPU is on an NVSwitch with multicast, as torch's symmetric memory finds it."""
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    index = device.index if device.index is not None else torch.cuda.current_device()
    return bool(_SymmetricMemory.has_multicast_support(DeviceType.CUDA, index))


class _Memory:
    """Device memory that torch did not allocate, as it asks for it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def at_address(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor over device memory; whoever allocated it keeps it until the tensor is gone."""
    return torch.as_tensor(_Memory(address, size_bytes), device=device)


def whole_allocation(size_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 memory at the beginning of an allocation of the driver's, which alone can be handed to other processes.

    Raises MemoryError where torch gives none.
    """
    others = []  # kept until there is one, so that torch gives the next
    snapshot: Any = torch.cuda.memory_snapshot
    for _ in range(_TRIES):
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        if memory.data_ptr() in {segment["address"] for segment in snapshot()}:
            return memory
        others.append(memory)
    raise MemoryError(f"none of {_TRIES} tensors of {size_bytes} bytes begins an allocation of the driver's")


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Dense memory to write an output to: its own, or a staging copy's for a strided one."""
    return tensor if tensor.is_contiguous() else tensor.new_empty(tensor.shape)
