"""The measured traffic that is not one tensor: right data are accepted and wrong ones found, with real processes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from commbench.coordinator.group import GroupCoordinator
from commbench.coordinator.hints import Hints
from commbench.coordinator.world import local_platform, new_group
from commbench.measure.places import IdleBuffers, Place, buffers_for
from commbench.measure.uneven import sizes_of
from commbench.policy import load_policy
from commbench.types import COLLECTIVES, Point
from tests.ranks import run_ranks, world

CPU = torch.device("cpu")
TRAFFIC = [c.name for c in COLLECTIVES.values() if not c.dispatched]


def point(collective: str, numel: int, n: int) -> Point:
    dtype = "uint8" if COLLECTIVES[collective].carries == "bytes" else "bfloat16"
    return Point(collective, "", dtype, numel * (1 if dtype == "uint8" else 2), n, placement="out")


@pytest.mark.parametrize("numel", [4, 5, 100, 65_537])
@pytest.mark.parametrize("n", [2, 4, 7])
def test_rows_add_up_and_skewed_ones_halve(numel: int, n: int) -> None:
    even = sizes_of(point("all_gatherv", numel, n))
    assert sum(even) == numel
    assert max(even) - min(even) <= 1
    skewed = sizes_of(point("all_gatherv_skewed", numel, n))
    assert sum(skewed) == numel
    assert skewed[0] == -(-numel // 2)
    assert all(a >= b for a, b in itertools.pairwise(skewed))


def spoil(value: Any) -> Any:
    """The same with one wrong element."""
    if isinstance(value, torch.Tensor):
        value[: min(1, value.numel())] += 1
        return value
    if isinstance(value, list):
        return [(name, spoil(tensor)) for name, tensor in value]
    if "data" in value:
        data = bytearray(value["data"])
        data[len(data) // 2] ^= 1
        return {**value, "data": bytes(data)}
    return {key: spoil(v) if isinstance(v, torch.Tensor) else v for key, v in value.items()}


def measured(rank: int, size: int) -> dict[str, Any]:
    platform, policy = local_platform(CPU), load_policy("commbench")
    group = GroupCoordinator(world(), policy, platform, hints=Hints(message_queue=True))
    half = size // 2
    halves = GroupCoordinator(
        new_group([list(range(half)), list(range(half, size))], "halves", CPU, "gloo", None), policy, platform
    )
    found: dict[str, Any] = {"wrong": [], "missed": [], "counts": []}
    for collective in TRAFFIC:
        for numel in (1, 3, 4096, 65_537 * 3):
            buffers = buffers_for(point(collective, numel, size), Place(group, halves), CPU)
            call = buffers.call(group)
            for exact in (True, False):
                buffers.refill(5, exact)
                if buffers.check(5, exact).wrong_count == 0 and getattr(buffers, "got", None) is not None:
                    found["missed"].append((collective, numel, "nothing received"))
                before = group.call_counts()
                call()
                call()
                made = {k: v - before.get(k, 0) for k, v in group.call_counts().items() if v != before.get(k, 0)}
                way = "message_queue" if collective == "queue_broadcast" else "torch_dist"
                if made != {way: 2}:
                    found["counts"].append((collective, made))
                if buffers.check(5, exact).wrong_count:
                    found["wrong"].append((collective, numel, exact))
                if buffers.got is not None and not buffers.sends:
                    buffers.got = spoil(buffers.got)
                    if buffers.check(5, exact).wrong_count == 0:
                        found["missed"].append((collective, numel, exact))
                    buffers.got = None
                    if buffers.check(5, exact).wrong_count == 0:
                        found["missed"].append((collective, numel, "a result that never came"))
            signature = buffers.signature(group)
            found[collective] = group.decide(signature).picked
    group.barrier()
    for made in (halves, group):
        made.destroy()
    return found


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(measured, 4, timeout_s=280)


def test_right_data_are_accepted_and_wrong_data_found(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert rank["wrong"] == []
        assert rank["missed"] == []


def test_each_call_counts_once_for_the_way_that_the_decision_names(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert rank["counts"] == []
        assert {c: rank[c] for c in TRAFFIC} == {
            c: "message_queue" if c == "queue_broadcast" else "torch_dist" for c in TRAFFIC
        }


def test_a_rank_outside_the_group_that_works_alone_does_nothing() -> None:
    idle = buffers_for(dataclasses.replace(point("send_object", 4, 2), group="tp:0"), Place(None, None, False), CPU)  # type: ignore[arg-type]
    assert isinstance(idle, IdleBuffers)
    assert idle.call(None)() is None  # type: ignore[arg-type]
    idle.refill(1, True)
    assert idle.check(1, True).wrong_count == 0
