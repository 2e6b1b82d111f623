"""Python objects between ranks, over the CPU group.

An object travels as a header (its size and kind) and its pickle. Where an object cannot be pickled the sender says so
in its place, so that receivers raise at once instead of waiting. Objects come from the ranks of one job, which trust
each other: unpickling runs code.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

from commbench.coordinator.p2p import Channel, P2PWork
from commbench.errors import CollectiveError

_OBJECT, _ERROR = 0, 1


def pickled(obj: Any) -> tuple[torch.Tensor, CollectiveError | None]:
    """The pickle as bytes; or, where the object has none, the error to raise and its text as bytes."""
    stream = io.BytesIO()
    try:
        pickle.dump(obj, stream, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - a class's own __reduce__ may raise anything; it becomes ours
        failure = CollectiveError(f"an object of type {type(obj).__name__} cannot be pickled: {error}")
        failure.__cause__ = error
        text = bytearray(str(failure), "utf-8")
        return torch.frombuffer(text, dtype=torch.uint8), failure
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8), None


def unpickled(data: torch.Tensor, sender: int) -> Any:
    """The object. Raises CollectiveError where it cannot be rebuilt here."""
    try:
        return pickle.loads(data.numpy().data)
    except Exception as error:
        raise CollectiveError(
            f"the object from rank {sender} ({data.numel()} bytes) cannot be unpickled: {type(error).__name__}: {error}"
        ) from error


def _header(data: torch.Tensor, failure: CollectiveError | None) -> torch.Tensor:
    return torch.tensor([data.numel(), _OBJECT if failure is None else _ERROR])


def _checked(kind: int, data: torch.Tensor, sender: int) -> torch.Tensor:
    if kind == _ERROR:
        raise CollectiveError(f"rank {sender} could not send: {bytes(data.numpy()).decode(errors='replace')}")
    return data


def send(channel: Channel, obj: Any, dst: int) -> None:
    """Send to one rank. Raises CollectiveError (on both sides) for an object without a pickle, and PeerLost."""
    data, failure = pickled(obj)
    channel.send(_header(data, failure), dst)
    channel.send(data, dst)
    if failure is not None:
        raise failure


def isend(channel: Channel, obj: Any, dst: int) -> list[P2PWork]:
    """As ``send``, without waiting: the works to wait for."""
    data, failure = pickled(obj)
    works = [channel.isend(_header(data, failure), dst), channel.isend(data, dst)]
    if failure is not None:
        raise failure
    return works


def recv(channel: Channel, src: int) -> Any:
    """The next object from one rank, however it was sent."""
    header = torch.empty(2, dtype=torch.int64)
    channel.recv(header, src)
    size, kind = header.tolist()
    data = torch.empty(size, dtype=torch.uint8)
    channel.recv(data, src)
    return unpickled(_checked(kind, data, src), src)


def broadcast(channel: Channel, obj: Any, src: int) -> Any:
    """Rank src's object on every rank (there, the object itself)."""
    if channel.rank == src:
        data, failure = pickled(obj)
        channel.broadcast(_header(data, failure), src)
        channel.broadcast(data, src)
        if failure is not None:
            raise failure
        return obj
    header = torch.empty(2, dtype=torch.int64)
    channel.broadcast(header, src)
    size, kind = header.tolist()
    data = torch.empty(size, dtype=torch.uint8)
    channel.broadcast(data, src)
    return unpickled(_checked(kind, data, src), src)


def all_gather(channel: Channel, obj: Any) -> list[Any]:
    """Every rank's object, in rank order. If one cannot be pickled, every rank raises."""
    data, failure = pickled(obj)
    n = len(channel.ranks)
    headers = [torch.empty(2, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(headers, _header(data, failure), group=channel.process_group)
    longest = max(int(h[0]) for h in headers)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(n)]
    dist.all_gather(parts, padded, group=channel.process_group)
    if failure is not None:
        raise failure
    checked = [
        _checked(int(header[1]), part[: int(header[0])], rank)
        for rank, (header, part) in enumerate(zip(headers, parts, strict=True))
    ]
    return [unpickled(part, rank) for rank, part in enumerate(checked)]
