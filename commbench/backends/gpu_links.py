"""How the GPUs of a group are linked, asked of NVIDIA's management library (ROCm: its answer is not needed there)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

# nvml.h: nvmlGpuP2PCapsIndex_t, nvmlGpuP2PStatus_t
_READ, _WRITE, _NVLINK = 0, 1, 2
_OK = 0
_LIBRARY = "libnvidia-ml.so.1"


def identity(device: torch.device) -> str:
    """The GPU's UUID, the same in every process whatever devices it sees."""
    properties = torch.cuda.get_device_properties(device)
    return f"GPU-{properties.uuid}"


def _library() -> Any:
    library = ctypes.CDLL(_LIBRARY)
    problem = library.nvmlInit_v2()
    if problem:
        raise OSError(f"nvmlInit_v2 failed ({problem})")
    return library


def _handle(library: Any, uuid: str) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    problem = library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
    if problem:
        raise OSError(f"nvmlDeviceGetHandleByUUID({uuid}) failed ({problem})")
    return handle


def links(mine: str, all_gpus: Sequence[str]) -> tuple[bool, bool]:
    """(peer access, NVLink): whether this GPU reads and writes every other's memory, and whether all those links are
    NVLink. Raises OSError where NVML does not say."""
    library = _library()
    own = _handle(library, mine)
    peer = nvlink = True
    for other in all_gpus:
        if other == mine:
            continue
        handle = _handle(library, other)
        status = []
        for capability in (_READ, _WRITE, _NVLINK):
            answer = ctypes.c_int()
            problem = library.nvmlDeviceGetP2PStatus(own, handle, capability, ctypes.byref(answer))
            status.append(problem == 0 and answer.value == _OK)
        peer = peer and status[0] and status[1]
        nvlink = nvlink and status[2]
    return peer, nvlink
