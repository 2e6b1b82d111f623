"""Sweeps on two and three hosts that are namespaces of this machine, each started by a command of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts.machines import Host, hosts, wait_for, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"needs hosts made of namespaces: {WHY_NOT}"),
]
LIMIT_S = 150


def command(host: Host, count: int, *options: str) -> list[str]:
    where = ["--nnodes", str(count), "--node-rank", str(host.number), "--rdzv-endpoint", f"10.87.0.1:{29400}"]
    return [sys.executable, "-m", "commbench", "sweep", *where, "--tp", str(count), "--dtypes", "float32", *options]


def start(made: list[Host], count: int, out: Path, *options: str) -> list[subprocess.Popen[str]]:
    """The command of each host; node 0's writes into ``out``."""
    return [
        host.start(command(host, count, *options, *(["--out", str(out)] if host.number == 0 else []))) for host in made
    ]


def ended(jobs: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, what it said on stderr) of each."""
    found = []
    for job in jobs:
        _, said = job.communicate(timeout=LIMIT_S)
        found.append((job.returncode, said))
    return found


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "points.jsonl").read_text().splitlines()]


def manifest(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text())  # type: ignore[no-any-return]


def ranks_of(host: Host) -> list[psutil.Process]:
    found = []
    for process in host.processes():
        words = process.cmdline()
        if "commbench.harness.ranks.rank" in words and "commbench.harness.launchers.agent" not in words:
            found.append(process)
    return found


def assert_nothing_is_left(made: list[Host]) -> None:
    for host in made:
        wait_for(
            lambda host=host: not [p for p in host.processes() if p.name() != "unshare"], 15, f"{host.name} is empty"
        )
        assert host.segments() == [], f"{host.name}'s shared memory"
    assert not list(Path("/tmp").glob("commbench-node-*"))


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


def test_a_pulled_cable_costs_the_point_and_the_sweep_goes_on_when_it_is_back(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with hosts(2) as made:
        options = ["--collectives", "all_reduce,broadcast", "--sizes", "8,1KiB,64KiB", "--max-time-per-point", "4s"]
        jobs = start(made, 2, out, *options, "--target-ci", "0.01%")
        wait_for(
            lambda: (out / "progress.jsonl").exists() and '"visit"' in (out / "progress.jsonl").read_text(), 90, "up"
        )
        made[1].cable("down")
        wait_for(lambda: not ranks_of(made[0]) and not ranks_of(made[1]), 30, "the ranks of both hosts are ended")
        made[1].cable("up")
        (code, said), (other_code, _) = ended(jobs)
        assert_nothing_is_left(made)
    assert code == 1, said
    assert other_code == 1, "the other host ends with node 0's outcome"
    found = rows(out)
    bad = [row for row in found if row["status"] != "ok"]
    assert len(found) == 6
    assert [row["status"] for row in bad] == ["failed"]
    assert "node 1 (hostb) was lost: no sign of life for" in bad[0]["reason"]
    assert "node 1 (hostb) is back" in said


def test_a_host_that_is_cut_off_for_good_ends_the_sweep_with_its_name(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with hosts(2) as made:
        jobs = start(made, 2, out, "--collectives", "all_reduce", "--sizes", "8:64KiB:x2", "--max-time-per-point", "3s")
        wait_for(
            lambda: (out / "progress.jsonl").exists() and '"visit"' in (out / "progress.jsonl").read_text(), 90, "up"
        )
        made[1].cable("down")
        (code, said), (other_code, other_said) = ended(jobs)
        assert_nothing_is_left(made)
    assert code == 1
    assert "node 1 (hostb) did not come back within 30 s; node 0 (hosta) is here" in said
    assert other_code == 1
    assert "node 1 (hostb) could not come back to node 0 at 10.87.0.1:29400" in other_said
    assert manifest(out)["outcome"] == "failed"


def test_a_killed_rank_of_another_host_is_named_and_costs_its_point_only(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with hosts(2) as made:
        options = ["--collectives", "all_reduce", "--sizes", "8,1KiB,64KiB", "--max-time-per-point", "3s"]
        jobs = start(made, 2, out, *options, "--target-ci", "0.01%")
        wait_for(
            lambda: (out / "progress.jsonl").exists() and '"visit"' in (out / "progress.jsonl").read_text(), 90, "up"
        )
        (victim,) = ranks_of(made[1])
        victim.send_signal(signal.SIGKILL)
        (code, said), _ = ended(jobs)
        assert_nothing_is_left(made)
    assert code == 1, said
    reasons = [row["reason"] for row in rows(out) if row["status"] == "failed"]
    assert reasons == ["node 1 (hostb): rank 1 was killed by SIGKILL"]
    assert len(rows(out)) == 3


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
        assert_nothing_is_left(made)
    assert [code for code, _ in found] == [0, 0, 0], found[0][1]
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
