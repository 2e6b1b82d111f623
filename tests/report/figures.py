"""Figures of the report as matplotlib holds them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import matplotlib.text
import pytest
from matplotlib.figure import Figure


def kept_figures(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *, written: bool) -> list[Figure]:
    """Every figure that the module makes from here on. written: it is also laid out and written as ever."""
    made: list[Figure] = []

    class Kept(Figure):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

        def savefig(self, *args: Any, **kwargs: Any) -> None:
            if written:
                super().savefig(*args, **kwargs)

    monkeypatch.setattr(module, "Figure", Kept)
    return made


def texts(figure: Figure) -> list[str]:
    return [t.get_text() for t in figure.findobj(matplotlib.text.Text) if t.get_text()]
