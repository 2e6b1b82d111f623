"""How picks change with the size: winner intervals, the nearest threshold, and the sizes worth probing.

Between two thresholds a pick depends only on the alignment of the size, and no engine looks beyond 16 bytes. So the
sizes of one alignment class are stepped through 16 bytes at a time, and within a class a pick is constant between
neighbouring thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from commbench.policy.evaluate import Bound, Verdict
from commbench.types import DTYPES, CallSignature

ALIGN = 16  # bytes; every engine's alignment gates divide it


@dataclass(frozen=True, slots=True)
class Interval:
    """Sizes of one alignment class from first to last, in bytes, that all take the same route."""

    first: int
    last: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Nearest:
    """The nearest size of the same alignment class that takes another route.

    size_bytes: that size. elements: how many more (negative: fewer) than the call has. verdict: what it takes.
    """

    size_bytes: int
    elements: int
    verdict: Verdict


def sized(call: CallSignature, size_bytes: int, hidden: int = 0) -> CallSignature:
    """The same call with another size. hidden: the width of a row; the shape is then (rows, hidden), or one row
    where the size is not a whole number of rows."""
    numel = size_bytes // DTYPES[call.dtype].itemsize
    shape: tuple[int, ...] = ()
    if hidden:
        shape = (numel // hidden, hidden) if numel % hidden == 0 and numel else (1, numel)
    elif len(call.shape) > 1:
        width = call.shape[-1]
        shape = (numel // width, width) if width and numel % width == 0 and numel else (1, numel)
    return replace(call, size_bytes=size_bytes, numel=numel, shape=shape)


def answer_of(verdict: Verdict) -> tuple[str, str]:
    """What distinguishes two verdicts for a user: the route (or the exception) and the engine's word for it."""
    return (verdict.route.name if verdict.route else "", verdict.picked)


def winners(bound: Bound, call: CallSignature, low: int, high: int, hidden: int = 0) -> list[Interval]:
    """Winner intervals over [low, high] bytes for sizes aligned like ``low``, smallest first.

    Exact at every threshold that the policy's gates declare, and found by bisection elsewhere (sizes between two
    powers of two are taken to change at most once where no threshold is declared).
    """
    step = _step(call)
    last = low + (high - low) // step * step
    ask = _asker(bound, call, hidden)
    points = sorted({p for p in _points(bound, call, low, last, step) if low <= p <= last})
    intervals: list[Interval] = []
    first = low
    for left, right in pairwise(points):
        if answer_of(ask(left)) != answer_of(ask(right)):
            edge = _edge(ask, left, right, step)
            intervals.append(Interval(first, edge - step, ask(edge - step)))
            first = edge
    intervals.append(Interval(first, last, ask(last)))
    return intervals


def nearest(bound: Bound, call: CallSignature, below: bool, most: int = 1 << 40) -> Nearest | None:
    """The nearest smaller (below) or larger size, aligned like the call's, that takes another route; None if none does.

    One step of 16 bytes (or one element, if that is larger) back towards the call takes the call's own route again.
    """
    step = _step(call)
    size = call.size_bytes
    low, high = (size % step, size) if below else (size, most)
    ask = _asker(bound, call, 0)
    here = answer_of(ask(size))
    points = sorted({size, *(p for p in _points(bound, call, low, high, step) if low <= p <= high)}, reverse=below)
    previous = size
    for point in points:
        if answer_of(ask(point)) != here:
            edge = _edge(ask, previous, point, step)
            return Nearest(edge, (edge - size) // DTYPES[call.dtype].itemsize, ask(edge))
        previous = point
    return None


def aligned(bound: Bound, call: CallSignature) -> Nearest | None:
    """The nearest multiple of 16 bytes, if it takes another route than a call whose size is none."""
    itemsize = DTYPES[call.dtype].itemsize
    rest = call.size_bytes % ALIGN
    if rest == 0:
        return None
    candidates = sorted(
        (call.size_bytes - rest, call.size_bytes - rest + ALIGN), key=lambda s: abs(s - call.size_bytes)
    )
    here = answer_of(bound.verdict(call))
    for size in candidates:
        verdict = bound.verdict(sized(call, size))
        if answer_of(verdict) != here:
            return Nearest(size, (size - call.size_bytes) // itemsize, verdict)
    return None


def misaligned(bound: Bound, call: CallSignature) -> list[Nearest]:
    """What sizes next to an aligned call take, where breaking its multiple of 16 or of 4 changes the route."""
    itemsize = DTYPES[call.dtype].itemsize
    here = answer_of(bound.verdict(call))
    found: list[Nearest] = []
    for more in dict.fromkeys((max(4, itemsize), itemsize)):
        if more % ALIGN and call.size_bytes % ALIGN == 0:
            verdict = bound.verdict(sized(call, call.size_bytes + more))
            if answer_of(verdict) != here:
                found.append(Nearest(call.size_bytes + more, more // itemsize, verdict))
    return found


def _step(call: CallSignature) -> int:
    return max(ALIGN, DTYPES[call.dtype].itemsize)


def _asker(bound: Bound, call: CallSignature, hidden: int) -> Callable[[int], Verdict]:
    known: dict[int, Verdict] = {}

    def ask(size_bytes: int) -> Verdict:
        if size_bytes not in known:
            known[size_bytes] = bound.verdict(sized(call, size_bytes, hidden))
        return known[size_bytes]

    return ask


def _points(bound: Bound, call: CallSignature, low: int, high: int, step: int) -> Iterator[int]:
    """The sizes aligned like low, around every declared threshold and every power of two."""
    yield low
    yield high
    limits = [t.size_bytes for t in bound.thresholds(call.mode)] + [1 << n for n in range(41)]
    for limit in limits:
        base = low + (limit - low) // step * step
        yield from (base - step, base, base + step)


def _edge(ask: Callable[[int], Verdict], near: int, far: int, step: int) -> int:
    """Of the sizes from ``near`` to ``far``, up or down, the first off near's route; ``far`` is off it."""
    here = answer_of(ask(near))
    while abs(far - near) > step:
        middle = near + (far - near) // step // 2 * step
        if answer_of(ask(middle)) == here:
            near = middle
        else:
            far = middle
    return far
