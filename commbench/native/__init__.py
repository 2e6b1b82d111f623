"""The compiled part of commbench: shared-memory collectives, a start gate and a timed loop.

``load()`` gives the extension module, or raises BackendUnavailable with the way to get it; ``why_unavailable()``
asks without raising. The module's functions are described in ``_shm.pyi``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from commbench.errors import BackendUnavailable

REMEDY = "install a C++17 compiler (g++ or clang) and reinstall: pip install --force-reinstall --no-deps commbench"

_module: ModuleType | None = None
_reason = ""


def _import() -> ModuleType | None:
    global _module, _reason
    if _module is None and not _reason:
        if sys.platform != "linux":
            _reason = f"the native module is for Linux, this is {sys.platform}"
            return None
        try:
            from commbench.native import _shm as module
        except ImportError as error:
            missing = isinstance(error, ModuleNotFoundError) or "_shm" in str(error).split("(")[0]
            _reason = "the native module was not built" if missing else f"the native module does not load: {error}"
        else:
            _module = module
    return _module


def why_unavailable() -> str:
    """Why the native module cannot be used here, in words; "" if it can."""
    return "" if _import() is not None else _reason


def load() -> Any:
    """The extension module. Raises BackendUnavailable where it was not built or does not load."""
    module = _import()
    if module is None:
        raise BackendUnavailable("the native module", _reason, REMEDY)
    return module
