"""The parallel state: groups cover exactly their members, errors name values, and nothing changed stays changed."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import torch

from commbench.coordinator import state
from commbench.errors import CollectiveError, PeerLost, UsageError
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_state", state._State())


class Stub:
    """A group for tests that need none."""


# ---- without processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("get", "said"),
    [
        (state.get_world_group, "no world group; call init_distributed_environment"),
        (state.get_tp_group, "no tensor parallel group; call initialize_model_parallel"),
        (state.get_pp_group, "no pipeline parallel group"),
        (state.get_moe_ep_group, "no expert parallel group"),
        (state.get_moe_tp_group, "no MoE tensor parallel group"),
        (state.get_world_size, "no world group"),
        (state.get_world_rank, "no world group"),
        (state.get_tensor_model_parallel_world_size, "no tensor parallel group"),
        (state.get_moe_expert_parallel_rank, "no expert parallel group"),
        (state.initialize_model_parallel, "no world group"),
    ],
)
def test_what_is_not_initialised_says_what_to_call(get: Any, said: str) -> None:
    with pytest.raises(CollectiveError, match=said):
        get()


def test_a_patched_group_is_restored_also_when_the_body_raises() -> None:
    mine, other = Stub(), Stub()
    state._state.tp = mine  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError), state.patch_tensor_parallel_group(other):  # type: ignore[arg-type]
        _ = 1 / int(state.get_tp_group() is not other)
    assert state.get_tp_group() is mine
    with state.patch_tensor_parallel_group(other):  # type: ignore[arg-type]
        assert state.get_tp_group() is other


def test_patches_do_not_nest() -> None:
    mine, other = Stub(), Stub()
    state._state.tp = mine  # type: ignore[assignment]
    with state.patch_tensor_parallel_group(other):  # type: ignore[arg-type]
        with (
            pytest.raises(CollectiveError, match="patched already"),
            state.patch_tensor_parallel_group(other),  # type: ignore[arg-type]
        ):
            pass
        assert state.get_tp_group() is other
    assert state.get_tp_group() is mine


def test_prefill_multiplexing_switches_the_tp_group_and_a_patch_goes_before_it() -> None:
    mine, prefill, draft = Stub(), Stub(), Stub()
    state._state.tp, state._state.prefill_tp = mine, prefill  # type: ignore[assignment]
    state.set_pdmux_status(True)
    assert state.get_tp_group() is prefill
    with state.patch_tensor_parallel_group(draft):  # type: ignore[arg-type]
        assert state.get_tp_group() is draft
    assert state.get_tp_group() is prefill
    state.set_pdmux_status(False)
    assert state.get_tp_group() is mine
    state.set_pdmux_status(True)
    state._state.prefill_tp = None
    with pytest.raises(CollectiveError, match="duplicate_tp_group"):
        state.get_tp_group()


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_a_timeout_must_be_a_positive_number(timeout: Any) -> None:
    with pytest.raises(UsageError, match="timeout"):
        state.init_distributed_environment(timeout=timeout)


@pytest.mark.parametrize(
    ("toggle", "hint", "default"),
    [
        (state.set_custom_all_reduce, "custom_allreduce", True),
        (state.set_mscclpp_all_reduce, "pymscclpp", False),
        (state.set_symm_mem_all_reduce, "torch_symm_mem", False),
    ],
)
def test_a_toggle_holds_for_groups_made_afterwards(
    toggle: Any, hint: str, default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(state, "_make_group", lambda ranks, local, backend, name, hints: made.append(hints))
    state.init_model_parallel_group([[0]], 0, "gloo")
    toggle(not default)
    state.init_model_parallel_group([[0]], 0, "gloo")
    state.init_model_parallel_group(
        [[0]], 0, "gloo", use_custom_allreduce=default, use_mscclpp_allreduce=default, use_symm_mem_allreduce=default
    )
    assert [getattr(hints, hint) for hints in made] == [default, not default, default]


# ---- with processes -------------------------------------------------------------------------------------------------


def raised(call: Any) -> str:
    try:
        call()
    except (CollectiveError, UsageError) as error:
        return str(error)
    return "nothing was raised"


def members_of(group: Any, rank: int) -> list[int]:
    """Who took part in a reduction to which each rank gave a power of two of its own."""
    x = torch.tensor([1 << rank], dtype=torch.int64)
    bits = int(group.all_reduce(x).item())
    return [r for r in range(64) if bits >> r & 1]


GETTERS = {
    "world": state.get_world_group,
    "tp": state.get_tp_group,
    "pp": state.get_pp_group,
    "moe_ep": state.get_moe_ep_group,
    "moe_tp": state.get_moe_tp_group,
}


def groups_cover_their_members(rank: int, size: int, sizes: list[tuple[int, int, int]]) -> dict[str, Any]:
    from commbench.coordinator.layouts import parallel_layout

    state.init_distributed_environment(timeout=120)
    found: dict[str, Any] = {"wrong": []}
    for tp, ep, pp in sizes:
        state.initialize_model_parallel(tp, ep, pp, duplicate_tp_group=tp == 2)
        layout = parallel_layout(size, tp, ep, pp)
        for kind, get in GETTERS.items():
            (mine,) = [g for g in layout.of(kind) if rank in g]
            covered = members_of(get(), rank)
            if covered != list(mine) or get().ranks != mine:
                found["wrong"].append((tp, ep, pp, kind, covered))
        if (state.get_moe_ep_group() is state.get_tp_group()) != (ep == tp):
            found["wrong"].append((tp, ep, pp, "moe_ep is tp"))
        if (state.get_moe_tp_group() is state.get_tp_group()) != (ep == 1):
            found["wrong"].append((tp, ep, pp, "moe_tp is tp"))
        ranks = (
            state.get_tensor_model_parallel_rank(), state.get_moe_expert_parallel_rank(),
            state.get_moe_tensor_parallel_rank(), state.get_pipeline_model_parallel_rank(),
        )  # fmt: skip
        within = rank % tp
        if ranks != (within, within // (tp // ep), within % (tp // ep), rank // tp):
            found["wrong"].append((tp, ep, pp, "ranks", ranks))
        counts = (
            state.get_tensor_model_parallel_world_size(), state.get_moe_expert_parallel_world_size(),
            state.get_moe_tensor_parallel_world_size(), state.get_pipeline_model_parallel_world_size(),
        )  # fmt: skip
        if counts != (tp, ep, tp // ep, pp):
            found["wrong"].append((tp, ep, pp, "sizes", counts))
        if tp == 2:
            state.set_pdmux_status(True)
            prefill = state.get_tp_group()
            state.set_pdmux_status(False)
            if prefill is state.get_tp_group() or members_of(prefill, rank) != list(state.get_tp_group().ranks):
                found["wrong"].append((tp, ep, pp, "prefill"))
        with state.graph_capture() as context:
            if context.stream is not None or state.get_pp_group()._mode != "graph":
                found["wrong"].append((tp, ep, pp, "graph_capture"))
        given = {"tp": rank} if state.get_tensor_model_parallel_rank() == 0 else None
        obj = state.get_tp_group().broadcast_object(given)
        if obj != {"tp": state.get_tp_group().first_rank}:
            found["wrong"].append((tp, ep, pp, "broadcast_object", obj))
        if sizes[0] == (tp, ep, pp):
            found.update(misuse(tp, ep, pp, size))
        state.destroy_model_parallel()
        state.destroy_model_parallel()
    found["initialised"] = state.model_parallel_is_initialized()
    found["world"] = (state.get_world_size(), state.get_world_rank())
    found.update(lost_peers(rank, size))
    return found


def misuse(tp: int, ep: int, pp: int, size: int) -> dict[str, Any]:
    state.ensure_model_parallel_initialized(tp, ep, pp)
    state.init_distributed_environment(world_size=size)
    return {
        "same node": state.in_the_same_node_as(state.get_world_group().cpu_group, 1),
        "no such source": raised(lambda: state.in_the_same_node_as(state.get_world_group().cpu_group, size)),
        "twice": raised(lambda: state.initialize_model_parallel(tp, ep, pp)),
        "other tp": raised(lambda: state.ensure_model_parallel_initialized(2 * tp, ep, pp)),
        "other ep": raised(lambda: state.ensure_model_parallel_initialized(tp, ep + 1, pp)),
        "other pp": raised(lambda: state.ensure_model_parallel_initialized(tp, ep, pp + 1)),
        "other world": raised(lambda: state.init_distributed_environment(world_size=size + 1)),
    }


def lost_peers(rank: int, size: int) -> dict[str, Any]:
    """The last rank ends; rank 1 waits for it. Rank 0 sends nothing for longer than the timeout; rank 2 waits."""
    state._state.timeout = datetime.timedelta(seconds=2)
    state.initialize_model_parallel(size, 1, 1, use_message_queue=False)
    group = state.get_tp_group()
    group.barrier()
    if rank == size - 1:
        return {}
    found: dict[str, Any] = {}
    started = time.monotonic()
    if rank == 1:
        with pytest.raises(PeerLost) as caught:
            group.recv_object(size - 1)
        found["dead"] = (str(caught.value), caught.value.rank, time.monotonic() - started)
    if rank == 2:
        with pytest.raises(PeerLost) as caught:
            group.recv_tensor_dict(0)
        found["late"] = (str(caught.value), caught.value.rank, time.monotonic() - started)
    if rank == 0:
        time.sleep(6)
    return found


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(groups_cover_their_members, 4, [(2, 2, 2), (4, 2, 1), (1, 1, 4), (4, 1, 1)], timeout_s=280)


def test_with_four_processes_each_group_reduces_over_exactly_its_members(four: list[dict[str, Any]]) -> None:
    assert [rank["wrong"] for rank in four] == [[]] * 4
    assert [rank["world"] for rank in four] == [(4, r) for r in range(4)]
    assert not any(rank["initialised"] for rank in four)


@pytest.mark.slow
def test_with_eight_processes_each_group_reduces_over_exactly_its_members() -> None:
    sizes = [(4, 2, 2), (8, 2, 1), (8, 4, 1), (2, 1, 4), (4, 4, 2)]
    assert [rank["wrong"] for rank in run_ranks(groups_cover_their_members, 8, sizes, timeout_s=290)] == [[]] * 8


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no such source", "source_rank=4"),
        ("twice", "exist already; call destroy_model_parallel"),
        ("other tp", "tensor parallel size is 2 already; 4 was asked for"),
        ("other ep", "expert parallel size is 2 already; 3 was asked for"),
        ("other pp", "pipeline parallel size is 2 already; 3 was asked for"),
        ("other world", "has 4 ranks already; it cannot be initialised with 5"),
    ],
)
def test_a_second_initialisation_that_differs_names_both_values(
    four: list[dict[str, Any]], case: str, said: str
) -> None:
    for rank in four:
        assert said in rank[case]


def test_ranks_of_one_machine_see_each_others_memory(four: list[dict[str, Any]]) -> None:
    assert [rank["same node"] for rank in four] == [[True] * 4] * 4


def test_a_dead_peer_is_named_at_once(four: list[dict[str, Any]]) -> None:
    text, peer, seconds = four[1]["dead"]
    assert "receive from rank 3 (global rank 3)" in text
    assert peer == 3
    assert seconds < 10


def test_a_late_peer_is_named_within_the_timeout(four: list[dict[str, Any]]) -> None:
    text, peer, seconds = four[2]["late"]
    assert "receive from rank 0 (global rank 0)" in text
    assert peer == 0
    assert 1 < seconds < 6
