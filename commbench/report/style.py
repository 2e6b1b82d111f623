"""How things look in every plot: a fixed colour and marker per backend, ticks with units.

Colours are from Okabe and Ito's colour-blind-safe palette ("Color Universal Design", 2008), without its yellow,
which is too pale for a line on white. The marker tells backends apart where the colour cannot.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from commbench.units import format_time

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#6E6E6E"
PROBLEM = "#B00020"

RC: Any = {  # matplotlib's settings for all plots
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "svg.hashsalt": "commbench",
}


@dataclass(frozen=True, slots=True)
class Look:
    colour: str
    marker: str


# Pairs, not colours, are unique: two backends of one colour differ in their marker.
_KNOWN: dict[str, Look] = {
    "torch_dist": Look(BLUE, "o"),
    "shm": Look(VERMILLION, "s"),
    "shm_oneshot": Look(GREEN, "^"),
    "shm_twoshot": Look(PURPLE, "v"),
    "pynccl": Look(SKY, "D"),
    "nccl_symm": Look(BLUE, "P"),
    "symm_mem": Look(ORANGE, "X"),
    "symm_mem_multimem": Look(ORANGE, "<"),
    "symm_mem_twoshot": Look(ORANGE, ">"),
    "symm_mem_oneshot": Look(ORANGE, "p"),
    "ca": Look(VERMILLION, "D"),
    "qr": Look(GREEN, "s"),
    "pymscclpp": Look(PURPLE, "h"),
    "flashinfer": Look(BLACK, "^"),
    "mpi": Look(BLACK, "v"),
    "hpu": Look(GREEN, "P"),
    "xpu": Look(SKY, "P"),
    "npu": Look(PURPLE, "P"),
    "fake": Look(GREY, "d"),
}
_FREE = [
    Look(colour, marker)
    for marker in ("*", "H", "8", "o", "s", "^", "v", "D")
    for colour in (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
]


def looks(backends: Iterable[str]) -> dict[str, Look]:
    """A look per backend, the same in every plot of every run; unknown names get one by their hash."""
    names = sorted(set(backends))
    chosen = {name: _KNOWN[name] for name in names if name in _KNOWN}
    taken = set(chosen.values())
    for name in names:
        if name in chosen:
            continue
        start = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")
        options = (_FREE[(start + i) % len(_FREE)] for i in range(len(_FREE)))
        chosen[name] = next((look for look in options if look not in taken), _FREE[start % len(_FREE)])
        taken.add(chosen[name])
    return chosen


def short_time(seconds: float) -> str:
    """A tick label: ``1 µs``, ``20 ms``, ``1.5 s``; at most three digits and no needless zeros."""
    if seconds <= 0 or not math.isfinite(seconds):
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= scale * 0.9999 or unit == "ns":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError("unreachable")


def interval_text(low: float, high: float) -> str:
    """``271–280 µs``, or ``984 ns–1.02 µs`` where the ends have different units; "–" where there is no interval."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "–"
    if not low > 0 or high / low > 1000:  # two launches that disagree, for example
        return ">1000× wide"
    start, end = format_time(low), format_time(high)
    return f"{start.partition(' ')[0]}–{end}" if start.split(" ")[1] == end.split(" ")[1] else f"{start}–{end}"


def short_rate(gb_per_s: float) -> str:
    """GB/s in at most three significant digits and six characters."""
    if not math.isfinite(gb_per_s):
        return "–"
    if gb_per_s == 0 or gb_per_s >= 99.95:
        return f"{gb_per_s:.0f}"
    if gb_per_s < 0.00095:
        return f"{gb_per_s:.0e}".replace("e-0", "e-")
    if gb_per_s < 0.1:
        return f"{gb_per_s:.2g}"
    return f"{gb_per_s:.{1 if gb_per_s >= 9.995 else 2 if gb_per_s >= 0.9995 else 3}f}"


def size_ticks(sizes: Iterable[float], most: int = 6) -> list[int]:
    """Powers of two for a size axis, evenly spaced and at most ``most``; the sizes themselves if they are few."""
    values = sorted({int(s) for s in sizes if s > 0})
    if not values:
        return []
    low, high = math.ceil(math.log2(values[0])), math.floor(math.log2(values[-1]))
    if len(values) <= min(3, most) or high - low < 2:
        return _apart(values, most)
    step = max(1, math.ceil((high - low) / (most - 1)))
    if step > 2:  # 1 KiB and 1 MiB are ten apart: steps of 5 or 10 hit both
        step = next((s for s in (5, 10, 15, 20) if s >= step), step)
    return [1 << k for k in range(low, high + 1) if k % step == 0] or [1 << low]


def _apart(values: list[int], most: int) -> list[int]:
    """Some of the values, none so near to another on a log axis that their labels would touch."""
    span = math.log(values[-1] / values[0]) or 1.0
    kept = [values[0]]
    for value in values[1:]:
        if math.log(value / kept[-1]) >= span / most:
            kept.append(value)
    return kept


def decade_ticks(low: float, high: float) -> list[float]:
    """Ticks of a log axis from low to high: decades, with 2 and 5 between where the range is short."""
    if not (0 < low <= high):
        return []
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = math.log10(high / low)
    if decades >= 5:
        step = math.ceil(decades / 5)
        ticks = [10.0**k for k in range(first, last + 1) if k % step == 0]
    elif decades >= 1.6:
        ticks = [10.0**k for k in range(first, last + 1)]
    else:
        factors = (1, 2, 5) if decades >= 0.7 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
        ticks = [f * 10.0**k for k in range(first, last + 1) for f in factors]
    inside = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
    if len(inside) >= 2:
        return inside
    return _even_ticks(low, high)


def _even_ticks(low: float, high: float) -> list[float]:
    """Round values at even distances, about four: for a range too short for the usual steps of a log axis."""
    raw = (high - low) / 4 or low
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next((f * scale for f in (1, 2, 2.5, 5) if f * scale >= raw), 10 * scale)
    first, last = math.ceil(low / step - 0.001), math.floor(high / step + 0.001)
    return [i * step for i in range(first, last + 1) if i > 0] or [low]
