"""A whole ``Meter`` with a device whose clock is scripted: real ranks, real reductions, known answers."""

from __future__ import annotations

from typing import Any

import pytest

from commbench.types import Point
from tests.measure.cpu_device import EVENT_NS
from tests.measure.cpu_device_ranks import Script, launch
from tests.ranks import run_ranks


def point(mode: str = "eager", size: int = 4096, ranks: int = 2, **changes: Any) -> Point:
    backend = "scripted_device" if ranks > 1 else "auto"
    values = {"backend": backend, "mode": mode, "placement": "out"} | changes
    return Point("all_reduce", "sum", "float32", size, ranks, **values)


def run(script: Script, ranks: int = 2) -> list[dict[str, Any]]:
    return run_ranks(launch, ranks, script)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    """Rank 1 is slower: 30 µs a call against 20, and 15 µs against 12 in graphs."""
    points = [point(), point("graph"), point(placement="in"), point("graph", placement="in"), point(cache="cold")]
    barrier = Point("barrier", "", "none", 0, 2, backend="scripted_device")
    return run(Script([*points, barrier], eager_us=(20.0, 30.0), graph_us=(12.0, 15.0)))


def test_an_eager_latency_is_the_slowest_ranks_device_time(two_ranks: list[dict[str, Any]]) -> None:
    for order in (0, 2, 4):
        row = two_ranks[0]["rows"][order]
        assert row["status"] == "ok", row["reason"]
        assert row["latency_median_s"] == pytest.approx(30e-6, rel=1e-9)
        assert row["latency_min_s"] == row["latency_max_s"] == row["latency_median_s"]
        assert (row["timing"], row["sync"], row["loop"], row["iters_per_sample"]) == ("single", "barrier", "python", 1)
        assert row["t_win_median_s"] is row["skew_median_s"] is None  # clocks of devices cannot be compared
        assert row["target_reached"]


def test_a_latency_in_graphs_is_the_slope_without_what_launching_costs(two_ranks: list[dict[str, Any]]) -> None:
    for order in (1, 3):
        row = two_ranks[0]["rows"][order]
        assert row["status"] == "ok", row["reason"]
        assert row["latency_median_s"] == pytest.approx(15e-6, rel=1e-9)
        assert (row["timing"], row["iters_per_sample"]) == ("isolated", 24)
        assert row["n_invalid"] == 0


def test_the_hosts_time_to_queue_a_call_stands_apart(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["rows"][0]["enqueue_median_s"] == pytest.approx(2e-6)
    assert two_ranks[0]["rows"][1]["enqueue_median_s"] == pytest.approx(2e-6)  # the launch of a graph


def test_results_are_looked_at_as_on_the_host(two_ranks: list[dict[str, Any]]) -> None:
    for order in range(5):
        row = two_ranks[0]["rows"][order]
        assert (row["checked"], row["wrong_count"], row["extremes_wrong"]) == (True, 0, 0)
        assert row["ranks_agree"]
        assert row["repeatable"]
        assert row["max_ulp_error"] == 0.5


def test_the_backend_is_read_from_its_counter_also_in_graphs(two_ranks: list[dict[str, Any]]) -> None:
    for order in range(5):
        assert two_ranks[0]["rows"][order]["backend_picked"] == "scripted_device"
        assert two_ranks[0]["rows"][order]["provider"] == "scripted"


def test_every_capture_is_left_again_and_decisions_are_back_to_eager(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        entered, left = rank["captures"]
        assert entered == left > 0
        assert rank["mode"] == "eager"


def test_inputs_that_a_backend_opens_in_graphs_outlive_their_points(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["opened"] == [1024, 1024]  # those of the two points in graphs


def test_a_barrier_is_timed_on_the_host_for_it_waits_there(two_ranks: list[dict[str, Any]]) -> None:
    row = two_ranks[0]["rows"][5]
    assert row["status"] in ("ok", "unsteady"), row["reason"]
    assert row["enqueue_median_s"] is None


def test_raw_samples_are_each_ranks_own_times(two_ranks: list[dict[str, Any]]) -> None:
    eager = [(s, e) for _, s, e, _ in two_ranks[0]["kept"] if s[0][0] == 0 and e[0][0] == 20_000]
    assert eager
    for starts, ends in eager:
        assert set(starts[0] + starts[1]) == {0}
        assert set(ends[1]) == {30_000}
    graphs = [(s, e) for _, s, e, _ in two_ranks[0]["kept"] if s[0][0] > 0 and e[1][0] - s[1][0] == 24 * 15_000]
    assert graphs
    for starts, ends in graphs:
        assert {e - s for s, e in zip(starts[0], ends[0], strict=True)} == {24 * 12_000}


def test_streams_meet_before_every_timed_call_while_they_are_held(two_ranks: list[dict[str, Any]]) -> None:
    log = two_ranks[0]["log"]
    assert "abandon" not in log
    first = log.index("hold", log.index("call"))  # behind the calibration of events
    block = log[first : log.index("release", first)]
    assert block[1:5] == ["barrier", "record", "call", "record"]
    assert len(block[1:]) % 4 == 0


def test_chained_calls_are_labelled_so() -> None:
    rows = run(Script([point("graph")], settings={"graph_timing": "chained"}))[0]["rows"]
    assert rows[0]["timing"] == "chained"
    assert rows[0]["latency_median_s"] == pytest.approx(12e-6, rel=1e-9)


def test_one_process_is_enough() -> None:
    points = [point(ranks=1), point("graph", ranks=1), point(ranks=1, size=1 << 20)]
    rows = run(Script(points, eager_us=(20.0,)), ranks=1)[0]["rows"]
    assert [rows[i]["status"] for i in range(3)] == ["ok"] * 3, rows
    assert rows[0]["latency_median_s"] == pytest.approx(20e-6, rel=1e-9)
    assert rows[1]["latency_median_s"] == pytest.approx(12e-6, rel=1e-9)


def test_a_call_that_events_cannot_resolve_is_batched_and_a_shorter_one_is_refused() -> None:
    rows = run(Script([point(ranks=1)], eager_us=(4.0,)), ranks=1)[0]["rows"]
    # 0.5 µs is 5 % of 10 µs: three calls of 4 µs
    assert (rows[0]["timing"], rows[0]["iters_per_sample"]) == ("batched", 3)
    assert rows[0]["latency_median_s"] == pytest.approx(4e-6, rel=1e-9)
    rows = run(Script([point(ranks=1)], eager_us=(0.1,)), ranks=1)[0]["rows"]
    assert rows[0]["status"] == "refused"
    assert "events leave 500 ns uncertain" in rows[0]["reason"]


def test_a_graph_that_kept_the_data_of_its_capture_is_wrong() -> None:
    rows = run(Script([point("graph", ranks=1), point(ranks=1)], frozen=True), ranks=1)[0]["rows"]
    assert rows[0]["status"] == "wrong"
    assert rows[1]["status"] == "ok"


def test_a_slope_that_means_nothing_is_void_counted_and_no_result() -> None:
    rows = run(Script([point("graph", ranks=1)], graph_us=(0.0,)), ranks=1)[0]["rows"]
    assert rows[0]["status"] == "unsteady"
    assert rows[0]["n_invalid"] > 0
    assert rows[0].get("latency_median_s") is None
    assert "samples are void: the slope is not positive" in rows[0]["reason"]


@pytest.mark.parametrize("fail_at", [1, 3, 12, 30])
def test_a_call_that_fails_costs_its_point_and_leaves_the_device_usable(fail_at: int) -> None:
    ranks = run(Script([point("graph"), point("graph", size=8192), point(size=8192)], fail_at=fail_at))
    statuses = [ranks[0]["rows"][i]["status"] for i in range(3)]
    assert sorted(statuses) == ["failed", "ok", "ok"]
    for rank in ranks:
        assert rank["rejoined"] == 1
        assert rank["captures"][0] == rank["captures"][1]
        assert rank["mode"] == "eager"
    failed = ranks[0]["rows"][statuses.index("failed")]
    assert "scripted failure" in failed["reason"]


def test_ranks_that_share_a_device_are_marked() -> None:
    rows = run(Script([point()], identities=("gpu0", "gpu0")))[0]["rows"]
    assert rows[0]["shared_device"] is True
    rows = run(Script([point()], identities=("gpu0", "gpu1")))[0]["rows"]
    assert rows[0]["shared_device"] is False


def test_a_graph_that_cannot_be_is_skipped_with_the_reason() -> None:
    points = [point("graph", ranks=1), point(ranks=1)]
    for device, words in (
        ({"graphs": False}, "has no graphs to capture"),
        ({"isolated": False}, "--graph-timing chained"),
    ):
        rows = run(Script(points, device=device), ranks=1)[0]["rows"]
        assert rows[0]["status"] == "skipped"
        assert words in rows[0]["reason"]
        assert rows[1]["status"] == "ok"


def test_what_events_cost_is_taken_off(two_ranks: list[dict[str, Any]]) -> None:
    raw = [e[0][0] for _, s, e, _ in two_ranks[0]["kept"] if s[0][0] == 0]
    assert EVENT_NS > 0
    assert set(raw) >= {20_000}  # and not EVENT_NS more
