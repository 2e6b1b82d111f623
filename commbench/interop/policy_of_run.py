"""The policy that a stored run was made with, on the platform that its manifest tells of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commbench.analysis.incumbent import Incumbent
from commbench.errors import UsageError
from commbench.policy import load_policy
from commbench.types import Platform


def incumbent_of(manifest: Mapping[str, Any], policy: str | None = None) -> tuple[Incumbent, str]:
    """The run's policy and the name that it has in the run's points.

    policy: which, where the run holds several. Raises UsageError where it must be said or the run has none of that
    name, UnknownName or PolicyError where the policy cannot be loaded (a file that is gone).
    """
    names = [str(n) for n in manifest.get("spec", {}).get("policy", ())]
    if policy is None:
        if len(names) != 1:
            raise UsageError(
                f"the run holds points of {len(names)} policies ({', '.join(names)}); say which with --policy"
            )
        policy = names[0]
    elif names and policy not in names:
        raise UsageError(f"--policy {policy}: the run holds points of {', '.join(names)}")
    return Incumbent(load_policy(policy), platform_of(manifest), _splits(manifest, policy)), policy


def _splits(manifest: Mapping[str, Any], policy: str) -> dict[str, int]:
    """The sizes at which backends changed their kernels in the run, as its first launch recorded them."""
    for record in manifest.get("launches", ()):
        if isinstance(record, Mapping) and isinstance(splits := record.get("splits"), Mapping):
            return {str(name): int(size) for name, size in splits.get(policy, {}).items()}
    return {}


def platform_of(manifest: Mapping[str, Any]) -> Platform:
    """What the manifest tells of the platform. The world size is the run's; analysis puts in that of each point."""
    settings = manifest.get("settings", {})
    variables = manifest.get("fingerprint", {}).get("env")
    env = {str(k): str(v) for k, v in variables.items()} if isinstance(variables, Mapping) else {}
    ranks = int(manifest.get("spec", {}).get("tp", 1))
    return Platform(device=str(settings.get("device", "cpu")), world_size=ranks, one_host=True, env=env)
