"""What a coordinator finds out about a group of GPUs, which are played here; and that all ranks find the same."""

from __future__ import annotations

from typing import Any

from tests.ranks import run_ranks


def facts(rank: int, size: int) -> dict[str, Any]:
    from commbench.backends import gpu_links
    from commbench.coordinator import facts as module
    from commbench.coordinator.facts import of_group
    from commbench.policy import load_policy
    from commbench.types import CallSignature, Platform
    from tests.backends.simulation import World, play_device
    from tests.ranks import world

    group = world()
    play_device(World(rank, size))
    hopper = Platform(device="cuda", capability=(9, 0))
    found: dict[str, Any] = {"linked": of_group(group, hopper)}
    # one rank has no NVLink to another
    gpu_links.links = lambda mine, everyone: (True, mine != "GPU-1")
    found["one_without"] = of_group(group, hopper)

    def missing(mine: str, everyone: list[str]) -> tuple[bool, bool]:
        raise OSError("no libnvidia-ml.so.1")

    gpu_links.links = missing  # type: ignore[assignment]
    found["no_nvml"] = of_group(group, hopper)
    module.boot_id = lambda: f"boot-{rank}"
    found["two_nodes"] = of_group(group, hopper)
    found["hip"] = of_group(group, Platform(device="hip", capability=(9, 4)))
    found["cpu"] = of_group(group, Platform())
    call = CallSignature("all_reduce", "sum", "bfloat16", 1 << 20, 1 << 19)
    policy = load_policy("commbench")
    found["picks"] = [policy.decide(call, found[name]).picked for name in ("linked", "no_nvml", "two_nodes")]
    return found


def test_all_ranks_find_the_same_links_nodes_and_multicast_and_the_policy_uses_them() -> None:
    first, second = run_ranks(facts, 2)
    assert first == second
    assert first["linked"].nvlink
    assert first["linked"].multicast
    assert first["linked"].p2p
    assert first["linked"].nnodes == 1
    assert not first["one_without"].nvlink
    assert not first["no_nvml"].nvlink
    assert first["two_nodes"].nnodes == 2
    assert first["hip"].nnodes == 2
    assert not first["hip"].multicast
    assert (first["cpu"].nnodes, first["cpu"].one_host) == (1, True)
    # a pair of GPUs may sit on PCIe; across nodes custom all-reduce does not come up
    assert first["picks"][:2] == ["ca", "ca"]
    assert first["picks"][2] != "ca"
