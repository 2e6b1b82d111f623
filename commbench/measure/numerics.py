"""The numbers of an all-reduce: how far off, the same on all ranks, the same again, right at the ends of the range.

One look per point, outside the timed path: three calls on fresh inputs.

random    uniform tables (correctness.py). Errors against the answer in float64: relative to Σ_r|x_r|, as results near
          zero after cancellation have no relative error of their own; and in units in the last place of the right
          answer, where 0.5 is a correctly rounded result. The bits of all ranks' results are compared.
again     the same inputs: the bits must be those of before for ``repeatable``.
extreme   magnitudes that fill the dtype's range, and some at its lower end, alternating; every partial result stays in
          range, so a right answer is finite and not flushed. A kernel that goes through a narrower type on the way
          (bfloat16 through float16: above 65504, below 6e-8) gives infinity or zero. Integers: up to the largest
          that n ranks can add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from commbench.measure.buffers import Buffers
from commbench.measure.correctness import (
    Check,
    chunks,
    compare,
    fill,
    poison,
    quantised_tolerance,
    reduction,
    table,
    tolerance,
)
from commbench.types import DTYPES, Point

CALLS = 3  # that ``examine`` makes
_WEIGHTS = 8191  # of a checksum; prime, so that repeated data meet other weights
_WORDS = 1 << 22  # words summed at once, to bound temporary memory
_AWAY = 64.0  # times n and the smallest normal number: the lower end, with room for an average


@dataclass(slots=True)
class Numerics:
    """What one rank found. digests: of its results on random inputs, on the same again, and on extreme ones.

    relative and ulp are None where nothing can be off (integers, min, max).
    """

    check: Check
    relative: float | None
    ulp: float | None
    extremes_wrong: int
    digests: tuple[int, int, int]


def examine(buffers: Buffers, call: Callable[[], object], meet: Callable[[], None], seed: int) -> Numerics:
    """Call three times on fresh inputs and hold the results against the right answers.

    Collective: all ranks with the same seed; ``meet`` is called before each call. buffers: of an all-reduce.
    """
    point = buffers.point
    tables = [table(point, r, seed, exact=False) for r in range(point.world_size)]
    random = _run(buffers, call, meet, tables)
    check, relative, ulp = _errors(buffers, tables)
    again = _run(buffers, call, meet, tables)
    tables = [extremes(point, r, seed) for r in range(point.world_size)]
    extreme = _run(buffers, call, meet, tables)
    at_ends = compare(_output(buffers), *_answer(buffers, tables))
    check.wrong_count += at_ends.wrong_count  # its errors are of another size: they would hide the others
    return Numerics(check, relative, ulp, at_ends.wrong_count, (random, again, extreme))


def extremes(point: Point, rank: int, seed: int) -> torch.Tensor:
    """A table like correctness.table's with magnitudes at both ends of the range, whose reduction stays inside.

    All ranks' elements have the same sign, so nothing cancels. For prod rank 0 has them and the others have ones.
    """
    dtype, torch_dtype, n = DTYPES[point.dtype], getattr(torch, point.dtype), point.world_size
    length = len(table(point, rank, seed, exact=True))
    common = torch.Generator().manual_seed(seed % (1 << 62))
    own = torch.Generator().manual_seed((seed * 1_000_003 + rank + 1) % (1 << 62))
    sign = 1 - 2 * torch.randint(0, 2, (length,), generator=common)
    if point.op == "prod" and rank:
        return torch.ones(length, dtype=torch_dtype)
    parts = 1 if point.op in ("prod", "min", "max") else n
    if not dtype.is_float:
        top = torch.iinfo(torch_dtype).max // parts
        values = top - torch.randint(0, max(1, top // 2), (length,), generator=own)
        return (values if dtype.kind == "uint" else values * sign).to(torch_dtype)
    info = torch.finfo(torch_dtype)
    fraction = 0.5 + 0.5 * torch.rand(length, generator=own, dtype=torch.float64)
    # halved, so that roundings on the way up cannot leave the range
    large, small = info.max / (2 * parts) * fraction, info.smallest_normal * _AWAY * n * fraction
    lower = torch.arange(length) % 2 == 1
    return (torch.where(lower, small, large) * sign).to(torch_dtype)


def _run(buffers: Buffers, call: Callable[[], object], meet: Callable[[], None], tables: Sequence[torch.Tensor]) -> int:
    """One call on these inputs; the digest of its result."""
    output = _output(buffers)
    poison(output)
    if buffers.input is not None:
        fill(buffers.input, tables[buffers.rank].to(buffers.input.device))
    meet()
    call()
    return digest(output)


def _output(buffers: Buffers) -> torch.Tensor:
    if buffers.output is None:
        raise ValueError(f"{buffers.point.collective} has no output on rank {buffers.rank}")
    return buffers.output


def _answer(buffers: Buffers, tables: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The right answer and what a result may be off it, on the device of the result."""
    point, device = buffers.point, _output(buffers).device
    moved = [t.to(device) for t in tables]
    if buffers.quantised:
        return reduction(point.op, moved), quantised_tolerance(point.op, moved, point.dtype, buffers.quantised)
    return reduction(point.op, moved), tolerance(point.op, moved, point.dtype)


def _errors(buffers: Buffers, tables: Sequence[torch.Tensor]) -> tuple[Check, float | None, float | None]:
    """The comparison with the right answer, and the largest relative and ulp error."""
    point, output = buffers.point, _output(buffers)
    answer, allowed = _answer(buffers, tables)
    if allowed is None:
        return compare(output, answer, None), None, None
    scale = _magnitudes(point.op, [t.to(output.device) for t in tables])
    step = ulp_of(answer, point.dtype)
    flat = output.reshape(-1)
    check, relative, ulp = Check(), 0.0, 0.0
    for part, start in chunks(flat, len(answer)):
        shift, width = start % len(answer), part.shape[1]
        want, room, size, unit = (
            (t.roll(-shift) if shift else t)[:width] for t in (answer, allowed, scale, step)
        )  # fmt: skip
        error = torch.nan_to_num((part.double() - want).abs(), nan=float("inf"))
        check.add(Check(int((error > room).sum()), float(error.max())))
        relative = max(relative, float(torch.where(error > 0, error / size, 0.0).max()))
        ulp = max(ulp, float((error / unit).max()))
    return check, relative, ulp


def _magnitudes(op: str, tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """Σ|x_r| of a sum, that over n of an average, |Π x_r| of a product: what rounding errors are in proportion to."""
    stacked = torch.stack([t.double() for t in tables]).abs()
    if op == "prod":
        return stacked.prod(0)
    return stacked.sum(0) / (len(tables) if op == "avg" else 1)


def ulp_of(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """Distance of neighbouring numbers of a float dtype at each value (float64); below the normal range, the least."""
    smallest = torch.finfo(getattr(torch, dtype)).smallest_normal
    _, exponent = torch.frexp(values.double().abs().clamp_min(smallest))  # value = m · 2^exponent, ½ ≤ m < 1
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponent - 1 - DTYPES[dtype].mantissa_bits)


def digest(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bits: Σ word_i · weight_(i mod 8191) mod 2^64, with odd random weights.

    Computed where the tensor lives. Tensors that differ in one word always differ in it.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    tail = int.from_bytes(bytes(data[whole:].tolist()), "little")
    # a storage may begin anywhere; words need a boundary of eight bytes
    words = data[:whole].clone().view(torch.int64) if data.data_ptr() % 8 else data[:whole].view(torch.int64)
    weights = _weights(tensor.device)
    total = tail * 0x9E3779B97F4A7C15
    for start in range(0, words.numel(), _WORDS // _WEIGHTS * _WEIGHTS):
        part = words[start : start + _WORDS // _WEIGHTS * _WEIGHTS]
        rows = part.numel() // _WEIGHTS
        body, rest = part[: rows * _WEIGHTS], part[rows * _WEIGHTS :]
        if rows:
            total += int((body.view(rows, _WEIGHTS) * weights).sum())
        if rest.numel():
            total += int((rest * weights[: rest.numel()]).sum())
    return total % (1 << 64)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_WEIGHTS)
    return (torch.randint(0, 1 << 62, (_WEIGHTS,), generator=generator) * 2 + 1).to(device)
