"""GroupCoordinator: every collective of a group goes through here and takes the backend that the policy picks.

A decision is made once per distinct call signature and kept with the bound backend method, so a decided call
costs one dictionary look-up. Backends count the calls they make; what was really taken is read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from commbench.backends.base import Backend, Group
from commbench.coordinator.setup import BackendSet, backends_of, set_up_backends
from commbench.errors import BackendUnavailable, CollectiveError
from commbench.policy import Policy
from commbench.types import OPS, CallSignature, Decision, Platform

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


class GroupCoordinator:
    """The collectives of one group of ranks, dispatched by a policy.

    Every rank of the group constructs it with the same arguments. ``backends`` names those to set up beside
    the policy's own. Ranks given to methods (``src``, ``dst``) are ranks in the group.
    """

    def __init__(
        self,
        group: Group,
        policy: Policy,
        platform: Platform,
        backends: Sequence[str] = (),
    ) -> None:
        self.group = group
        self.policy = policy
        self.rank_in_group = group.rank
        self.world_size = group.world_size
        self._set: BackendSet = set_up_backends(group, [*backends_of(policy, platform.device), *backends])
        self.platform = replace(
            platform, world_size=group.world_size, one_host=group.one_host, usable=self._set.usable
        )
        self._mode = "eager"
        self._forced: str | None = None
        self._routes_by_force: dict[str | None, dict[tuple[Any, ...], Route]] = {None: {}}
        self._routes = self._routes_by_force[None]
        self._closed = False

    # ---- what is here -------------------------------------------------------------------------------

    @property
    def usable(self) -> dict[str, str | None]:
        """Backend → None where it is set up on every rank, else why it is off."""
        return dict(self._set.usable)

    def backend(self, name: str) -> Backend:
        """A backend that is set up. Raises BackendUnavailable with its reason otherwise."""
        if name not in self._set.ready:
            reason = self._set.usable.get(name) or "it was not asked for when the group was made"
            raise BackendUnavailable(name, reason)
        return self._set.ready[name]

    def provider(self, name: str) -> str:
        """The library behind a backend that is set up, with its version."""
        return self._set.providers.get(name, "")

    def call_counts(self) -> dict[str, int]:
        """Calls that each backend has made so far: the truth about what was taken."""
        return {name: backend.calls for name, backend in self._set.ready.items()}

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
        self._routes = self._routes_by_force.setdefault(backend, {})

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

    def _decided(self, key: tuple[Any, ...], collective: str, tensor: torch.Tensor | None, op: str, placement: str) -> Route:
        self._check_usable(collective, op)
        decision = self.decide(self.signature(collective, tensor, op, placement))
        backend = self.backend(decision.picked)
        route = Route(decision, backend, getattr(backend, collective))
        self._routes[key] = route
        return route

    def _check_usable(self, collective: str, op: str) -> None:
        if self._closed:
            raise CollectiveError(f"{collective}: group {self.group.name} is destroyed")
        if op and op not in OPS:
            raise CollectiveError(f"{collective}: op {op!r} is not one of {', '.join(OPS)}")

    # ---- collectives ----------------------------------------------------------------------------------
    # Each builds its key from what a policy may look at; shapes are checked when a signature is new.

    def all_reduce(self, input: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None) -> torch.Tensor:
        """Reduce over all ranks. input: any shape; out: the same shape and dtype, or None for in place.

        Gives the tensor that holds the result. Raises CollectiveError on a shape or dtype that does not fit.
        """
        if out is None:
            out = input
        key = ("all_reduce", op, input.dtype, input.numel(), input.is_contiguous(), None if out is input else _facts(out), self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_like("all_reduce", input, out, 1, 1)
            route = self._decided(key, "all_reduce", input, op, _placement(out is input))
        route.method(input, out, op)
        return out

    def all_gather(self, input: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out (world_size × input's elements) = every rank's input in rank order."""
        in_place = _inside(input, out)
        key = ("all_gather", input.dtype, input.numel(), input.is_contiguous(), in_place, _facts(out), self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_like("all_gather", input, out, 1, self.world_size)
            route = self._decided(key, "all_gather", input, "", _placement(in_place))
        route.method(input, out)
        return out

    def reduce_scatter(self, input: torch.Tensor, out: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """out = this rank's 1/world_size of the reduction of every rank's input."""
        in_place = _inside(out, input)
        key = ("reduce_scatter", op, input.dtype, input.numel(), input.is_contiguous(), in_place, _facts(out), self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_like("reduce_scatter", input, out, self.world_size, 1)
            route = self._decided(key, "reduce_scatter", input, op, _placement(in_place))
        route.method(input, out, op)
        return out

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """tensor = rank src's tensor, in place."""
        key = ("broadcast", tensor.dtype, tensor.numel(), tensor.is_contiguous(), src, self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_rank("broadcast", "src", src)
            route = self._decided(key, "broadcast", tensor, "", "in")
        route.method(tensor, src)
        return tensor

    def all_to_all(self, input: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Part i of out = this rank's part of rank i's input; both of one size, in world_size equal parts."""
        key = ("all_to_all", input.dtype, input.numel(), input.is_contiguous(), _facts(out), self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_like("all_to_all", input, out, 1, 1)
            if input.numel() % self.world_size:
                raise CollectiveError(
                    f"all_to_all: {input.numel()} elements do not split into {self.world_size} equal parts"
                )
            route = self._decided(key, "all_to_all", input, "", "out")
        route.method(input, out)
        return out

    def reduce(
        self, input: torch.Tensor, dst: int = 0, op: str = "sum", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """On rank dst: out (or input, in place) = the reduction. Elsewhere its content is undefined."""
        if out is None:
            out = input
        key = ("reduce", op, input.dtype, input.numel(), input.is_contiguous(), None if out is input else _facts(out), dst, self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_rank("reduce", "dst", dst)
            self._check_like("reduce", input, out, 1, 1)
            route = self._decided(key, "reduce", input, op, _placement(out is input))
        route.method(input, out, dst, op)
        return out

    def gather(self, input: torch.Tensor, out: torch.Tensor | None, dst: int = 0) -> torch.Tensor | None:
        """On rank dst: out (world_size × input's elements) = the inputs in rank order. None elsewhere."""
        key = ("gather", input.dtype, input.numel(), input.is_contiguous(), None if out is None else _facts(out), dst, self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_rank("gather", "dst", dst)
            self._check_root("gather", "out", out, dst)
            if out is not None:
                self._check_like("gather", input, out, 1, self.world_size)
            route = self._decided(key, "gather", input, "", "out")
        route.method(input, out, dst)
        return out

    def scatter(self, input: torch.Tensor | None, out: torch.Tensor, src: int = 0) -> torch.Tensor:
        """out = this rank's part of rank src's input (world_size × out's elements); input None elsewhere."""
        key = ("scatter", *_facts(out), None if input is None else _facts(input), src, self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_rank("scatter", "src", src)
            self._check_root("scatter", "input", input, src)
            if input is not None:
                self._check_like("scatter", input, out, self.world_size, 1)
            route = self._decided(key, "scatter", out, "", "out")
        route.method(input, out, src)
        return out

    def send_recv(self, input: torch.Tensor, out: torch.Tensor, dst: int, src: int) -> torch.Tensor:
        """Send input to dst while out is received from src; all ranks may call it at once (a ring)."""
        key = ("send_recv", input.dtype, input.numel(), input.is_contiguous(), _facts(out), dst, src, self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_rank("send_recv", "dst", dst)
            self._check_rank("send_recv", "src", src)
            self._check_like("send_recv", input, out, 1, 1)
            route = self._decided(key, "send_recv", input, "", "out")
        route.method(input, out, dst, src)
        return out

    def barrier(self) -> None:
        """Returns on no rank before every rank has called it."""
        key = ("barrier", self._mode)
        route = self._routes.get(key)
        if route is None:
            route = self._decided(key, "barrier", None, "", "in")
        route.method()

    def destroy(self) -> None:
        """Release every backend; the coordinator cannot be used afterwards. May be called twice."""
        if not self._closed:
            self._closed = True
            for routes in self._routes_by_force.values():
                routes.clear()
            for backend in self._set.ready.values():
                backend.close()

    # ---- checks ---------------------------------------------------------------------------------------

    def _check_like(self, what: str, a: torch.Tensor, b: torch.Tensor, parts_a: int, parts_b: int) -> None:
        if a.dtype != b.dtype:
            raise CollectiveError(f"{what}: input is {a.dtype} but out is {b.dtype}")
        if a.numel() * parts_b != b.numel() * parts_a:
            raise CollectiveError(
                f"{what}: input has {a.numel()} elements and out {b.numel()}; with {self.world_size} ranks "
                f"they must stand as {parts_a} : {parts_b}"
            )

    def _check_rank(self, what: str, name: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise CollectiveError(f"{what}: {name}={rank} is no rank of a group of {self.world_size}")

    def _check_root(self, what: str, name: str, tensor: torch.Tensor | None, root: int) -> None:
        if (tensor is not None) != (root == self.rank_in_group):
            raise CollectiveError(f"{what}: {name} is needed on rank {root} and only there")


def _placement(in_place: bool) -> str:
    return "in" if in_place else "out"


def _facts(tensor: torch.Tensor) -> tuple[torch.dtype, int, bool]:
    """What a key must hold of a second tensor, so that its shape is checked once per combination."""
    return tensor.dtype, tensor.numel(), tensor.is_contiguous()


def _inside(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether part lies in whole's memory (an in-place all_gather or reduce_scatter)."""
    offset = part.data_ptr() - whole.data_ptr()
    return 0 <= offset < max(1, whole.numel() * whole.element_size())


