"""A team over a process group: with real processes, with scripted clocks, and with 1,024 ranks that are made up."""

from __future__ import annotations

import os
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from commbench.errors import PeerLost
from commbench.measure.clock import now_ns
from commbench.measure.gate import HostsWindowGate, make_gate
from commbench.measure.offset import Correction, Link
from commbench.measure.team import PageTeam, PointFailed
from commbench.measure.team_hosts import BLOCK_BYTES, HostsTeam, TorchWire, form_team, is_oversubscribed
from tests.ranks import run_ranks, world

SECOND = 1_000_000_000


def ahead_by(rank: int, shift_ns: int) -> int:
    return now_ns() + rank * shift_ns


def team_of(rank: int, size: int, shift_ns: int = 0) -> HostsTeam:
    """Every rank on a host of its own, whose clock is ahead by ``shift_ns`` more than that of the rank before."""
    import torch.distributed as dist

    world()
    wire = TorchWire(dist.new_group(list(range(size)), backend="gloo"))
    names = [f"host{r}" for r in range(size)]
    return HostsTeam(rank, size, wire, names, names, False, clock=lambda: ahead_by(rank, shift_ns))


def exchange(rank: int, size: int) -> dict[str, Any]:
    team = team_of(rank, size)
    found: dict[str, Any] = {}
    found["from_first"] = team.from_first(*(range(20) if rank == 0 else [5] * 20))
    starts = np.arange(5, dtype=np.int64) + now_ns()
    shared = team.share(starts, starts + 1, np.full(5, rank, dtype=np.uint8))
    found["shapes"] = [a.shape for a in shared]
    found["late"] = shared[2].tolist()
    found["durations"] = (shared[1] - shared[0]).tolist()
    found["numbers"] = team.gather_numbers(rank + 0.5, -1.0).tolist()
    found["texts"] = team.gather_texts("✓" * rank)
    try:
        team.gather_texts("x" * 9000)
    except ValueError as error:
        found["too long"] = str(error)
    team.barrier()
    team.close()
    return found


def test_ranks_of_several_hosts_hand_over_numbers_texts_and_samples() -> None:
    ranks = run_ranks(exchange, 3)
    for found in ranks:
        assert found["from_first"] == tuple(range(20))
        assert found["numbers"] == [[r + 0.5, -1.0] for r in range(3)]
        assert found["texts"] == ["", "✓", "✓✓"]
        assert found["too long"].startswith("a text of 9000 bytes does not fit")
    assert ranks[0]["shapes"] == [(3, 5)] * 3
    assert ranks[0]["late"] == [[r] * 5 for r in range(3)]
    assert ranks[0]["durations"] == [[1] * 5] * 3
    assert ranks[1]["shapes"] == [(1, 5)] * 3, "only rank 0 needs everybody's samples"
    assert ranks[1]["late"] == [[1] * 5]


def fail_and_go_on(rank: int, size: int) -> list[str]:
    team = team_of(rank, size)
    said = []
    for attempt in range(4):
        failing = (1,) if attempt < 2 else (0, 2) if attempt == 2 else ()
        try:
            if rank in failing:
                team.fail(f"attempt {attempt} went wrong")
                team.raise_if_failed()
            else:
                team.barrier()
        except PointFailed as error:
            said.append(str(error))
        team.recover(timeout_s=10)
        assert team.from_first(attempt if rank == 0 else -1) == (attempt,)
    return said


def test_a_rank_that_fails_is_heard_on_other_hosts_and_all_go_on_together() -> None:
    first, second, third = run_ranks(fail_and_go_on, 3)
    assert first == ["rank 1: attempt 0 went wrong", "rank 1: attempt 1 went wrong", "rank 0: attempt 2 went wrong"]
    assert second[:2] == first[:2]
    assert second[2:] == ["rank 2: attempt 2 went wrong"], "of two that fail at once, the last one is named to the rest"
    assert third == [*first[:2], "rank 2: attempt 2 went wrong"]


def stay_away(rank: int, size: int) -> tuple[str, float]:
    team = team_of(rank, size)
    started = time.monotonic()
    if rank == 1:
        time.sleep(2.5)
        return "", 0.0
    try:
        team.recover(timeout_s=1.0)
    except PeerLost as error:
        return str(error), time.monotonic() - started
    return "met", 0.0


def test_a_rank_that_never_comes_back_is_given_up_within_the_timeout() -> None:
    said, waited = run_ranks(stay_away, 2)[0]
    assert said.startswith("the ranks of the other hosts did not come or are gone: ")
    assert waited < 2.0


# ---- clocks -------------------------------------------------------------------------------------------------


def times_of_one_moment(rank: int, size: int) -> Any:
    """Rank 0 publishes a moment of its clock; every rank takes a sample at that moment as its own clock shows it."""
    shift = 3600 * SECOND
    team = team_of(rank, size, shift)
    clocks = team.compare_clocks()
    gate = make_gate("window", team)
    assert isinstance(gate, HostsWindowGate)
    gate._clock = team._clock
    gate.delta_ns = 2_000_000
    late, starts = [], np.zeros(20, dtype=np.int64)
    for i in range(20):
        late.append(gate())
        starts[i] = ahead_by(rank, shift)
    shared = team.share(starts, starts + 1000, np.array(late, dtype=np.uint8))
    return clocks.to_dict(), clocks.verdict(), [a.tolist() for a in shared], team.clock_error_s


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="windows need a core for each rank")
def test_samples_of_hosts_whose_clocks_are_an_hour_apart_line_up_within_the_stated_error() -> None:
    (record, verdict, (starts, _, late), error_s), (_, other, _, _) = run_ranks(times_of_one_moment, 2)
    assert verdict == other
    assert "2 clocks" in verdict
    assert record["ok"]
    host = record["across_hosts"][1]
    assert host["host"] == "host1"
    assert host["ranks"] == [1]
    assert abs(host["offset_ns"] - 3600 * SECOND) <= host["error_s"] * 1e9 + 1
    assert len(host["line"]["residuals_s"]) == 3
    on_time = [abs(a - b) for a, b, x, y in zip(*starts, *late, strict=True) if not x and not y]
    assert len(on_time) >= 5
    assert np.median(on_time) * 1e-9 < error_s + 100e-6


def same_clock(rank: int, size: int) -> Any:
    import torch.distributed as dist

    from commbench.harness.ranks.worker import Objects

    group = world()
    objects = Objects(group.cpu_group)
    page = form_team(
        rank, size, objects, one_host=True, oversubscribed=False, new_group=lambda: pytest.fail("not needed")
    )
    kind = type(page) is PageTeam
    page.close()
    team = form_team(
        rank, size, objects, one_host=False, oversubscribed=False,
        new_group=lambda: dist.new_group(list(range(size)), backend="gloo"),
    )  # fmt: skip
    assert isinstance(team, HostsTeam)
    return kind, team.compare_clocks().verdict(), team.clock_error_s


def test_containers_of_one_machine_share_no_page_but_one_clock() -> None:
    for kind, verdict, error_s in run_ranks(same_clock, 2):
        assert kind
        assert verdict == "2 ranks read one clock"
        assert error_s == 0.0


# ---- many ranks ---------------------------------------------------------------------------------------------


class ManyRanks:
    """A wire whose other ranks are made up: rank r's samples start r ns later than rank 0's and last 1000 + r ns."""

    def __init__(self, size: int) -> None:
        self.size = size

    def all_max(self, words: NDArray[np.int64], timeout_s: float | None = None) -> NDArray[np.int64]:
        return words.copy()

    def gather(self, row: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        n = len(row) // 17
        whole = np.empty((self.size, len(row)), dtype=np.uint8)
        whole[:] = row
        ranks = np.arange(self.size)[:, None]
        whole[:, : 8 * n].view(np.int64)[:] += ranks
        whole[:, 8 * n : 16 * n].view(np.int64)[:] += 2 * ranks
        return whole

    def all_gather(self, row: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return np.broadcast_to(row, (self.size, len(row))).copy()

    def broadcast(self, data: NDArray[np.uint8], source: int) -> NDArray[np.uint8]:
        return data.copy()

    def link(self, peer: int) -> Link:
        raise AssertionError("all ranks read one clock")


def test_samples_of_1024_ranks_are_reduced_in_bounded_memory(tmp_path: Any) -> None:
    """60,000 samples of each of 1,024 ranks are 1 GB; rank 0 holds one block of them at a time."""
    from commbench.measure.aggregate import aggregate
    from commbench.store.samples import SampleLog, _blocks

    size, total = 1024, 60_000
    team = HostsTeam(0, size, ManyRanks(size), ["h"] * size, ["c"] * size, False)
    (tmp_path / "samples").mkdir()
    log = SampleLog(tmp_path, 0)
    latencies = []
    tracemalloc.start()
    for first in range(0, total, team.capacity):
        n = min(team.capacity, total - first)
        n -= n % 8  # whole rows, as the wire above needs them
        starts = np.arange(first, first + n, dtype=np.int64) * 10_000
        shared = team.share(starts, starts + 1000, np.zeros(n, dtype=np.uint8))
        latencies.append(aggregate(*shared, synchronising=True, sync="window", batch=1, overhead_s=0.0).latency)
        if first == 0:  # the rest would fill a disk with the same
            log.append("p", first, shared[0], shared[1], shared[2] == 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    log.close()
    # start of rank 1023 to end of rank 1023: it is the last to start and the last to end
    assert np.concatenate(latencies) == pytest.approx((1000 + size - 1) * 1e-9)
    assert len(np.concatenate(latencies)) > 0.99 * total
    assert peak < 5 * BLOCK_BYTES, f"{peak / 1e6:.0f} MB"
    assert [header["ranks"] for header, _ in _blocks(tmp_path / "samples" / "launch-0.bin")] == [size]


def test_a_correction_carries_an_offset_on_along_the_slope_and_back() -> None:
    c = Correction(at_ns=10 * SECOND, offset_ns=-3 * SECOND, slope=1e-5, error_s=1e-6, slope_error=1e-7)
    local = 25 * SECOND
    remote = c.to_remote(local)
    assert remote == local - 3 * SECOND + 150_000
    assert int(c.to_local(np.array([remote]))[0]) == pytest.approx(local, abs=2)
    assert c.error_at(local) == pytest.approx(1e-6 + 15e-7)
    assert Correction().to_remote(7) == 7


def test_ranks_are_held_against_the_cores_of_their_own_machine() -> None:
    assert not is_oversubscribed([("a", [0, 1]), ("a", [0, 1]), ("b", [0])])
    assert is_oversubscribed([("a", [0, 1]), ("b", [0]), ("b", [0])])
    assert not is_oversubscribed([("a", [0]), ("a", [1])]), "pinned to a core each"
