"""Coordinators for measurements."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from commbench.backends.base import Group
from commbench.coordinator import setup
from commbench.coordinator.group import GroupCoordinator
from commbench.coordinator.world import local_platform
from commbench.policy import load_policy


def over_fake_group() -> GroupCoordinator:
    """Over torch's fake process group (initialised, two ranks of which the other does not exist): calls cost what
    Python costs. Nobody answers, so the ranks' agreement on backends is taken as given."""
    cpu, everyone = torch.device("cpu"), dist.group.WORLD
    with mock.patch.object(setup, "_agree", lambda group, name, reason, waited=False: reason):
        return GroupCoordinator(
            Group("tp", (0, 1), 0, cpu, everyone, everyone, False), load_policy("commbench"), local_platform(cpu)
        )
