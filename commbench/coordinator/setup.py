"""Setting up a group's backends: the ranks agree on each, and a failure keeps its reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from commbench.backends.base import Backend, Group
from commbench.errors import BackendUnavailable
from commbench.policy import Policy
from commbench.registry import BACKENDS, load_backend
from commbench.types import COLLECTIVES

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class BackendSet:
    """The backends of one group. usable: name → None, or the reason it is off on every rank."""

    ready: dict[str, Backend] = field(default_factory=dict)
    usable: dict[str, str | None] = field(default_factory=dict)
    providers: dict[str, str] = field(default_factory=dict)


def backends_of(policy: Policy, device: str) -> list[str]:
    """The backends that a policy may pick on a device, in its order, each once."""
    names: dict[str, None] = {}
    for collective in COLLECTIVES:
        for route in policy.data.order(collective, device):
            names[route.backend] = None
    return list(names)


def set_up_backends(group: Group, names: Sequence[str], switched_off: Mapping[str, str]) -> BackendSet:
    """Set up each named backend on every rank of the group, or on none.

    A backend is used only if every rank could set it up; otherwise it is off on all ranks with the first
    failing rank's reason. switched_off: backend → why it is not to be set up. Collective: every rank calls it with
    the same names.
    """
    result = BackendSet()
    for name in names:
        if name in result.usable:
            continue
        if name in switched_off:
            result.usable[name] = switched_off[name]
            continue
        if name not in BACKENDS:  # a policy may know backends of its engine that commbench does not drive
            result.usable[name] = "commbench has no such backend"
            continue
        backend_class = load_backend(name)
        availability = backend_class.availability(group.device.type)
        reason = "" if availability.ok else _with_remedy(availability.reason, availability.remedy)
        reason = _agree(group, reason)
        backend: Backend | None = None
        if not reason:
            try:
                backend = backend_class(group)
            except BackendUnavailable as error:
                reason = _with_remedy(error.reason, error.remedy)
            except (RuntimeError, OSError, ValueError, ImportError) as error:
                # the backend's own set-up: any failure turns it off here, with its reason, on all ranks
                logger.warning("backend %s failed to set up on rank %d", name, group.rank, exc_info=True)
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            reason = _agree(group, reason)
        if reason and backend is not None:
            backend.close()
            backend = None
        result.usable[name] = reason or None
        if backend is not None:
            result.ready[name] = backend
            result.providers[name] = availability.provider
    return result


def _with_remedy(reason: str, remedy: str) -> str:
    return f"{reason} ({remedy})" if remedy else reason


def _agree(group: Group, reason: str) -> str:
    """The first rank's non-empty reason, the same on every rank; "" when all have none."""
    reasons: list[Any] = [None] * group.world_size
    dist.all_gather_object(reasons, reason, group=group.cpu_group)
    for rank, text in enumerate(reasons):
        if text:
            return text if all(r == text for r in reasons) else f"rank {rank}: {text}"
    return ""
