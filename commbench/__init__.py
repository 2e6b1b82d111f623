"""commbench: measures, dispatches and judges collective communication.

Importing this package imports no torch; the parts that measure do.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


# what a notebook needs, imported when it is used; __init__.pyi says the same to type checkers
_LAZY = {"Engine": "commbench.harness.engine.driver", "Point": "commbench.types"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'commbench' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
