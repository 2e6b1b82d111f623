"""Where two policies disagree: cells of (mode, dtype, size interval) that change backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from commbench.policy.evaluate import Policy, Verdict
from commbench.policy.intervals import Interval, winners
from commbench.types import CallSignature, Platform

DTYPES_COMPARED = ("bfloat16", "float16", "float32")
MODES_COMPARED = ("eager", "graph", "pcg", "compile")
SMALLEST, LARGEST = 16, 4 << 30


@dataclass(frozen=True, slots=True)
class Cell:
    """An interval of sizes (multiples of 16 bytes) where two policies take different backends."""

    mode: str
    dtype: str
    first: int
    last: int
    left: Verdict
    right: Verdict


def backend_of(verdict: Verdict) -> str:
    """The registry name taken, or ``raise X``."""
    return verdict.route.backend if verdict.route else verdict.picked


def differences(
    left: tuple[Policy, Platform],
    right: tuple[Policy, Platform],
    dtypes: Sequence[str] = DTYPES_COMPARED,
    modes: Sequence[str] = MODES_COMPARED,
    hidden: int = 0,
) -> list[Cell]:
    """The cells whose backend differs, in the order of modes, dtypes and sizes.

    Each side has its own platform: the same machine with the switches that the policy knows.
    """
    cells: list[Cell] = []
    for mode in modes:
        for dtype in dtypes:
            call = CallSignature("all_reduce", "sum", dtype, 0, 0, "contiguous", mode)
            sides = [
                winners(policy.bind(platform, "all_reduce", dtype), call, SMALLEST, LARGEST, hidden)
                for policy, platform in (left, right)
            ]
            cells += _merge(mode, dtype, *sides)
    return cells


def differences_by_option(
    left: tuple[Policy, Platform], right: tuple[Policy, Platform], hidden: int = 0
) -> dict[str, list[Cell]]:
    """The cells that differ on the platforms as they are (under ""), and with each word of each option that both
    policies have and that the platforms leave at its default; options under which the same cells differ stand
    together, and those that change nothing are left out.
    """
    from commbench.policy.check import option_words, options

    plain = differences(left, right, hidden=hidden)
    groups: list[tuple[list[str], list[Cell]]] = [([], plain)]
    known = set(options(right[0], right[1].device))
    for name, word in options(left[0], left[1].device):
        if (name, word) not in known or _is_set(left, name) or _is_set(right, name):
            continue
        sides = [(policy, replace(p, settings={**p.settings, name: word})) for policy, p in (left, right)]
        cells = differences(sides[0], sides[1], hidden=hidden)
        alike = next((names for names, known_cells in groups if _shape(known_cells) == _shape(cells)), None)
        if alike is None:
            groups.append(([option_words(left[0], name, word)], cells))
        elif alike is not groups[0][0]:
            alike.append(option_words(left[0], name, word))
    return {" or ".join(names): cells for names, cells in groups}


def _shape(cells: Sequence[Cell]) -> list[tuple[str, str, int, int, str, str]]:
    return [(c.mode, c.dtype, c.first, c.last, c.left.picked, c.right.picked) for c in cells]


def _is_set(side: tuple[Policy, Platform], parameter: str) -> bool:
    policy, platform = side
    by_variable = any(v.parameter == parameter and v.name in platform.env for v in policy.data.variables.values())
    return by_variable or parameter in platform.settings


def _merge(mode: str, dtype: str, left: Sequence[Interval], right: Sequence[Interval]) -> list[Cell]:
    """Overlay two coverings of the same sizes; keep the pieces that differ, joined where neighbours agree."""
    cells: list[Cell] = []
    i = j = 0
    while i < len(left) and j < len(right):
        a, b = left[i], right[j]
        first, last = max(a.first, b.first), min(a.last, b.last)
        if backend_of(a.verdict) != backend_of(b.verdict):
            before = cells[-1] if cells else None
            if before and before.last + 16 == first and _same(before, a.verdict, b.verdict):
                cells[-1] = Cell(mode, dtype, before.first, last, before.left, before.right)
            else:
                cells.append(Cell(mode, dtype, first, last, a.verdict, b.verdict))
        i, j = i + (a.last == last), j + (b.last == last)
    return cells


def _same(cell: Cell, left: Verdict, right: Verdict) -> bool:
    return (cell.left.picked, cell.right.picked) == (left.picked, right.picked)
