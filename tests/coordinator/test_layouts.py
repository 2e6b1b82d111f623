"""Group layouts rank by rank, without processes."""

from __future__ import annotations

import pytest

from commbench.coordinator.layouts import GROUP_KINDS, parallel_layout
from commbench.errors import UsageError

FACTORISATIONS = [
    (world, tp, ep, world // tp)
    for world in range(1, 17)
    for tp in range(1, world + 1)
    if world % tp == 0
    for ep in range(1, tp + 1)
    if tp % ep == 0
]


def place(rank: int, tp: int, ep: int) -> tuple[int, int, int]:
    """(pipeline stage, expert rank, rank within the experts' tensor parallelism): the rank's digits, slowest first."""
    within = rank % tp
    return rank // tp, within // (tp // ep), within % (tp // ep)


@pytest.mark.parametrize(("world", "tp", "ep", "pp"), FACTORISATIONS)
def test_a_group_holds_the_ranks_that_differ_in_its_own_digit_only(world: int, tp: int, ep: int, pp: int) -> None:
    layout = parallel_layout(world, tp, ep, pp)
    same_for = {
        "world": lambda r: (),
        "tp": lambda r: place(r, tp, ep)[:1],
        "pp": lambda r: place(r, tp, ep)[1:],
        "moe_ep": lambda r: (place(r, tp, ep)[0], place(r, tp, ep)[2]),
        "moe_tp": lambda r: place(r, tp, ep)[:2],
    }
    for kind in GROUP_KINDS:
        groups = layout.of(kind)
        for rank in range(world):
            (mine,) = [g for g in groups if rank in g]
            assert list(mine) == [r for r in range(world) if same_for[kind](r) == same_for[kind](rank)], kind


@pytest.mark.parametrize(("world", "tp", "ep", "pp"), FACTORISATIONS)
def test_the_groups_of_a_kind_hold_every_rank_once_and_are_of_one_size(world: int, tp: int, ep: int, pp: int) -> None:
    layout = parallel_layout(world, tp, ep, pp)
    sizes = {"world": world, "tp": tp, "pp": pp, "moe_ep": ep, "moe_tp": tp // ep}
    for kind in GROUP_KINDS:
        assert sorted(r for g in layout.of(kind) for r in g) == list(range(world))
        assert {len(g) for g in layout.of(kind)} == {sizes[kind]}


def test_eight_ranks_as_the_documentation_draws_them() -> None:
    layout = parallel_layout(8, tp=4, ep=2, pp=2)
    assert layout.tp == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.pp == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.moe_tp == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.moe_ep == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize(
    ("world", "tp", "ep", "pp", "said"),
    [
        (8, 4, 1, 1, "4 × 1 = 4 must equal the world size, 8"),
        (8, 3, 1, 2, "3 × 2 = 6 must equal the world size, 8"),
        (8, 4, 3, 2, "expert parallel size 3 must divide the tensor parallel size 4"),
        (8, 4, 8, 2, "expert parallel size 8 must divide the tensor parallel size 4"),
        (8, 0, 1, 1, "tensor parallel size 0 must be"),
        (8, 8, 1, -1, "pipeline parallel size -1 must be"),
        (8, 8, True, 1, "expert parallel size True must be"),
    ],
)
def test_sizes_that_do_not_fit_are_named(world: int, tp: int, ep: int, pp: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parallel_layout(world, tp, ep, pp)
