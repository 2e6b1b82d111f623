"""Setting up a group's backends: the ranks agree on each, and a failure keeps its reason."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from commbench.backends.base import Backend, Group, UnavailableTogether, compare_notes, has_waited, why
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
        reason = _agree(group, name, reason)
        if not reason:
            backend, reason = _construct(group, name, backend_class)
            if backend is not None:
                result.ready[name] = backend
                result.providers[name] = backend.provider or availability.provider
        result.usable[name] = reason or None
    return result


def _construct(group: Group, name: str, backend_class: type[Backend]) -> tuple[Backend | None, str]:
    """(the backend, "") where every rank could make it, else (None, why not); the same on all ranks."""
    backend: Backend | None = None
    reason = ""
    waited = False
    try:
        backend = backend_class(group)
    except UnavailableTogether as error:  # all ranks know it already
        return None, _with_remedy(error.reason, error.remedy)
    except BackendUnavailable as error:
        reason = _with_remedy(error.reason, error.remedy)
        waited = has_waited(error)
    except Exception as error:
        logger.warning("backend %s failed to set up on rank %d", name, group.rank, exc_info=True)
        reason = why(error)
        waited = has_waited(error)
    reason = _agree(group, name, reason, waited)
    if reason and backend is not None:
        backend.close()
        backend = None
    return backend, reason


def _with_remedy(reason: str, remedy: str) -> str:
    return f"{reason} ({remedy})" if remedy else reason


def _agree(group: Group, name: str, reason: str, waited: bool = False) -> str:
    """The first rank's non-empty reason, the same on every rank; "" when all have none."""
    try:
        compare_notes(group, name, None, reason, waited=waited)
    except UnavailableTogether as error:
        return error.reason
    return ""
