"""The command and the environment of a launch: on one host, on several, and where its sockets are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commbench.errors import LaunchError, SpecError
from commbench.harness.hosts.sockets import interface_of, listen_on, parse_endpoint
from commbench.harness.launch import Launch
from commbench.harness.launchers import commands as launchers
from commbench.harness.launchers.commands import Nodes, Program, environment_of, launch_command, launcher_facts


def test_on_one_host_torchrun_meets_on_loopback_under_our_agent() -> None:
    command = launch_command(Path("run"), 3, 4, Program("python3"))
    assert command[:3] == ["python3", "-m", "commbench.harness.launchers.agent"]
    assert "--nnodes=1" in command
    assert "--nproc-per-node=4" in command
    assert "--rdzv-endpoint=localhost:0" in command
    assert command[-4:] == ["--module", "commbench.harness.ranks.rank", "run", "3"]


def test_another_commbench_is_started_by_torchs_own_agent() -> None:
    assert "torch.distributed.run" in launch_command(Path("run"), 0, 2, Program("python3", own_commbench=True))


def test_a_launcher_that_cannot_be_started_is_named_and_not_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    launch = Launch(tmp_path, 3, 2, {}, Program(python="/nonexistent/python"))
    with pytest.raises(LaunchError, match="launch 3 could not start: /nonexistent/python: No such file or directory"):
        launch.run(lambda event: None)


def test_each_host_starts_its_part_and_the_node_rank_decides_which() -> None:
    nodes = Nodes(count=2, rank=1, address="10.0.0.1", port=4321, own_address="10.0.0.2")
    command = launch_command(Path("run"), 0, 8, Program("python3", nodes=nodes))
    for option in ("--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "--rdzv-backend=static"):
        assert option in command
    assert "--rdzv-endpoint=10.0.0.1:4321" in command
    assert "--local-addr=10.0.0.2" in command


def test_the_record_says_how_ranks_were_bound_and_on_how_many_hosts() -> None:
    assert launcher_facts(4, Program()) == {"launcher": "torchrun", "bind": "as the launcher does"}
    facts = launcher_facts(4, Program(bind="core", nodes=Nodes(count=2)))
    assert facts["bind"] == "core"
    assert facts["nodes"] == {"count": 2, "ranks_per_node": 2}


def test_ranks_of_one_host_open_their_sockets_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    environment = environment_of(Program())
    assert environment["GLOO_SOCKET_IFNAME"] == loopback
    assert environment["NCCL_SOCKET_IFNAME"] == loopback


def test_the_users_own_choice_of_interface_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert environment_of(Program())["GLOO_SOCKET_IFNAME"] == "ib0"


def test_between_hosts_gloo_uses_the_interface_that_the_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launchers, "interface_of", {"10.0.0.2": "eth1"}.get)
    environment = environment_of(Program(nodes=Nodes(count=2, rank=1, own_address="10.0.0.2")))
    assert environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "NCCL_SOCKET_IFNAME" not in environment, "NCCL finds its own network between hosts"
    assert interface_of("203.0.113.7") is None


def test_what_binds_the_ranks_is_told_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMBENCH_BIND", raising=False)
    assert environment_of(Program(bind="numa"))["COMMBENCH_BIND"] == "numa"
    assert "COMMBENCH_BIND" not in environment_of(Program())


def test_the_agents_stores_listen_on_the_address_they_are_named_by_only() -> None:
    """torch's own listens on every interface; asked in a process of its own, for it replaces torch's class."""
    program = """
import os, psutil, torch.distributed as dist
from commbench.harness.launchers.agent import bind_stores
bind_stores()
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as backend
assert backend.TCPStore is dist.TCPStore
stores = [
    dist.TCPStore("localhost", 0, is_master=True, multi_tenant=True, wait_for_workers=False),
    dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False),
]
client = dist.TCPStore("127.0.0.1", stores[0].port, is_master=False, wait_for_workers=False)
stores[0].set("a", "b")
assert client.get("a") == b"b"
mine = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
print(sorted(c.laddr.ip for c in mine))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['127.0.0.1', '127.0.0.1']"


def test_a_port_that_is_taken_is_an_error_and_an_address_of_another_machine_is_none() -> None:
    listener = listen_on("127.0.0.1", 0)
    assert listener is not None
    try:
        with pytest.raises(OSError, match="in use"):
            listen_on("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.close()
    assert listen_on("203.0.113.7", 0) is None


def test_an_endpoint_is_a_host_with_or_without_a_port() -> None:
    assert parse_endpoint("node0:4321") == ("node0", 4321)
    assert parse_endpoint("node0") == ("node0", 29400)
    assert parse_endpoint("[fd00::1]:77") == ("fd00::1", 77)
    assert parse_endpoint("fd00::1") == ("fd00::1", 29400)
    for bad in ("", ":1", "node0:port", "node0:99999"):
        with pytest.raises(SpecError, match="is not HOST:PORT"):
            parse_endpoint(bad)
