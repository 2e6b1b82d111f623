"""A group under several policies: each point's own policy picks, and its thresholds reach the backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_ranks, world

POLICY = """
format = 1
extends = "commbench"
name = "mine"
[tables.shm_one_shot_max_bytes]
by = ["world_size"]
rows = [{ world_size = 2, value = "2KiB" }]
[order.all_reduce]
cpu = ["large", "shm", "torch_dist"]
gpu = ["torch_dist"]
[routes.large]
backend = "torch_dist"
accepts = [{ gate = "size_at_least", limit = "8KiB" }]
"""


def under_two_policies(rank: int, size: int, path: str) -> list[Any]:
    from commbench.coordinator.group import GroupCoordinator
    from commbench.policy import load_policy
    from commbench.types import Platform

    group = GroupCoordinator(world(), load_policy("commbench"), Platform(one_host=True))
    x = torch.ones(4096)

    def taken() -> str:
        before = group.call_counts()
        group.all_reduce(x.fill_(1.0))
        assert x[0] == size
        return next(name for name, n in group.call_counts().items() if n > before[name])

    seen: list[Any] = [taken(), group.backend("shm").twoshot_threshold]  # type: ignore[attr-defined]
    with group.under(load_policy(path)):
        seen += [taken(), group.backend("shm").twoshot_threshold]  # type: ignore[attr-defined]
    seen += [taken(), group.backend("shm").twoshot_threshold]  # type: ignore[attr-defined]
    group.destroy()
    return seen


def test_a_policy_holds_for_the_calls_inside_it_and_the_former_one_comes_back(tmp_path: Path) -> None:
    from commbench.policy import load_policy
    from commbench.types import Platform

    path = tmp_path / "mine.toml"
    path.write_text(POLICY)
    default = load_policy("commbench").bind(Platform(world_size=2, one_host=True)).splits()["shm"]
    expected = ["shm", default, "torch_dist", 2048, "shm", default]
    assert run_ranks(under_two_policies, 2, str(path)) == [expected, expected]


def test_the_kernel_behind_a_pick_changes_at_the_policys_own_size() -> None:
    from commbench.policy import load_policy
    from commbench.types import Platform

    bound = load_policy("commbench").bind(Platform(world_size=8, one_host=True))
    last = bound.splits()["shm"]
    assert [bound.kernel("shm", s) for s in (last, last + 1)] == ["shm_oneshot", "shm_twoshot"]
    assert bound.kernel("torch_dist", 1) == "torch_dist"
