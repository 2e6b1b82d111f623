"""Run the real SGLang 0.5.3 coordinator and ours side by side, on the CPU.

Run by test_sglang_coordinator.py, in an environment of its own.

``results N``   N processes over gloo: every operation over a grid; prints the cases where the two differ, as JSON
``layouts``     the group lists that SGLang's initialize_model_parallel makes for every factorisation of 1 to 16 ranks
``overhead``    nanoseconds of an 8-byte all_reduce over torch's fake process group, the two and what is below them
``dictionary``  two processes: seconds of handing over 1,000 small tensors, the two in turns
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy  # noqa: F401 - before the stand-ins, which must not stand in for what it imports
import torch
import torch._dynamo
import torch.distributed as dist

from tests.conformance.sglang_driver import StandIns
from tests.ranks import free_port

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool", "int16")


def load() -> Any:
    """SGLang's parallel_state as it loads on a machine without a GPU."""
    sys.meta_path.append(StandIns())
    import sglang.srt.distributed.parallel_state as parallel_state

    return parallel_state


# ---- results ------------------------------------------------------------------------------------------------------


def tensors(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Named inputs: a grid of shapes and dtypes, and layouts with gaps."""
    for dtype in DTYPES:
        for shape in ((0,), (1,), (7,), (4, 3), (2, 0, 3), (2, 1, 3, 2, 2)):
            count = torch.Size(shape).numel()
            yield f"{dtype} {shape}", ((torch.arange(count) % 11) + rank).reshape(shape).to(getattr(torch, dtype))
    yield "float32 scalar", torch.tensor(1.5 + rank)
    yield "float32 transposed", (torch.arange(24.0) + rank).reshape(4, 6).t()
    yield "float32 gaps", (torch.arange(12.0) + rank)[::2]
    yield "float32 expanded", torch.full((1, 3), float(rank)).expand(4, 3)


Call = Callable[[Any], Any]  # of a coordinator


def cases(rank: int, n: int) -> Iterator[tuple[str, str, Call]]:
    """(operation, arguments in words, the call on a coordinator), the same list on every rank."""
    following, before = (rank + 1) % n, (rank - 1) % n
    for name, x in tensors(rank):
        yield "all_reduce", name, lambda g, x=x: g.all_reduce(x.clone(memory_format=torch.preserve_format))
        for dim in {0, -1, x.dim() // 2, -x.dim(), x.dim(), -x.dim() - 1}:
            yield "all_gather", f"{name} dim {dim}", lambda g, x=x, dim=dim: g.all_gather(x, dim)
            yield "gather", f"{name} dim {dim}", lambda g, x=x, dim=dim: g.gather(x, n - 1, dim)

        def into_list(g: Any, x: torch.Tensor = x) -> Any:
            outputs = [torch.empty(x.shape, dtype=x.dtype) for _ in range(n)]
            return [g.all_gather(x, output_tensor_list=outputs), *outputs]

        yield "all_gather into a list", name, into_list

        def into_tensor(g: Any, x: torch.Tensor = x) -> Any:
            output = torch.empty((n * x.shape[0], *x.shape[1:]), dtype=x.dtype)
            # SGLang's own is a custom op that is registered for accelerators only; this is what the op calls
            getattr(g, "_all_gather_into_tensor", g.all_gather_into_tensor)(output, x)
            return output

        if x.dim():
            yield "all_gather_into_tensor", name, into_tensor

        def scattered(g: Any, x: torch.Tensor = x) -> Any:
            output = torch.empty(x.shape, dtype=x.dtype)
            g.reduce_scatter_tensor(output, torch.cat([x] * n))
            return output

        if x.dim():
            yield "reduce_scatter_tensor", name, scattered

        def scattered_list(g: Any, x: torch.Tensor = x) -> Any:
            output = torch.empty(x.shape, dtype=x.dtype)
            return g.reduce_scatter(output, [(x.clone() + i if x.dtype != torch.bool else x) for i in range(n)])

        yield "reduce_scatter", name, scattered_list
        for src in (0, n - 1):
            yield "broadcast", f"{name} src {src}", lambda g, x=x, src=src: g.broadcast(x.clone(), src)
        if not x.is_contiguous():
            continue  # SGLang raises on the sender alone, and the receiver would wait
        yield (
            "broadcast_tensor_dict",
            name,
            (lambda g, x=x: sorted_items(g.broadcast_tensor_dict({"x": x, "n": rank} if rank == 1 else None, 1))),
        )
        for asynchronous in (False, True):

            def hand_over(g: Any, x: torch.Tensor = x, asynchronous: bool = asynchronous) -> Any:
                works = []
                got = None
                if rank % 2 == 0:
                    works = g.send_tensor_dict({"x": x, "e": torch.empty(0), "n": rank}, following, None, asynchronous)
                if rank % 2 or n == 1:
                    got = g.recv_tensor_dict(before)
                for work in works:
                    work.work.wait()
                return None if got is None else sorted_items(got)

            yield "send_tensor_dict", f"{name} async {asynchronous}", hand_over

        def pass_on(g: Any, x: torch.Tensor = x) -> Any:
            if rank % 2 == 0:
                return g.send(x, following)
            return g.recv(x.shape, x.dtype, before)

        yield "send and recv", name, pass_on
    for name, value in (
        ("none", None), ("text", "a" * 5000), ("bytes", b"\0" * 3_000_000), ("nested", {"a": [1, (2, {"b": {3}})]}),
        ("tensor", torch.arange(3)), ("empty", b""),
    ):  # fmt: skip
        for src in (0, n - 1):
            yield (
                "broadcast_object",
                f"{name} src {src}",
                (lambda g, v=value, src=src: g.broadcast_object(v if rank == src else None, src)),
            )
            yield (
                "broadcast_object_list",
                f"{name} src {src}",
                (lambda g, v=value, src=src: g.broadcast_object_list([v, rank] if rank == src else [None, None], src)),
            )
        yield "all_gather_object", name, lambda g, v=value: g.all_gather_object((rank, v))
        for asynchronous in (False, True):

            def objects(g: Any, v: Any = value, asynchronous: bool = asynchronous) -> Any:
                if rank % 2:
                    return g.recv_object(before)
                for work in g.send_object(v, following, asynchronous):
                    work.work.wait()
                return None

            yield "send_object", f"{name} async {asynchronous}", objects
    x = torch.ones(4)
    for what, call in (
        ("broadcast src too large", lambda g: g.broadcast(x, n)),
        ("broadcast_object src too large", lambda g: g.broadcast_object(1, n)),
        ("broadcast_object_list src too large", lambda g: g.broadcast_object_list([1], n)),
        ("broadcast_tensor_dict src too large", lambda g: g.broadcast_tensor_dict({}, n)),
        ("send_object to itself", lambda g: g.send_object(1, rank)),
        ("send_object dst too large", lambda g: g.send_object(1, n)),
        ("recv_object from itself", lambda g: g.recv_object(rank)),
        ("recv_object src too large", lambda g: g.recv_object(n)),
        ("send_tensor_dict of a list", lambda g: g.send_tensor_dict([x], following)),
        ("send_tensor_dict dst too large", lambda g: g.send_tensor_dict({}, n)),
        ("recv_tensor_dict src too large", lambda g: g.recv_tensor_dict(n)),
        (
            "send_object of a lambda",
            lambda g: g.send_object(lambda: None, following) if rank % 2 else only_ours(g, before),
        ),
        ("all_gatherv", lambda g: g.all_gatherv(x)),
        ("reduce_scatterv", lambda g: g.reduce_scatterv(x)),
    ):
        yield "errors", what, call


def only_ours(g: Any, src: int) -> Any:
    """Ours tells the receiver; SGLang's would wait until its timeout."""
    if type(g).__module__.startswith("sglang"):
        raise AssertionError("would wait")
    return g.recv_object(src)


def sorted_items(values: Any) -> Any:
    return [values[k] for k in sorted(values)] if isinstance(values, dict) else values


def outcome(call: Call, group: Any) -> tuple[str, Any]:
    try:
        return "value", call(group)
    except Exception as error:  # noqa: BLE001 - what either raises is what is compared
        return "error", f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def shown(value: Any) -> str:
    return str(value).replace("\n", " ")[:200]


def compare(rank: int, n: int) -> dict[str, Any]:
    theirs = load()
    theirs.init_distributed_environment(n, rank, "env://", rank, "gloo", 60)
    sglang = theirs.get_world_group()
    from commbench.coordinator import state
    from commbench.errors import CommbenchError

    state.init_distributed_environment(timeout=60)
    state.initialize_model_parallel(n, use_message_queue=False)
    ours = state.get_tp_group()
    differences: list[dict[str, str]] = []
    compared: dict[str, int] = {}
    foreign: list[str] = []
    for operation, what, call in cases(rank, n):
        compared[operation] = compared.get(operation, 0) + 1
        kind, value = outcome(call, sglang)
        our_kind, our_value = outcome(call, ours)
        if our_kind == "error" and not _is_ours(str(our_value).partition(":")[0], CommbenchError):
            foreign.append(f"{operation} {what}: {our_value}")
        if kind != our_kind or (kind == "value" and not alike(value, our_value)):
            both = {"sglang": f"{kind}: {shown(value)}", "ours": f"{our_kind}: {shown(our_value)}"}
            differences.append({"operation": operation, "case": what, **both})
    dist.barrier()
    return {"differences": differences, "compared": compared, "foreign": foreign}


def _is_ours(name: str, root: type[Exception]) -> bool:
    found = [root]
    for kind in found:
        found += kind.__subclasses__()
    return name in {kind.__name__ for kind in found}


# ---- group layouts ------------------------------------------------------------------------------------------------


def layouts() -> list[dict[str, Any]]:
    """SGLang's own initialize_model_parallel, with torch.distributed made up and the groups recorded."""
    theirs = load()
    found = []
    for world in range(1, 17):
        for tp in range(1, world + 1):
            for ep in range(1, tp + 1):
                if world % tp or tp % ep:
                    continue
                made: dict[str, Any] = {}

                def record(groups: Any, local_rank: int, backend: str, made: Any = made, **options: Any) -> Any:
                    made[options["group_name"]] = groups
                    return mock.MagicMock()

                with (
                    mock.patch.object(theirs, "init_model_parallel_group", record),
                    mock.patch.object(theirs, "get_world_group", mock.MagicMock()),
                    mock.patch.object(dist, "is_initialized", return_value=True),
                    mock.patch.object(dist, "get_world_size", lambda group=None, world=world: world),
                    mock.patch.object(dist, "get_backend", return_value="gloo"),
                ):
                    theirs._TP = theirs._PP = theirs._MOE_EP = theirs._MOE_TP = None
                    theirs.initialize_model_parallel(tp, ep, world // tp)
                same = {"moe_ep": theirs._MOE_EP is theirs._TP, "moe_tp": theirs._MOE_TP is theirs._TP}
                found.append({"world": world, "tp": tp, "ep": ep, "groups": made, "is_tp": same})
    return found


# ---- speed ----------------------------------------------------------------------------------------------------------


def overhead() -> dict[str, float]:
    """The least time of each over many short turns, in nanoseconds a call."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    everyone = dist.group.WORLD
    theirs = load()
    with mock.patch.object(dist, "new_group", return_value=everyone):
        sglang = theirs.GroupCoordinator([[0, 1]], 0, "fake", *[False] * 7, group_name="tp")
    from tests.perf.coordinators import over_fake_group

    ours = over_fake_group()
    backend = ours.backend("torch_dist")
    x = torch.ones(2)
    calls = {
        "sglang": lambda: sglang.all_reduce(x),
        "ours": lambda: ours.all_reduce(x),
        "torch": lambda: dist.all_reduce(x, group=everyone),
        "backend": lambda: backend.all_reduce(x, x, "sum"),
    }
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(800):
        for name, call in calls.items():
            best[name] = min(best[name], timeit.timeit(call, number=30) / 30 * 1e9)
    return best


def dictionary(rank: int, n: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    theirs = load()
    theirs.init_distributed_environment(n, rank, "env://", rank, "gloo")
    from commbench.coordinator import state

    state.init_distributed_environment(timeout=60)
    state.initialize_model_parallel(n, use_message_queue=False)
    groups = {"sglang": theirs.get_world_group(), "ours": state.get_tp_group()}
    values = {f"tensor.{i}": torch.full((8,), float(i)) for i in range(1000)}
    times: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(14):
        for name, group in groups.items():
            dist.barrier()
            started = time.perf_counter()
            if rank == 0:
                group.send_tensor_dict(values, 1)
                group.recv_object(1)
            else:
                group.recv_tensor_dict(0)
                group.send_object("arrived", 0)
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    return {name: {"min": min(t), "median": statistics.median(t)} for name, t in times.items()}


def _rank_main(target: str, rank: int, n: int, port: int, results: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    results.put((rank, globals()[target](rank, n)))


def with_ranks(target: str, n: int) -> list[Any]:
    context = mp.get_context("spawn")
    results, port = context.Queue(), free_port()
    ranks = [context.Process(target=_rank_main, args=(target, r, n, port, results), daemon=True) for r in range(n)]
    for process in ranks:
        process.start()
    answers = dict(results.get(timeout=500) for _ in ranks)
    for process in ranks:
        process.join(10)
        process.kill()
    return [answers[r] for r in range(n)]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["results", count]:
            print(json.dumps(with_ranks("compare", int(count))))
        case ["layouts"]:
            print(json.dumps(layouts()))
        case ["overhead"]:
            print(json.dumps(overhead()))
        case ["dictionary"]:
            print(json.dumps(with_ranks("dictionary", 2)[0]))
