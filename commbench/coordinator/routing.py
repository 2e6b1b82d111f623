"""Dispatch: which backend a call takes, decided once per distinct call and remembered with the bound method.

A decided call costs one dictionary look-up. Backends count the calls they make; what was really taken is read from
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from commbench.backends.base import Backend, Group
from commbench.coordinator.alone import AloneBackend
from commbench.coordinator.facts import of_group
from commbench.coordinator.setup import BackendSet, backends_of, set_up_backends
from commbench.errors import BackendUnavailable, CollectiveError
from commbench.policy import Policy
from commbench.types import COLLECTIVES, OPS, CallSignature, Decision, Platform

DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name
    for name in (
        "float32",
        "float16",
        "bfloat16",
        "float64",
        "int8",
        "uint8",
        "int32",
        "int64",
        "float8_e4m3fn",
        "float8_e5m2",
    )
}


@dataclass(frozen=True, slots=True)
class Route:
    """A decided call: the decision, the backend and its bound method."""

    decision: Decision
    backend: Backend
    method: Callable[..., None]


class _Undecided(dict[tuple[Any, ...], Route]):
    """Routes of a group that checks every call: no look-up ever finds one."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default


def layout_of(tensor: torch.Tensor) -> str:
    """contiguous, dense_t (dense in another order of dimensions) or strided (with gaps)."""
    if tensor.is_contiguous():
        return "contiguous"
    spans = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, length in spans:
        if length != 1:
            if stride != expected:
                return "strided"
            expected *= length
    return "dense_t"


class Router:
    """The backends of one group, and the decision among them for each call.

    Every rank of the group constructs it with the same arguments. ``backends`` names those to set up beside the
    policy's own; ``switched_off`` maps the backends that must not be set up to the reason. With ``check_calls`` the
    ranks compare notes (over the CPU group) before every call, and a call on which they disagree raises
    CollectiveError on all of them; that costs a round trip per call.
    """

    def __init__(
        self,
        group: Group,
        policy: Policy,
        platform: Platform,
        backends: Sequence[str] = (),
        *,
        switched_off: Mapping[str, str] | None = None,
        check_calls: bool = False,
    ) -> None:
        self.group = group
        self.policy = policy
        self.rank_in_group = group.rank
        self.world_size = group.world_size
        facts = of_group(group, platform)
        if self.world_size == 1:
            self._set = BackendSet({AloneBackend.name: AloneBackend(group)}, {AloneBackend.name: None})
        else:
            names = [*backends_of(policy, platform.device), *backends]
            self._set = set_up_backends(group, names, switched_off or {})
        self.platform = replace(facts, usable=self._set.usable)
        self._mode = "eager"
        self._forced: str | None = None
        self._check_calls = check_calls and self.world_size > 1
        self._routes_by_force: dict[tuple[Policy, str | None], dict[tuple[Any, ...], Route]] = {}
        self._follow(policy)
        self._closed = False
        self._own_calls: Counter[str] = Counter()

    # ---- what is here -------------------------------------------------------------------------------

    @property
    def usable(self) -> dict[str, str | None]:
        """Backend → None where it is set up on every rank, else why it is off."""
        return dict(self._set.usable)

    def backend(self, name: str) -> Backend:
        """A backend that is set up. Raises BackendUnavailable with its reason otherwise."""
        if name not in self._set.ready:
            raise BackendUnavailable(name, self._set.usable.get(name) or "it was not asked for when the group was made")
        return self._set.ready[name]

    def provider(self, name: str) -> str:
        """The library behind a backend that is set up, with its version."""
        return self._set.providers.get(name, "")

    def call_counts(self) -> dict[str, int]:
        """Calls that each backend has made so far: the truth about what was taken.

        Object traffic counts under ``torch_dist`` (it goes over the CPU group) or ``message_queue``, once per call.
        """
        counts = {name: backend.calls for name, backend in self._set.ready.items()}
        for name, calls in self._own_calls.items():
            counts[name] = counts.get(name, 0) + calls
        return counts

    @contextmanager
    def forcing(self, backend: str | None) -> Iterator[None]:
        """Inside, every call takes this backend, or raises BackendUnavailable with the reason it cannot.

        None leaves the choice to the policy. The previous state comes back whatever happens.
        """
        before = self._forced
        self._force(backend)
        try:
            yield
        finally:
            self._force(before)

    def _force(self, backend: str | None) -> None:
        self._forced = backend
        key = (self.policy, backend)
        if key not in self._routes_by_force:
            self._routes_by_force[key] = _Undecided() if self._check_calls else {}
        self._routes = self._routes_by_force[key]

    @contextmanager
    def under(self, policy: Policy) -> Iterator[None]:
        """Inside, this policy picks among the backends that are set up. The previous one comes back whatever happens.

        All ranks enter and leave together, between collectives.
        """
        before = self.policy
        self._follow(policy)
        try:
            yield
        finally:
            self._follow(before)

    def _follow(self, policy: Policy) -> None:
        """Take this policy's picks, and its sizes at which a backend changes its kernel."""
        for name, size_bytes in policy.bind(self.platform).splits().items():
            if name in self._set.ready:
                self._set.ready[name].split_at(size_bytes)
        self.policy = policy
        self._force(self._forced)

    # ---- decisions ----------------------------------------------------------------------------------

    def signature(self, collective: str, tensor: torch.Tensor | None, op: str, placement: str) -> CallSignature:
        """What the policy sees of a call."""
        if tensor is None:
            return CallSignature(collective, "", "none", 0, 0, mode=self._mode)
        if tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(sorted(DTYPE_NAMES.values()))
            raise CollectiveError(f"{collective}: dtype {tensor.dtype} is not one of {known}")
        return CallSignature(
            collective,
            op,
            DTYPE_NAMES[tensor.dtype],
            tensor.numel() * tensor.element_size(),
            tensor.numel(),
            layout=layout_of(tensor),
            mode=self._mode,
            placement=placement,
        )

    def decide(self, call: CallSignature) -> Decision:
        """The decision for a call; the same on every rank.

        Raises BackendUnavailable when a forced backend cannot take it, PolicyError when none can.
        """
        if self.world_size == 1:
            return Decision(
                AloneBackend.name, policy=self.policy.name, reason="a group of one rank has nobody to talk to"
            )
        kind = COLLECTIVES.get(call.collective)
        if kind is not None and not kind.dispatched:
            return self._only_way(call.collective)
        declines = {}
        for name, backend in self._set.ready.items():
            reason = backend.declines(call)
            if reason is not None:
                declines[name] = reason
        if self._forced is None:
            return self.policy.decide(call, self.platform, declines)
        reason = self._set.usable.get(self._forced, "it was not asked for when the group was made")
        reason = reason or declines.get(self._forced)
        if reason is not None:
            raise BackendUnavailable(self._forced, reason)
        return Decision(picked=self._forced, policy="forced", reason="asked for by name")

    def _only_way(self, collective: str) -> Decision:
        """The decision for what has no choice of backends. Raises BackendUnavailable when another is forced."""
        way = "message_queue" if collective == "queue_broadcast" else "torch_dist"
        if self._forced not in (None, way):
            raise BackendUnavailable(str(self._forced), f"it has no {collective}, which goes through {way}")
        return Decision(way, policy=self.policy.name, reason=f"the coordinator has this one way for {collective}")

    def count_call(self, name: str) -> None:
        """Add one to the calls of ``name``, for traffic that goes past the backends."""
        self._own_calls[name] += 1

    def _decided(
        self,
        key: tuple[Any, ...],
        collective: str,
        tensor: torch.Tensor | None,
        op: str,
        placement: str,
        agreed: tuple[Any, ...],
    ) -> Route:
        """Decide a call that is new. agreed: the arguments that every rank must pass alike, beside op and dtype."""
        self._check_usable(collective, op)
        if self._check_calls:
            self._compare_calls((collective, op, None if tensor is None else tensor.dtype, *agreed))
        call = self.signature(collective, tensor, op, placement)
        decision = self.decide(call)
        backend = self.backend(decision.picked)
        route = Route(decision, backend, backend.bound(call))
        self._routes[key] = route
        return route

    def _compare_calls(self, call: tuple[Any, ...]) -> None:
        """All ranks must make the same call. Collective over the CPU group."""
        mine = " ".join(str(part) for part in call if part != "")
        calls: list[Any] = [None] * self.world_size
        dist.all_gather_object(calls, mine, group=self.group.cpu_group)
        for rank, theirs in enumerate(calls):
            if theirs != calls[0]:
                raise CollectiveError(
                    f"the ranks of group {self.group.name} disagree: rank 0 calls ({calls[0]}), rank {rank} ({theirs})"
                )

    def _check_usable(self, collective: str, op: str = "") -> None:
        if self._closed:
            raise CollectiveError(f"{collective}: group {self.group.name} is destroyed; make a new one")
        if op and op not in OPS:
            raise CollectiveError(f"{collective}: op {op!r} is not one of {', '.join(OPS)}")

    def _failed(self, collective: str, error: RuntimeError) -> CollectiveError:
        """A foreign failure in a backend as one of ours. torch's own text says what it knows of the peer."""
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return CollectiveError(f"{collective} failed on rank {self.rank_in_group} of group {self.group.name}: {text}")

    def _close_backends(self) -> None:
        self._closed = True
        for routes in self._routes_by_force.values():
            routes.clear()
        for backend in self._set.ready.values():
            backend.close()
