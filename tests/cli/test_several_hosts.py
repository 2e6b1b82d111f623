"""The flags of a sweep on several hosts: what is read from where, and what is refused before anybody is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from commbench.cli._nodes import Place, digest, take
from commbench.errors import SpecError
from commbench.harness.run import prepare
from commbench.store.run import Plan
from commbench.sweep import make_spec

VARIABLES = ("SLURM_NODEID", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def flags(**given: Any) -> dict[str, Any]:
    known = ("nnodes", "nproc_per_node", "node_rank", "rdzv_endpoint", "join_timeout", "bind", "tp", "pp")
    return {name: given.get(name) for name in known}


def test_ranks_per_host_and_hosts_make_the_tensor_parallel_group_unless_it_is_said() -> None:
    given = flags(nnodes=4, nproc_per_node=8)
    place = take(given)
    place.fit(given, {})
    assert given["tp"] == 32
    given = flags(nnodes=4, nproc_per_node=8, pp=2)
    take(given).fit(given, {})
    assert given["tp"] == 16
    for said in (flags(nproc_per_node=8, tp=8), flags(nproc_per_node=8)):
        take(said.copy()).fit(said, {"tp": 8} if said["tp"] is None else {})
        assert said["tp"] in (8, None)


def test_only_what_belongs_to_the_spec_stays_among_the_flags() -> None:
    given = flags(nnodes=2, node_rank=1, rdzv_endpoint="n:1", join_timeout="30s", bind="core")
    assert take(given) == Place(1, "n:1", None, 30.0)
    assert set(given) == {"nnodes", "bind", "tp", "pp"}


def test_place_and_meeting_point_come_from_flags_or_else_from_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Place(1, "node0:77", None, 1.0).among(2) == (1, "node0", 77)
    monkeypatch.setenv("SLURM_NODEID", "3")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert Place(None, "", None, 1.0).among(4) == (3, "10.0.0.1", 29400)
    assert Place(0, "", None, 1.0).among(4)[0] == 0, "the flag wins"


@pytest.mark.parametrize("flag", ["--trace", "--profile"])
def test_what_nobody_would_put_together_is_refused_inside_ranks_that_somebody_else_started(
    flag: str, commbench: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    code, _, said = commbench("sweep", "--launcher", "external", flag, "--dry-run")
    assert (code, said.startswith(f"error: {flag}: nobody watches ranks that torchrun started")) == (2, True)


def test_what_is_missing_or_impossible_is_refused_with_the_flag_to_use() -> None:
    with pytest.raises(SpecError, match="--nnodes 3: say which host this is with --node-rank 0 to 2"):
        Place(None, "n:1", None, 1.0).among(3)
    with pytest.raises(SpecError, match="say where the hosts meet with --rdzv-endpoint HOST:PORT"):
        Place(0, "", None, 1.0).among(3)
    with pytest.raises(SpecError, match="--node-rank 3 is not between 0 and 2"):
        Place(3, "n:1", None, 1.0).among(3)


def test_hosts_with_other_timeouts_are_given_the_same_sweep_and_with_another_seed_they_are_not() -> None:
    given: dict[str, Any] = {"tp": 2, "nnodes": 2, "device": "cpu", "sizes": "64", "point_timeout": 5.0}
    digests = []
    for change in ({}, {"point_timeout": 500.0}, {"seed": 9}):
        expansion, settings = prepare(make_spec(given | change, {}))
        digests.append(digest(Plan(expansion.points, settings.to_dict()), 1))
    assert digests[0] == digests[1] != digests[2]


def test_flags_that_contradict_each_other_are_refused() -> None:
    one = make_spec({"device": "cpu"}, {})
    with pytest.raises(SpecError, match="--node-rank 1: it is for several hosts; add --nnodes N"):
        Place(1, "", None, 1.0).check(one)
    with pytest.raises(SpecError, match="--nproc-per-node 3 on 1 host makes 3 ranks, but tp × pp is 2"):
        Place(None, "", 3, 1.0).check(one)
    Place(None, "", 2, 1.0).check(one)


def test_a_spec_spreads_its_ranks_evenly_over_hosts_that_it_starts_itself() -> None:
    assert make_spec({"tp": 8, "nnodes": 2}, {}).ranks_per_node == 4
    with pytest.raises(SpecError, match="3 ranks cannot be spread evenly over 2 hosts"):
        make_spec({"tp": 3, "nnodes": 2}, {})
    with pytest.raises(SpecError, match="mpirun starts the ranks of all hosts itself"):
        make_spec({"tp": 4, "nnodes": 2, "launcher": "mpirun"}, {})
    with pytest.raises(SpecError, match="0 hosts cannot run anything"):
        make_spec({"nnodes": 0}, {"nnodes": "--nnodes"})
    with pytest.raises(SpecError, match="'socket' is no way to bind ranks; allowed: core, numa, none"):
        make_spec({"bind": "socket"}, {"bind": "--bind"})
