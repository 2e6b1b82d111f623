"""What disturbs a GPU: its SM clock and why it is held down, from NVML where ``nvidia-ml-py`` is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Bits of nvmlClocksEventReasons that change what a kernel takes (nvml.h). Idleness and clocks that somebody has set are
# no disturbance.
IDLE = 0x1
REASONS: dict[int, str] = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True)
class GpuState:
    """sm_clock_hz: now. throttle: the reasons that hold now, bits of REASONS and others."""

    sm_clock_hz: float
    throttle: int


ReadGpu = Callable[[], GpuState | None]


def reasons_of(throttle: int) -> list[str]:
    """The disturbances among a bit mask, in words."""
    return [text for bit, text in REASONS.items() if throttle & bit]


def reader(uuid: str) -> ReadGpu | None:
    """A function that reads the GPU with that id (as torch tells it); None without NVML or where it does not answer."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    return reader_over(nvml, uuid)


def reader_over(nvml: Any, uuid: str) -> ReadGpu | None:
    """``reader`` over a module with NVML's functions."""
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except nvml.NVMLError:
        return None
    # the newer name of the same; a driver knows at least one
    reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons

    def read() -> GpuState | None:
        try:
            clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            return GpuState(clock * 1e6, int(reasons(handle)))
        except nvml.NVMLError:  # a virtual GPU may not tell
            return None

    return read
