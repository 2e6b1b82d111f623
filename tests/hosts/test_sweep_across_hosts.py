"""Sweeps on two and three hosts that are namespaces of this machine, each started by a command of its own."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.hosts.commands import LIMIT_S, assert_nothing_is_left, ended, manifest, rows, start
from tests.hosts.machines import hosts, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"needs hosts made of namespaces: {WHY_NOT}"),
]


def test_two_hosts_with_clocks_an_hour_apart_measure_one_sweep(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with hosts(2, clocks=[0, 3600]) as made:
        options = ["--collectives", "all_reduce", "--sizes", "1KiB", "--backends", "auto,shm", "--bind", "none"]
        (code, said), (other_code, other_said) = ended(start(made, 2, out, *options))
        assert_nothing_is_left(made)
    assert code == 0, said
    assert other_code == 0, other_said
    assert "node 1 (hostb) joined, from 10.87.0.2" in said
    assert "preflight: 2 nodes have the same versions and devices and reach each other" in said
    assert "node 0 writes the results" in other_said

    auto, shm = sorted(rows(out), key=lambda row: str(row["backend_requested"]))
    assert (auto["status"], auto["backend_picked"]) == ("ok", "torch_dist")
    declined = json.loads(auto["decision"])["declined"]
    assert {"backend": "shm", "reason": "the ranks are on different hosts"} in declined
    assert shm["status"] == "skipped"
    assert "its ranks are not proven to share memory (one host, one /dev/shm)" in shm["reason"]
    record = manifest(out)
    (launch,) = record["launches"]
    assert launch["nodes"] == {"count": 2, "ranks_per_node": 1}
    assert launch["bind"] == "none"
    assert len(launch["affinity"]) == 2
    assert [n["host"] for n in record["nodes"]] == ["hosta", "hostb"]
    (link,) = record["preflight"]["links"]
    assert link["latency_s"] > 0
    first, second = launch["clocks"]["across_hosts"]
    assert (first["host"], second["host"]) == ("hosta", "hostb")
    # both read this machine's clock, so the namespace's offset is the truth
    assert abs(second["offset_ns"] - 3600e9) <= second["error_s"] * 1e9
    assert second["line"]["residuals_s"]
    last = launch["clocks_end"]["across_hosts"][1]
    assert launch["clocks_end"]["ok"]
    assert last["at_ns"] > second["at_ns"], "compared again while the launch went on"
    assert abs(last["offset_ns"] - 3600e9) <= last["error_s"] * 1e9
    samples = out / "samples" / "launch-0.parquet"
    import pyarrow.parquet as pq

    table = pq.read_table(samples).to_pandas()
    assert set(table["rank"]) == {0, 1}, "samples of every host reach the store"
    starts = table.groupby("rank")["start_ns"].min()
    assert abs(starts[0] - starts[1]) < 1e9, "on rank 0's clock, an hour apart or not"


def test_doctor_compares_two_hosts_and_times_their_link_without_ranks() -> None:
    with hosts(2) as made:
        jobs = []
        for host in made:
            where = ["--nnodes", "2", "--node-rank", str(host.number), "--rdzv-endpoint", "10.87.0.1"]
            jobs.append(host.start([sys.executable, "-m", "commbench", "doctor", "--preflight", *where]))
        told = [job.communicate(timeout=LIMIT_S) for job in jobs]
        assert_nothing_is_left(made)
    assert [job.returncode for job in jobs] == [0, 0], told
    assert "2 nodes have the same versions and devices and reach each other" in " ".join(told[0][0].split())
    assert "node 0 has ended: 2 nodes have the same versions" in told[1][1]


def test_a_node_that_never_comes_is_named_within_the_timeout(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with hosts(2) as made:
        jobs = start(made, 3, out, "--tp", "3", "--join-timeout", "8s")
        (code, said), (other_code, other_said) = ended(jobs)
        assert_nothing_is_left(made)
    assert code == 1
    assert "node 2 did not come within 8 s; node 0 (hosta), node 1 (hostb) are here" in said
    assert other_code == 1
    assert "node 2 did not come" in other_said, "who waited hears why it ends"
    assert not out.exists(), "nothing was measured"


def test_three_hosts_measure_and_a_slow_one_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with hosts(3, clocks=[0, 1000, 7]) as made:
        # a kernel without netem cannot delay packets: then three equal hosts are measured
        slow = shutil.which("tc") is not None and not (
            made[2].run(["tc", "qdisc", "add", "dev", "eth0", "root", "netem", "delay", "3ms"], timeout=20).returncode
        )
        options = ["--collectives", "all_reduce", "--sizes", "1KiB", "--max-time-per-point", "1s"]
        found = ended(start(made, 3, out, *options))
        assert [code for code, _ in found] == [0, 0, 0], found[0][1]
        assert_nothing_is_left(made)
    (row,) = rows(out)
    assert row["status"] in ("ok", "unsteady")
    assert row["world_size"] == 3
    clocks = manifest(out)["launches"][0]["clocks"]["across_hosts"]
    assert [c["host"] for c in clocks] == ["hosta", "hostb", "hostc"]
    for clock, ahead_s in zip(clocks, (0, 1000, 7), strict=True):
        assert abs(clock["offset_ns"] - ahead_s * 1e9) <= clock["error_s"] * 1e9
    if slow:
        assert "preflight: node 2 (hostc) is slow: " in found[0][1]
        assert row["latency_median_s"] > 1.5e-3, "the delay of the third host is in it"
    if len(os.sched_getaffinity(0)) < 3:
        assert row["oversubscribed"]
