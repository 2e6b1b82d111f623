"""Dictionaries of tensors and other values between ranks.

First an object goes over the CPU group: for each key the value, or a tensor's device type, dtype and size. Then the
tensors that are not empty follow one by one, CPU tensors over the CPU group and others over the device group. With an
all-gather group, which stands at both ends (the tensor-parallel group of a pipeline), each of its ranks sends one part
of a tensor and the receivers gather the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from commbench.coordinator import objects
from commbench.coordinator.p2p import Channel, P2PWork
from commbench.errors import CollectiveError

if TYPE_CHECKING:
    from commbench.coordinator.group import GroupCoordinator


class TensorMetadata(NamedTuple):
    """What a receiver needs to make room for a tensor. device: the type alone; each rank has its own index.
    parts: into how many parts the sender cut it (1: it comes whole)."""

    device: str
    dtype: torch.dtype
    size: torch.Size
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Channels:
    """Where tensors travel: CPU tensors and objects over one process group, device tensors over the other."""

    cpu: Channel
    device: Channel
    here: torch.device

    def of(self, tensor: torch.Tensor) -> Channel:
        return self.cpu if tensor.is_cpu else self.device

    def room(self, metadata: TensorMetadata) -> torch.Tensor:
        device = self.here if metadata.device == self.here.type else torch.device(metadata.device)
        return torch.empty(metadata.size, dtype=metadata.dtype, device=device)


def split(values: Mapping[str, Any], parts: int = 1) -> tuple[list[tuple[str, Any]], list[torch.Tensor]]:
    """(key, value or metadata) in order, and the tensors that will travel (not the empty ones)."""
    metadata: list[tuple[str, Any]] = []
    tensors: list[torch.Tensor] = []
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            numel = value.numel()
            cut = parts if numel and numel % parts == 0 else 1
            metadata.append((key, TensorMetadata(value.device.type, value.dtype, value.size(), cut)))
            if numel:
                tensors.append(value)
        else:
            metadata.append((key, value))
    return metadata, tensors


def check(what: str, values: Any) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise CollectiveError(f"{what}: expects a dictionary, got {type(values).__name__}")
    return values


def send(
    channels: Channels, values: Mapping[str, Any], dst: int, helpers: GroupCoordinator | None, async_send: bool
) -> list[P2PWork]:
    """Send to rank dst; the works to wait for ([] unless async_send)."""
    parts, mine = (1, 0) if helpers is None else (helpers.world_size, helpers.rank_in_group)
    metadata, tensors = split(values, parts)
    works: list[P2PWork] = []
    if async_send:
        works = objects.isend(channels.cpu, metadata, dst)
    else:
        objects.send(channels.cpu, metadata, dst)
    for tensor in tensors:
        channel = channels.of(tensor)
        if parts > 1 and tensor.numel() % parts == 0:
            tensor = tensor.reshape(parts, -1)[mine]
        tensor = tensor.contiguous()
        if async_send:
            works.append(channel.isend(tensor, dst))
        else:
            channel.send(tensor, dst)
    return works


def recv(channels: Channels, src: int, helpers: GroupCoordinator | None) -> dict[str, Any]:
    """The next dictionary from rank src. Raises CollectiveError where the sender cut tensors for a group of another
    size than ours; what it sent is then received all the same, so that the traffic stays in step."""
    parts, mine = (1, 0) if helpers is None else (helpers.world_size, helpers.rank_in_group)
    values: dict[str, Any] = {}
    trouble = ""
    for key, value in objects.recv(channels.cpu, src):
        if not isinstance(value, TensorMetadata):
            values[key] = value
            continue
        tensor = values[key] = channels.room(value)
        if not tensor.numel():
            continue
        if value.parts == 1:
            channels.of(tensor).recv(tensor, src)
        elif value.parts != parts:
            trouble = trouble or (
                f"recv_tensor_dict: rank {src} cut {key!r} into {value.parts} parts, "
                f"our all_gather_group has {parts if helpers is not None else 'no'} ranks"
            )
            channels.of(tensor).recv(tensor.view(-1)[: tensor.numel() // value.parts], src)
        else:
            assert helpers is not None
            flat = tensor.view(parts, -1)
            channels.of(tensor).recv(flat[mine], src)
            helpers.all_gather_into_tensor(flat, flat[mine])
    if trouble:
        raise CollectiveError(trouble)
    return values


def broadcast(channels: Channels, values: Mapping[str, Any] | None, src: int) -> dict[str, Any]:
    """Rank src's dictionary on every rank (there, its own tensors)."""
    if channels.cpu.rank == src:
        result = dict(check("broadcast_tensor_dict", values))
        metadata, tensors = split(result)
        objects.broadcast(channels.cpu, metadata, src)
        tensors = [t.contiguous() for t in tensors]
    else:
        tensors, result = [], dict(objects.broadcast(channels.cpu, None, src))
        for key, value in result.items():
            if isinstance(value, TensorMetadata):
                result[key] = room = channels.room(value)
                if room.numel():
                    tensors.append(room)
    for wait in [channels.of(tensor).ibroadcast(tensor, src) for tensor in tensors]:
        wait()
    return result
