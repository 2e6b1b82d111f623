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
    "mpi": "commbench.backends.mpi:MpiBackend",
    "fake": "commbench.backends.fake:FakeBackend",
}


def check_backend(name: str) -> str:
    """The name itself, if it is registered. Raises UnknownName."""
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    return name


def load_backend(name: str) -> Any:
    """The backend class. Raises UnknownName for a name that is not registered."""
    module, _, attribute = BACKENDS[check_backend(name)].partition(":")
    return getattr(importlib.import_module(module), attribute)
