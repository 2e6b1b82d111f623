"""What ``policies check`` finds in policies whose weak places are known."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from commbench.policy import list_policies, load_policy
from commbench.policy.check import Finding, check, scenes


@lru_cache
def findings(name: str, gpu: str, *world_sizes: int) -> tuple[Finding, ...]:
    policy = load_policy(name)
    return tuple(check(policy, scenes(policy, [gpu], list(world_sizes))))


def told(found: tuple[Finding, ...], kind: str) -> str:
    return "\n".join(f.what for f in found if f.kind == kind)


def test_vllm_on_rocm_has_a_dead_zone_between_custom_and_quick_all_reduce() -> None:
    found = findings("vllm-0.33", "mi300x", 8)
    assert "8 MiB to 16 MiB − 16 B takes pynccl, with ca below and qr above" in told(found, "dead zone")
    where = next(f.where for f in found if f.kind == "dead zone")
    assert any("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=FP" in place for place in where)


def test_vllms_nccl_symmetric_memory_wins_loses_and_wins_again() -> None:
    assert "nccl_symm wins, loses and wins again" in told(findings("vllm-0.33", "h100", 8), "not monotone")


def test_custom_all_reduce_of_0_5_3_hides_quick_all_reduce_and_that_of_0_5_2rc2_does_not() -> None:
    assert "qr would start at 1 MiB; ca ahead takes the sizes below 16 MiB" in told(
        findings("sglang-0.5.3", "mi300x", 4), "shadowed"
    )
    assert "qr would start" not in told(findings("sglang-0.5.2rc2", "mi300x", 4), "shadowed")


def test_a_strict_cap_is_found_and_an_inclusive_one_is_not() -> None:
    assert "8 MiB to torch_dist" in told(findings("sglang-0.5.3", "h100", 8), "cap excludes its size")
    assert "ca" not in told(findings("sglang-0.5.10", "h100", 8), "cap excludes its size")


@pytest.mark.parametrize(
    ("name", "serious"), [("sglang-0.5.3", 0), ("sglang-0.5.4", 1), ("sglang-0.5.10", 1), ("sglang-0.5.15", 0)]
)
def test_results_that_are_silently_wrong_come_first(name: str, serious: int) -> None:
    found = findings(name, "h100", 8)
    assert [f.serious for f in found].count(True) == serious
    assert found[0].serious is bool(serious)
    assert ("UNREDUCED" in found[0].what) is bool(serious)


@pytest.mark.parametrize("name", list_policies())
@pytest.mark.parametrize("gpu", ["b200", "rtx5090", "mi300x", "cpu"])
def test_every_shipped_policy_can_be_checked(name: str, gpu: str) -> None:
    assert all(f.what and "{" not in f.what for f in findings(name, gpu, 2, 8))


def test_commbench_has_no_dead_zone_no_exclusive_cap_and_no_fault() -> None:
    for gpu in ("h100", "mi300x", "cpu"):
        kinds = {f.kind for f in findings("commbench", gpu, 2, 4, 8)}
        assert not kinds & {"dead zone", "cap excludes its size", "fault", "not monotone"}


def test_a_route_that_can_never_come_up_is_found(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'format = 1\nextends = "commbench"\n[routes.ca]\nneeds = [{ gate = "world_size_in", sizes = [3] }]\n'
    )
    policy = load_policy(str(path))
    found = check(policy, scenes(policy, ["h100"], [2, 4, 8]))
    assert any(f.kind == "never holds" and f.what.startswith("ca: world size 2 is not 3") for f in found)
