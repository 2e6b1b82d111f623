"""Sweeps on two hosts that go wrong. docs/hosts.md has the table; its rows are these tests.

No point of these sweeps reaches the interval that is asked for, so that each takes its whole time, on any machine: what
is to happen in the middle of one does.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commbench.store.run import open_run
from tests.hosts.commands import (
    assert_nothing_is_left,
    command,
    command_on,
    ended,
    manifest,
    ranks_of,
    said_until,
    start,
)
from tests.hosts.commands import wait_until_they_measure as measures
from tests.hosts.machines import Host, hosts, wait_for, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"needs hosts made of namespaces: {WHY_NOT}"),
]
POINTS = ["--collectives", "all_reduce", "--sizes", "8,1KiB,8KiB,64KiB", "--backends", "auto"]
LONG = ["--max-time-per-point", "3s", "--target-ci", "0.001%"]


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def no_ranks(made: list[Host]) -> None:
    wait_for(lambda: not ranks_of(made[0]) and not ranks_of(made[1]), 30, "the ranks of both hosts are ended")


# ---- one sweep, a fault in each of its jobs -------------------------------------------------------------------------


@dataclass
class Survived:
    """rows: of the points, in the order in which they ended. said: by each command, on stderr."""

    codes: tuple[int, int]
    said: tuple[str, str]
    rows: list[dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Survived:
    """Four points: the rank of the other host is killed in the first, and stopped in the second; the cable is pulled in
    the third, and put back."""
    out = tmp_path_factory.mktemp("hosts") / "run"
    with hosts(2) as made:
        jobs = start(made, 2, out, *POINTS, *LONG, "--point-timeout", "8s")
        for job, sign in ((1, signal.SIGKILL), (2, signal.SIGSTOP)):
            measures(jobs, out, job)
            (victim,) = ranks_of(made[1])
            victim.send_signal(sign)
        measures(jobs, out, 3)
        made[1].cable("down")
        no_ranks(made)
        made[1].cable("up")
        (code, said), (other_code, other_said) = ended(jobs)
        assert_nothing_is_left(made)
    return Survived((code, other_code), (said, other_said), open_run(out).rows(), out)


def test_what_goes_wrong_costs_its_point_and_the_other_host_ends_with_node_0s_code(survived: Survived) -> None:
    assert survived.codes == (1, 1), survived.said[0]
    statuses = [row["status"] for row in survived.rows]
    assert statuses[:3] == ["failed", "timeout", "failed"]
    assert statuses[3:] in (["ok"], ["unsteady"])  # the latter: something else was busy


def test_a_killed_rank_of_another_host_is_named_with_its_host(survived: Survived) -> None:
    assert survived.rows[0]["reason"] == "node 1 (hostb): rank 1 was killed by SIGKILL"


def test_a_rank_that_hangs_on_another_host_is_named_with_its_host_and_all_stacks_are_kept(survived: Survived) -> None:
    reason = survived.rows[1]["reason"]
    assert reason.startswith("no result within 8 s; rank 1 on node 1 (hostb) stopped first, in ")
    assert reason.endswith(": it is stopped (SIGSTOP); stacks: logs/launch-0.stacks-0.txt")
    stacks = (survived.folder / "logs" / "launch-0.stacks-0.txt").read_text()
    for head in ("==== rank 0, pid ", "==== rank 1, pid "):
        assert "most recent call first" in stacks.partition(head)[2].partition("====")[0]
    assert "of node 1 (hostb), process state T" in stacks


def test_a_pulled_cable_is_noticed_and_the_sweep_goes_on_when_it_is_back(survived: Survived) -> None:
    assert "node 1 (hostb) was lost: no sign of life for" in survived.rows[2]["reason"]
    assert "node 1 (hostb) is back" in survived.said[0]


# ---- hosts that do not come back ------------------------------------------------------------------------------------


def test_a_host_that_is_cut_off_for_good_ends_the_sweep_with_its_name(tmp_path: Path, two: list[Host]) -> None:
    out = tmp_path / "run"
    # and no longer for a host that was lost to come back
    jobs = start(two, 2, out, *POINTS, *LONG, "--join-timeout", "15s")
    measures(jobs, out)
    two[1].cable("down")
    (code, said), (other_code, other_said) = ended(jobs)
    assert_nothing_is_left(two)
    assert code == 1
    assert "node 1 (hostb) did not come back within 15 s; node 0 (hosta) is here" in said
    assert other_code == 1
    assert "node 1 (hostb) could not come back to node 0 at 10.87.0.1:29400 within 15 s" in other_said
    assert manifest(out)["outcome"] == "failed"


def test_a_hosts_command_that_is_killed_costs_its_point_and_the_run_goes_on_until_node_0_is_stopped(
    tmp_path: Path, two: list[Host]
) -> None:
    out = tmp_path / "run"
    jobs = start(two, 2, out, *POINTS, *LONG)
    measures(jobs, out)
    command_on(two[1]).kill()
    wait_for(lambda: open_run(out).rows(), 30, "the point has failed")
    no_ranks(two)
    command_on(two[0]).send_signal(signal.SIGTERM)  # it waits for the other to come back, as for one that is cut off
    (code, said), (other_code, _) = ended(jobs)
    assert (code, other_code) == (130, -signal.SIGKILL), said
    (row,) = open_run(out).rows()
    assert row["status"] == "failed"
    assert row["reason"].startswith("node 1 (hostb) was lost: its command has ended")
    (left,) = two[1].temporary.iterdir()
    assert left.name.startswith("commbench-node-")

    # the same commands again, with another timeout: that is no part of what is measured
    where = ["--node-rank", "0", "--rdzv-endpoint", "10.87.0.1:29400", "--point-timeout", "100s"]
    # forced, since a checkout in which somebody works may have another commit by now
    first = two[0].start([*command(two[0], 2)[:4], "--resume", str(out), "--force", *where])
    second = two[1].start(command(two[1], 2, *POINTS, *LONG, "--point-timeout", "90s"))
    measures([first, second], out, 2)
    assert not left.exists(), "the next command on that host takes it away"
    command_on(two[0]).send_signal(signal.SIGTERM)
    (code, said), (other_code, other_said) = ended([first, second])
    assert_nothing_is_left(two)
    assert (code, other_code) == (130, 130), said
    assert "error: interrupted; 1 finished points are kept" in said
    assert "node 0 has ended" in other_said
    assert manifest(out)["outcome"] == "interrupted"


def test_no_rank_of_another_host_outlives_node_0s_command_that_is_killed(tmp_path: Path, two: list[Host]) -> None:
    out = tmp_path / "run"
    jobs = start(two, 2, out, *POINTS, *LONG)
    measures(jobs, out)
    command_on(two[0]).kill()
    said = said_until(jobs[1], "trying to come back for 30 s")  # as when it is cut off
    assert "launch 0: node 0 was lost: its command has ended" in said
    no_ranks(two)
    command_on(two[1]).send_signal(signal.SIGTERM)
    _, (other_code, _) = ended(jobs)
    assert_nothing_is_left(two)
    assert other_code == 130
    assert manifest(out)["outcome"] == "running"
