"""Weight-update groups: a trainer (rank 0) hands a model's tensors to the ranks of an engine, in buckets.

The group is independent of torch's default group: trainer and engine are different jobs that meet at an address. All
ranks first compare what they are about to move, so that a mismatch is an error on all of them. Tensors are packed into
buckets of bytes; while one is on its way the next is packed.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commbench.errors import CollectiveError, PeerLost, UsageError

SOURCE = 0  # the trainer's rank
DEFAULT_BUCKET_BYTES = 64 << 20
DEFAULT_TIMEOUT = timedelta(seconds=300)
_ALIGNMENT = 16  # bytes; every dtype may be viewed at such an offset


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor by name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Bucket = list[tuple[TensorSpec, int]]  # with offsets in bytes


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Consecutive tensors together, up to bucket_bytes; a larger tensor has a bucket of its own."""
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes={bucket_bytes} must be at least 1")
    buckets: list[Bucket] = []
    used = 0
    for spec in specs:
        start = -(-used // _ALIGNMENT) * _ALIGNMENT
        if not buckets or start + spec.size_bytes > bucket_bytes:
            buckets.append([])
            start = 0
        buckets[-1].append((spec, start))
        used = start + spec.size_bytes
    return buckets


def bucket_size(bucket: Bucket) -> int:
    """Bytes of a bucket, padding included."""
    spec, offset = bucket[-1]
    return offset + spec.size_bytes


class WeightUpdateGroup:
    """A process group over which rank 0 broadcasts weights. Collective to make.

    store: where the ranks meet, the same for all. device: where received tensors live. Raises CollectiveError when the
    ranks do not find each other within the timeout.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        name: str,
        *,
        backend: str = "gloo",
        device: torch.device | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        _check(name, rank, world_size, backend, device)
        self.name, self.rank, self.world_size = name, rank, world_size
        self.device = device or torch.device("cpu" if backend == "gloo" else "cuda")
        self._timeout = timeout
        prefixed = dist.PrefixStore(f"commbench/weights/{name}", store)  # type: ignore[attr-defined]
        try:
            if backend == "gloo":
                self._group: Any = dist.ProcessGroupGloo(prefixed, rank, world_size, timeout)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
        except RuntimeError as error:
            raise CollectiveError(
                f"weight-update group {name}: rank {rank} of {world_size} found no others: {str(error).splitlines()[0]}"
            ) from error

    def send(self, tensors: Mapping[str, torch.Tensor], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        """On rank 0: hand these tensors to all. Raises CollectiveError where others expect something else."""
        self._check_side(sending=True)
        specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
        self._compare(specs, bucket_bytes)
        flying: list[tuple[Any, torch.Tensor]] = []
        for bucket in plan_buckets(specs, bucket_bytes):
            if not (size := bucket_size(bucket)):
                continue
            packed = torch.empty(size, dtype=torch.uint8, device=self.device)
            for spec, offset in bucket:
                _view(packed, spec, offset).copy_(tensors[spec.name])
            if len(flying) == 2:  # two staging buffers at most
                self._wait(flying.pop(0)[0])
            flying.append((self._broadcast(packed), packed))
        for work, _ in flying:
            self._wait(work)

    def receive(
        self, specs: Sequence[TensorSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES
    ) -> list[tuple[str, torch.Tensor]]:
        """On the other ranks: the tensors, in the order of specs. They are views of their buckets.

        Raises CollectiveError where rank 0 sends something else, PeerLost when it is gone or late.
        """
        self._check_side(sending=False)
        self._compare(specs, bucket_bytes)
        received: list[tuple[str, torch.Tensor]] = []
        works = []
        for bucket in plan_buckets(specs, bucket_bytes):
            packed = torch.empty(bucket_size(bucket), dtype=torch.uint8, device=self.device)
            if packed.numel():
                works.append(self._broadcast(packed))
            received += [(spec.name, _view(packed, spec, offset)) for spec, offset in bucket]
        for work in works:
            self._wait(work)
        return received

    def destroy(self) -> None:
        """End the group. May be called twice."""
        group, self._group = self._group, None
        if group is not None and hasattr(group, "shutdown"):
            group.shutdown()

    def _check_side(self, sending: bool) -> None:
        if self._group is None:
            raise CollectiveError(f"weight-update group {self.name} is destroyed; make a new one")
        if sending != (self.rank == SOURCE):
            raise CollectiveError(
                f"weight-update group {self.name}: rank {SOURCE} sends, the others receive; this is rank {self.rank}"
            )

    def _compare(self, specs: Sequence[TensorSpec], bucket_bytes: int) -> None:
        """All ranks must have the same list of tensors: the digest's smallest and largest value are then equal."""
        text = repr((bucket_bytes, [(s.name, str(s.dtype), s.shape) for s in specs]))
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        extremes = torch.tensor([digest, -digest], device=self.device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        try:
            self._wait(self._group.allreduce([extremes], options))
        except PeerLost as error:
            raise PeerLost(f"weight-update group {self.name}: not all ranks came to the update: {error}") from error
        largest, smallest = int(extremes[0]), -int(extremes[1])
        if largest != smallest:
            total = sum(s.size_bytes for s in specs)
            raise CollectiveError(
                f"weight-update group {self.name}: the ranks disagree about what is moved; rank {self.rank} has "
                f"{len(specs)} tensors, {total} bytes, in buckets of {bucket_bytes} bytes"
            )

    def _broadcast(self, tensor: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SOURCE, 0
        try:
            return self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> PeerLost:
        return PeerLost(
            f"weight-update group {self.name}: rank {self.rank} lost a peer: {str(error).splitlines()[0]}",
            SOURCE if self.rank != SOURCE else -1,
        )


def _check(name: str, rank: int, world_size: int, backend: str, device: torch.device | None) -> None:
    """Raises UsageError for a group that cannot be, before anybody is waited for."""
    if not 0 <= rank < world_size or world_size < 2:
        raise UsageError(
            f"weight-update group {name}: rank {rank} of {world_size} ranks cannot be; it takes at least 2"
        )
    if backend not in ("gloo", "nccl"):
        raise UsageError(f"weight-update group {name}: backend {backend!r} is neither gloo nor nccl")
    if backend == "nccl" and not dist.is_nccl_available():
        raise UsageError(f"weight-update group {name}: this torch was built without NCCL; take backend='gloo'")
    if backend == "nccl" and device is not None and device.type == "cpu":
        raise UsageError(f"weight-update group {name}: NCCL moves no tensors of the CPU; take backend='gloo'")


def _view(packed: torch.Tensor, spec: TensorSpec, offset: int) -> torch.Tensor:
    return packed[offset : offset + spec.size_bytes].view(spec.dtype).view(spec.shape)


# ---- by name, as an engine's requests come in ------------------------------------------------------------------

_groups: dict[str, WeightUpdateGroup] = {}


def init_weights_update_group(
    master_address: str,
    master_port: int,
    rank: int,
    world_size: int,
    group_name: str = "weight_update_group",
    backend: str = "gloo",
    device: torch.device | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> WeightUpdateGroup:
    """Join the group of that name; rank 0 (the trainer) listens at the address. An engine's rank is its offset plus its
    TP rank. Raises UsageError when this process has a group of that name and for what cannot be, CollectiveError when
    nobody is found."""
    if group_name in _groups:
        raise UsageError(f"this process has a weight-update group {group_name!r}; destroy it first, or name another")
    _check(group_name, rank, world_size, backend, device)
    store = _meet(master_address, master_port, rank, world_size, group_name, timeout)
    group = WeightUpdateGroup(store, rank, world_size, group_name, backend=backend, device=device, timeout=timeout)
    _groups[group_name] = group
    return group


def _meet(address: str, port: int, rank: int, world_size: int, name: str, timeout: timedelta) -> Any:
    """The store where all ranks of the group have met.

    Who comes early may meet the store of an earlier group at the same address, which is about to close: so all wait for
    each other under the group's own name, and try again where the store goes away.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, world_size, is_master=rank == SOURCE, timeout=left, wait_for_workers=False
            )
            store.set(f"{name}/joined/{rank}", "")
            store.wait([f"{name}/joined/{other}" for other in range(world_size)], left)
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError among them
            if rank != SOURCE and time.monotonic() < deadline - 0.1:
                time.sleep(0.05)
                continue
            raise CollectiveError(
                f"weight-update group {name}: rank {rank} cannot reach {address}:{port}: {str(error).splitlines()[0]}"
            ) from error
        store.set_timeout(timeout)
        return store


def get_weights_update_group(group_name: str) -> WeightUpdateGroup:
    """The group of that name. Raises CollectiveError naming those that exist."""
    if group_name not in _groups:
        raise CollectiveError(f"no weight-update group {group_name!r}; there are: {', '.join(_groups) or 'none'}")
    return _groups[group_name]


def update_weights_from_distributed(
    names: Sequence[str],
    dtypes: Sequence[torch.dtype | str],
    shapes: Sequence[Sequence[int]],
    group_name: str = "weight_update_group",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> list[tuple[str, torch.Tensor]]:
    """Receive these tensors from the trainer: (name, tensor) in order, to be loaded into a model.

    dtypes: torch dtypes or their names. Raises UsageError where the lists do not fit, else as
    ``WeightUpdateGroup.receive``.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise UsageError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes were given; one of each is needed"
        )
    specs = [
        TensorSpec(name, _dtype(dtype), tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
    return get_weights_update_group(group_name).receive(specs, bucket_bytes)


def destroy_weights_update_group(group_name: str = "weight_update_group") -> None:
    """End the group of that name. Raises CollectiveError when there is none."""
    group = get_weights_update_group(group_name)
    del _groups[group_name]
    group.destroy()


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"{dtype!r} is no torch dtype")
    return found
