"""Inputs whose right answer is known, and the comparison of results with it.

The input of rank r repeats a random table of PERIOD elements, so every rank can work out the right answer from
PERIOD × ranks numbers, in float64, without communicating and whatever the message size. The period is prime: data that
end up at a wrong place (a chunk, a rank's part) meet another table position. Two kinds of tables:

exact   small integers (powers of two for prod): every partial result is representable, so the answer must match
        bit for bit, whatever the order of the reduction.
random  uniform in [−1, 1) (for prod: magnitudes in [½, 2)): the answer must lie within the tolerance.

Tolerance of element i, for n ranks and unit roundoff u = 2^−(mantissa bits + 1) of the dtype, with γ = n·u / (1 − n·u):
sum: γ Σ_r |x_r,i|; avg: that over n, and one more rounding; prod: γ |Π_r x_r,i|. It bounds the rounding error of any
order of n − 1 operations that each round to the dtype, and of a final one (Higham, Accuracy and Stability of Numerical
Algorithms, 4.2).
A quantised all-reduce sends every input and the sum once through a level of types.QUANTISED, so it may be off by that
level's share of the largest magnitude of each: q (Σ_r max|x_r| + max|Σ_r x_r|), and what the scales' own rounding adds.
min, max and collectives that only move data are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from commbench.types import DTYPES, QUANTISED, Point

PERIOD = 65537
ROOT = 0  # the root rank of rooted collectives
_CHUNK = 1 << 22  # elements compared at once, to bound temporary memory


@dataclass(slots=True)
class Check:
    """The outcome of comparing one rank's results: elements that are wrong, and the largest error of any element."""

    wrong_count: int = 0
    max_abs_error: float = 0.0

    def add(self, other: Check) -> None:
        self.wrong_count += other.wrong_count
        self.max_abs_error = max(self.max_abs_error, other.max_abs_error)


def table(point: Point, rank: int, seed: int, exact: bool) -> torch.Tensor:
    """The table of one rank: min(PERIOD, numel) elements of the point's dtype, on the CPU."""
    length = max(1, min(PERIOD, point.numel))
    dtype = DTYPES[point.dtype]
    torch_dtype = getattr(torch, point.dtype)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + rank) % (1 << 62))
    n = point.world_size

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (length,), generator=generator)

    if not dtype.is_float:
        if point.op == "prod":  # at most six ranks give 2s, so that int8 holds the product
            values = integers(1, 2) if rank < 6 else torch.ones(length, dtype=torch.int64)
        else:
            top = max(1, 100 // n)
            values = integers(0 if dtype.kind == "uint" else -top, top)
        return values.to(torch_dtype)
    if exact and point.op == "prod":
        values = integers(0, 1) * (1 if rank < 8 else 0)
        return (torch.exp2(values.double()) * (1 - 2 * integers(0, 1))).to(torch_dtype)
    if exact:
        top = max(1, min(1000, (2 << dtype.mantissa_bits) // n))
        return integers(-top, top).to(torch_dtype)
    uniform = torch.rand(length, generator=generator, dtype=torch.float64) * 2 - 1
    if point.op == "prod":
        uniform = torch.exp2(uniform) * (1 - 2 * integers(0, 1))
    return uniform.to(torch_dtype)


def reduction(op: str, tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """The exact reduction of tables, in float64 (int64 for integers)."""
    integral = not tables[0].dtype.is_floating_point
    stacked = torch.stack([t.to(torch.int64 if integral else torch.float64) for t in tables])
    if op == "sum":
        return stacked.sum(0)
    if op == "avg":
        return stacked.sum(0) / len(tables)
    if op == "prod":
        return stacked.prod(0)
    return stacked.amin(0) if op == "min" else stacked.amax(0)


def tolerance(op: str, tables: Sequence[torch.Tensor], dtype: str) -> torch.Tensor | None:
    """The tolerance per table element in float64, or None where results must be exact."""
    info = DTYPES[dtype]
    if not info.is_float or op in ("min", "max", ""):
        return None
    n = len(tables)
    u = 2.0 ** -(info.mantissa_bits + 1)
    gamma = n * u / (1 - n * u)
    stacked = torch.stack([t.double() for t in tables])
    # results below the smallest normal number round absolutely, not relatively
    floor = torch.finfo(getattr(torch, dtype)).smallest_normal * u
    if op == "prod":
        return gamma * stacked.prod(0).abs() + floor
    if op == "avg":
        return gamma * stacked.abs().sum(0) / n + u * (stacked.sum(0) / n).abs() + floor
    return gamma * stacked.abs().sum(0) + floor


SCALE_ROUNDING = 2.0**-7  # scales of blocks are kept in 16 bits; bfloat16 is off by 2^-8, twice on the way


def quantised_tolerance(op: str, tables: Sequence[torch.Tensor], dtype: str, level: str) -> torch.Tensor:
    """The tolerance of a quantised reduction per table element, in float64. Raises KeyError for an unknown level."""
    n = len(tables)
    stacked = torch.stack([t.double() for t in tables])
    answer = reduction(op, tables).double()
    sent = stacked.abs().amax(1).sum() / (n if op == "avg" else 1) + answer.abs().max()
    rounding = tolerance(op, tables, dtype)
    exact = torch.zeros_like(answer) if rounding is None else rounding
    return exact + QUANTISED[level] * (1 + SCALE_ROUNDING) * sent


def fill(tensor: torch.Tensor, pattern: torch.Tensor, phase: int = 0) -> None:
    """tensor[i] = pattern[(phase + i) mod len(pattern)], in the tensor's own order of elements."""
    n, length = tensor.numel(), len(pattern)
    if n == 0:
        return
    rolled = pattern.roll(-phase) if phase else pattern
    flat = tensor.view(-1) if tensor.is_contiguous() else None
    whole = n // length
    if flat is not None:
        if whole:
            flat[: whole * length].view(whole, length).copy_(rolled)
        flat[whole * length :].copy_(rolled[: n - whole * length])
    else:
        tensor.copy_(rolled.repeat(whole + 1)[:n].view(tensor.shape))


def poison(tensor: torch.Tensor) -> None:
    """Content that no right answer has: NaN, or the largest integer."""
    if tensor.dtype.is_floating_point:
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def compare(result: torch.Tensor, answer: torch.Tensor, allowed: torch.Tensor | None, phase: int = 0) -> Check:
    """Hold result[i] against answer[(phase + i) mod period], within ``allowed`` (None: bit for bit).

    NaN is never right. An exact answer is compared in the result's dtype.
    """
    flat = result.reshape(-1)
    check = Check()
    if allowed is None and answer.dtype != flat.dtype:
        answer = answer.to(flat.dtype)
    for part, start in chunks(flat, len(answer)):
        shift = (phase + start) % len(answer)
        want = answer.roll(-shift) if shift else answer
        tol = None if allowed is None else (allowed.roll(-shift) if shift else allowed)
        check.add(_compare_rows(part, want, tol))
    return check


def chunks(flat: torch.Tensor, length: int) -> Iterator[tuple[torch.Tensor, int]]:
    """The tensor in pieces of whole periods (and the rest), each with where it starts."""
    rows = max(1, _CHUNK // length)
    for start in range(0, flat.numel(), rows * length):
        part = flat[start : start + rows * length]
        whole = part.numel() // length * length
        if whole:
            yield part[:whole].view(-1, length), start
        if whole < part.numel():
            yield part[whole:].view(1, -1), start + whole


def _compare_rows(part: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor | None) -> Check:
    want = want[: part.shape[1]]
    if allowed is None:
        if part.dtype.is_floating_point and part.dtype.itemsize == 1:
            part, want = part.view(torch.uint8), want.view(torch.uint8)
        different = part != want
        wrong = int(different.sum())
        if not wrong:
            return Check()
        error = (part.double() - want.double()).abs()
        return Check(wrong, _largest(error))
    error = (part.double() - want).abs()
    wrong = int((~(error <= allowed[: part.shape[1]])).sum())
    return Check(wrong, _largest(error))


def _largest(error: torch.Tensor) -> float:
    """The largest error; infinite where a result is NaN."""
    return float(torch.nan_to_num(error, nan=float("inf")).max()) if error.numel() else 0.0
