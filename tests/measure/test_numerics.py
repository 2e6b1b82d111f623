"""The numbers of an all-reduce, on ranks that are tables in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from commbench.measure import correctness
from commbench.measure.buffers import Buffers
from commbench.measure.numerics import CALLS, Numerics, digest, examine, extremes, ulp_of
from commbench.measure.rows import numbers_over_ranks
from commbench.types import DTYPES, OPS, QUANTISED, Point

FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_float]
SEED = 11
Reduce = Callable[[list[torch.Tensor]], torch.Tensor]


def point_of(dtype: str, op: str = "sum", ranks: int = 4, numel: int = 3000, placement: str = "out") -> Point:
    return Point("all_reduce", op, dtype, numel * DTYPES[dtype].itemsize, ranks, placement=placement)


def look(point: Point, reduce: Reduce, quantised: str = "", rank: int = 0) -> Numerics:
    """``examine`` on one rank, whose call reduces what all ranks put in."""
    buffers = Buffers(point, rank, torch.device("cpu"))
    buffers.quantised = quantised
    assert buffers.output is not None
    made = 0

    def call() -> None:
        nonlocal made
        seed_of = extremes if made == 2 else lambda p, r, s: correctness.table(p, r, s, exact=False)
        made += 1
        tables = [seed_of(point, r, SEED) for r in range(point.world_size)]
        assert buffers.output is not None
        correctness.fill(buffers.output, reduce(tables))

    found = examine(buffers, call, lambda: None, SEED)
    assert made == CALLS
    return found


def rounded(point: Point) -> Reduce:
    """The answer in float64, rounded once."""
    return lambda tables: correctness.reduction(point.op, tables).to(getattr(torch, point.dtype))


def one_after_the_other(tables: list[torch.Tensor]) -> torch.Tensor:
    total = tables[0].clone()
    for table in tables[1:]:
        total += table
    return total


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_correctly_rounded_result_is_off_by_half_a_unit_in_the_last_place_at_most(dtype: str, op: str) -> None:
    point = point_of(dtype, op)
    found = look(point, rounded(point))
    assert found.check.wrong_count == 0
    if op in ("min", "max"):
        assert found.relative is found.ulp is None
        return
    # float64 is held against itself
    assert found.ulp == 0 if dtype == "float64" else 0.4 < (found.ulp or 0) <= 0.5
    assert (found.relative or 0) <= 2.0 ** -(DTYPES[dtype].mantissa_bits + 1)


def test_an_error_of_known_size_is_reported_relative_to_the_inputs_magnitudes_and_in_units_in_the_last_place() -> None:
    point = point_of("float32", ranks=2, numel=1)
    a, b = (correctness.table(point, r, SEED, exact=False).double() for r in range(2))
    answer = (a + b).float()
    off = torch.nextafter(torch.nextafter(answer, answer + 1), answer + 1)
    found = look(point, lambda tables: off if tables[0].abs().max() < 1 else rounded(point)(tables))
    error = float((off.double() - (a + b)).abs())
    assert found.relative == pytest.approx(error / float(a.abs() + b.abs()))
    assert found.ulp == pytest.approx(error / float(ulp_of(a + b, "float32")))
    assert 1.5 <= found.ulp <= 2.5


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_unit_in_the_last_place_is_the_distance_to_the_next_number(dtype: str) -> None:
    one = torch.tensor([1.0, 1.5, 2.0, -1.0], dtype=torch.float64)
    expected = 2.0 ** -DTYPES[dtype].mantissa_bits
    assert ulp_of(one, dtype).tolist() == [expected, expected, 2 * expected, expected]
    tiny = float(torch.finfo(getattr(torch, dtype)).smallest_normal)
    assert float(ulp_of(torch.zeros(1), dtype)) == tiny * expected  # subnormal numbers are so far apart


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_extreme_inputs_have_a_reduction_inside_the_range_whatever_its_order(dtype: str, op: str) -> None:
    if op == "avg" and not DTYPES[dtype].is_float:
        return
    point = point_of(dtype, op)
    tables = [extremes(point, r, SEED) for r in range(4)]
    torch_dtype = getattr(torch, dtype)
    if DTYPES[dtype].is_float:
        info = torch.finfo(torch_dtype)
        magnitudes = torch.stack([t.double().abs() for t in tables])
        top = magnitudes.prod(0) if op == "prod" else magnitudes.sum(0)
        assert info.max / 4 <= float(top.max()) <= info.max * 0.6 or op in ("min", "max")
        assert torch.isfinite(magnitudes).all()
        assert float(magnitudes.min()) >= info.smallest_normal
        assert float(magnitudes.min()) <= info.smallest_normal * 1024 or op == "prod" or info.bits == 8
    else:
        answer = correctness.reduction(op, tables)
        limit = torch.iinfo(torch_dtype)
        assert limit.min <= int(answer.min())
        assert int(answer.max()) <= limit.max
        assert int(answer.abs().max()) > limit.max // 4


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "max"])
def test_a_cast_to_a_narrower_type_on_the_way_is_caught(op: str) -> None:
    point = point_of("bfloat16", op)
    through = lambda tables: rounded(point)(tables).to(torch.float16).to(torch.bfloat16)  # noqa: E731
    found = look(point, through)
    overflowing = [extremes(point, r, SEED) for r in range(4)]
    assert torch.isinf(through(overflowing)).any()
    assert found.extremes_wrong == 3000  # half of them infinite, half of them flushed to zero
    assert found.check.wrong_count == found.extremes_wrong  # on ordinary inputs it is right


def test_integers_that_go_through_floats_are_caught() -> None:
    point = point_of("int64")
    found = look(point, lambda tables: correctness.reduction("sum", tables).double().to(torch.int64))
    assert found.extremes_wrong > 2000
    assert found.check.wrong_count == found.extremes_wrong


@pytest.mark.parametrize("placement", ["in", "out"])
def test_results_that_are_wrong_on_ordinary_inputs_are_counted(placement: str) -> None:
    point = point_of("float32", placement=placement)

    def spoilt(tables: list[torch.Tensor]) -> torch.Tensor:
        result = one_after_the_other(tables)
        result[:5] += 1
        return result

    found = look(point, spoilt)
    assert found.check.wrong_count - found.extremes_wrong == 5


@pytest.mark.parametrize("level", QUANTISED)
def test_a_quantised_result_is_right_within_its_level_and_wrong_beyond_it(level: str) -> None:
    point = point_of("bfloat16", ranks=2)

    def quantise(tables: list[torch.Tensor], steps: float = 1.0) -> torch.Tensor:
        answer = correctness.reduction("sum", tables)
        step = steps * QUANTISED[level] * answer.abs().max()
        return ((answer / step).round() * step).to(torch.bfloat16)

    within = look(point, quantise, quantised=level)
    assert within.check.wrong_count == 0
    assert (within.ulp or 0) > 1
    assert look(point, quantise).check.wrong_count > 100  # nobody said that it is quantised
    assert look(point, lambda tables: quantise(tables, 10), quantised=level).check.wrong_count > 100
    assert look(point, lambda tables: tables[0] * torch.nan, quantised=level).check.wrong_count == 6000


def test_a_quantised_backend_that_overflows_is_wrong_too() -> None:
    point = point_of("bfloat16", ranks=2)
    found = look(point, lambda t: rounded(point)(t).to(torch.float16).to(torch.bfloat16), quantised="int4")
    assert found.extremes_wrong == 1500  # infinite; what is flushed is within the level


def test_other_bits_the_second_time_and_on_another_rank_are_found() -> None:
    point = point_of("float32")
    calls = 0

    def restless(tables: list[torch.Tensor]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return one_after_the_other(tables if calls == 1 else tables[::-1])

    def row(found: Numerics, group: tuple[int, ...] = (0, 1)) -> dict[str, object]:
        return {
            "relative": found.relative, "ulp": found.ulp, "extremes_wrong": found.extremes_wrong,
            "digests": found.digests, "group": list(group),
        }  # fmt: skip

    steady = look(point, one_after_the_other)
    other = look(point, lambda tables: one_after_the_other(tables[::-1]), rank=1)
    moved = look(point, restless)
    assert numbers_over_ranks([row(steady), row(steady)])["ranks_agree"]
    assert numbers_over_ranks([row(steady), row(steady)])["repeatable"]
    assert not numbers_over_ranks([row(steady), row(other)])["ranks_agree"]
    assert numbers_over_ranks([row(steady), row(other, (2, 3))])["ranks_agree"]  # groups that work side by side
    assert not numbers_over_ranks([row(moved)])["repeatable"]
    assert numbers_over_ranks([]) == {}


@pytest.mark.parametrize("numel", [0, 1, 7, 8191 * 8, 8191 * 8 * 600 + 13])
def test_a_checksum_sees_one_bit_and_where_it_is(numel: int) -> None:
    data = torch.zeros(numel, dtype=torch.uint8)
    before = digest(data)
    seen = {before}
    for i in {0, numel // 2, numel - 1} if numel else set():
        data[i] = 1
        seen.add(digest(data))
        data[i] = 0
    assert len(seen) == 1 + len({0, numel // 2, numel - 1} if numel else set())
    assert digest(data) == before


def test_a_checksum_does_not_depend_on_where_in_memory_the_tensor_lies() -> None:
    data = torch.arange(101, dtype=torch.uint8)
    assert digest(data[1:]) == digest(data[1:].clone())
    assert digest(torch.arange(10)[::2]) == digest(torch.tensor([0, 2, 4, 6, 8]))
