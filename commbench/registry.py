"""Backend names → where they live. A new backend is one file and one line here.

The value is ``module:Class``; nothing is imported until the backend is used.
"""

from __future__ import annotations

import importlib
from typing import Any

from commbench.errors import unknown

BACKENDS: dict[str, str] = {
    "shm": "commbench.backends.shm:ShmBackend",
    "shm_oneshot": "commbench.backends.shm:ShmOneShotBackend",
    "shm_twoshot": "commbench.backends.shm:ShmTwoShotBackend",
    "torch_dist": "commbench.backends.torch_dist:TorchDistBackend",
    "pynccl": "commbench.backends.pynccl:PyNcclBackend",
    "nccl_symm": "commbench.backends.nccl_symm:NcclSymmBackend",
    "symm_mem": "commbench.backends.symm_mem:SymmMemBackend",
    "symm_mem_multimem": "commbench.backends.symm_mem:SymmMemMultimemBackend",
    "symm_mem_twoshot": "commbench.backends.symm_mem:SymmMemTwoShotBackend",
    "symm_mem_oneshot": "commbench.backends.symm_mem:SymmMemOneShotBackend",
    "ca": "commbench.backends.ca:CustomAllReduceBackend",
    "qr": "commbench.backends.qr:QuickReduceBackend",
    "pymscclpp": "commbench.backends.pymscclpp:MscclppBackend",
    "flashinfer": "commbench.backends.flashinfer:FlashInferBackend",
    "hpu": "commbench.backends.accelerators:HpuBackend",
    "xpu": "commbench.backends.accelerators:XpuBackend",
    "npu": "commbench.backends.accelerators:NpuBackend",
    "mpi": "commbench.backends.mpi:MpiBackend",
    "fake": "commbench.backends.fake:FakeBackend",
}

# Those that have run on the hardware that they are for. The others are tested through their call paths only, against
# recorders with the providers' published signatures (docs/backends.md).
HARDWARE_PROVEN: frozenset[str] = frozenset({"shm", "shm_oneshot", "shm_twoshot", "torch_dist", "mpi", "fake"})

# Where custom all-reduce's kernels come from (``ca``); the first that is installed, unless one is asked for.
CA_PROVIDERS: tuple[str, ...] = ("sgl_kernel", "vllm", "flashinfer")


def check_backend(name: str) -> str:
    """The name itself, if it is registered. Raises UnknownName."""
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    return name


def load_backend(name: str) -> Any:
    """The backend class. Raises UnknownName for a name that is not registered."""
    module, _, attribute = BACKENDS[check_backend(name)].partition(":")
    return getattr(importlib.import_module(module), attribute)
