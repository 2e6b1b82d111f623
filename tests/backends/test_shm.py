"""The shared-memory backends, with real processes as ranks."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commbench import native
from commbench.backends import shm
from commbench.backends.base import Group
from commbench.errors import BackendUnavailable, CollectiveError, PeerLost
from commbench.registry import load_backend
from commbench.types import CallSignature
from tests.backends.shm_pool import Ranks

pytestmark = pytest.mark.skipif(bool(native.why_unavailable()), reason=native.why_unavailable())

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]
NAMES = ["shm", "shm_oneshot", "shm_twoshot"]
# Around the inline line (56 bytes), vectors, the 64 KiB chunk and several chunks.
SIZES = [0, 1, 3, 14, 15, 17, 1000, 16384, 16385, 50001]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(params=["two", "four"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue(request.param)


# ---- helpers that run in the ranks -------------------------------------------------------------------------------

_made: dict[str, Any] = {}


def backend_of(group: Group, name: str = "shm") -> shm.ShmBackend:
    """The rank's backend of that name; all three are made together and kept."""
    if not _made:
        _made.update({n: load_backend(n)(group) for n in NAMES})
    return _made[name]


def integers(rank: int, numel: int, dtype: torch.dtype, high: int = 5) -> torch.Tensor:
    """Values that every dtype holds exactly, and their sums over a few ranks too."""
    return torch.randint(1, high, (numel,), generator=torch.Generator().manual_seed(rank * 1009 + numel)).to(dtype)


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    combine = {"sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}[op]
    result = inputs[0].clone()
    for x in inputs[1:]:
        result = combine(result, x)
    return result / len(inputs) if op == "avg" else result


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each."""
    holes = torch.empty(x.numel() * 2, dtype=x.dtype)
    holes[::2] = x
    return holes[::2]


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values at an address that is a multiple of the element size only."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype)
    room[1:] = x
    return room[1:]


def check_all_reduce(group: Group, name: str, dtype: torch.dtype, ops: list[str]) -> None:
    backend = backend_of(group, name)
    n = group.world_size
    for op in ops:
        for numel in SIZES:
            inputs = [integers(r, numel, dtype, 3 if op == "prod" else 5) for r in range(n)]
            expected = reduced(inputs, op)
            for place in (torch.Tensor.clone, unaligned, strided):
                x = place(inputs[group.rank])
                out = place(torch.zeros_like(expected))
                backend.all_reduce(x, out, op)
                torch.testing.assert_close(out, expected, rtol=0, atol=0, msg=f"{name} {dtype} {op} {numel}")
                assert torch.equal(x, inputs[group.rank]), "an out-of-place call must leave its input"
                backend.all_reduce(x, x, op)
                assert torch.equal(x, expected), (name, dtype, op, numel, place)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_equals_torch_for_every_size_alignment_and_layout(
    ranks: Ranks, name: str, dtype: torch.dtype
) -> None:
    ops = ["sum", "prod", "min", "max"] + (["avg"] if dtype in (torch.float32, torch.float64) else [])
    ranks.run(check_all_reduce, name, dtype, ops if ranks.n == 2 else ops[:1])


def check_large(group: Group) -> None:
    numel = (40 << 20) // 4 + 3
    expected = torch.full((numel,), float(sum(range(1, group.world_size + 1))))
    for name in NAMES:
        x = torch.full((numel,), float(group.rank + 1))
        backend_of(group, name).all_reduce(x, x, "sum")
        assert torch.equal(x, expected), name


def test_all_reduce_of_forty_mebibytes(two: Ranks) -> None:
    two.run(check_large)


def bits_of_all_reduce(group: Group, name: str, dtype: torch.dtype, numel: int) -> bytes:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
    x[::7] = -0.0
    x[3::11] *= 1e30 if dtype in (torch.float32, torch.bfloat16) else 100
    backend_of(group, name).all_reduce(x, x, "sum")
    return x.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [13, 5000, 70001])
def test_results_are_bit_identical_on_all_ranks_from_run_to_run_and_between_algorithms(
    four: Ranks, dtype: torch.dtype, numel: int
) -> None:
    results = {bits for name in NAMES * 2 for bits in four.run(bits_of_all_reduce, name, dtype, numel)}
    assert len(results) == 1


def sum_of_constants(group: Group, name: str, dtype: torch.dtype, values: list[float], numel: int) -> torch.Tensor:
    x = torch.full((numel,), values[group.rank], dtype=dtype)
    backend_of(group, name).all_reduce(x, x, "sum")
    return x


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        # Stepwise rounding would stay at the first value: each 1 is half a unit in its last place.
        (torch.float16, [2048.0, 1.0, 1.0, 1.0], 2052.0),
        (torch.bfloat16, [256.0, 1.0, 1.0, 1.0], 260.0),
        # Sums in rank order: the small value is lost before the large ones cancel, and kept after.
        (torch.float32, [1e8, 1.0, -1e8, 0.0], 0.0),
        (torch.float32, [1e8, -1e8, 1.0, 0.0], 1.0),
        (torch.int32, [2.0**31 - 1, 1.0, 0.0, 0.0], -(2.0**31)),
        (torch.uint8, [200.0, 100.0, 0.0, 0.0], 44.0),
    ],
    ids=["float16", "bfloat16", "order-lost", "order-kept", "int32-wraps", "uint8-wraps"],
)
@pytest.mark.parametrize("numel", [2, 40000])
def test_sums_are_in_rank_order_in_float32_and_wrap_for_integers(
    four: Ranks, dtype: torch.dtype, values: list[float], expected: float, numel: int
) -> None:
    for name in NAMES:
        for result in four.run(sum_of_constants, name, dtype, values, numel):
            assert torch.equal(result, torch.full((numel,), expected, dtype=dtype))


def check_nan(group: Group) -> None:
    for name in NAMES:
        for op in ("min", "max"):
            for culprit in range(group.world_size):
                x = torch.ones(100)
                if group.rank == culprit:
                    x[50] = float("nan")
                backend_of(group, name).all_reduce(x, x, op)
                assert x.isnan().nonzero().tolist() == [[50]]


def test_a_nan_on_any_rank_reaches_min_and_max(two: Ranks) -> None:
    two.run(check_nan)


def check_movers(group: Group, dtype: torch.dtype, layout: str) -> None:
    backend, n, me = backend_of(group), group.world_size, group.rank
    place = {"contiguous": torch.Tensor.clone, "strided": strided, "unaligned": unaligned}[layout]
    for part in (0, 1, 5, 56, 57, 3000, 40000):
        if dtype.itemsize == 1:
            top = 2 if dtype is torch.bool else 100  # a bool holds 0 or 1
            whole = [torch.arange(part * n).add(r * 3).remainder(top).to(torch.uint8).view(dtype) for r in range(n)]
        else:
            whole = [torch.arange(part * n).add(r * 3).remainder(100).to(dtype) for r in range(n)]

        def slot(of: int, which: int, whole: list[torch.Tensor] = whole, part: int = part) -> torch.Tensor:
            return whole[of][which * part : (which + 1) * part]

        def same(a: torch.Tensor, b: torch.Tensor) -> bool:
            dense = [torch.empty(t.numel(), dtype=dtype).copy_(t) for t in (a, b)]
            return torch.equal(dense[0].view(torch.uint8), dense[1].view(torch.uint8))

        def room(numel: int) -> torch.Tensor:
            return place(
                torch.zeros(numel, dtype=torch.uint8).view(dtype)
                if dtype.itemsize == 1
                else torch.zeros(numel, dtype=dtype)
            )

        out = room(part * n)
        backend.all_gather(place(slot(me, 0)), out)
        assert same(out, torch.cat([slot(r, 0) for r in range(n)]))
        if layout != "strided":
            out = place(torch.cat([slot(me, 0)] * n))
            backend.all_gather(out[me * part : (me + 1) * part], out)
            assert same(out, torch.cat([slot(r, 0) for r in range(n)]))
        out = room(part * n)
        backend.all_to_all(place(whole[me]), out)
        assert same(out, torch.cat([slot(r, me) for r in range(n)]))
        for root in {0, n - 1}:
            x = place(whole[me])
            backend.broadcast(x, root)
            assert same(x, whole[root])
            out = room(part * n)
            backend.gather(place(slot(me, 0)), out if me == root else None, root)
            assert me != root or same(out, torch.cat([slot(r, 0) for r in range(n)]))
            out = room(part)
            backend.scatter(place(whole[me]) if me == root else None, out, root)
            assert same(out, slot(root, me))
        for distance in range(n):
            out = room(part)
            backend.send_recv(place(slot(me, 0)), out, (me + distance) % n, (me - distance) % n)
            assert same(out, slot((me - distance) % n, 0))
        x = place(whole[me])
        if me == 0:
            backend.send(x, n - 1)
        elif me == n - 1:
            backend.recv(x, 0)
            assert same(x, whole[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn, torch.bool], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "strided", "unaligned"])
def test_collectives_without_arithmetic_move_any_dtype(two: Ranks, dtype: torch.dtype, layout: str) -> None:
    two.run(check_movers, dtype, layout)


def test_collectives_without_arithmetic_among_four_ranks(four: Ranks) -> None:
    four.run(check_movers, torch.float32, "contiguous")


def check_reducers(group: Group, dtype: torch.dtype) -> None:
    backend, n, me = backend_of(group), group.world_size, group.rank
    for place in (torch.Tensor.clone, strided):
        for part in (0, 1, 5, 3000, 40000):
            inputs = [integers(r, part * n, dtype) for r in range(n)]
            expected = reduced(inputs, "sum")
            out = place(torch.zeros(part, dtype=dtype))
            backend.reduce_scatter(place(inputs[me]), out, "sum")
            assert torch.equal(out, expected[me * part : (me + 1) * part])
            if place is not strided:
                x = inputs[me].clone()
                backend.reduce_scatter(x, x[me * part : (me + 1) * part], "sum")
                assert torch.equal(x[me * part : (me + 1) * part], expected[me * part : (me + 1) * part])
            for root in {0, n - 1}:
                x, out = place(inputs[me]), place(torch.zeros_like(expected))
                backend.reduce(x, out, root, "sum")
                assert me != root or torch.equal(out, expected)
                backend.reduce(x, x, root, "max")
                assert me != root or torch.equal(x, reduced(inputs, "max"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_reduce_and_reduce_scatter_equal_torch(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.run(check_reducers, dtype)


def check_uneven(group: Group) -> None:
    backend, n, me = backend_of(group), group.world_size, group.rank
    for sizes in ([3] * n, [0] * n, [7, 0, 2, 1][:n], list(range(5000, 5000 + n)), [0] * (n - 1) + [30000]):
        total = sum(sizes)
        start = sum(sizes[:me])
        rows = [torch.arange(total * 3, dtype=torch.float32).reshape(total, 3) + r for r in range(n)]
        out = torch.zeros(total, 3)
        backend.all_gatherv(rows[me][start : start + sizes[me]], out, sizes)
        expected = torch.cat([rows[r][sum(sizes[:r]) : sum(sizes[: r + 1])] for r in range(n)])
        assert torch.equal(out, expected)
        part = torch.zeros(sizes[me], 3)
        backend.reduce_scatterv(rows[me], part, sizes, "sum")
        assert torch.equal(part, sum(rows)[start : start + sizes[me]])
    with pytest.raises(CollectiveError, match="do not describe"):
        backend.all_gatherv(torch.zeros(2, 3), torch.zeros(5, 3), [1] * n)


def test_uneven_parts_are_gathered_and_reduced(ranks: Ranks) -> None:
    ranks.run(check_uneven)


def times_at_barrier(group: Group) -> tuple[float, float]:
    backend = backend_of(group)
    backend.barrier()
    time.sleep(0.05 * group.rank)
    entered = time.perf_counter()
    backend.barrier()
    return entered, time.perf_counter()


def test_no_rank_leaves_a_barrier_before_the_last_has_come(four: Ranks) -> None:
    times = four.run(times_at_barrier)
    assert min(left for _, left in times) >= max(entered for entered, _ in times)


def count_calls(group: Group) -> int:
    backend = backend_of(group)
    before = backend.calls
    x = torch.ones(4)
    backend.all_reduce(x, x, "sum")
    backend.broadcast(x, 0)
    backend.barrier()
    with pytest.raises(CollectiveError):
        backend.all_reduce(x, torch.ones(5), "sum")
    return backend.calls - before


def test_only_calls_that_were_made_are_counted(two: Ranks) -> None:
    assert two.run(count_calls) == [3, 3]


# ---- registered tensors ------------------------------------------------------------------------------------------


def check_registered(group: Group) -> None:
    backend, n, me = backend_of(group, "shm_twoshot"), group.world_size, group.rank
    numel = 12000 * n
    a = shm.empty((numel,), torch.float32, group)
    b = shm.empty(numel, torch.float32, group)
    assert backend._comm.is_registered(a[100:].data_ptr(), (numel - 100) * 4)
    assert not backend._comm.is_registered(a[100:].data_ptr(), numel * 4)
    inputs = [integers(r, numel, torch.float32) for r in range(n)]
    total = reduced(inputs, "sum")
    for out in (a, b, torch.zeros(numel)):  # in place, registered, and not
        a.copy_(inputs[me])
        backend.all_reduce(a, out, "sum")
        assert torch.equal(out, total)
    for offset in (1, 1 + me):  # the same and another place on each rank
        x = a[offset : offset + numel - n]
        x.copy_(inputs[me][: numel - n])
        backend.all_reduce(x, x, "sum")
        assert torch.equal(x, total[: numel - n])
    mixed = a if me == 0 else torch.zeros(numel)  # only one rank has it registered
    mixed.copy_(inputs[me])
    backend.all_reduce(mixed, mixed, "sum")
    assert torch.equal(mixed, total)
    a.copy_(inputs[me])
    part = numel // n
    mine = slice(me * part, (me + 1) * part)
    out = torch.zeros(part)
    backend.reduce_scatter(a, out, "sum")
    assert torch.equal(out, total[mine])
    assert torch.equal(a, inputs[me])
    backend.reduce_scatter(a, a[mine], "sum")
    assert torch.equal(a[mine], total[mine])
    for source in (a[:part], torch.zeros(part)):
        source.copy_(inputs[me][:part])
        backend.all_gather(source, b)
        assert torch.equal(b, torch.cat([i[:part] for i in inputs]))
    a.copy_(inputs[me])
    backend.all_to_all(a, b)
    assert torch.equal(b, torch.cat([i[mine] for i in inputs]))
    backend.broadcast(a, n - 1)
    assert torch.equal(a, inputs[n - 1])
    empty = shm.empty((0, 3), torch.int8, backend)
    assert empty.shape == (0, 3)


def test_registered_tensors_give_the_same_results_as_others(ranks: Ranks) -> None:
    ranks.run(check_registered)


def registered_and_gone(group: Group) -> tuple[int, int]:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("commbench-")

    backend_of(group)
    before = mapped()
    tensors = [shm.empty((1000,), torch.float32, group) for _ in range(3)]
    assert mapped() == before + 3
    view = tensors[0][:10]
    tensors.clear()
    during = mapped()
    view.fill_(1)  # one view keeps its piece
    del view
    return during - before, mapped() - before


def test_registered_memory_goes_with_its_last_tensor(two: Ranks) -> None:
    assert two.run(registered_and_gone) == [(1, 0)] * 2


def disagree(group: Group) -> None:
    backend_of(group)
    with pytest.raises(CollectiveError, match="different registered tensors"):
        shm.empty((group.rank + 1,), torch.float32, group)


def test_ranks_that_register_different_shapes_are_told(two: Ranks) -> None:
    two.run(disagree)


# ---- groups, threads, processes ----------------------------------------------------------------------------------


def subgroup(group: Group, name: str, members: list[int]) -> Group | None:
    handle = dist.new_group(members)
    if group.rank not in members:
        return None
    return Group(name, tuple(members), members.index(group.rank), group.device, handle, handle, True)


def check_overlapping(group: Group) -> None:
    layouts = {"pair": [0, 1], "middle": [1, 2], "odd": [1, 3], "all": [0, 1, 2, 3], "reversed": [2, 0]}
    groups = {name: subgroup(group, name, sorted(m)) for name, m in layouts.items()}
    mine = {name: shm.ShmBackend(g) for name, g in groups.items() if g is not None}
    for _ in range(20):
        for name, backend in mine.items():
            for numel in (1, 5000, 50000):
                x = torch.full((numel,), float(group.rank + 1))
                backend.all_reduce(x, x, "sum")
                assert (x == sum(r + 1 for r in layouts[name])).all(), name
    for backend in mine.values():
        backend.close()


def test_overlapping_groups_do_not_disturb_each_other(four: Ranks) -> None:
    four.run(check_overlapping)


def check_threads(group: Group) -> None:
    backend = backend_of(group)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for numel in (3, 30000):
                x = torch.ones(numel)
                backend.all_reduce(x, x, "sum")
                assert (x == group.world_size).all()
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    for _ in range(5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        work()
    assert not failures, failures


def test_threads_may_call_in_turn(two: Ranks) -> None:
    two.run(check_threads)


def two_threads_at_once(group: Group) -> str:
    backend = backend_of(group)
    backend.barrier()
    if group.rank == 1:
        time.sleep(0.4)
        backend.barrier()
        return ""
    waiting = threading.Thread(target=backend.barrier)
    waiting.start()
    time.sleep(0.1)
    try:
        backend.barrier()
        message = ""
    except CollectiveError as error:
        message = str(error)
    waiting.join()
    return message


def test_two_threads_at_once_are_refused_and_a_waiting_rank_lets_other_threads_run(two: Ranks) -> None:
    assert "another thread is in a collective" in two.run(two_threads_at_once)[0]


def check_fork(group: Group) -> str:
    backend = backend_of(group)
    x = torch.ones(10)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            backend.all_reduce(x, x, "sum")
            os.write(write, b"no error")
        except CollectiveError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    said = os.read(read, 1000).decode()
    os.close(read)
    os.waitpid(child, 0)
    backend.all_reduce(x, x, "sum")
    assert (x == group.world_size).all()
    return said


def test_a_forked_child_is_refused_and_its_parent_goes_on(two: Ranks) -> None:
    assert all("belongs to the parent process" in said for said in two.run(check_fork))


# ---- what is left behind -----------------------------------------------------------------------------------------


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder in shared memory where nobody else makes files."""
    with tempfile.TemporaryDirectory(prefix="commbench-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def create_and_destroy(group: Group, times: int, folder: str) -> tuple[int, int, list[str]]:
    def state() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("commbench-")
        return len(list(Path("/proc/self/fd").iterdir())), maps

    handle = dist.new_group(list(group.ranks))
    fresh = Group("fresh", group.ranks, group.rank, group.device, handle, handle, True)

    def cycle(close: bool) -> None:
        backend = shm.ShmBackend(fresh)
        x = torch.ones(20000)
        backend.all_reduce(x, x, "sum")
        shm.empty((1000,), torch.float32, fresh)
        if close:
            backend.close()

    os.environ["COMMBENCH_SHM_DIR"] = folder
    try:
        cycle(True)
        before = state()
        for i in range(times):
            cycle(i % 2 == 0)  # some are only dropped
    finally:
        del os.environ["COMMBENCH_SHM_DIR"]
    dist.barrier(handle)  # the first rank unlinks, after the others have mapped
    fds, maps = state()
    return fds - before[0], maps - before[1], [p.name for p in Path(folder).iterdir()]


def test_creating_and_destroying_leaks_no_descriptor_mapping_or_file(two: Ranks, own_folder: Path) -> None:
    assert two.run(create_and_destroy, 30, str(own_folder)) == [(0, 0, [])] * 2


def use_and_wait(group: Group) -> None:
    backend = backend_of(group)
    shm.empty((1000,), torch.float32, group)
    backend.barrier()
    folder = os.environ.get("COMMBENCH_SHM_DIR")
    assert folder is None or not list(Path(folder).iterdir()), "the name must be gone while the group lives"
    assert folder is None or folder in Path("/proc/self/maps").read_text()


def test_killing_every_rank_leaves_nothing_behind(own_folder: Path) -> None:
    ranks = Ranks(2, {"COMMBENCH_SHM_DIR": str(own_folder)})
    try:
        ranks.run(use_and_wait)
    finally:
        for process in ranks.processes:
            os.kill(process.pid or 0, signal.SIGKILL)
        ranks.close()
    assert not list(own_folder.iterdir())


# ---- failures ----------------------------------------------------------------------------------------------------


def wait_for_the_others(group: Group) -> tuple[str, int, float, str]:
    """Kind, blamed rank, seconds and message of the failure of a second collective."""
    backend = backend_of(group)
    backend.barrier()
    if group.rank == group.world_size - 1:
        time.sleep(30)
    start = time.perf_counter()
    x = torch.ones(100000)
    try:
        backend.all_reduce(x, x, "sum")
    except CollectiveError as error:
        elapsed = time.perf_counter() - start
        with pytest.raises(CollectiveError, match="cannot be used any more"):
            backend.barrier()
        return type(error).__name__, getattr(error, "rank", -1), elapsed, str(error)
    return "none", -1, 0.0, ""


def test_a_killed_peer_raises_peer_lost_with_its_rank_within_a_second() -> None:
    ranks = Ranks(3)
    try:
        ranks.run(use_and_wait)
        ranks.start(wait_for_the_others)
        time.sleep(0.5)
        killed = time.perf_counter()
        os.kill(ranks.processes[2].pid or 0, signal.SIGKILL)
        answers = ranks.finish([0, 1], timeout_s=10)
        assert time.perf_counter() - killed < 1
    finally:
        ranks.close()
    assert [(kind, rank) for kind, rank, *_ in answers] == [("PeerLost", 2)] * 2


def closes_early(group: Group) -> tuple[str, str]:
    handle = dist.new_group(list(group.ranks))
    backend = shm.ShmBackend(Group("early", group.ranks, group.rank, group.device, handle, handle, True))
    if group.rank == 1:
        x = torch.ones(3)
        backend.broadcast(x, 1)  # what it published stays readable
        backend.close()
        with pytest.raises(CollectiveError, match="has been closed"):
            backend.barrier()
        return "", ""
    time.sleep(0.1)
    x = torch.zeros(3)
    backend.broadcast(x, 1)
    assert (x == 1).all()
    try:
        backend.barrier()
    except PeerLost as error:
        return str(error.rank), str(error)
    return "", ""


def test_a_peer_that_closed_the_group_is_named_but_its_last_message_arrives(two: Ranks) -> None:
    rank, message = two.run(closes_early)[0]
    assert rank == "1"
    assert "has closed the group" in message


def test_a_rank_that_never_comes_ends_in_a_timeout_that_names_it() -> None:
    ranks = Ranks(2, {"COMMBENCH_SHM_TIMEOUT": "400ms"})
    try:
        ranks.run(use_and_wait)
        ranks.start(wait_for_the_others)
        ((kind, _, elapsed, message),) = ranks.finish([0], timeout_s=10)
    finally:
        ranks.close()
    assert kind == "CollectiveError"
    assert "no answer from rank 1 within 0.4" in message
    assert 0.4 <= elapsed < 1


def interrupted(group: Group) -> tuple[str, float]:
    handle = dist.new_group(list(group.ranks))
    backend = shm.ShmBackend(Group("signals", group.ranks, group.rank, group.device, handle, handle, True))
    if group.rank == 1:
        time.sleep(1)
        return "", 0.0
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.perf_counter()
    try:
        backend.barrier()
    except KeyboardInterrupt:
        return "KeyboardInterrupt", time.perf_counter() - start
    return "none", 0.0


def test_a_signal_ends_a_wait(two: Ranks) -> None:
    kind, elapsed = two.run(interrupted)[0]
    assert kind == "KeyboardInterrupt"
    assert elapsed < 0.7


def harmless_signal(group: Group) -> int:
    backend = backend_of(group)
    seen: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    backend.barrier()
    if group.rank == 1:
        time.sleep(0.5)
    else:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    backend.barrier()
    signal.signal(signal.SIGUSR1, previous)
    return len(seen)


def test_a_signal_that_is_handled_does_not_end_the_wait(two: Ranks) -> None:
    assert two.run(harmless_signal) == [1, 0]


def mismatches(group: Group) -> list[str]:
    backend = shm.ShmBackend(group)
    me = group.rank
    messages = []
    x = torch.ones(100)
    for call in (
        lambda: backend.all_reduce(x[: 10 + me], x[: 10 + me], "sum"),
        lambda: backend.all_reduce(x, x, "sum" if me else "max"),
        lambda: backend.broadcast(x, me),
        lambda: backend.barrier() if me else backend.all_reduce(x, x, "sum"),
        lambda: backend.all_gatherv(x[:1], x[:2], [1, 1]) if me else backend.all_gatherv(x[:2], x[:2], [2, 0]),
    ):
        try:
            call()
            messages.append("")
        except CollectiveError as error:
            messages.append(str(error))
    y = torch.ones(10)
    backend.all_reduce(y, y, "sum")
    assert (y == group.world_size).all(), "the group must stay usable"
    backend.close()
    return messages


def test_debug_mode_names_what_ranks_disagree_about() -> None:
    ranks = Ranks(2, {"COMMBENCH_SHM_DEBUG": "1"})
    try:
        first, second = ranks.run(mismatches)
    finally:
        ranks.close()
    assert first == second
    for message, parts in zip(
        first,
        (
            ("10 elements", "11 elements"),
            ("all_reduce max", "all_reduce sum"),
            ("root 0", "root 1"),
            ("all_reduce", "barrier"),
            ("sizes",),
        ),
        strict=True,
    ):
        assert message.startswith("ranks disagree: rank 0 calls")
        assert all(part in message for part in parts), message


def bad_input(group: Group) -> None:
    backend, x = backend_of(group), torch.ones(4)
    for call, message in (
        (lambda: backend.all_reduce(x.to(torch.complex64), x.to(torch.complex64), "sum"), "shapes|dtype|complex64"),
        (lambda: backend.all_reduce(x, x, "xor"), "op xor"),
        (lambda: backend.all_reduce(x.int(), x.int(), "avg"), "integers have no average"),
        (lambda: backend.broadcast(x, 7), "src 7 is not a rank"),
        (lambda: backend.reduce(x, x, -1, "sum"), "dst -1 is not a rank"),
        (lambda: backend.send(x, group.rank), "cannot send to itself"),
        (lambda: backend.all_gather(x, x), "does not fit"),
        (lambda: backend.all_to_all(x[:3], torch.ones(3)), "does not split"),
        (lambda: backend.all_to_all(x, x), "in place"),
        (lambda: backend.scatter(None, x, group.rank), "needs an input"),
        (lambda: backend.gather(x, None, group.rank), "needs an output"),
    ):
        with pytest.raises(CollectiveError, match=message):
            call()
    backend.barrier()


def test_bad_input_is_named_and_leaves_the_group_usable(two: Ranks) -> None:
    two.run(bad_input)


def sizes_differ(group: Group) -> str:
    handle = dist.new_group(list(group.ranks))
    backend = shm.ShmBackend(Group("sizes", group.ranks, group.rank, group.device, handle, handle, True))
    if group.rank == 0:
        backend.send(torch.ones(8), 1)
        return ""
    with pytest.raises(CollectiveError) as failure:
        backend.recv(torch.ones(4), 0)
    return str(failure.value)


def test_a_received_message_of_another_size_is_told(two: Ranks) -> None:
    assert "sent 32 bytes, but 16 were to be received" in two.run(sizes_differ)[1]


# ---- availability and set-up -------------------------------------------------------------------------------------


def proofs(group: Group, hide: str) -> bool:
    if group.rank == 1 and hide == "file":
        original = Path.read_bytes
        Path.read_bytes = lambda self: (_ for _ in ()).throw(FileNotFoundError(str(self)))  # type: ignore[method-assign]
        try:
            return shm.prove_one_host(group.cpu_group)
        finally:
            Path.read_bytes = original  # type: ignore[method-assign]
    if group.rank == 1 and hide == "boot":
        original_id = shm._boot_id
        shm._boot_id = lambda: "another"  # type: ignore[assignment]
        try:
            return shm.prove_one_host(group.cpu_group)
        finally:
            shm._boot_id = original_id
    if group.rank == 0 and hide == "everything":
        os.environ["COMMBENCH_SHM_DIR"] = "/nonexistent"
        try:
            return shm.prove_one_host(group.cpu_group)
        finally:
            del os.environ["COMMBENCH_SHM_DIR"]
    return shm.prove_one_host(group.cpu_group)


@pytest.mark.parametrize(("hide", "expected"), [("", True), ("file", False), ("boot", False), ("everything", False)])
def test_one_host_is_proven_by_reading_and_all_ranks_agree(two: Ranks, hide: str, expected: bool) -> None:
    assert two.run(proofs, hide) == [expected] * 2


def no_room(group: Group, directory: str) -> str:
    os.environ["COMMBENCH_SHM_DIR"] = directory
    handle = dist.new_group(list(group.ranks))
    try:
        shm.ShmBackend(Group("none", group.ranks, group.rank, group.device, handle, handle, True))
    except BackendUnavailable as error:
        return str(error)
    finally:
        del os.environ["COMMBENCH_SHM_DIR"]
    return ""


def test_without_a_place_for_the_segment_every_rank_declines_with_the_bytes_needed(two: Ranks) -> None:
    messages = two.run(no_room, "/nonexistent/folder")
    assert messages[0] == messages[1]
    needed = native.load().segment_bytes(2, shm.chunk_bytes(2))
    assert f"{needed} bytes" in messages[0]
    assert "/nonexistent/folder: No such file or directory" in messages[0]
    assert "COMMBENCH_SHM_DIR" in messages[0]


def in_directory(group: Group, directory: str) -> None:
    os.environ["COMMBENCH_SHM_DIR"] = directory
    handle = dist.new_group(list(group.ranks))
    try:
        backend = shm.ShmBackend(Group("file", group.ranks, group.rank, group.device, handle, handle, True))
    finally:
        del os.environ["COMMBENCH_SHM_DIR"]
    x = torch.ones(50000)
    backend.all_reduce(x, x, "sum")
    assert (x == group.world_size).all()
    assert directory in Path("/proc/self/maps").read_text()
    assert not list(Path(directory).iterdir())
    backend.close()


def test_a_mapped_file_elsewhere_serves_as_well(two: Ranks, tmp_path: Path) -> None:
    two.run(in_directory, str(tmp_path))


def local_group(**changes: Any) -> Group:
    fields = {"name": "g", "ranks": (0, 1), "rank": 0, "device": torch.device("cpu"), "one_host": True}
    fields.update(changes)
    return Group(cpu_group=None, device_group=None, **fields)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"one_host": False}, "not proven to share memory"),
        ({"ranks": (0,)}, "2 to 64 ranks, not 1"),
        ({"ranks": tuple(range(65))}, "2 to 64 ranks, not 65"),
        ({"device": torch.device("meta")}, "CPU tensors"),
    ],
)
def test_a_group_that_cannot_share_memory_is_declined(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BackendUnavailable, match=reason):
        shm.ShmBackend(local_group(**changes))


def test_without_the_native_module_the_backends_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_module", None)
    monkeypatch.setattr(native, "_reason", "the native module was not built")
    for name in NAMES:
        answer = load_backend(name).availability("cpu")
        assert not answer.ok
        assert answer.reason == "the native module was not built"
        assert "compiler" in answer.remedy
    with pytest.raises(BackendUnavailable, match="not built"):
        native.load()


def test_availability_names_the_instruction_set() -> None:
    answer = shm.ShmBackend.availability("cpu")
    assert answer.ok
    assert native.load().isa() in answer.provider
    assert not shm.ShmBackend.availability("cuda").ok


def declined(group: Group, call: CallSignature) -> str | None:
    return backend_of(group).declines(call)


@pytest.mark.parametrize(
    ("collective", "op", "dtype", "reason"),
    [
        ("all_reduce", "sum", "float32", None),
        ("all_reduce", "avg", "bfloat16", None),
        ("all_reduce", "avg", "int32", "has no avg of int32"),
        ("all_reduce", "sum", "float8_e4m3fn", "cannot reduce float8_e4m3fn"),
        ("all_gather", "", "float8_e4m3fn", None),
        ("barrier", "", "none", None),
        ("scan", "sum", "float32", "has no scan"),
    ],
)
def test_what_cannot_be_done_is_declined_with_a_reason(
    two: Ranks, collective: str, op: str, dtype: str, reason: str | None
) -> None:
    call = CallSignature(collective, op, dtype, 64, 16)
    assert two.run(declined, call) == [reason] * 2


@pytest.mark.parametrize(
    ("affinities", "quota", "expected"),
    [
        ([{0}, {1}], float("inf"), False),
        ([{0}, {0}], float("inf"), True),
        ([{0, 1}, {0}], float("inf"), False),
        ([{0, 1}, {0}, {0, 1}], float("inf"), True),
        ([{0, 1, 2}, {0, 1}, {0}], float("inf"), False),
        ([{0, 1}, {0, 1}], 1.5, True),
    ],
)
def test_ranks_are_oversubscribed_when_not_each_can_have_a_core(
    affinities: list[set[int]], quota: float, expected: bool
) -> None:
    assert shm.oversubscribed([frozenset(a) for a in affinities], quota) is expected


def test_thresholds_fall_with_the_world_size() -> None:
    values = [shm.default_twoshot_threshold(n) for n in range(2, 65)]
    assert values == sorted(values, reverse=True)
    assert values[0] == shm.DEFAULT_TWOSHOT_THRESHOLD[2]


def test_chunks_split_evenly_into_lines_for_every_world_size() -> None:
    assert all(shm.chunk_bytes(n) % (64 * n) == 0 for n in range(2, 65))


# ---- the native call ---------------------------------------------------------------------------------------------


def check_bound(group: Group) -> None:
    backend, n, me = backend_of(group), group.world_size, group.rank
    whole = torch.arange(4000.0 * n) + me
    part = torch.arange(4000.0) + me
    for collective, x, out in (
        ("all_reduce", whole, torch.zeros(4000 * n)),
        ("reduce_scatter", whole, torch.zeros(4000)),
        ("all_gather", part, torch.zeros(4000 * n)),
        ("all_to_all", whole, torch.zeros(4000 * n)),
    ):
        expected = torch.zeros_like(out)
        arguments = ("sum",) if collective in ("all_reduce", "reduce_scatter") else ()
        getattr(backend, collective)(x, expected, *arguments)
        call = backend.native_call(collective, x, out)
        assert call is not None
        call()
        assert torch.equal(out, expected), collective
    for collective, x, out in (
        ("reduce", whole, torch.zeros(4000 * n)),
        ("gather", part, torch.zeros(4000 * n)),
        ("scatter", whole, torch.zeros(4000)),
    ):
        expected = torch.zeros_like(out)
        if collective == "reduce":
            backend.reduce(x, expected, 1, "sum")
        else:
            getattr(backend, collective)(x, expected, 1)
        call = backend.native_call(collective, x, out, root=1)
        assert call is not None
        call()
        assert (me != 1 and collective != "scatter") or torch.equal(out, expected), collective
    x = torch.full((100,), float(me))
    call = backend.native_call("broadcast", x, None, root=1)
    assert call is not None
    call()
    assert (x == 1).all()
    assert backend.native_call("all_reduce", whole[::2], whole[::2]) is None
    assert backend.native_call("send_recv", whole, whole) is None


def test_a_bound_call_does_what_the_method_does(two: Ranks) -> None:
    two.run(check_bound)


# ---- segments ----------------------------------------------------------------------------------------------------


def test_a_segment_has_a_random_name_and_is_for_its_owner_only() -> None:
    from commbench.native import segment as segments

    names = set()
    for _ in range(2):
        fd, path = segments.create_file(5000)
        try:
            status = os.fstat(fd)
            assert stat.S_IMODE(status.st_mode) == 0o600
            assert status.st_size == 5000
            assert status.st_blocks * 512 >= 5000, "its pages are reserved"
        finally:
            os.close(fd)
            segments.unlink(path)
        names.add(path.name)
    assert len(names) == 2
    assert all(len(name.removeprefix("commbench-")) == 32 for name in names)


def test_a_full_directory_is_an_error_with_the_bytes_and_the_next_one_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from commbench.native import segment as segments

    monkeypatch.setattr(segments, "SHM_DIR", tmp_path / "missing")
    monkeypatch.setattr(segments.tempfile, "gettempdir", lambda: str(tmp_path))
    fd, path = segments.create_file(4096)
    os.close(fd)
    assert path.parent == tmp_path
    segments.unlink(path)

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments.os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"4096 bytes \(4 KiB\).*missing.*No such file.*No space left on device"):
        segments.create_file(4096)
    assert not list(tmp_path.iterdir())


def test_a_file_of_another_size_is_not_mapped(tmp_path: Path) -> None:
    from commbench.native import segment as segments

    (tmp_path / "other").write_bytes(b"x" * 100)
    with pytest.raises(OSError, match="has 100 bytes, 4096 were expected"):
        segments.open_file(tmp_path / "other", 4096)


def check_fast_path(group: Group) -> bool:
    backend = backend_of(group)
    fast = backend._fast
    before = backend.calls
    x = torch.ones(6, dtype=torch.float64).reshape(2, 3)
    backend.all_reduce(x, x, "sum")
    backend.all_reduce(input=x, output=x, op="max")
    backend.all_reduce(x.t(), x.t(), "".join(["s", "um"]))  # strided, and a name that is not interned
    backend.all_reduce(torch.nn.Parameter(x, requires_grad=False), x, "max")
    assert (x == group.world_size**2).all()
    assert backend.calls == before + 4
    threshold = backend.twoshot_threshold
    backend.twoshot_threshold = 8
    assert fast is None or fast.threshold == 8
    backend.all_reduce(x, x, "sum")
    backend.twoshot_threshold = threshold
    assert (x == group.world_size**3).all()
    with pytest.raises(TypeError):
        backend.all_reduce(x)  # type: ignore[call-arg]
    with pytest.raises(CollectiveError, match="integers have no average"):
        backend.all_reduce(x.int(), x.int(), "avg")
    with pytest.raises(CollectiveError, match="does not fit"):
        backend.all_reduce(x, x[0], "sum")
    return fast is not None


def test_calls_that_are_not_plain_fall_back_to_the_method_and_count_alike(two: Ranks) -> None:
    two.run(check_fast_path)
