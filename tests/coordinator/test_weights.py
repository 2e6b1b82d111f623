"""Weight-update groups: buckets without processes, and a trainer with two engine ranks."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import torch

from commbench.coordinator.weights import (
    TensorSpec,
    bucket_size,
    destroy_weights_update_group,
    get_weights_update_group,
    init_weights_update_group,
    plan_buckets,
    update_weights_from_distributed,
)
from commbench.errors import CollectiveError, PeerLost, UsageError
from tests.ranks import free_port, run_ranks


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


def test_consecutive_tensors_share_a_bucket_up_to_its_size() -> None:
    specs = [spec("a", 10), spec("b", 10), spec("c", 10), spec("big", 1000), spec("d", 1)]
    buckets = plan_buckets(specs, 100)
    assert [[s.name for s, _ in b] for b in buckets] == [["a", "b"], ["c"], ["big"], ["d"]]
    assert [bucket_size(b) for b in buckets] == [88, 40, 4000, 4]


def test_every_tensor_starts_where_its_dtype_may_be_viewed() -> None:
    specs = [spec("a", 3, dtype=torch.int8), spec("b", 3, dtype=torch.float64), spec("c", 1, dtype=torch.bfloat16)]
    ((_, *others),) = plan_buckets(specs, 1 << 20)
    assert [(s.name, offset) for s, offset in others] == [("b", 16), ("c", 48)]
    assert all(offset % 16 == 0 for _, offset in others)


def test_a_bucket_needs_a_size() -> None:
    with pytest.raises(UsageError, match="bucket_bytes=0"):
        plan_buckets([], 0)


def test_a_group_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(CollectiveError, match="'nobody'; there are: none"):
        get_weights_update_group("nobody")


def test_a_group_needs_two_ranks() -> None:
    with pytest.raises(UsageError, match="one of each is needed"):
        update_weights_from_distributed(["a"], [], [[1]], "nobody")


def test_nobody_at_the_address_is_an_error_in_time() -> None:
    started = time.monotonic()
    with pytest.raises(CollectiveError, match=r"rank 1 cannot reach 127\.0\.0\.1:"):
        init_weights_update_group("127.0.0.1", free_port(), 1, 2, timeout=datetime.timedelta(seconds=1))
    assert time.monotonic() - started < 20


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(12):
        tensors[f"layers.{layer}.weight"] = torch.randn(64, 33, generator=generator).to(torch.bfloat16)
        tensors[f"layers.{layer}.bias"] = torch.randn(33, generator=generator)
        tensors[f"layers.{layer}.scale"] = torch.randint(-9, 9, (5,), generator=generator, dtype=torch.int8)
    tensors["transposed"] = torch.randn(17, 9, generator=generator).t()
    tensors["empty"] = torch.empty(0, 4)
    tensors["scalar"] = torch.tensor(2.5, dtype=torch.float64)
    return tensors


def update(rank: int, size: int, port: int) -> dict[str, Any]:
    wait = datetime.timedelta(seconds=20)
    found: dict[str, Any] = {}
    right = []
    tensors = model()
    for round_, bucket in enumerate((1, 5000, 1 << 20)):
        group = init_weights_update_group("127.0.0.1", port + 0, rank, size, f"round{round_}", timeout=wait)
        if round_ == 0:
            with pytest.raises(UsageError, match="has a weight-update group 'round0'"):
                init_weights_update_group("127.0.0.1", port, rank, size, "round0", timeout=wait)
        if rank == 0:
            group.send(tensors, bucket)
            with pytest.raises(CollectiveError, match="rank 0 sends, the others receive; this is rank 0"):
                group.receive([], bucket)
        else:
            got = update_weights_from_distributed(
                list(tensors), [str(t.dtype) for t in tensors.values()], [t.shape for t in tensors.values()],
                f"round{round_}", bucket,
            )  # fmt: skip
            right.append(
                [n for n, _ in got] == list(tensors)
                and all(torch.equal(t, tensors[n]) and t.dtype == tensors[n].dtype for n, t in got)
            )
        if round_ == 2:  # another list of tensors: all ranks are told
            with pytest.raises(CollectiveError, match="disagree about what is moved"):
                group.send({"a": torch.ones(3)}) if rank == 0 else group.receive([spec("a", 2 + rank)])
        destroy_weights_update_group(f"round{round_}")
        with pytest.raises(CollectiveError, match="is destroyed"):
            group.send({}) if rank == 0 else group.receive([])
    found["right"] = right
    group = init_weights_update_group("127.0.0.1", port, rank, size, timeout=datetime.timedelta(seconds=3))
    if rank == 0:
        time.sleep(6)  # the trainer is late
        return found
    with pytest.raises(PeerLost, match="not all ranks came to the update"):
        group.receive([spec("a", 3)])
    return found


def test_a_trainer_hands_a_models_tensors_to_two_ranks_in_buckets_of_any_size() -> None:
    trainer, *engines = run_ranks(update, 3, free_port())
    assert trainer["right"] == []
    assert [rank["right"] for rank in engines] == [[True] * 3] * 2
