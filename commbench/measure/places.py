"""Where a point runs on this rank: the coordinator of its group, or nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from commbench.coordinator.group import GroupCoordinator
from commbench.coordinator.weights import DEFAULT_BUCKET_BYTES
from commbench.measure.buffers import Buffers
from commbench.measure.correctness import Check
from commbench.measure.loop import nothing
from commbench.measure.traffic import DictTraffic, ObjectTraffic, Traffic, WeightTraffic
from commbench.measure.uneven import UnevenBuffers
from commbench.types import CallSignature, Point

if TYPE_CHECKING:
    from commbench.backends.base import Backend
    from commbench.native._shm import BoundCall

_FAMILIES: dict[str, type[Traffic]] = {
    "send_object": ObjectTraffic,
    "broadcast_object": ObjectTraffic,
    "queue_broadcast": ObjectTraffic,
    "send_tensor_dict": DictTraffic,
    "send_tensor_dict_async": DictTraffic,
    "send_tensor_dict_split": DictTraffic,
    "broadcast_tensor_dict": DictTraffic,
    "weight_update": WeightTraffic,
}


@dataclass(frozen=True, slots=True)
class Place:
    """This rank's group for a point. halves: the group of this rank's half of it, where a point needs one.
    takes_part: false on ranks that are idle while the first group works alone. weight_numels, bucket_bytes: of a weight
    update, as in Settings."""

    coordinator: GroupCoordinator
    halves: GroupCoordinator | None = None
    takes_part: bool = True
    weight_numels: tuple[int, ...] = ()
    bucket_bytes: int = DEFAULT_BUCKET_BYTES


Places = Mapping[str, Place]  # by a point's group


class IdleBuffers(Buffers):
    """Of a rank that does nothing in this point, and starts and ends with the others."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self.input = self.output = None

    def call(self, coordinator: GroupCoordinator) -> Callable[[], object]:
        return nothing

    def signature(self, coordinator: GroupCoordinator) -> CallSignature:
        point = self.point
        name = point.collective.removesuffix("_skewed")
        return CallSignature(name, point.op, point.dtype, point.size_bytes, point.numel)

    def native_call(self, backend: Backend) -> BoundCall | None:
        return None

    def refill(self, seed: int, exact: bool) -> None:
        pass

    def check(self, seed: int, exact: bool) -> Check:
        return Check()


def buffers_for(point: Point, place: Place, device: torch.device) -> Buffers:
    """What this rank needs for a point."""
    if not place.takes_part:
        return IdleBuffers(point)
    rank = place.coordinator.rank_in_group
    if point.collective == "weight_update" and place.weight_numels:
        return WeightTraffic(
            point, rank, device, place.coordinator, numels=place.weight_numels, bucket_bytes=place.bucket_bytes
        )
    if point.collective in _FAMILIES:
        halves = place.halves if point.collective == "send_tensor_dict_split" else None
        return _FAMILIES[point.collective](point, rank, device, place.coordinator, halves)
    if point.collective.startswith(("all_gatherv", "reduce_scatterv")):
        return UnevenBuffers(point, rank, device)
    return Buffers(point, rank, device)
