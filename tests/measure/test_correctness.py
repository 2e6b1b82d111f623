"""Right answers are accepted, wrong ones are found: for every collective, op, dtype and size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.measure.buffers import Buffers, copies_for
from commbench.measure.correctness import PERIOD, compare, fill, poison, reduction, table, tolerance
from commbench.types import COLLECTIVES, DTYPES, Point, ops_of

CPU = torch.device("cpu")


def emulate(point: Point, seed: int, exact: bool) -> list[Buffers]:
    """Every rank's buffers after a collective done by plain tensor operations, rounding in the dtype at each step."""
    n = point.world_size
    ranks = [Buffers(point, r, CPU) for r in range(n)]
    for buffers in ranks:
        buffers.refill(seed, exact)
    inputs = [None if b.input is None else b.input.clone() for b in ranks]
    part = point.numel // n

    def reduced() -> torch.Tensor:
        total = inputs[0].clone()
        for other in inputs[1:]:
            match point.op:
                case "sum" | "avg":
                    total = total + other
                case "prod":
                    total = total * other
                case "min":
                    total = torch.minimum(total, other)
                case "max":
                    total = torch.maximum(total, other)
        return (total / n).to(total.dtype) if point.op == "avg" else total

    for r, buffers in enumerate(ranks):
        out = buffers.output
        match point.collective:
            case "all_reduce" | "reduce":
                if point.collective == "all_reduce" or r == 0:
                    out.copy_(reduced())
            case "reduce_scatter":
                out.copy_(reduced()[r * part : (r + 1) * part])
            case "all_gather" | "gather":
                if out is not None:
                    out.copy_(torch.cat(inputs))
            case "all_to_all":
                out.copy_(torch.cat([x[r * part : (r + 1) * part] for x in inputs]))
            case "scatter":
                out.copy_(inputs[0][r * part : (r + 1) * part])
            case "broadcast":
                out.copy_(inputs[0])
            case "send_recv":
                out.copy_(inputs[(r - 1) % n])
    return ranks


CASES = [
    (name, op, dtype, placement)
    for name, info in COLLECTIVES.items()
    if info.has_data and info.dispatched and not name.removesuffix("_skewed").endswith("v")
    for dtype in DTYPES
    if not (info.reduces and dtype.startswith("float8"))
    for op in (ops_of(dtype) if info.reduces else ("",))
    for placement in info.placements
]


@pytest.mark.parametrize(("name", "op", "dtype", "placement"), CASES)
def test_a_right_answer_is_accepted(name: str, op: str, dtype: str, placement: str) -> None:
    for n, elements in ((2, 6), (4, 4000), (8, 8)):
        point = Point(name, op, dtype, elements * DTYPES[dtype].itemsize, n, placement=placement)
        for exact in (True, False):
            for buffers in emulate(point, 5, exact):
                check = buffers.check(5, exact)
                assert check.wrong_count == 0, (n, exact, check)


@pytest.mark.parametrize(("name", "op", "dtype"), [case[:3] for case in CASES if case[3] == "out"])
def test_results_that_were_never_written_are_wrong(name: str, op: str, dtype: str) -> None:
    point = Point(name, op, dtype, 24 * DTYPES[dtype].itemsize, 4, placement="out")
    buffers = Buffers(point, 0, CPU)
    buffers.refill(5, True)
    assert buffers.check(5, True).wrong_count == buffers.output.numel()


@given(
    st.sampled_from(["float32", "bfloat16", "int32"]),
    st.integers(1, 3 * PERIOD),
    st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_one_wrong_element_is_found_wherever_it_stands(dtype: str, numel: int, where: int) -> None:
    point = Point("all_reduce", "sum", dtype, numel * DTYPES[dtype].itemsize, 2)
    result = torch.empty(numel, dtype=getattr(torch, dtype))
    tables = [table(point, r, 3, True) for r in range(2)]
    answer = reduction("sum", tables)
    fill(result, answer.to(result.dtype))
    assert compare(result, answer, None).wrong_count == 0
    result[where % numel] += 8
    check = compare(result, answer, None)
    assert check.wrong_count == 1
    assert check.max_abs_error == pytest.approx(8)


@pytest.mark.parametrize("shift", [1, 1024, 4096, 65536])
def test_data_at_a_wrong_place_are_found(shift: int) -> None:
    point = Point("broadcast", "", "float32", 4 * 3 * PERIOD, 2)
    pattern = table(point, 0, 1, True)
    result = torch.empty(3 * PERIOD)
    fill(result, pattern)
    assert compare(result.roll(shift), pattern, None).wrong_count > PERIOD


def test_a_rank_left_out_of_a_sum_is_found_in_every_dtype() -> None:
    for dtype in ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"):
        point = Point("all_reduce", "sum", dtype, 4000 * DTYPES[dtype].itemsize, 4)
        tables = [table(point, r, 1, True) for r in range(4)]
        short = reduction("sum", tables[:3]).to(getattr(torch, dtype))
        assert compare(short, reduction("sum", tables), None).wrong_count > 2000


def test_nan_is_never_right() -> None:
    point = Point("all_reduce", "sum", "float32", 400, 2)
    tables = [table(point, r, 1, False) for r in range(2)]
    result = reduction("sum", tables).float()
    allowed = tolerance("sum", tables, "float32")
    assert compare(result, reduction("sum", tables), allowed).wrong_count == 0
    result[7] = float("nan")
    check = compare(result, reduction("sum", tables), allowed)
    assert (check.wrong_count, check.max_abs_error) == (1, float("inf"))


def test_an_error_beyond_the_tolerance_is_wrong_and_one_within_it_is_not() -> None:
    point = Point("all_reduce", "sum", "bfloat16", 2000, 2)
    tables = [table(point, r, 1, False) for r in range(2)]
    answer, allowed = reduction("sum", tables), tolerance("sum", tables, "bfloat16")
    inside = answer + 0.99 * allowed
    outside = answer + 1.01 * allowed
    assert compare(inside, answer, allowed).wrong_count == 0
    assert compare(outside, answer, allowed).wrong_count == 1000


def test_strided_tensors_are_filled_and_checked_like_others() -> None:
    point = Point("all_reduce", "sum", "float32", 4000, 2, layout="strided")
    for buffers in emulate(point, 9, True):
        assert not buffers.input.is_contiguous()
        assert buffers.check(9, True).wrong_count == 0


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_poison_is_no_value_that_an_answer_has(dtype: str) -> None:
    tensor = torch.zeros(4).to(getattr(torch, dtype))
    poison(tensor)
    if tensor.dtype.is_floating_point:
        assert torch.isnan(tensor.float()).all()
    else:
        assert (tensor == torch.iinfo(tensor.dtype).max).all()


def test_cold_buffers_hold_twice_the_cache_within_the_cap() -> None:
    small = Point("all_reduce", "sum", "float32", 1 << 20, 2, cache="cold")
    assert copies_for(small, 32 << 20) * 2 * small.size_bytes >= 2 * (32 << 20)
    assert copies_for(Point("all_reduce", "sum", "float32", 1 << 20, 2), 32 << 20) == 1
    huge = Point("all_reduce", "sum", "float32", 1 << 30, 2, cache="cold")
    assert copies_for(huge, 32 << 20) == 2
