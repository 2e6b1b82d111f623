"""The contract between the coordinator and a backend.

A backend is one file: a subclass of ``Backend``, one line in ``registry``. It takes tensors that the
coordinator has checked, moves the data, and counts every call it really made: ``backend_picked`` in
the results is read from these counters, never from what a policy predicted.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from commbench.errors import BackendUnavailable, PeerLost
from commbench.types import CallSignature
from commbench.units import format_size

if TYPE_CHECKING:
    import torch

    from commbench.native._shm import BoundCall

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can work in this process, as far as one process can tell.

    ok false: ``reason`` says why in words, ``remedy`` what the user can do ("" if nothing).
    provider: the library behind it with its version, for the results' ``provider`` column.
    """

    ok: bool
    reason: str = ""
    remedy: str = ""
    provider: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks a backend is set up for.

    ranks: global ranks in group order. rank: this process's place in that order. cpu_group is the
    torch process group (gloo) for set-up traffic; device_group the one for the device (the same on CPU).
    one_host is proven by a shared-memory handshake among all ranks, not by counts.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    device: torch.device
    cpu_group: Any
    device_group: Any
    one_host: bool

    @property
    def world_size(self) -> int:
        return len(self.ranks)


class UnavailableTogether(BackendUnavailable):
    """Every rank of the group raises this at the same step, with the same reason."""


def together(group: Group, backend: str, step: Callable[[], T]) -> list[T]:
    """Take a step of a set-up on every rank, and give every rank's value in rank order. Collective.

    ``step`` must not wait for another rank; its value is pickled. Where it raises on a rank, all ranks raise
    UnavailableTogether with the first such rank's reason, so that none waits for one that has given up. A backend's
    constructor does all its talking through this: a rank that fails outside of a step then meets the others in their
    next one (the coordinator compares notes the same way).
    """
    value: T | None = None
    reason = remedy = ""
    waited = False
    try:
        value = step()
    except BackendUnavailable as error:
        reason, remedy = error.reason, error.remedy
        waited = has_waited(error)
    except Exception as error:  # a provider may raise anything; all ranks get to know it
        logger.warning("backend %s failed to set up on rank %d", backend, group.rank, exc_info=True)
        reason = why(error)
        waited = has_waited(error)
    return compare_notes(group, backend, value, reason, remedy, waited=waited)


def compare_notes(
    group: Group, backend: str, value: T | None, reason: str, remedy: str = "", *, waited: bool = False
) -> list[T]:
    """Every rank's value; UnavailableTogether where a rank gives a reason ("" for none). Collective.

    waited: the reason is that another rank did not come, which that rank can tell better.
    """
    import torch.distributed as dist

    notes: list[Any] = [None] * group.world_size
    dist.all_gather_object(notes, (value, reason, remedy, waited), group=group.cpu_group)
    failed = [(late, rank, text, help_text) for rank, (_, text, help_text, late) in enumerate(notes) if text]
    if failed:
        _, rank, text, help_text = min(failed)
        everywhere = len(failed) == group.world_size and len({f[2] for f in failed}) == 1
        raise UnavailableTogether(backend, text if everywhere else f"rank {rank}: {text}", help_text)
    return [note[0] for note in notes]


def has_waited(error: BaseException) -> bool:
    """Whether it says no more than that another rank did not come in time."""
    return isinstance(error, TimeoutError | PeerLost) or isinstance(error.__cause__, TimeoutError | PeerLost)


def why(error: BaseException) -> str:
    """A foreign exception in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def beyond_kernels(call: CallSignature, dtypes: Collection[str], whose: str = "its") -> str | None:
    """Why kernels that sum contiguous tensors of these dtypes cannot take a call, or None; for ``Backend.declines``."""
    if call.dtype not in dtypes:
        return f"{whose} kernels reduce {(' and ' if len(dtypes) == 2 else ', ').join(dtypes)}, not {call.dtype}"
    if call.op != "sum":
        return f"{whose} kernels have op sum, not {call.op}"
    if call.layout != "contiguous":
        return f"{whose} kernels take contiguous tensors, this one is {call.layout}"
    return None


def beyond_cap(call: CallSignature, cap_bytes: int, variable: str) -> str | None:
    """Why a call is larger than a backend's cap, with the environment variable that sets it, or None."""
    if call.size_bytes <= cap_bytes:
        return None
    return f"{format_size(call.size_bytes)} exceed the cap of {format_size(cap_bytes)} ({variable})"


def beyond_sizes(call: CallSignature, pack_bytes: int, cap_bytes: int, variable: str, pack: str = "") -> str | None:
    """Why kernels that move whole packs of so many bytes, up to a cap, cannot take a call of that size, or None.

    variable: as in ``beyond_cap``. pack: what a pack is, in words, where its size does not say it.
    """
    if call.size_bytes == 0:
        return "the tensor is empty"
    if call.size_bytes % pack_bytes:
        return f"{call.size_bytes} bytes is not a multiple of {pack_bytes}" + (f", {pack}" if pack else "")
    return beyond_cap(call, cap_bytes, variable)


class Backend(ABC):
    """One way to run collectives on one group.

    The constructor is collective: every rank of the group calls it, or none. It raises
    BackendUnavailable where this rank cannot take part; the coordinator then disables the backend on
    all ranks with that reason. Where ranks talk to each other in it, they do so through ``together``.

    Operations: tensors are dense unless ``declines`` says nothing against strided ones. ``output`` may
    be ``input`` itself where the placement is in-place. ``op`` is a name of types.OPS. ``src`` and
    ``dst`` are ranks in the group. Each operation ends complete: the result may be read when it returns
    (on the current stream, for devices). Each adds one to ``calls``.
    """

    name: ClassVar[str]
    collectives: ClassVar[frozenset[str]]
    # Other ranks open the memory of captured inputs for good: freed and given out anew, it could not be opened again
    opens_inputs: ClassVar[bool] = False

    def __init__(self, group: Group) -> None:
        self.group = group
        self.calls = 0
        self.provider = ""  # the library behind it with its version, where only the constructor finds out
        self.quantised = ""  # a level of types.QUANTISED at which data travel; "": they arrive as they are

    @classmethod
    @abstractmethod
    def availability(cls, device: str) -> Availability:
        """Whether it can work in this process on ``cpu``, ``cuda``, …; cheap, touches no group."""

    def declines(self, call: CallSignature) -> str | None:
        """Why this backend cannot run that call correctly (its hard limits), or None if it can.

        Must depend on the signature alone, so that all ranks answer alike.
        """
        if call.collective not in self.collectives:
            return f"has no {call.collective}"
        return None

    def bound(self, call: CallSignature) -> Callable[..., None]:
        """The operation for calls of one signature, which ``declines`` does not refuse: what depends on the signature
        alone is worked out here, once. Takes the operation's arguments; the operation itself unless overridden."""
        operation: Callable[..., None] = getattr(self, call.collective)
        return operation

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        """output = reduction of every rank's input; both of one number of elements."""
        raise self._missing("all_reduce")

    def all_gather(self, input: torch.Tensor, output: torch.Tensor) -> None:
        """output (n × numel) = the inputs in rank order; in place, input is output's own part."""
        raise self._missing("all_gather")

    def reduce_scatter(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        """output = this rank's part of the reduction of the inputs (n × numel of output)."""
        raise self._missing("reduce_scatter")

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """tensor = rank src's tensor."""
        raise self._missing("broadcast")

    def all_to_all(self, input: torch.Tensor, output: torch.Tensor) -> None:
        """Part i of output = this rank's part of rank i's input; both split into n equal parts."""
        raise self._missing("all_to_all")

    def reduce(self, input: torch.Tensor, output: torch.Tensor, dst: int, op: str) -> None:
        """On dst: output = reduction of the inputs. Elsewhere output's content is undefined."""
        raise self._missing("reduce")

    def gather(self, input: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        """On dst: output (n × numel) = the inputs in rank order; None elsewhere."""
        raise self._missing("gather")

    def scatter(self, input: torch.Tensor | None, output: torch.Tensor, src: int) -> None:
        """output = this rank's part of src's input (n × numel); input is None elsewhere."""
        raise self._missing("scatter")

    def send_recv(self, input: torch.Tensor, output: torch.Tensor, dst: int, src: int) -> None:
        """Send input to dst while receiving output from src, without deadlock when all ranks call it."""
        raise self._missing("send_recv")

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send to rank dst; returns when the tensor may be changed again."""
        raise self._missing("send")

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Receive into tensor from rank src."""
        raise self._missing("recv")

    def all_gatherv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int]) -> None:
        """all_gather where rank i gives sizes[i] rows (first dimension)."""
        raise self._missing("all_gatherv")

    def reduce_scatterv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int], op: str) -> None:
        """reduce_scatter where rank i gets sizes[i] rows (first dimension)."""
        raise self._missing("reduce_scatterv")

    def barrier(self) -> None:
        """Returns on no rank before every rank has called it."""
        raise self._missing("barrier")

    def capture(self) -> AbstractContextManager[None]:
        """Entered around the capture of a graph and left after it, also when the capture fails.

        Here a backend turns on what it does in graphs only, and registers buffers when the capture is over.
        """
        return nullcontext()

    def native_call(
        self, collective: str, input: torch.Tensor, output: torch.Tensor | None, op: str = "sum", root: int = 0
    ) -> BoundCall | None:
        """The collective on these tensors bound for the native timed loop; None where it cannot be.

        Whoever runs it adds the iterations to ``calls``.
        """
        return None

    def split_at(self, size_bytes: int) -> None:  # noqa: B027 - optional: most backends have one kernel
        """Take the kernel for small messages up to and including that size, the other one above.

        Called alike on all ranks, between collectives.
        """

    def close(self) -> None:  # noqa: B027 - optional: a backend without resources has nothing to release
        """Release what it holds; called once, by every rank of a living group."""

    def _missing(self, collective: str) -> BackendUnavailable:
        return BackendUnavailable(self.name, f"it has no {collective}")
