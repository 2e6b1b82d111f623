"""The coordinator with real processes: right results, recorded decisions, counters that tell the truth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commbench.coordinator.group import GroupCoordinator, layout_of
from commbench.coordinator.world import local_platform
from commbench.errors import BackendUnavailable, CollectiveError
from commbench.measure.places import Place, buffers_for
from commbench.policy import Policy, load_policy
from commbench.types import COLLECTIVES, DTYPES, CallSignature, Decision, Point, ops_of
from tests.ranks import run_ranks, world

CPU = torch.device("cpu")


def coordinator(policy: Any = None, backends: tuple[str, ...] = ()) -> GroupCoordinator:
    return GroupCoordinator(world(), policy or load_policy("commbench"), local_platform(CPU), backends=backends)


def every_collective_is_right(rank: int, size: int) -> list[str]:
    group = coordinator(backends=("torch_dist", "fake"))
    wrong = []
    for backend in ("torch_dist", "fake"):
        with group.forcing(backend):
            for name, info in COLLECTIVES.items():
                if not info.dispatched:
                    continue
                for dtype in ("float32", "bfloat16", "int8", "int64"):
                    for op in ops_of(dtype) if info.reduces else ("",):
                        for placement in info.placements:
                            for layout in ("contiguous", "strided"):
                                if layout == "strided" and placement == "in" and name != "all_reduce":
                                    continue
                                numel = 24 if info.has_data else 0
                                point = Point(
                                    name, op, dtype if info.has_data else "none",
                                    numel * DTYPES[dtype].itemsize, size, layout=layout, placement=placement,
                                )  # fmt: skip
                                buffers = buffers_for(point, Place(group), CPU)
                                call = buffers.call(group)
                                for exact in (True, False):
                                    buffers.refill(11, exact)
                                    call()
                                    if buffers.check(11, exact).wrong_count:
                                        wrong.append(f"{backend} {point.label()} exact={exact}")
    group.destroy()
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_op_dtype_placement_and_layout_gives_the_right_answer(size: int) -> None:
    assert run_ranks(every_collective_is_right, size) == [[]] * size


def facts(rank: int, size: int) -> dict[str, Any]:
    group = coordinator(backends=("fake",))
    x = torch.ones(8)
    found: dict[str, Any] = {}
    decision = group.decide(group.signature("all_reduce", x, "sum", "in"))
    with group.forcing("torch_dist"):
        group.all_reduce(x)
        found["forced"] = group.decide(group.signature("all_reduce", x, "sum", "in")).picked
    found["sum"] = x.tolist()
    found["usable"] = group.usable
    found["declined"] = [d.backend for d in decision.declined]
    found["counts"] = group.call_counts()["torch_dist"]
    with group.forcing("fake"):
        for _ in range(3):
            group.barrier()
    found["fake"] = group.call_counts()["fake"]
    try:
        with group.forcing("nonsense"):
            group.all_reduce(x)
    except BackendUnavailable as error:
        found["unavailable"] = str(error)
    found["after"] = group._forced
    errors = []
    for call in (
        lambda: group.all_reduce(x, op="xor"),
        lambda: group.all_reduce(x, out=torch.ones(9)),
        lambda: group.all_reduce(x, out=torch.ones(8, dtype=torch.float64)),
        lambda: group.all_gather_into_tensor(torch.ones(17), x),
        lambda: group.reduce_scatter_tensor(torch.ones(4), torch.ones(9)),
        lambda: group.broadcast(x, src=2),
        lambda: group.all_to_all(torch.ones(7), torch.ones(7)),
        lambda: group.gather_into_tensor(torch.ones(16) if rank else None, x, dst=0),
        lambda: group.send_recv(x, torch.ones(8), dst=-1, src=0),
        lambda: group.all_reduce(torch.ones(4, dtype=torch.complex64)),
    ):
        with pytest.raises(CollectiveError) as caught:
            call()
        errors.append(str(caught.value))
    found["errors"] = errors
    group.destroy()
    group.destroy()
    with pytest.raises(CollectiveError, match="destroyed"):
        group.all_reduce(x)
    return found


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    return run_ranks(facts, 2)


def test_a_forced_backend_is_taken_and_counted(told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert rank["forced"] == "torch_dist"
        assert rank["sum"] == [2.0] * 8
        assert rank["counts"] == 1
        assert rank["fake"] == 3


def test_a_backend_that_cannot_be_forced_says_why_and_the_policy_is_back_afterwards(told: list[dict[str, Any]]) -> None:
    for rank in told:
        assert "nonsense is unavailable" in rank["unavailable"]
        assert rank["after"] is None


def test_all_ranks_decide_alike(told: list[dict[str, Any]]) -> None:
    assert told[0]["declined"] == told[1]["declined"]
    assert told[0]["usable"] == told[1]["usable"]


def test_a_wrong_call_names_the_value(told: list[dict[str, Any]]) -> None:
    for rank in told:
        for message, part in zip(
            rank["errors"],
            ("op 'xor'", "8 elements and out 9", "torch.float32 but out is torch.float64", "8 elements and out 17",
             "9 elements and out 4", "src=2", "7 elements do not split", "needed on rank 0", "dst=-1", "complex64"),
            strict=True,
        ):  # fmt: skip
            assert part in message


class LyingPolicy(Policy):
    """Tells the first who asks that fake is taken, and afterwards takes torch_dist."""

    def __init__(self) -> None:
        super().__init__(load_policy("commbench").data)
        self._asked = 0

    def decide(self, call: CallSignature, platform: Any, declines: Any = None) -> Decision:
        self._asked += 1
        return Decision("fake" if self._asked == 1 else "torch_dist", policy="lying")


def lied_to(rank: int, size: int) -> tuple[str, dict[str, int]]:
    group = coordinator(LyingPolicy(), backends=("fake",))
    x = torch.ones(4)
    prediction = group.decide(group.signature("all_reduce", x, "sum", "in")).picked
    for _ in range(5):
        group.all_reduce(x)
    return prediction, {name: n for name, n in group.call_counts().items() if n}


def test_counters_tell_what_was_taken_when_a_policy_lies() -> None:
    assert run_ranks(lied_to, 2) == [("fake", {"torch_dist": 5})] * 2


def one_rank_fails(rank: int, size: int) -> dict[str, str | None]:
    from commbench.backends import fake
    from commbench.backends.base import Availability

    if rank == 1:

        def missing(cls: Any, device: str) -> Availability:
            return Availability(False, "its library is missing", "install it")

        fake.FakeBackend.availability = classmethod(missing)  # type: ignore[method-assign,assignment]
    return coordinator(backends=("fake",)).usable


def test_a_backend_that_one_rank_cannot_set_up_is_off_on_all_with_that_ranks_reason() -> None:
    for usable in run_ranks(one_rank_fails, 2):
        assert usable["fake"] == "rank 1: its library is missing (install it)"


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [(torch.ones(4), "contiguous"), (torch.ones(8)[::2], "strided"), (torch.ones(2, 3).t(), "dense_t"),
     (torch.ones(1, 3).t(), "contiguous"), (torch.ones(4, 4)[:, :2], "strided")],
)  # fmt: skip
def test_layouts_are_told_apart(tensor: torch.Tensor, layout: str) -> None:
    assert layout_of(tensor) == layout
