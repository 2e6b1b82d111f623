"""The collectives under torch.compile: one graph, the eager result, and a fake implementation for each op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from commbench.coordinator import custom_ops, names
from commbench.coordinator.group import GroupCoordinator
from commbench.coordinator.world import local_platform
from commbench.errors import CollectiveError
from commbench.policy import load_policy
from tests.ranks import run_ranks, world

CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    """A small tensor-parallel layer that uses every collective with a custom op."""

    def __init__(self, group: GroupCoordinator) -> None:
        super().__init__()
        self.group = group
        self.linear = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.ones_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = self.group.world_size
        y = self.group.all_reduce(self.linear(x).relu())
        largest = torch.empty_like(y)
        self.group.all_reduce(y * (1 + self.group.rank_in_group), "max", largest)
        gathered = self.group.all_gather(y, dim=-1)
        assert gathered is not None
        flat = torch.empty((size * y.shape[0], y.shape[1]))
        self.group.all_gather_into_tensor(flat, y)
        part = torch.empty_like(y)
        self.group.reduce_scatter_tensor(part, flat)
        swapped = torch.empty_like(flat)
        self.group.all_to_all(flat, swapped)
        root = self.group.broadcast(part + self.group.rank_in_group, 1)
        return y + 1, largest, gathered * 2, part, swapped, root


def compiled_and_eager(rank: int, size: int) -> dict[str, Any]:
    group = GroupCoordinator(world(120), load_policy("commbench"), local_platform(CPU), backends=("torch_dist",))
    layer = Layer(group)
    x = torch.arange(4 * 8, dtype=torch.float32).reshape(4, 8) + rank
    found: dict[str, Any] = {}
    with torch.no_grad():
        eager = layer(x.clone())
        fast = torch.compile(layer, fullgraph=True)
        found["equal"] = [torch.equal(a, b) for a, b in zip(fast(x.clone()), eager, strict=True)]
        found["again"] = [torch.equal(a, b) for a, b in zip(fast(x.clone()), eager, strict=True)]
        explained = torch._dynamo.explain(layer)(x.clone())
        found["breaks"] = explained.graph_break_count
        targets = {str(node.target) for graph in explained.graphs for node in graph.graph.nodes}
        found["ops"] = sorted(t.removeprefix("commbench.") for t in targets if t.startswith("commbench."))
        before = group.call_counts()["torch_dist"]
        with group.forcing("torch_dist"):
            torch.compile(lambda t: group.all_reduce(t) + 1, fullgraph=True, backend="aot_eager")(torch.ones(3))
        found["forced"] = group.call_counts()["torch_dist"] - before
    found["mode after"] = group._mode
    group.destroy()
    try:
        torch.ops.commbench.all_reduce_(torch.ones(2), group.unique_name, 0, "")
    except CollectiveError as error:
        found["destroyed"] = str(error)
    return found


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    return run_ranks(compiled_and_eager, 2, timeout_s=280)


def test_a_module_compiles_to_one_graph_and_gives_the_eager_results(compiled: list[dict[str, Any]]) -> None:
    for rank in compiled:
        assert rank["equal"] == [True] * 6
        assert rank["again"] == [True] * 6
        assert rank["breaks"] == 0


def test_every_collective_goes_through_its_custom_op(compiled: list[dict[str, Any]]) -> None:
    for rank in compiled:
        assert rank["ops"] == [
            "all_gather_into_tensor", "all_reduce", "all_reduce_", "all_to_all", "broadcast_", "reduce_scatter_tensor",
        ]  # fmt: skip


def test_a_backend_forced_while_tracing_is_taken(compiled: list[dict[str, Any]]) -> None:
    assert [rank["forced"] for rank in compiled] == [1, 1]


def test_a_destroyed_group_is_an_error_in_a_graph_too(compiled: list[dict[str, Any]]) -> None:
    for rank in compiled:
        assert "destroyed" in rank["destroyed"]
        assert rank["mode after"] == "eager"


def test_fakes_give_shapes_without_a_group() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 4, dtype=torch.bfloat16)
        reduced = torch.ops.commbench.all_reduce(x, "nobody:0", 0, "")
        assert reduced.shape == (3, 4)
        assert reduced.dtype == torch.bfloat16
        torch.ops.commbench.all_reduce_(x, "nobody:0", 0, "")


def test_an_unknown_group_is_named() -> None:
    assert custom_ops is not None
    with pytest.raises(CollectiveError, match="group nobody:7 does not exist"):
        torch.ops.commbench.all_reduce_(torch.ones(2), "nobody:7", 0, "")


def test_names_count_up_and_a_deleted_group_is_told_from_one_that_never_was() -> None:
    first, second = names.unique_name("counted"), names.unique_name("counted")
    assert (first, second) == ("counted:0", "counted:1")
    with pytest.raises(CollectiveError, match="counted:1 is gone"):
        names.find(second)
