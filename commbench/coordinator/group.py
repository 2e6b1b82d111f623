"""GroupCoordinator: every collective of a group goes through here and takes the backend that the policy picks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commbench.backends.base import Group
from commbench.coordinator import names, objects
from commbench.coordinator import tensor_dict as _tensor_dict
from commbench.coordinator.collectives import TensorCollectives
from commbench.coordinator.hints import Hints
from commbench.coordinator.message_queue import MessageQueue
from commbench.coordinator.p2p import Channel, P2PWork, as_bytes
from commbench.coordinator.routing import DTYPE_NAMES, Route, layout_of
from commbench.errors import CollectiveError, PeerLost
from commbench.policy import Policy
from commbench.types import Platform

__all__ = ["DTYPE_NAMES", "GraphCaptureContext", "GroupCoordinator", "P2PWork", "Route", "layout_of"]

logger = logging.getLogger(__name__)
_QUEUE_WRITER = 0  # the rank whose objects go through a group's own message queue


@dataclass(frozen=True, slots=True)
class GraphCaptureContext:
    """What all groups share while a graph is captured. stream: None on the CPU, which has none."""

    stream: Any


class GroupCoordinator(TensorCollectives):
    """The communication of one group of ranks: collectives dispatched by a policy, objects, point-to-point traffic.

    Every rank of the group constructs it with the same arguments. ``backends`` names those to set up beside the
    policy's own, ``hints`` those to leave out. ``name`` is the group's kind (``tp``); ``unique_name`` adds a number.
    With ``owns_process_groups`` the torch process groups end with ``destroy``. Ranks given to methods (``src``,
    ``dst``) are ranks in the group.
    """

    def __init__(
        self,
        group: Group,
        policy: Policy,
        platform: Platform,
        backends: Sequence[str] = (),
        *,
        local_rank: int = 0,
        hints: Hints | None = None,
        owns_process_groups: bool = False,
        check_calls: bool = False,
    ) -> None:
        self.hints = Hints() if hints is None else hints
        self.unique_name = names.unique_name(group.name)
        self.local_rank = local_rank
        self._owns_process_groups = owns_process_groups
        super().__init__(
            group, policy, platform, backends, switched_off=self.hints.switched_off(), check_calls=check_calls
        )
        self._cpu = Channel(group.cpu_group, group.name, group.ranks, group.rank)
        self._device = (
            self._cpu
            if group.device_group is group.cpu_group
            else Channel(group.device_group, group.name, group.ranks, group.rank)
        )
        self._channels = _tensor_dict.Channels(self._cpu, self._device, group.device)
        self.message_queue: MessageQueue | None = None
        if self.hints.message_queue and self.world_size > 1:
            self.message_queue = MessageQueue(group.cpu_group, writer=_QUEUE_WRITER)
        names.register(self)

    def __repr__(self) -> str:
        return f"<GroupCoordinator {self.unique_name} rank {self.rank_in_group} of {list(self.ranks)}>"

    # ---- who is here ----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.group.ranks[self.group.rank]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in the group's order."""
        return self.group.ranks

    @property
    def device(self) -> torch.device:
        return self.group.device

    @property
    def cpu_group(self) -> Any:
        """The torch process group for objects and set-up (gloo)."""
        return self.group.cpu_group

    @property
    def device_group(self) -> Any:
        """The torch process group of the device: nccl, or the gloo group itself on the CPU."""
        return self.group.device_group

    @property
    def first_rank(self) -> int:
        """Global rank of the group's first."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """Global rank of the group's last."""
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def next_rank(self) -> int:
        """Global rank of the next in the group; after the last comes the first."""
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        """Global rank of the one before; before the first comes the last."""
        return self.ranks[(self.rank_in_group - 1) % self.world_size]

    # ---- objects --------------------------------------------------------------------------------------

    def send_object(self, obj: Any, dst: int, async_send: bool = False) -> list[P2PWork]:
        """Send any object that pickles to rank dst, over the CPU group.

        async_send: returns at once with the works to wait for, else with []. Raises CollectiveError for a wrong dst
        and for an object that cannot be pickled (also on the receiver), PeerLost naming a receiver that is gone.
        """
        self._check_peer("send_object", "dst", dst)
        self._own_calls["torch_dist"] += 1
        if async_send:
            return objects.isend(self._cpu, obj, dst)
        objects.send(self._cpu, obj, dst)
        return []

    def recv_object(self, src: int) -> Any:
        """The next object that rank src sends, either way. Raises CollectiveError for a wrong src or an object that
        src could not pickle, and PeerLost naming a sender that is gone or sends nothing within the timeout."""
        self._check_peer("recv_object", "src", src)
        self._own_calls["torch_dist"] += 1
        return objects.recv(self._cpu, src)

    def broadcast_object(self, obj: Any = None, src: int = 0, *, through_queue: bool = True) -> Any:
        """Rank src's object on every rank. Through the message queue where the group has one and src is its writer,
        unless through_queue is false.

        Raises CollectiveError (on every rank) for an object that cannot be pickled, PeerLost as ``recv_object``.
        """
        self._check_usable("broadcast_object")
        self._check_rank("broadcast_object", "src", src)
        if self.world_size == 1:
            return obj
        if through_queue and self.message_queue is not None and src == _QUEUE_WRITER:
            self._own_calls["message_queue"] += 1
            return self.message_queue.broadcast_object(obj)
        self._own_calls["torch_dist"] += 1
        return objects.broadcast(self._cpu, obj, src)

    def broadcast_object_list(self, obj_list: list[Any], src: int = 0) -> list[Any]:
        """Every rank's obj_list (of one length) filled with rank src's objects, in place. Gives obj_list."""
        self._check_usable("broadcast_object_list")
        self._check_rank("broadcast_object_list", "src", src)
        if self.world_size == 1:
            return obj_list
        self._own_calls["torch_dist"] += 1
        theirs = objects.broadcast(self._cpu, obj_list, src)
        if len(theirs) != len(obj_list):
            raise CollectiveError(
                f"broadcast_object_list: room for {len(obj_list)} objects, rank {src} sends {len(theirs)}"
            )
        obj_list[:] = theirs
        return obj_list

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, in rank order. Raises CollectiveError on every rank if one cannot be pickled."""
        self._check_usable("all_gather_object")
        if self.world_size == 1:
            return [obj]
        self._own_calls["torch_dist"] += 1
        return objects.all_gather(self._cpu, obj)

    # ---- dictionaries of tensors ------------------------------------------------------------------------

    def broadcast_tensor_dict(self, tensor_dict: Mapping[str, Any] | None = None, src: int = 0) -> dict[str, Any]:
        """Rank src's dictionary (tensors of any shape, and values that pickle) on every rank.

        CPU tensors go over the CPU group, others over the device group; empty ones are made, not sent. Receivers get
        new tensors on their own device. Raises CollectiveError where rank src gives no dictionary.
        """
        self._check_usable("broadcast_tensor_dict")
        self._check_rank("broadcast_tensor_dict", "src", src)
        if self.world_size == 1:
            return dict(_tensor_dict.check("broadcast_tensor_dict", tensor_dict))
        self._own_calls["torch_dist"] += 1
        return _tensor_dict.broadcast(self._channels, tensor_dict, src)

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        async_send: bool = False,
    ) -> list[P2PWork]:
        """Send a dictionary (tensors of any shape, and values that pickle) to rank dst, None for the next rank.

        all_gather_group: a group that stands at both ends (the tensor-parallel one in a pipeline) whose ranks hold the
        same tensors: each sends one part of every tensor that divides evenly, and the receivers gather them.
        async_send: isend; gives the works to wait for, before which no tensor may change. Else, and in a group of
        one rank (where nothing is sent), gives []. Raises as ``send_object``.
        """
        self._check_usable("send_tensor_dict")
        values = _tensor_dict.check("send_tensor_dict", tensor_dict)
        if self.world_size == 1:
            return []
        if dst is None:
            dst = (self.rank_in_group + 1) % self.world_size
        self._check_peer("send_tensor_dict", "dst", dst)
        self._own_calls["torch_dist"] += 1
        return _tensor_dict.send(self._channels, values, dst, all_gather_group, async_send)

    def recv_tensor_dict(
        self, src: int | None = None, all_gather_group: GroupCoordinator | None = None
    ) -> dict[str, Any] | None:
        """The next dictionary from rank src, None for the rank before. None in a group of one rank.

        all_gather_group: as the sender's; another size raises CollectiveError when the sender did cut a tensor.
        Raises as ``recv_object``.
        """
        self._check_usable("recv_tensor_dict")
        if self.world_size == 1:
            return None
        if src is None:
            src = (self.rank_in_group - 1) % self.world_size
        self._check_peer("recv_tensor_dict", "src", src)
        self._own_calls["torch_dist"] += 1
        return _tensor_dict.recv(self._channels, src, all_gather_group)

    # ---- tensors from one rank to another -----------------------------------------------------------------

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send a tensor to rank dst (None: the next); on return it may change. Raises as ``send_object``."""
        if dst is None:
            dst = (self.rank_in_group + 1) % self.world_size
        self._pass_on("send", _movable(tensor), dst, "dst")

    def recv(self, size: torch.Size | Sequence[int], dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """A tensor of that size and dtype, on the group's device, from rank src (None: the one before).

        It must be what src sends; another size raises CollectiveError or PeerLost, or fails on src.
        """
        if src is None:
            src = (self.rank_in_group - 1) % self.world_size
        tensor = torch.empty(tuple(size), dtype=dtype, device=self.device)
        self._pass_on("recv", _movable(tensor), src, "src")
        return tensor

    def _pass_on(self, collective: str, tensor: torch.Tensor, peer: int, word: str) -> None:
        key = (collective, tensor.dtype, tensor.numel(), peer, self._mode)
        route = self._routes.get(key)
        if route is None:
            self._check_peer(collective, word, peer)
            route = self._undisputed(key, collective, tensor)
        try:
            route.method(tensor, peer)
        except RuntimeError as error:
            what = "send to" if collective == "send" else "receive from"
            raise self._device.lost(what, peer, error) from error

    def _undisputed(self, key: tuple[Any, ...], collective: str, tensor: torch.Tensor) -> Route:
        """Decide a call that two ranks make, so that nobody else could be asked about it."""
        checking, self._check_calls = self._check_calls, False
        try:
            return self._decided(key, collective, tensor, "", "in", ())
        finally:
            self._check_calls = checking

    # ---- modes ------------------------------------------------------------------------------------------

    @contextmanager
    def graph_capture(self, context: GraphCaptureContext | None = None) -> Iterator[GraphCaptureContext]:
        """Around the capture of a graph: one stream for all groups, decisions of mode ``graph``, and every backend in
        its capture state (what only graphs use is on; buffers are registered when the capture is over).

        context: another group's, whose stream is shared. Everything is as before afterwards, whatever happens.
        """
        self._check_usable("graph_capture")
        with ExitStack() as stack:
            if context is None:
                context = GraphCaptureContext(_new_stream(self.device))
            if context.stream is not None:
                module = torch.get_device_module(self.device)
                current = module.current_stream()
                if current != context.stream:
                    # what is being set up must be there before a graph refers to it
                    context.stream.wait_stream(current)
                stack.enter_context(module.stream(context.stream))
            for backend in self._set.ready.values():
                stack.enter_context(backend.capture())
            stack.enter_context(self.in_mode("graph"))
            yield context

    @contextmanager
    def compiled(self, method: str) -> Iterator[GroupCoordinator]:
        """Around a call from a compiled graph. method: the backend that was forced while tracing, "" for none."""
        with self.in_mode("compile" if self._mode == "eager" else self._mode), self.forcing(method or self._forced):
            yield self

    @contextmanager
    def in_mode(self, mode: str) -> Iterator[None]:
        """Decisions as in that mode, while calls run at once: what a capture will take is warmed up so."""
        before = self._mode
        self._mode = mode
        try:
            yield
        finally:
            self._mode = before

    # ---- the end ------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Wait for sends in flight, release every backend, the message queue and owned process groups.

        The coordinator cannot be used afterwards. May be called twice.
        """
        if self._closed:
            return
        for work in list(self._cpu.in_flight | self._device.in_flight):
            try:
                work.wait()
            except PeerLost as error:
                logger.warning("%s: a send that nobody waited for failed: %s", self.unique_name, error)
        self._close_backends()
        if self.message_queue is not None:
            self.message_queue.close()
            self.message_queue = None
        if self._owns_process_groups and dist.is_initialized():
            groups = {id(g): g for g in (self.group.device_group, self.group.cpu_group)}
            for process_group in groups.values():
                with contextlib.suppress(ValueError):  # it ended with the default group
                    dist.destroy_process_group(process_group)

    def _check_peer(self, what: str, word: str, rank: int) -> None:
        self._check_usable(what)
        self._check_rank(what, word, rank)
        if rank == self.rank_in_group:
            raise CollectiveError(f"{what}: {word}={rank} is this rank itself")


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as dense memory of a dtype that backends know: its bytes where they do not know its own."""
    tensor = tensor.contiguous()
    if tensor.dtype in DTYPE_NAMES:
        return tensor
    return as_bytes(tensor)


def _new_stream(device: torch.device) -> Any:
    """A stream for capture; None where the device has no streams."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).Stream(device=device)
