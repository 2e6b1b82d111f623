"""Point-to-point traffic over a torch process group, with errors that name the peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commbench.errors import PeerLost

TAG = 0  # one stream of messages per pair and process group, received in the order they were sent


class P2PWork:
    """A send in flight. ``payload`` is the tensor being sent; it must not change, and is kept alive, until ``wait``."""

    def __init__(self, channel: Channel, work: Any, payload: torch.Tensor, dst: int) -> None:
        self.payload: torch.Tensor | None = payload
        self._work = work
        self._channel = channel
        self._dst = dst

    @property
    def work(self) -> P2PWork:
        """Itself: engines wait for ``entry.work.wait()``."""
        return self

    def wait(self) -> None:
        """Until the payload may change again; at once when called again. Raises PeerLost naming the receiver."""
        if self._work is None:
            return
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as error:
            raise self._channel.lost("send to", self._dst, error) from error
        finally:
            self.payload = None
            self._channel.in_flight.discard(self)


class Channel:
    """Sends and receives between the ranks of one process group. Ranks in arguments are ranks in the group."""

    def __init__(self, process_group: Any, name: str, ranks: tuple[int, ...], rank: int) -> None:
        self.process_group = process_group
        self.name = name
        self.ranks = ranks
        self.rank = rank
        # a payload must outlive its send even where the caller drops the work
        self.in_flight: set[P2PWork] = set()

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send a contiguous tensor; on return it may change. Raises PeerLost."""
        try:
            self.process_group.send([tensor], dst, TAG).wait()
        except RuntimeError as error:
            raise self.lost("send to", dst, error) from error

    def isend(self, tensor: torch.Tensor, dst: int) -> P2PWork:
        """Start to send a contiguous tensor. Raises PeerLost where the peer is known to be gone already."""
        try:
            work = P2PWork(self, self.process_group.send([tensor], dst, TAG), tensor, dst)
        except RuntimeError as error:
            raise self.lost("send to", dst, error) from error
        self.in_flight.add(work)
        return work

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receive into a contiguous tensor of the sender's size. Raises PeerLost."""
        try:
            self.process_group.recv([tensor], src, TAG).wait()
        except RuntimeError as error:
            raise self.lost("receive from", src, error) from error

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """tensor = rank src's, on every rank. Raises PeerLost."""
        self.ibroadcast(tensor, src)()

    def ibroadcast(self, tensor: torch.Tensor, src: int) -> Callable[[], None]:
        """Start a broadcast of a contiguous tensor; what is returned waits for it. Both raise PeerLost."""
        # libraries broadcast few dtypes, and bytes always
        tensor = as_bytes(tensor)
        what = "receive a broadcast of" if self.rank != src else "broadcast as"
        try:
            work: Any = dist.broadcast(tensor, self.ranks[src], group=self.process_group, async_op=True)
        except RuntimeError as error:
            raise self.lost(what, src, error) from error

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self.lost(what, src, error) from error

        return wait

    def lost(self, what: str, peer: int, error: RuntimeError) -> PeerLost:
        text = str(error).strip()
        return PeerLost(
            f"rank {self.rank} of group {self.name} could not {what} rank {peer} (global rank {self.ranks[peer]}): "
            f"{text.splitlines()[0] if text else type(error).__name__}",
            peer,
        )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as bytes, in one dimension: what any library moves, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)
