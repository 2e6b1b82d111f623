"""What an engine offers to a trainer: a weight-update group that its ranks join, and the weights that came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commbench.errors import UsageError
from commbench.harness.engine.arrays import Packed
from commbench.harness.engine.calls import PartOfEngine

DEFAULT_BUCKET_BYTES = 64 << 20  # as coordinator.weights has it
DEFAULT_GROUP = "weight_update_group"


@dataclass(frozen=True, slots=True)
class Received:
    """What one rank got in a weight update: bytes, and the seconds it took on that rank."""

    rank: int
    size_bytes: int
    seconds: float


class WeightUpdates(PartOfEngine):
    """The methods of ``Engine`` that concern weights from a trainer."""

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int = 1,
        world_size: int | None = None,
        group_name: str = DEFAULT_GROUP,
        backend: str = "gloo",
        timeout_s: float = 300.0,
    ) -> None:
        """The ranks join a weight-update group: rank r as rank_offset + r, of world_size (default: all and a trainer).

        The trainer is rank 0, elsewhere (``commbench.coordinator.weights.init_weights_update_group``), and must join
        meanwhile. Raises CollectiveError when it is not found, UsageError for a group that exists, a port that is
        none, and other values that cannot be.
        """
        what = "init_weights_update_group"
        if isinstance(master_port, bool) or not isinstance(master_port, int) or not 0 < master_port < 1 << 16:
            raise UsageError(f"{what}: master_port={master_port!r} is no port (1 to 65535)")
        if not isinstance(master_address, str) or not master_address:
            raise UsageError(f"{what}: master_address={master_address!r} is no host name or address")
        check_whole(what, "rank_offset", rank_offset)
        size = self.ranks + rank_offset if world_size is None else world_size
        check_whole(what, "world_size", size)
        if size < self.ranks + rank_offset:
            raise UsageError(
                f"{what}: world_size={size} does not hold {self.ranks} ranks from {rank_offset} on; it takes at least "
                f"{self.ranks + rank_offset}"
            )
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
            raise UsageError(f"{what}: timeout_s={timeout_s!r} is no time; give seconds above 0")
        message = {
            "command": what, "master_address": master_address, "master_port": master_port, "rank_offset": rank_offset,
            "world_size": size, "group_name": str(group_name), "backend": str(backend), "timeout_s": timeout_s,
        }  # fmt: skip
        self._calls.run(what, [message] * self.ranks)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = DEFAULT_GROUP,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> list[Received]:
        """Every rank receives these tensors from the trainer, which must send meanwhile; ``weight`` gives them.

        dtypes: torch's, or their names. Raises UsageError where the lists do not fit, CollectiveError where the trainer
        sends something else, PeerLost when it is gone: as this may leave ranks waiting, PeerLost ends the engine.
        """
        what = "update_weights_from_distributed"
        check_whole(what, "bucket_bytes", bucket_bytes)
        message = {
            "command": what, "names": [str(name) for name in names],
            "dtypes": [str(d).removeprefix("torch.") for d in dtypes], "shapes": [_shape(what, s) for s in shapes],
            "group_name": str(group_name), "bucket_bytes": bucket_bytes,
        }  # fmt: skip
        replies = self._calls.run(what, [message] * self.ranks)
        return [Received(rank, r["bytes"], r["seconds"]) for rank, (r, _) in enumerate(replies)]

    def destroy_weights_update_group(self, group_name: str = DEFAULT_GROUP) -> None:
        """The ranks leave the group. Raises CollectiveError when there is none."""
        message = {"command": "destroy_weights_update_group", "group_name": str(group_name)}
        self._calls.run("destroy_weights_update_group", [message] * self.ranks)

    def weight(self, name: str) -> list[Any]:
        """A weight as each rank last received it, as torch tensors. Raises CollectiveError naming those there are."""
        import torch

        replies = self._calls.run("weight", [{"command": "weight", "name": str(name)}] * self.ranks)
        like = Packed({}, b"", torch.empty(0))  # results come as tensors: numpy has no bfloat16
        return [like.rebuilt(reply["arrays"][0], data[0]) for reply, data in replies]


def check_whole(what: str, name: str, value: Any) -> None:
    """Raises UsageError for what is no whole number from 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{what}: {name}={value!r} must be a whole number, at least 1")


def _shape(what: str, shape: Any) -> list[int]:
    try:
        sizes = [int(n) for n in shape]
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: shape {shape!r} is no sequence of whole numbers") from error
    if any(n < 0 for n in sizes):
        raise UsageError(f"{what}: shape {tuple(sizes)} has a negative size")
    return sizes
