from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commbench.types import Point
from tests.runs import RunBuilder


@pytest.fixture
def build_run(tmp_path: Path) -> Callable[..., Path]:
    """Build a run: ``build_run(points, name="run-a", launches=3, …)`` gives its directory."""

    def build(points: list[Point], name: str = "run-a", **options: Any) -> Path:
        return RunBuilder(tmp_path / name, points, **options).build()

    return build
