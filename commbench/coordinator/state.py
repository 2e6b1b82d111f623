"""The process's parallel state: its world group, and its tensor, pipeline and expert parallel groups.

The names and their order of use are those of inference engines: ``init_distributed_environment``, then
``initialize_model_parallel``, and at the end ``destroy_model_parallel`` and ``destroy_distributed_environment``.
One thread sets it up and tears it down; every rank calls the same functions in the same order.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from commbench.coordinator.group import GraphCaptureContext, GroupCoordinator
from commbench.coordinator.hints import Hints
from commbench.coordinator.hosts import in_the_same_node_as
from commbench.coordinator.layouts import parallel_layout
from commbench.coordinator.world import local_platform, new_group
from commbench.errors import CollectiveError, UsageError
from commbench.policy import Policy, load_policy
from commbench.policy.evaluate import switched_on
from commbench.types import Platform

__all__ = [
    "destroy_distributed_environment", "destroy_model_parallel", "ensure_model_parallel_initialized",
    "get_moe_ep_group", "get_moe_expert_parallel_rank", "get_moe_expert_parallel_world_size",
    "get_moe_tensor_parallel_rank", "get_moe_tensor_parallel_world_size", "get_moe_tp_group",
    "get_pipeline_model_parallel_rank", "get_pipeline_model_parallel_world_size", "get_pp_group",
    "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size", "get_tp_group", "get_world_group",
    "get_world_rank", "get_world_size", "graph_capture", "in_the_same_node_as", "init_distributed_environment",
    "init_model_parallel_group", "init_world_group", "initialize_model_parallel", "model_parallel_is_initialized",
    "patch_tensor_parallel_group", "set_custom_all_reduce", "set_mscclpp_all_reduce", "set_pdmux_status",
    "set_symm_mem_all_reduce",
]  # fmt: skip

ONE_DEVICE_VARIABLE = "COMMBENCH_ONE_DEVICE_PER_PROCESS"  # each process sees only its own device, as number 0


@dataclass(slots=True)
class _State:
    """Everything that the functions below keep."""

    world: GroupCoordinator | None = None
    tp: GroupCoordinator | None = None
    prefill_tp: GroupCoordinator | None = None  # a second TP group for prefill, where prefill and decode share devices
    pp: GroupCoordinator | None = None
    moe_ep: GroupCoordinator | None = None
    moe_tp: GroupCoordinator | None = None
    pdmux: bool = False
    patched: bool = False
    custom_all_reduce: bool = True
    mscclpp_all_reduce: bool = False
    symm_mem_all_reduce: bool = False
    policy: Policy | None = None
    backends: tuple[str, ...] = ()
    timeout: datetime.timedelta | None = None
    sizes: tuple[int, int, int] = field(default=(1, 1, 1))  # tp, ep, pp


_state = _State()


# ---- toggles: they hold for groups made afterwards -----------------------------------------------------------


def set_custom_all_reduce(enable: bool) -> None:
    """Whether groups set up custom (and quick) all-reduce. Default on."""
    _state.custom_all_reduce = enable


def set_mscclpp_all_reduce(enable: bool) -> None:
    """Whether groups set up MSCCL++. Default off."""
    _state.mscclpp_all_reduce = enable


def set_symm_mem_all_reduce(enable: bool) -> None:
    """Whether groups set up torch symmetric memory. Default off."""
    _state.symm_mem_all_reduce = enable


def set_pdmux_status(enable_prefill_multiplexing: bool) -> None:
    """Whether ``get_tp_group`` gives the prefill TP group (made with ``duplicate_tp_group``)."""
    _state.pdmux = enable_prefill_multiplexing


# ---- the world -------------------------------------------------------------------------------------------------


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str | None = None,
    timeout: float | None = None,
    *,
    policy: str | Policy = "commbench",
    backends: Sequence[str] = (),
) -> None:
    """Initialise torch.distributed (unless that is done) and the world group.

    world_size and rank: -1 takes the environment's (as torchrun sets it). backend: nccl where torch sees a CUDA device,
    else gloo. timeout: seconds after which an operation gives up. policy: the dispatch policy of all groups; backends:
    those to set up beside the policy's own. A second call does nothing; with another size it raises UsageError.
    Raises CollectiveError where the ranks do not find each other.
    """
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0):
        raise UsageError(f"timeout {timeout!r} must be a positive number of seconds")
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    wait = None if timeout is None else datetime.timedelta(seconds=timeout)
    if not dist.is_initialized():
        try:
            dist.init_process_group(
                backend, init_method=distributed_init_method, world_size=world_size, rank=rank, timeout=wait
            )
        except (ValueError, RuntimeError) as error:
            raise CollectiveError(
                f"rank {rank} of {world_size} found no others by {distributed_init_method} within the timeout: "
                f"{str(error).splitlines()[0]}"
            ) from error
    size = dist.get_world_size()
    if world_size not in (-1, size):
        raise UsageError(f"the world has {size} ranks already; it cannot be initialised with {world_size}")
    if _state.world is not None:
        if _state.world.world_size != size:
            raise UsageError(
                f"the world group has {_state.world.world_size} ranks already, torch.distributed has {size}"
            )
        return
    if local_rank == -1:
        from_environment = distributed_init_method == "env://"
        local_rank = int(os.environ.get("LOCAL_RANK", "0")) if from_environment else dist.get_rank()
    _state.policy = load_policy(policy) if isinstance(policy, str) else policy
    _state.backends = tuple(backends)
    _state.timeout = wait
    _state.world = init_world_group(list(range(size)), local_rank, backend)


def init_world_group(ranks: Sequence[int], local_rank: int, backend: str) -> GroupCoordinator:
    """A group of all ranks without device communicators of its own."""
    return _make_group([ranks], local_rank, backend, "world", Hints.none())


def init_model_parallel_group(
    group_ranks: Sequence[Sequence[int]],
    local_rank: int,
    backend: str,
    use_custom_allreduce: bool | None = None,
    use_message_queue_broadcaster: bool = False,
    group_name: str | None = None,
    use_mscclpp_allreduce: bool | None = None,
    use_symm_mem_allreduce: bool | None = None,
) -> GroupCoordinator:
    """The one of these groups that this process is in; None takes the toggle's word. Collective over the world.

    Raises UsageError where the lists do not hold every rank once.
    """
    hints = Hints(
        pymscclpp=_state.mscclpp_all_reduce if use_mscclpp_allreduce is None else use_mscclpp_allreduce,
        custom_allreduce=_state.custom_all_reduce if use_custom_allreduce is None else use_custom_allreduce,
        torch_symm_mem=_state.symm_mem_all_reduce if use_symm_mem_allreduce is None else use_symm_mem_allreduce,
        message_queue=use_message_queue_broadcaster,
    )
    return _make_group(group_ranks, local_rank, backend, group_name or "anonymous", hints)


def _make_group(
    group_ranks: Sequence[Sequence[int]], local_rank: int, backend: str, name: str, hints: Hints
) -> GroupCoordinator:
    policy = _state.policy or load_policy("commbench")
    device = _device(backend, local_rank)
    group = new_group(group_ranks, name, device, backend, _state.timeout)
    platform = replace(local_platform(device), group=name)
    return GroupCoordinator(
        group,
        policy,
        _with_hints(policy, platform, hints),
        backends=_state.backends,
        local_rank=local_rank,
        hints=hints,
        owns_process_groups=True,
    )


def _device(backend: str, local_rank: int) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    index = 0 if os.environ.get(ONE_DEVICE_VARIABLE, "") not in ("", "0") else local_rank
    return torch.device("cuda", index)


def _with_hints(policy: Policy, platform: Platform, hints: Hints) -> Platform:
    """Turn on the policy's switches for what is off by default and was asked for."""
    wanted = {"pymscclpp": hints.pymscclpp, "symm_mem": hints.torch_symm_mem}
    extra = {name for name, on in wanted.items() if on and name in policy.data.switches}
    if not extra:
        return platform
    return replace(platform, requested=switched_on(policy.data, platform) | extra)


# ---- the parallel groups -----------------------------------------------------------------------------------------


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    backend: str | None = None,
    duplicate_tp_group: bool = False,
    *,
    use_message_queue: bool = True,
) -> None:
    """Make the TP, PP, MoE-EP and MoE-TP groups (see layouts.py). Collective over the world.

    duplicate_tp_group: also a second TP group, for prefill. use_message_queue: the TP groups broadcast objects through
    shared memory. An expert group of the TP group's size *is* the TP group. Raises UsageError for sizes that do not
    fit the world, CollectiveError before ``init_distributed_environment`` or when groups exist already. When a group
    cannot be made, those made before it are destroyed.
    """
    world = get_world_group()
    if _state.tp is not None or _state.pp is not None:
        raise CollectiveError("the parallel groups exist already; call destroy_model_parallel first")
    tp, ep, pp = tensor_model_parallel_size, expert_model_parallel_size, pipeline_model_parallel_size
    layout = parallel_layout(world.world_size, tp, ep, pp)
    backend = backend or dist.get_backend(world.device_group)

    def make(groups: Sequence[Sequence[int]], name: str, **options: Any) -> GroupCoordinator:
        return init_model_parallel_group(groups, world.local_rank, backend, group_name=name, **options)

    try:
        _state.tp = make(layout.tp, "tp", use_message_queue_broadcaster=use_message_queue)
        if duplicate_tp_group:
            _state.prefill_tp = make(layout.tp, "pdmux_prefill_tp", use_message_queue_broadcaster=use_message_queue)
        _state.moe_ep = _state.tp if ep == tp else make(layout.moe_ep, "moe_ep")
        _state.moe_tp = _state.tp if ep == 1 else make(layout.moe_tp, "moe_tp")
        # activations go from stage to stage; nothing is reduced over a pipeline
        _state.pp = make(layout.pp, "pp", use_custom_allreduce=False)
    except BaseException:
        destroy_model_parallel()
        raise
    _state.sizes = (tp, ep, pp)


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    expert_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    backend: str | None = None,
) -> None:
    """``initialize_model_parallel`` unless that is done. Raises UsageError where it was done with other sizes."""
    asked = (tensor_model_parallel_size, expert_model_parallel_size, pipeline_model_parallel_size)
    if not model_parallel_is_initialized():
        initialize_model_parallel(*asked, backend)
        return
    for name, have, want in zip(("tensor", "expert", "pipeline"), _state.sizes, asked, strict=True):
        if have != want:
            raise UsageError(f"the {name} parallel size is {have} already; {want} was asked for")


def model_parallel_is_initialized() -> bool:
    """Whether TP and PP groups exist."""
    return _state.tp is not None and _state.pp is not None


@contextmanager
def patch_tensor_parallel_group(tp_group: GroupCoordinator) -> Iterator[None]:
    """Inside, ``get_tp_group`` gives tp_group (draft models run with another TP size). The group before comes back
    whatever happens. Raises CollectiveError when it is patched already."""
    if _state.patched:
        raise CollectiveError("the tensor parallel group is patched already; patches do not nest")
    before, pdmux = _state.tp, _state.pdmux
    _state.patched, _state.tp, _state.pdmux = True, tp_group, False
    try:
        yield
    finally:
        _state.patched, _state.tp, _state.pdmux = False, before, pdmux


@contextmanager
def graph_capture() -> Iterator[GraphCaptureContext]:
    """``GroupCoordinator.graph_capture`` of the TP and PP groups at once, on one stream."""
    with get_tp_group().graph_capture() as context, get_pp_group().graph_capture(context):
        yield context


def destroy_model_parallel() -> None:
    """Destroy the parallel groups; new ones may be made afterwards. Does nothing where there are none."""
    groups = {
        id(g): g for g in (_state.tp, _state.prefill_tp, _state.moe_ep, _state.moe_tp, _state.pp) if g is not None
    }
    _state.tp = _state.prefill_tp = _state.moe_ep = _state.moe_tp = _state.pp = None
    _state.sizes = (1, 1, 1)
    for group in groups.values():
        group.destroy()


def destroy_distributed_environment() -> None:
    """Destroy the world group, and torch.distributed if it is initialised."""
    destroy_model_parallel()
    world, _state.world = _state.world, None
    if world is not None:
        world.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()
    _state.policy, _state.backends, _state.timeout = None, (), None


# ---- getters: each raises CollectiveError before its group exists --------------------------------------------------


def _there(group: GroupCoordinator | None, what: str, how: str = "initialize_model_parallel") -> GroupCoordinator:
    if group is None:
        raise CollectiveError(f"there is no {what} group; call {how} first")
    return group


def get_world_group() -> GroupCoordinator:
    return _there(_state.world, "world", "init_distributed_environment")


def get_tp_group() -> GroupCoordinator:
    """The tensor parallel group; the prefill one while PD multiplexing is on."""
    if _state.pdmux:
        return _there(
            _state.prefill_tp, "prefill tensor parallel", "initialize_model_parallel(duplicate_tp_group=True)"
        )
    return _there(_state.tp, "tensor parallel")


def get_pp_group() -> GroupCoordinator:
    return _there(_state.pp, "pipeline parallel")


def get_moe_ep_group() -> GroupCoordinator:
    return _there(_state.moe_ep, "expert parallel")


def get_moe_tp_group() -> GroupCoordinator:
    return _there(_state.moe_tp, "MoE tensor parallel")


def get_world_size() -> int:
    return get_world_group().world_size


def get_world_rank() -> int:
    return get_world_group().rank_in_group


def get_tensor_model_parallel_world_size() -> int:
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank_in_group


def get_pipeline_model_parallel_world_size() -> int:
    return get_pp_group().world_size


def get_pipeline_model_parallel_rank() -> int:
    return get_pp_group().rank_in_group


def get_moe_expert_parallel_world_size() -> int:
    return get_moe_ep_group().world_size


def get_moe_expert_parallel_rank() -> int:
    return get_moe_ep_group().rank_in_group


def get_moe_tensor_parallel_world_size() -> int:
    return get_moe_tp_group().world_size


def get_moe_tensor_parallel_rank() -> int:
    return get_moe_tp_group().rank_in_group
