"""A vendor's device that is played on the CPU, inside torch: what torch makes on it are CPU tensors, its events tell
the host's time, and its collective library is gloo. ``install`` does what a vendor's package does when imported.

SCRIPTED_DEVICES is how many there are (2). SCRIPTED_LOG is a file where every process notes what it asked for.
"""

from __future__ import annotations

import os
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_kept: list[Any] = []  # torch.library's registrations end with their object


def note(text: str) -> None:
    if "SCRIPTED_LOG" in os.environ:
        with Path(os.environ["SCRIPTED_LOG"]).open("a") as file:
            file.write(f"{os.environ.get('RANK', 'command')} {text}\n")


class Event:
    """Of a stream on which everything is done when it is queued."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timing, self._at_ns = enable_timing, 0

    def record(self, stream: object = None) -> None:
        self._at_ns = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self._timing
        assert end._timing
        return (end._at_ns - self._at_ns) * 1e-6


def install(kind: str, key: str, library: str, timed: bool = True, one_each: bool = False) -> None:
    """kind: torch's word for the device. key: its dispatch key. library: the name of its torch.distributed backend.

    timed: whether it has events. one_each: a process sees its own device alone.
    """
    current = [0]

    def set_device(device: Any) -> None:
        assert not one_each, "there is nothing to choose"
        index = torch.device(device).index
        assert index is not None
        assert index < device_count(), f"there is no {kind}:{index}"
        note(f"set_device {kind}:{index}")
        current[0] = index

    def device_count() -> int:
        return int(os.environ.get("SCRIPTED_DEVICES", "2"))

    module: Any = types.ModuleType(f"torch.{kind}")
    module.is_available = lambda: device_count() > 0
    module.device_count = device_count
    module.current_device = lambda: current[0]
    module.set_device = set_device
    module.synchronize = lambda device=None: None
    module._lazy_init = lambda: None  # torch calls it before the first tensor of some kinds
    module.get_device_name = lambda index=0: f"a played {kind}"
    module.get_device_properties = lambda index=0: types.SimpleNamespace(name=f"a played {kind}", total_memory=1 << 34)
    if timed:
        module.Event = Event
        module.current_stream = lambda device=None: "the stream"
    torch._register_device_module(kind, module)

    operators = torch.library.Library("aten", "IMPL", key)
    operators.impl("empty.memory_format", _empty)
    operators.impl("empty_strided", _empty_strided)
    _kept.append(operators)

    def group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        note(f"{library} of {size}")
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend(library, group, devices=[kind, "cpu"])


def _empty(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> torch.Tensor:  # fmt: skip
    return torch.empty(size, dtype=dtype, device="cpu")


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
