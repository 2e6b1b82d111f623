"""The collectives of a group of one rank: nothing is sent, outputs are copies of inputs."""

from __future__ import annotations

import torch

from commbench.backends.base import Availability, Backend
from commbench.errors import CollectiveError
from commbench.types import COLLECTIVES


class AloneBackend(Backend):
    """Not in the registry: a coordinator takes it, and no other, when its group has one rank."""

    name = "alone"
    collectives = frozenset(COLLECTIVES)

    @classmethod
    def availability(cls, device: str) -> Availability:
        return Availability(True, provider="none")

    def _copy(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self.calls += 1
        if output is not input:
            output.copy_(input.reshape(output.shape))

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self._copy(input, output)

    def all_gather(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self._copy(input, output)

    def reduce_scatter(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self._copy(input, output)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self.calls += 1

    def all_to_all(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self._copy(input, output)

    def reduce(self, input: torch.Tensor, output: torch.Tensor, dst: int, op: str) -> None:
        self._copy(input, output)

    def gather(self, input: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        if output is None:
            raise CollectiveError("gather: rank 0 receives and needs an output")
        self._copy(input, output)

    def scatter(self, input: torch.Tensor | None, output: torch.Tensor, src: int) -> None:
        if input is None:
            raise CollectiveError("scatter: rank 0 sends and needs an input")
        self._copy(input, output)

    def send_recv(self, input: torch.Tensor, output: torch.Tensor, dst: int, src: int) -> None:
        self._copy(input, output)

    def all_gatherv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int]) -> None:
        self._copy(input, output)

    def reduce_scatterv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int], op: str) -> None:
        self._copy(input, output)

    def barrier(self) -> None:
        self.calls += 1
