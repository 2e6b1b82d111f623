"""What the coordinator's operations give, with four real processes; and what they say to wrong arguments."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
import torch

from commbench.coordinator.group import GroupCoordinator
from commbench.coordinator.hints import Hints
from commbench.coordinator.world import local_platform, new_group
from commbench.errors import BackendUnavailable, CollectiveError, CommbenchError
from commbench.policy import load_policy
from tests.ranks import run_ranks, world

CPU = torch.device("cpu")
SIZE = 4


def make(rank: int, size: int, ranks: list[list[int]] | None = None, **options: Any) -> GroupCoordinator:
    """The world's coordinator, or that of the caller's list of ranks."""
    if ranks is None:
        group = world()
    else:
        group = new_group(ranks, "some", CPU, "gloo", None)
    return GroupCoordinator(group, load_policy("commbench"), local_platform(CPU), **options)


def shapes() -> list[tuple[int, ...]]:
    return [(1,), (3,), (4, 0), (2, 5), (3, 1, 2), (2, 3, 1, 2, 3)]


def of_rank(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) + 1000 * rank).reshape(shape).to(dtype)


def same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# ---- the processes' part: each returns the names of the checks that failed ---------------------------------------


class Checks:
    def __init__(self) -> None:
        self.failed: dict[str, list[str]] = {}

    def add(self, subject: str, holds: bool, what: str) -> None:
        found = self.failed.setdefault(subject, [])
        if not holds:
            found.append(what)

    def raises(self, subject: str, call: Any, *parts: str, kind: type[Exception] = CollectiveError) -> None:
        try:
            result = call()
        except kind as error:
            for part in parts:
                self.add(subject, part in str(error), f"{part!r} is not in {error}")
        else:
            self.add(subject, False, f"no error but {result!r}; expected {parts}")


def gathers(c: Checks, group: GroupCoordinator, rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for shape in shapes():
            inputs = [of_rank(shape, r, dtype) for r in range(size)]
            for dim in range(-len(shape), len(shape)):
                want = torch.cat(inputs, dim)
                c.add("all_gather", same(group.all_gather(inputs[rank], dim), want), f"{shape} {dtype} dim {dim}")
                for dst in (0, size - 1):
                    got = group.gather(inputs[rank], dst, dim)
                    ok = same(got, want) if rank == dst else got is None
                    c.add("gather", ok, f"{shape} {dtype} dim {dim} dst {dst}")
            outputs = [torch.empty_like(x) for x in inputs]
            nothing = group.all_gather(inputs[rank], output_tensor_list=outputs)
            ok = nothing is None and all(same(a, b) for a, b in zip(outputs, inputs, strict=True))
            c.add("output_tensor_list", ok, f"{shape} {dtype}")
            into = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
            group.all_gather_into_tensor(into, inputs[rank])
            c.add("all_gather_into_tensor", same(into, torch.cat(inputs)), f"{shape} {dtype}")
    turned = of_rank((4, 3), rank).t()
    want = torch.cat([of_rank((4, 3), r).t() for r in range(size)], 1)
    c.add("all_gather", same(group.all_gather(turned, 1), want), "transposed")
    gaps = of_rank((8,), rank)[::2]
    want = torch.cat([of_rank((8,), r)[::2] for r in range(size)])
    c.add("all_gather", same(group.all_gather(gaps), want), "strided")


def uneven(c: Checks, group: GroupCoordinator, rank: int, size: int) -> None:
    for sizes in ([1, 2, 3, 4], [5, 0, 0, 1], [0, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 7]):
        for tail in ((), (3,), (2, 0), (2, 2)):
            for dtype in (torch.float32, torch.int32, torch.bool):
                parts = [of_rank((n, *tail), r, dtype) for r, n in enumerate(sizes)]
                want = torch.cat(parts)
                c.add("all_gatherv", same(group.all_gatherv(parts[rank], sizes), want), f"{sizes} {tail} {dtype}")
            parts = [of_rank((n, *tail), r) for r, n in enumerate(sizes)]
            both = group.all_gatherv([parts[rank], parts[rank] + 1], sizes)
            ok = same(both[0], torch.cat(parts)) and same(both[1], torch.cat(parts) + 1)
            c.add("all_gatherv", ok, f"a list, {sizes} {tail}")
            inputs = [of_rank((sum(sizes), *tail), r) for r in range(size)]
            first = sum(sizes[:rank])
            reduced = torch.stack(inputs).sum(0)[first : first + sizes[rank]]
            c.add("reduce_scatterv", same(group.reduce_scatterv(inputs[rank], sizes=sizes), reduced), f"{sizes} {tail}")
            room = torch.empty_like(reduced)
            given = group.reduce_scatterv(inputs[rank], room, sizes)
            c.add("reduce_scatterv", given is room and same(room, reduced), f"into output, {sizes} {tail}")
    even = of_rank((2 * size, 3), rank)
    whole = torch.stack([of_rank((2 * size, 3), r) for r in range(size)]).sum(0)
    c.add("reduce_scatterv", same(group.reduce_scatterv(even), whole[2 * rank : 2 * rank + 2]), "without sizes")
    gathered = torch.cat([of_rank((2 * size, 3), r) for r in range(size)])
    c.add("all_gatherv", same(group.all_gatherv(even), gathered), "without sizes")
    strided = of_rank((sum([1, 2, 3, 4]), 2), rank).t().contiguous().t()
    want = torch.stack([of_rank((10, 2), r) for r in range(size)]).sum(0)
    first = sum([1, 2, 3, 4][:rank])
    got = group.reduce_scatterv(strided, sizes=[1, 2, 3, 4])
    c.add("reduce_scatterv", same(got, want[first : first + rank + 1]), "transposed input")


def scatters(c: Checks, group: GroupCoordinator, rank: int, size: int) -> None:
    for op, fold in (("sum", torch.sum), ("max", torch.amax), ("min", torch.amin)):
        inputs = [of_rank((size * 2, 3), r) for r in range(size)]
        whole = fold(torch.stack(inputs), 0)
        out = torch.empty(2, 3)
        group.reduce_scatter_tensor(out, inputs[rank], op)
        c.add("reduce_scatter_tensor", same(out, whole[2 * rank : 2 * rank + 2]), op)
        out = torch.empty(2, 3)
        given = group.reduce_scatter(out, list(inputs[rank].chunk(size)), op)
        c.add("reduce_scatter", given is out and same(out, whole[2 * rank : 2 * rank + 2]), op)
    ragged = [torch.full((r + 1, 2), float(rank + 1)) for r in range(size)]
    out = torch.empty(rank + 1, 2)
    group.reduce_scatter(out, ragged)
    c.add("reduce_scatter", same(out, torch.full((rank + 1, 2), 10.0)), "parts of different shapes")
    column = torch.empty(3, 2).t()
    group.reduce_scatter(column, [of_rank((2, 3), rank) for _ in range(size)])
    want = torch.stack([of_rank((2, 3), r) for r in range(size)]).sum(0)
    c.add("reduce_scatter", same(column, want), "strided output")
    for src in range(size):
        x = of_rank((2, 3), rank)
        c.add("broadcast", group.broadcast(x, src) is x and same(x, of_rank((2, 3), src)), f"src {src}")
        flags = torch.tensor([rank == src, False])
        c.add("broadcast", same(group.broadcast(flags, src), torch.tensor([True, False])), f"bool, src {src}")


def point_to_point(c: Checks, group: GroupCoordinator, rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64):
        for shape in shapes():
            mine = of_rank(shape, rank, dtype)
            if rank % 2 == 0:
                group.send(mine)
                got = group.recv(mine.shape, dtype)
            else:
                got = group.recv(mine.shape, dtype)
                group.send(mine)
            c.add("send and recv", same(got, of_rank(shape, (rank - 1) % size, dtype)), f"{shape} {dtype}")
    if rank == 3:
        group.send(of_rank((4, 4), 3).t(), dst=1)
    elif rank == 1:
        c.add("send and recv", same(group.recv((4, 4), torch.float32, src=3), of_rank((4, 4), 3).t()), "transposed")


def random_objects(seed: int, count: int) -> list[Any]:
    """Objects and dictionaries of all sizes from a seed."""
    chance = random.Random(seed)
    made: list[Any] = []
    for i in range(count):
        size = chance.choice([0, 1, 7, 100, 5_000, 70_000, 1_000_000])
        kind = chance.randrange(3)
        if kind == 0:
            made.append(("object", chance.randbytes(size)))
        elif kind == 1:
            made.append(("object", {"i": i, "list": list(range(size % 97)), "none": None}))
        else:
            made.append(("dict", {"a": torch.full((size // 4,), float(i)), "i": i, "b": torch.arange(size // 8 or 1)}))
    return made


def digest(value: Any) -> str:
    if isinstance(value, dict):
        return "|".join(f"{k}:{digest(v)}" for k, v in value.items())
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.numpy().tobytes()).hexdigest() + str(value.shape)
    return hashlib.sha256(repr(value).encode()).hexdigest()


def objects(c: Checks, group: GroupCoordinator, rank: int, size: int) -> None:
    following, before = (rank + 1) % size, (rank - 1) % size
    works = []
    for kind, value in random_objects(rank, 60):  # all in flight before anything is received
        if kind == "object":
            works += group.send_object(value, following, async_send=True)
        else:
            works += group.send_tensor_dict(value, async_send=True)
    del value
    c.add("async sends", all(w.payload is not None for w in works), "payloads are kept")
    for i, (kind, value) in enumerate(random_objects(before, 60)):
        got = group.recv_object(before) if kind == "object" else group.recv_tensor_dict()
        c.add("async sends", digest(got) == digest(value), f"number {i}, a {kind}")
    for work in works:
        work.work.wait()
        work.wait()
    c.add("async sends", all(w.payload is None for w in works) and not group._cpu.in_flight, "payloads are let go")
    for src in range(size):
        want = {"from": src, "data": b"x" * 100_000}
        c.add("broadcast_object", group.broadcast_object(want if rank == src else None, src) == want, f"src {src}")
        filled = group.broadcast_object_list([src, "a", None] if rank == src else [0, 0, 0], src)
        c.add("broadcast_object_list", filled == [src, "a", None], f"src {src}")
    gathered = group.all_gather_object({"rank": rank, "data": "y" * 1000 * rank})
    c.add("all_gather_object", [g["rank"] for g in gathered] == [0, 1, 2, 3], "order")
    c.add("all_gather_object", [len(g["data"]) for g in gathered] == [0, 1000, 2000, 3000], "sizes")


def dictionaries(c: Checks, group: GroupCoordinator, halves: GroupCoordinator, rank: int, size: int) -> None:
    def values() -> dict[str, Any]:
        return {
            "hidden": of_rank((4, 6), 7),
            "turned": of_rank((3, 4), 5, torch.bfloat16).t(),
            "odd": of_rank((3,), 2, torch.int64),
            "empty": torch.empty(0, 5, dtype=torch.float16),
            "scalar": torch.tensor(3.5),
            "flags": torch.tensor([True, False]),
            "short": torch.tensor([1, 2], dtype=torch.int16),
            "n": 3,
            "nested": {"a": [1, torch.ones(2)]},
        }

    def right(got: Any) -> bool:
        return list(got) == list(values()) and all(
            same(got[k], v) if isinstance(v, torch.Tensor) else digest(got[k]) == digest(v) for k, v in values().items()
        )

    for src in (0, 2):
        given = values()
        got = group.broadcast_tensor_dict(given if rank == src else None, src)
        c.add("broadcast_tensor_dict", right(got), f"src {src}")
    for async_send in (False, True):
        for helpers in (None, halves):
            if rank < 2:  # 0 → 2 and 1 → 3: the halves are (0, 1) and (2, 3)
                sent = group.send_tensor_dict(values(), rank + 2, helpers, async_send)
                c.add("send_tensor_dict", (sent != []) == async_send, f"works with async_send={async_send}")
                for work in sent:
                    work.wait()
            else:
                got = group.recv_tensor_dict(rank - 2, helpers)
                c.add("send_tensor_dict", right(got), f"async {async_send}, split {helpers is not None}")
    # a receiver without the sender's all-gather group says so, and the traffic stays in step
    if rank < 2:
        group.send_tensor_dict(values(), rank + 2, halves)
        group.send_object("next", rank + 2)
    else:
        c.raises("send_tensor_dict", lambda: group.recv_tensor_dict(rank - 2), "'hidden' into 2 parts", "no ranks")
        c.add("send_tensor_dict", group.recv_object(rank - 2) == "next", "in step after a mismatch")


def reports(c: Checks, group: GroupCoordinator, pair: GroupCoordinator, rank: int, size: int) -> None:
    members = [0, 2] if rank % 2 == 0 else [1, 3]
    c.add("properties", list(pair.ranks) == members and pair.rank == rank, "ranks")
    c.add("properties", pair.rank_in_group == members.index(rank) and pair.world_size == 2, "rank in group")
    c.add("properties", (pair.first_rank, pair.last_rank) == tuple(members), "first and last")
    other = members[1 - members.index(rank)]
    c.add("properties", pair.next_rank == other and pair.prev_rank == other, "next and previous")
    c.add("properties", pair.is_first_rank == (rank < 2) and pair.is_last_rank == (rank >= 2), "is first, is last")
    c.add("properties", group.next_rank == (rank + 1) % size and group.prev_rank == (rank - 1) % size, "the ring")
    x = torch.tensor([float(1 << rank)])
    c.add("properties", pair.all_reduce(x).item() == sum(1 << m for m in members), "the pair reduces itself only")
    counts = group.call_counts()
    group.send_object(1, (rank + 1) % size, async_send=True)
    group.recv_object((rank - 1) % size)
    group.broadcast_object(1)
    after = group.call_counts()
    c.add("counts", after["torch_dist"] - counts["torch_dist"] == 3, f"object calls {counts} {after}")
    off = make_hinted(group)
    c.add("hints", off == {"pynccl", "ca", "symm_mem"}, f"turned off: {off}")


def make_hinted(group: GroupCoordinator) -> set[str]:
    hints = Hints(pynccl=False, custom_allreduce=False, torch_symm_mem=False)
    hinted = GroupCoordinator(
        group.group, load_policy("commbench"), local_platform(CPU), backends=("pynccl", "ca", "symm_mem"), hints=hints
    )
    return {n for n, reason in hinted.usable.items() if reason and "turned off for this group" in reason}


def graph_state(c: Checks, group: GroupCoordinator, rank: int, size: int) -> None:
    class StopError(Exception):
        pass

    inside = []
    backend = group.backend("torch_dist")
    from contextlib import contextmanager

    @contextmanager
    def capture() -> Any:
        inside.append("in")
        try:
            yield
        finally:
            inside.append("out")

    backend.capture = capture  # type: ignore[method-assign]
    with group.graph_capture() as context:
        c.add("graph_capture", group.signature("barrier", None, "", "in").mode == "graph", "mode inside")
        c.add("graph_capture", context.stream is None, "no stream on the CPU")
        c.add("graph_capture", inside == ["in"], "backends are told")
        x = torch.ones(3)
        c.add("graph_capture", group.all_reduce(x).tolist() == [4.0] * 3, "reduces inside")
    c.add("graph_capture", inside == ["in", "out"], "backends are told at the end")
    try:
        with group.graph_capture():
            raise StopError
    except StopError:
        pass
    c.add("graph_capture", group._mode == "eager" and inside == ["in", "out"] * 2, "restored on error")


def wrong_calls(c: Checks, group: GroupCoordinator, rank: int, size: int) -> None:
    x = torch.ones(4, 2)
    for call, *parts in (
        (lambda: group.all_gather(x, 2), "dim=2", "(4, 2)"),
        (lambda: group.all_gather(torch.tensor(1.0)), "dim=-1", "()"),
        (lambda: group.all_gather(x, output_tensor_list=[x]), "1 outputs", "4 ranks"),
        (lambda: group.all_gather(x, output_tensor_list=[x, x, x, x[:2]]), "output_tensor_list[3]", "(2, 2)"),
        (lambda: group.gather(x, dst=4), "dst=4"),
        (lambda: group.gather(x, dim=-3), "dim=-3"),
        (lambda: group.all_gatherv(x, [4, 4, 4]), "3 entries", "4 ranks"),
        (lambda: group.all_gatherv(x, [5, 5, 5, 5]), "has 4 rows", "says 5"),
        (lambda: group.all_gatherv(x, [4, 4, 4, -4]), "none below 0"),
        (lambda: group.all_gatherv(torch.tensor(1.0), [1, 1, 1, 1]), "no dimension"),
        (lambda: group.all_gatherv(x, [4] * 4, out=torch.ones(15, 2)), "(15, 2)", "(16, 2)"),
        (lambda: group.reduce_scatterv(x, sizes=[1, 1, 1, 2]), "sum up to 5", "4 rows"),
        (lambda: group.reduce_scatterv(torch.ones(5)), "5 rows do not split into 4"),
        (lambda: group.reduce_scatterv(x, torch.ones(2, 2)), "(2, 2)", "(1, 2)"),
        (lambda: group.reduce_scatter(x, [x, x]), "2 tensors given", "4 ranks"),
        (lambda: group.reduce_scatter(x, [torch.ones(3)] * 4), "(4, 2)", "(3,)"),
        (lambda: group.reduce_scatter(x, [x.double(), x, x, x]), *(["torch.float64"] if rank else ["torch.float32"])),
        (lambda: group.reduce_scatter_tensor(torch.ones(3), torch.ones(13)), "13 elements"),
        (lambda: group.broadcast(x, 4), "src=4"),
        (lambda: group.broadcast_object(1, -1), "src=-1"),
        (lambda: group.broadcast_tensor_dict({}, 9), "src=9"),
        (lambda: group.send_object(1, rank), f"dst={rank} is this rank itself"),
        (lambda: group.send_object(1, 4), "dst=4"),
        (lambda: group.recv_object(rank), "is this rank itself"),
        (lambda: group.recv_object(17), "src=17"),
        (lambda: group.send_tensor_dict([1], 0), "got list"),  # type: ignore[arg-type]
        (lambda: group.send_tensor_dict({}, rank), "is this rank itself"),
        (lambda: group.recv_tensor_dict(rank), "is this rank itself"),
        (lambda: group.send(x, rank), "is this rank itself"),
        (lambda: group.recv((2,), torch.float32, 4), "src=4"),
        (lambda: group.all_reduce(torch.ones(2, dtype=torch.bool)), "torch.bool"),
    ):
        c.raises("wrong calls", call, *parts)
    # an object that cannot be pickled is an error on every rank that waits for it
    unpicklable = lambda: None  # noqa: E731
    told = "function cannot be pickled"
    c.raises("unpicklable", lambda: group.broadcast_object(unpicklable if rank == 0 else None), told)
    c.raises("unpicklable", lambda: group.all_gather_object(unpicklable if rank == 1 else 1), told)
    given = {"f": unpicklable} if rank == 2 else None
    c.raises("unpicklable", lambda: group.broadcast_tensor_dict(given, 2), "cannot be pickled")
    if rank == 0:
        c.raises("unpicklable", lambda: group.send_object(unpicklable, 1), "cannot be pickled")
        values = {"f": unpicklable}
        c.raises("unpicklable", lambda: group.send_tensor_dict(values, 1, async_send=True), "cannot be pickled")
        group.send_object("after", 1)
    elif rank == 1:
        c.raises("unpicklable", lambda: group.recv_object(0), "rank 0 could not send", "cannot be pickled")
        c.raises("unpicklable", lambda: group.recv_tensor_dict(0), "rank 0 could not send")
        c.add("unpicklable", group.recv_object(0) == "after", "in step afterwards")
    c.add("unpicklable", group.broadcast_object("fine" if rank == 0 else None) == "fine", "usable afterwards")


def compared(c: Checks, group: GroupCoordinator, rank: int, size: int) -> None:
    checked = GroupCoordinator(group.group, load_policy("commbench"), local_platform(CPU), check_calls=True)
    x = torch.ones(4)
    for _ in range(2):
        c.add("check_calls", checked.all_reduce(x.clone()).tolist() == [4.0] * 4, "equal calls go through")
    out = torch.ones(16) if rank == 0 else None
    c.add("check_calls", checked.gather_into_tensor(out, x) is out, "calls that differ by role go through")
    for call in (
        lambda: checked.all_reduce(torch.ones(4 if rank else 5)),
        lambda: checked.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 3 else torch.float32)),
        lambda: checked.broadcast(x, src=rank % 2),
        lambda: checked.all_reduce(x) if rank else checked.barrier(),
        lambda: checked.all_gatherv(torch.ones(1 if rank else 2), [2, 1, 1, 1] if rank != 1 else [2, 1, 1, 2]),
    ):
        c.raises("check_calls", call, "disagree", "rank 0 calls")


def alone(c: Checks, single: GroupCoordinator) -> None:
    x = of_rank((2, 3), 1)
    c.add("a group of one", single.all_reduce(x) is x, "all_reduce")
    out = torch.empty(2, 3)
    c.add("a group of one", same(single.all_reduce(x, out=out), x), "all_reduce out of place")
    c.add("a group of one", single.all_gather(x) is x and single.gather(x) is x, "gathers")
    into = [torch.empty(2, 3)]
    c.add("a group of one", single.all_gather(x, output_tensor_list=into) is None and same(into[0], x), "list")
    c.add("a group of one", same(single.reduce_scatterv(x, sizes=[2]), x), "reduce_scatterv")
    c.add("a group of one", same(single.all_gatherv(x, [2]), x), "all_gatherv")
    c.add("a group of one", single.broadcast(x) is x and single.broadcast_object(5) == 5, "broadcasts")
    c.add("a group of one", single.send_tensor_dict({"a": x}) == [], "send_tensor_dict gives a list of works")
    c.add("a group of one", single.recv_tensor_dict() is None, "recv_tensor_dict")
    c.add("a group of one", single.all_gather_object(3) == [3], "all_gather_object")
    c.add("a group of one", single.broadcast_tensor_dict({"a": 1}) == {"a": 1}, "broadcast_tensor_dict")
    single.barrier()
    c.raises("a group of one", lambda: single.all_gather(x, 5), "dim=5")
    c.raises("a group of one", lambda: single.send_object(1, 0), "this rank itself")


def after_the_end(c: Checks, group: GroupCoordinator) -> None:
    x = torch.ones(4)
    group.all_reduce(x)
    group.destroy()
    group.destroy()
    for call in (
        lambda: group.all_reduce(x),
        lambda: group.all_gather(x),
        lambda: group.broadcast_object(1),
        lambda: group.send_object(1, 1),
        lambda: group.recv_tensor_dict(),
        lambda: group.barrier(),
        lambda: group.graph_capture().__enter__(),
    ):
        c.raises("use after destroy", call, "destroyed")


def everything(rank: int, size: int) -> dict[str, list[str]]:
    c = Checks()
    group = make(rank, size)
    pair = make(rank, size, [[0, 2], [1, 3]])
    halves = make(rank, size, [[0, 1], [2, 3]])
    single = make(rank, size, [[r] for r in range(size)])
    for backend in (None, "torch_dist"):
        with group.forcing(backend):
            gathers(c, group, rank, size)
            uneven(c, group, rank, size)
            scatters(c, group, rank, size)
            point_to_point(c, group, rank, size)
    objects(c, group, rank, size)
    dictionaries(c, group, halves, rank, size)
    reports(c, group, pair, rank, size)
    wrong_calls(c, group, rank, size)
    compared(c, group, rank, size)
    alone(c, single)
    graph_state(c, group, rank, size)
    try:
        make(rank, size, [[0, 1], [1, 2, 3]])
    except CommbenchError as error:
        c.add("group lists", "listed twice" in str(error), str(error))
    try:
        with pair.forcing("fake"):
            pair.all_reduce(torch.ones(1))
    except BackendUnavailable as error:
        c.add("group lists", "fake" in str(error), str(error))
    group.barrier()
    after_the_end(c, group)
    return c.failed


SUBJECTS = (
    "all_gather", "gather", "output_tensor_list", "all_gather_into_tensor", "all_gatherv", "reduce_scatterv",
    "reduce_scatter_tensor", "reduce_scatter", "broadcast", "send and recv", "async sends", "broadcast_object",
    "broadcast_object_list", "all_gather_object", "broadcast_tensor_dict", "send_tensor_dict", "properties", "counts",
    "hints", "wrong calls", "unpicklable", "check_calls", "a group of one", "graph_capture", "group lists",
    "use after destroy",
)  # fmt: skip


@pytest.fixture(scope="module")
def failed() -> list[dict[str, list[str]]]:
    return run_ranks(everything, SIZE, timeout_s=280)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_with_four_processes(failed: list[dict[str, list[str]]], subject: str) -> None:
    assert any(subject in rank for rank in failed), "no rank has checked it"
    assert [rank.get(subject, []) for rank in failed] == [[]] * SIZE
