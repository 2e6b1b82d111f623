"""What ranks do in test_call_paths.py: a coordinator over a played provider, from its set-up to its end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commbench.backends import flashinfer
from commbench.coordinator.group import GroupCoordinator
from commbench.coordinator.setup import set_up_backends
from commbench.errors import BackendUnavailable, CollectiveError
from commbench.policy import load_policy
from commbench.types import Platform
from tests.backends import simulation
from tests.backends.simulation import Graph, World
from tests.ranks import world as group_of_all


def _ca(provider: str) -> Callable[[World], None]:
    def play(world: World) -> None:
        os.environ["COMMBENCH_CA_PROVIDER"] = provider
        simulation.play_ca(world, provider)

    return play


def _ca_on_rocm(world: World) -> None:
    os.environ["COMMBENCH_CA_PROVIDER"] = "sgl_kernel"
    simulation.play_ca_on_rocm(world)


def _qr(provider: str) -> Callable[[World], None]:
    def play(world: World) -> None:
        os.environ.update(COMMBENCH_QR_PROVIDER=provider, ROCM_QUICK_REDUCE_QUANTIZATION="INT6")
        simulation.play_qr(world, provider)

    return play


# case → (backend, how its provider is played, dtypes of its all_reduce)
CASES: dict[str, tuple[str, Callable[[World], Any], tuple[str, ...]]] = {
    "pynccl": ("pynccl", simulation.play_nccl, ("float32", "bfloat16", "int64")),
    "nccl_symm": ("nccl_symm", simulation.play_nccl, ("float32", "bfloat16", "int64")),
    "symm_mem": ("symm_mem", simulation.play_symm_mem, ("float32", "bfloat16")),
    "symm_mem_multimem": ("symm_mem_multimem", simulation.play_symm_mem, ("float32", "bfloat16")),
    "symm_mem_twoshot": ("symm_mem_twoshot", simulation.play_symm_mem, ("float32", "bfloat16")),
    "symm_mem_oneshot": ("symm_mem_oneshot", simulation.play_symm_mem, ("float32", "bfloat16")),
    "ca-sgl_kernel": ("ca", _ca("sgl_kernel"), ("float32", "float16", "bfloat16")),
    "ca-vllm": ("ca", _ca("vllm"), ("float32", "float16", "bfloat16")),
    "ca-flashinfer": ("ca", _ca("flashinfer"), ("float32", "float16", "bfloat16")),
    "ca-rocm": ("ca", _ca_on_rocm, ("float32", "float16", "bfloat16")),
    "qr-sgl_kernel": ("qr", _qr("sgl_kernel"), ("float16", "bfloat16")),
    "qr-aiter": ("qr", _qr("aiter"), ("float16", "bfloat16")),
    "pymscclpp": ("pymscclpp", simulation.play_mscclpp, ("float32", "float16", "bfloat16")),
    "flashinfer": ("flashinfer", simulation.play_flashinfer, ("float32", "float16", "bfloat16")),
}
# the steps of each set-up, in order, at which a rank may fail
SETUP_STEPS: dict[str, tuple[str, ...]] = {
    "pynccl": ("ncclGetVersion", "ncclGetUniqueId", "ncclCommInitRankConfig"),
    "nccl_symm": (
        "ncclGetVersion", "ncclGetUniqueId", "ncclCommInitRankConfig", "ncclMemAlloc", "ncclCommWindowRegister",
    ),
    "symm_mem": ("empty", "rendezvous"),
    "ca-sgl_kernel": (
        "meta_size", "cudaMalloc", "cudaMemset", "cudaDeviceSynchronize", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle",
        "init_custom_ar", "register_buffer",
    ),
    "ca-flashinfer": ("meta_size", "init_custom_ar", "register_buffer"),
    "ca-rocm": (
        "meta_size", "allocate_meta_buffer", "get_meta_buffer_ipc_handle", "init_custom_ar", "register_buffer",
    ),
    "qr-sgl_kernel": ("init_custom_qr", "qr_get_handle", "qr_open_handles"),
    "pymscclpp": ("mscclpp_generate_unique_id", "mscclpp_init_context", "mscclpp_allreduce"),
    "flashinfer": ("TorchDistBackend", "create_allreduce_fusion_workspace"),
}  # fmt: skip
ON_FIRST_RANK_ONLY = ("ncclGetUniqueId", "mscclpp_generate_unique_id")
NUMEL = 4096


def start(rank: int, size: int, case: str) -> tuple[World, Any]:
    """The played world, and the group of all ranks."""
    _, play, _ = CASES[case]
    os.environ["COMMBENCH_NCCL_TIMEOUT"] = "1s"
    flashinfer.MEETING_S = 3.0
    group = group_of_all()
    world = World(rank, size)
    simulation.play_device(world)
    play(world)
    return world, group


def coordinator(group: Any, backend: str) -> GroupCoordinator:
    made = GroupCoordinator(group, load_policy("commbench"), Platform(device="cpu"), backends=[backend])
    if made.usable[backend] is not None:
        raise BackendUnavailable(backend, str(made.usable[backend]))
    return made


def values(rank: int, seed: int, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    """Whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 8, (numel,), generator=generator).to(dtype)


def right(size: int, seed: int, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    return torch.stack([values(r, seed, dtype, numel).double() for r in range(size)]).sum(0).to(dtype)


def whole_path(rank: int, size: int, case: str) -> dict[str, Any]:
    """Set-up, eager calls, capture, registration, replay, a capture that fails on one rank, the end."""
    backend, _, dtypes = CASES[case]
    world, process_group = start(rank, size, case)
    group = coordinator(process_group, backend)
    seen: dict[str, Any] = {"setup": list(world.calls), "provider": group.provider(backend), "wrong": []}
    seen["quantised"] = group.backend(backend).quantised

    def expect(what: str, tensor: torch.Tensor, seed: int) -> None:
        if not torch.equal(tensor, right(size, seed, tensor.dtype, tensor.numel())):
            seen["wrong"].append(what)

    with group.forcing(backend):
        for name in dtypes:
            dtype = getattr(torch, name)
            world.calls.clear()
            x = values(rank, 1, dtype)
            y = torch.empty_like(x)
            group.all_reduce(x, out=y)
            expect(f"{name} out", y, 1)
            seen["eager"] = list(world.calls)
            group.all_reduce(x)
            expect(f"{name} in", x, 1)
            # a result that goes to a strided tensor, and tensors that begin in the middle of a pack
            strided = torch.empty(NUMEL, 2, dtype=dtype)[:, 0]
            group.all_reduce(values(rank, 2, dtype), out=strided)
            expect(f"{name} strided out", strided.contiguous(), 2)
            odd = torch.cat([values(rank, 9, dtype, 1), values(rank, 3, dtype)])[1:]
            group.all_reduce(odd, out=torch.empty(NUMEL + 1, dtype=dtype)[1:])
            group.all_reduce(odd)
            expect(f"{name} misaligned", odd, 3)
            # other inputs than before, of another size
            small = values(rank, 4, dtype, 256)
            group.all_reduce(small)
            expect(f"{name} small", small, 4)

        # a graph: nothing is done while it is captured; inputs are overwritten after the call, and new for each replay
        dtype = getattr(torch, dtypes[-1])
        x, y, z = values(rank, 5, dtype), torch.zeros(NUMEL, dtype=dtype), values(rank, 6, dtype)
        inputs = torch.empty_like(x)
        world.calls.clear()
        with group.graph_capture(), Graph(world) as graph:
            inputs.copy_(x)
            group.all_reduce(inputs, out=y)
            inputs.fill_(77)
            group.all_reduce(z)
        seen["capture"] = list(world.calls)
        if int(y.abs().max()):
            seen["wrong"].append("the capture ran")
        for seed in (5, 7):
            x.copy_(values(rank, seed, dtype))
            z.copy_(values(rank, seed + 1, dtype))
            graph.replay()
            expect(f"replay {seed} out", y, seed)
            expect(f"replay {seed} in", z, seed + 1)

        # one rank's capture fails: all ranks know, the state is back, and the next one works
        try:
            with group.graph_capture(), Graph(world):
                group.all_reduce(inputs, out=y)
                if rank == size - 1:
                    raise ValueError("a scripted failure of the model")
        except (ValueError, CollectiveError) as error:
            seen["failed_capture"] = f"{type(error).__name__}: {error}"
        seen["mode_after"] = group._mode
        again, result = values(rank, 8, dtype), torch.zeros(NUMEL, dtype=dtype)
        with group.graph_capture(), Graph(world) as graph:
            group.all_reduce(again, out=result)
        graph.replay()
        expect("after a failed capture", result, 8)
        group.all_reduce(again)
        expect("eager after graphs", again, 8)
        seen["counted"] = group.call_counts()[backend] > 0

        # what the provider would reject does not get there
        seen["declined"] = {}
        for what, tensor, op in (
            ("dtype", torch.ones(64, dtype=torch.float8_e5m2), "sum"),
            ("op", torch.ones(64), "max"),
            ("empty", torch.ones(0), "sum"),
            ("odd", torch.ones(3, dtype=torch.bfloat16), "sum"),
            ("strided", torch.ones(64, 2, dtype=dtype)[:, 0], "sum"),
            ("transposed", torch.ones(8, 16, dtype=dtype).t(), "sum"),
            ("large", torch.empty(1 << 31, dtype=getattr(torch, dtypes[-1]), device="meta"), "sum"),
        ):
            reason = group.backend(backend).declines(group.signature("all_reduce", tensor, op, "in"))
            seen["declined"][what] = reason
    world.calls.clear()
    group.destroy()
    seen["end"] = list(world.calls)
    dist.barrier()  # the store goes with rank 0
    return seen


def fails_at_each_step(rank: int, size: int, case: str) -> dict[str, Any]:
    """Step → the reason that every rank gives when one rank fails there; and whether the next set-up works."""
    backend = CASES[case][0]
    world, group = start(rank, size, case)
    reasons: dict[str, Any] = {}
    for step in SETUP_STEPS[case]:
        culprit = 0 if step in ON_FIRST_RANK_ONLY else size - 1
        world.fail = (culprit, step)
        world.renew()
        made = set_up_backends(group, [backend], {})
        assert not made.ready
        reasons[step] = made.usable[backend]
    world.fail = None
    world.renew()
    made = set_up_backends(group, [backend], {})
    reasons["none"] = made.usable[backend]
    for ready in made.ready.values():
        ready.close()
    dist.barrier()  # the store goes with rank 0
    return reasons


def with_changed_signatures(rank: int, size: int, case: str, changes: list[tuple[str, str]]) -> dict[str, str]:
    """Each (provider, function) → how the path fails when that function loses its last parameter."""
    backend = CASES[case][0]
    os.environ["COMMBENCH_NCCL_TIMEOUT"] = "1s"
    group = group_of_all()
    outcomes: dict[str, str] = {}
    for provider, function in changes:
        world = World(rank, size)
        simulation.play_device(world)
        record = world.record(provider)
        places = record["files"].values() if "files" in record else [record["functions"]]
        for functions in places:
            for name in (function, f"{function}@hip"):
                if name in functions:
                    functions[name]["parameters"].pop()
        record.pop("schemas", None)
        world.records[provider] = record
        try:
            CASES[case][1](world)
            made = coordinator(group, backend)
            with made.forcing(backend):
                x = values(rank, 1, getattr(torch, CASES[case][2][-1]))
                made.all_reduce(x, out=torch.empty_like(x))
            outcomes[function] = "passed"
        except (AssertionError, TypeError, BackendUnavailable, CollectiveError) as error:
            outcomes[function] = f"{type(error).__name__}: {error}"
    return outcomes


def every_collective_of_nccl(rank: int, size: int) -> dict[str, Any]:
    """All collectives through pynccl, and a rank that goes away."""
    world, process_group = start(rank, size, "pynccl")
    group = coordinator(process_group, "pynccl")
    wrong: list[str] = []

    def expect(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(got, wanted):
            wrong.append(what)

    with group.forcing("pynccl"):
        mine = [values(r, 1, torch.float32, 6) for r in range(size)]
        out = torch.empty(size * 6)
        expect("all_gather", group.all_gather_into_tensor(out, mine[rank]), torch.cat(mine))
        whole = [values(r, 2, torch.float32, 6 * size) for r in range(size)]
        part = torch.stack(whole).sum(0)[rank * 6 :][:6]
        expect("reduce_scatter", group.reduce_scatter_tensor(torch.empty(6), whole[rank]), part)
        expect("broadcast", group.broadcast(mine[rank].clone(), src=1), mine[1])
        reduced = group.reduce(mine[rank].clone(), dst=1)
        if rank == 1:
            expect("reduce", reduced, torch.stack(mine).sum(0))
        sent = torch.cat([whole[r].view(size, 6)[rank] for r in range(size)])
        expect("all_to_all", group.all_to_all(whole[rank], torch.empty(6 * size)), sent)
        gathered = group.gather_into_tensor(torch.empty(size * 6) if rank == 0 else None, mine[rank], dst=0)
        if gathered is not None:
            expect("gather", gathered, torch.cat(mine))
        expect(
            "scatter", group.scatter(whole[1] if rank == 1 else None, torch.empty(6), src=1), whole[1][rank * 6 :][:6]
        )
        nxt, prev = (rank + 1) % size, (rank - 1) % size
        expect("send_recv", group.send_recv(mine[rank], torch.empty(6), nxt, prev), mine[prev])
        if rank == 0:
            group.send(mine[0], dst=1)
        else:
            expect("recv", group.recv(torch.Size([6]), torch.float32, src=0), mine[0])
        sizes = [2 + r for r in range(size)]
        rows = [values(r, 3, torch.float32, 3 * sizes[r]).view(-1, 3) for r in range(size)]
        everything = group.all_gatherv(rows[rank], sizes)
        assert isinstance(everything, torch.Tensor)
        expect("all_gatherv", everything, torch.cat(rows))
        wide = [values(r, 4, torch.float32, 3 * sum(sizes)).view(-1, 3) for r in range(size)]
        first = sum(sizes[:rank])
        total = torch.stack(wide).sum(0)[first : first + sizes[rank]]
        expect("reduce_scatterv", group.reduce_scatterv(wide[rank], sizes=sizes), total)
        for op in ("sum", "prod", "max", "min", "avg"):
            parts = torch.stack(mine)
            wanted = {"sum": parts.sum(0), "prod": parts.prod(0), "max": parts.amax(0), "min": parts.amin(0),
                      "avg": parts.mean(0)}[op]  # fmt: skip
            expect(op, group.all_reduce(mine[rank].clone(), op=op), wanted)
        group.barrier()
        errors = []
        simulated = group.backend("pynccl")._library.ncclAllReduce._behaviour.__self__  # type: ignore[attr-defined]
        simulated.async_error = 6
        try:
            group.barrier()
        except CollectiveError as error:
            errors.append(str(error))
        try:
            group.all_reduce(mine[rank].clone())
        except CollectiveError as error:
            errors.append(str(error))
    group.destroy()
    dist.barrier()  # the store goes with rank 0
    return {"wrong": wrong, "errors": errors, "calls": world.calls, "alive": simulated.alive}


def first_call_without_the_last_rank(rank: int, size: int) -> dict[str, Any]:
    """A rank stays away from the first call of a size, for which NCCL connects ranks on the host."""
    _, process_group = start(rank, size, "pynccl")
    group = coordinator(process_group, "pynccl")
    seen: dict[str, Any] = {}
    with group.forcing("pynccl"):
        for _ in range(2):
            group.all_reduce(torch.ones(NUMEL))
        if rank != size - 1:
            began = time.monotonic()
            for what in ("first", "next"):
                try:
                    group.all_reduce(torch.ones(2 * NUMEL))
                except CollectiveError as error:
                    seen[what] = f"{type(error).__name__}: {error}"
            seen["took_s"] = time.monotonic() - began
    dist.barrier()  # over gloo: nobody ends before
    if rank != size - 1:
        group.destroy()  # its communicator has no end any more
    return seen


def growth(rank: int, size: int) -> dict[str, Any]:
    """symm_mem's buffer: grows when it must, refuses what does not fit, and a failed growth fails on every rank."""
    os.environ["COMMBENCH_SYMM_MEM_MAX_BYTES"] = "8MiB"
    world, process_group = start(rank, size, "symm_mem_twoshot")
    group = coordinator(process_group, "symm_mem_twoshot")
    backend: Any = group.backend("symm_mem_twoshot")
    seen: dict[str, Any] = {"sizes": [backend._buffer.size_bytes]}
    with group.forcing("symm_mem_twoshot"):
        for numel in (1000, (1 << 18) + 8, 1000, 1 << 21):
            x = values(rank, numel, torch.float32, numel)
            world.calls.clear()
            group.all_reduce(x)
            assert torch.equal(x, right(size, numel, torch.float32, numel))
            seen["sizes"].append(backend._buffer.size_bytes)
        seen["calls"] = list(world.calls)
        try:
            group.all_reduce(torch.ones((1 << 21) + 1))
        except BackendUnavailable as error:
            seen["too_large"] = str(error)
    fresh = coordinator(process_group, "symm_mem_twoshot")
    world.fail = (size - 1, "empty")
    x = values(rank, 1, torch.float32, 1 << 20)
    before = x.clone()
    with fresh.forcing("symm_mem_twoshot"):
        try:
            fresh.all_reduce(x)
        except BackendUnavailable as error:
            seen["failed_growth"] = str(error)
    seen["untouched"] = torch.equal(x, before)
    return seen


def tuned(rank: int, size: int) -> dict[int, tuple[int, int]]:
    """The launches that pymscclpp chose."""
    _, process_group = start(rank, size, "pymscclpp")
    group = coordinator(process_group, "pymscclpp")
    launches: dict[int, tuple[int, int]] = group.backend("pymscclpp").launches  # type: ignore[attr-defined]
    group.destroy()
    return launches
