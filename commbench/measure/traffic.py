"""Traffic that is not one tensor: objects, dictionaries of tensors, and a model's weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commbench.coordinator.weights import DEFAULT_BUCKET_BYTES, SOURCE, TensorSpec, WeightUpdateGroup
from commbench.coordinator.world import collective_library
from commbench.measure import correctness
from commbench.measure.buffers import Buffers
from commbench.measure.correctness import ROOT, Check, compare, fill
from commbench.types import CallSignature, Point

if TYPE_CHECKING:
    from commbench.backends.base import Backend
    from commbench.coordinator.group import GroupCoordinator
    from commbench.native._shm import BoundCall

WEIGHTS_TIMEOUT = timedelta(seconds=60)
MOST_WEIGHTS = 64  # tensors in the model whose weights are updated


class Traffic(Buffers):
    """What a rank gives and what it gets last. ``coordinator`` is the point's group, ``halves`` the group of this
    rank's half of it (where the collective needs that). Ranks without a part in the traffic do nothing."""

    def __init__(
        self, point: Point, rank: int, device: torch.device, coordinator: GroupCoordinator,
        halves: GroupCoordinator | None = None,
    ) -> None:  # fmt: skip
        self.point = point
        self.rank = rank
        self._device = device
        self.coordinator = coordinator
        self.halves = halves
        self.input = self.output = None
        self.got: Any = None
        self.given: Any = None

    def sender(self) -> int:
        """The rank whose data arrives here: this rank itself where it sends."""
        n, rank = self.point.world_size, self.rank
        if self.point.collective == "send_tensor_dict_split":
            return rank % (n // 2)
        if self.point.collective.startswith("send_"):
            return rank // 2 * 2
        return ROOT

    @property
    def sends(self) -> bool:
        return self.sender() == self.rank

    def receiver(self) -> int:
        """The rank that this rank's data goes to, where it goes to one."""
        n = self.point.world_size
        return self.rank + n // 2 if self.point.collective == "send_tensor_dict_split" else self.rank + 1

    def signature(self, coordinator: GroupCoordinator) -> CallSignature:
        point = self.point
        return CallSignature(point.collective, "", point.dtype, point.size_bytes, point.numel, placement="out")

    def native_call(self, backend: Backend) -> BoundCall | None:
        return None

    def payload(self, numel: int, seed: int, exact: bool, which: int = 0) -> torch.Tensor:
        """What the sender of this rank's data gives, as number ``which``."""
        tensor = torch.empty(numel, dtype=getattr(torch, self.point.dtype), device=self._device)
        fill(tensor, self.table(seed, exact, which).to(self._device))
        return tensor

    def table(self, seed: int, exact: bool, which: int = 0) -> torch.Tensor:
        # the ranks of a half hold the same tensors, of which each sends its part
        giver = ROOT if self.point.collective == "send_tensor_dict_split" else self.sender()
        return correctness.table(self.point, giver, seed + 7919 * which, exact)


class ObjectTraffic(Traffic):
    """send_object, broadcast_object and queue_broadcast: an object with size_bytes of payload."""

    def refill(self, seed: int, exact: bool) -> None:
        self.got = None
        if self.sends:
            self.given = {"step": seed, "data": self.payload(self.point.numel, seed, exact).numpy().tobytes()}

    def call(self, coordinator: GroupCoordinator) -> Callable[[], object]:
        if self.point.collective == "send_object":
            return self._send if self.sends else self._receive
        return self._queue if self.point.collective == "queue_broadcast" else self._broadcast

    def _send(self) -> None:
        self.coordinator.send_object(self.given, self.receiver())

    def _receive(self) -> None:
        self.got = self.coordinator.recv_object(self.sender())

    def _broadcast(self) -> None:
        # over the CPU group also where the group has a queue, which queue_broadcast measures
        self.got = self.coordinator.broadcast_object(self.given, ROOT, through_queue=False)

    def _queue(self) -> None:
        self.got = self.coordinator.broadcast_object(self.given, ROOT)

    def check(self, seed: int, exact: bool) -> Check:
        if self.sends:
            return Check()
        if not isinstance(self.got, dict) or self.got.get("step") != seed:
            return Check(self.point.numel, float("inf"))
        data = torch.frombuffer(bytearray(self.got["data"]), dtype=torch.uint8)
        if data.numel() != self.point.numel:
            return Check(self.point.numel, float("inf"))
        return compare(data, self.table(seed, exact), None)


class DictTraffic(Traffic):
    """Dictionaries as pipeline stages hand them on: two tensors of half the size each, and a few values."""

    KEYS = ("hidden_states", "residual")

    def _numels(self) -> tuple[int, int]:
        first = -(-self.point.numel // 2)
        return first, self.point.numel - first

    def refill(self, seed: int, exact: bool) -> None:
        self.got = None
        if self.sends:
            self.given = {
                key: self.payload(numel, seed, exact, i)
                for i, (key, numel) in enumerate(zip(self.KEYS, self._numels(), strict=True))
            }
            self.given.update(step=seed, finished=False)

    def call(self, coordinator: GroupCoordinator) -> Callable[[], object]:
        if self.point.collective == "broadcast_tensor_dict":
            return self._broadcast
        if not self.sends:
            return self._receive
        return self._send_async if self.point.collective == "send_tensor_dict_async" else self._send

    def _send(self) -> None:
        self.coordinator.send_tensor_dict(self.given, self.receiver(), self.halves)

    def _send_async(self) -> None:
        for work in self.coordinator.send_tensor_dict(self.given, self.receiver(), async_send=True):
            work.wait()

    def _receive(self) -> None:
        self.got = self.coordinator.recv_tensor_dict(self.sender(), self.halves)

    def _broadcast(self) -> None:
        self.got = self.coordinator.broadcast_tensor_dict(self.given, ROOT)

    def check(self, seed: int, exact: bool) -> Check:
        if self.sends:
            return Check()
        check = Check()
        if not isinstance(self.got, dict) or self.got.get("step") != seed:
            return Check(self.point.numel, float("inf"))
        for i, (key, numel) in enumerate(zip(self.KEYS, self._numels(), strict=True)):
            tensor = self.got.get(key)
            if not isinstance(tensor, torch.Tensor) or tensor.numel() != numel:
                check.add(Check(numel, float("inf")))
            else:
                check.add(compare(tensor, self.table(seed, exact, i), None))
        return check


class WeightTraffic(Traffic):
    """A weight update from beginning to end: the group is made, a model's tensors arrive in buckets, the group ends.

    numels: elements of the model's tensors, all of the point's dtype; without them a model is made up.
    """

    def __init__(self, *arguments: Any, numels: Sequence[int] = (), bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        super().__init__(*arguments)
        self._store: Any = None
        self._numbers: Iterator[int] = itertools.count()
        self._bucket_bytes = bucket_bytes
        dtype = getattr(torch, self.point.dtype)
        self._specs = [TensorSpec(f"{i}", dtype, (numel,)) for i, numel in enumerate(numels)] or self._model()

    def _model(self) -> list[TensorSpec]:
        """size_bytes in up to MOST_WEIGHTS tensors of unequal sizes, as layers have: one large, three small in turn."""
        left = self.point.numel
        shares = [8, 1, 1, 2] * (MOST_WEIGHTS // 4)
        unit = max(1, left // sum(shares))
        specs: list[TensorSpec] = []
        dtype = getattr(torch, self.point.dtype)
        for i, share in enumerate(shares):
            numel = left if i == len(shares) - 1 else min(left, share * unit)
            if numel:
                specs.append(TensorSpec(f"layer.{i}", dtype, (numel,)))
                left -= numel
        return specs

    def refill(self, seed: int, exact: bool) -> None:
        self.got = None
        if self._store is None:
            self._store = self._meet()
        if self.rank == SOURCE:
            self.given = {s.name: self.payload(s.shape[0], seed, exact, i) for i, s in enumerate(self._specs)}

    def _meet(self) -> Any:
        """A store of the group's own, on rank 0. Collective."""
        n = self.point.world_size
        store: Any = None
        if self.rank == SOURCE:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", 0, n, is_master=True, timeout=WEIGHTS_TIMEOUT, wait_for_workers=False
            )
        # past the coordinator, which counts the calls that are measured
        port: list[Any] = [None if store is None else store.port]
        dist.broadcast_object_list(port, src=self.coordinator.first_rank, group=self.coordinator.cpu_group)
        if store is None:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", port[0], n, is_master=False, timeout=WEIGHTS_TIMEOUT
            )
        return store

    def call(self, coordinator: GroupCoordinator) -> Callable[[], object]:
        return self._update

    def _update(self) -> None:
        group = WeightUpdateGroup(
            self._store, self.rank, self.point.world_size, f"update{next(self._numbers)}",
            backend=collective_library(self._device.type), device=self._device, timeout=WEIGHTS_TIMEOUT,
        )  # fmt: skip
        try:
            if self.rank == SOURCE:
                group.send(self.given, self._bucket_bytes)
            else:
                self.got = group.receive(self._specs, self._bucket_bytes)
        finally:
            group.destroy()
        self.coordinator.count_call("torch_dist")

    def check(self, seed: int, exact: bool) -> Check:
        check = Check()
        if self.rank == SOURCE:
            return check
        if self.got is None:
            return Check(self.point.numel, float("inf"))
        for i, (spec, (name, tensor)) in enumerate(zip(self._specs, self.got, strict=True)):
            if name != spec.name or tensor.numel() != spec.shape[0]:
                check.add(Check(spec.shape[0], float("inf")))
            else:
                check.add(compare(tensor, self.table(seed, exact, i), None))
        return check
