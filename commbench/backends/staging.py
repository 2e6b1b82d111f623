"""Memory that kernels reach on every rank, which inputs are copied into: it grows as calls need it, up to a cap."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from commbench.errors import BackendUnavailable, CollectiveError, SpecError
from commbench.units import format_size, parse_size

FIRST_BYTES = 1 << 20
_MOST_VIEWS = 1024


def bytes_from_environment(backend: str, variable: str, default: int) -> int:
    """A number of bytes from an environment variable such as ``8MiB``. Raises BackendUnavailable for anything else."""
    text = os.environ.get(variable, "")
    try:
        size = parse_size(text) if text else default
    except SpecError as error:
        raise BackendUnavailable(backend, f"{variable}={text}: {error}", _remedy(variable)) from error
    if size <= 0:
        raise BackendUnavailable(backend, f"{variable}={text} leaves no room", _remedy(variable))
    return size


def _remedy(variable: str) -> str:
    return f"set {variable} to a size, such as 8MiB"


def front(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The first bytes of a uint8 tensor, with another's shape and dtype."""
    size_bytes = tensor.numel() * tensor.element_size()
    return memory[:size_bytes].view(tensor.dtype).view(tensor.shape)


class Views:
    """The front of some memory (uint8) as tensors; the same object for every tensor of one shape and dtype."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._views: dict[tuple[torch.dtype, torch.Size], torch.Tensor] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """With that tensor's shape and dtype; it must fit."""
        key = (tensor.dtype, tensor.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            view = self._views[key] = front(self._memory, tensor)
        return view


class Staging:
    """Memory of one rank that all ranks of the group have beside each other.

    make(size_bytes): a uint8 tensor of that many bytes in such memory; collective, raises the same on all ranks. What
    was made before stays: kernels of other ranks may still read it. Ranks ask for the same sizes in the same order,
    as their calls are alike.
    """

    def __init__(self, backend: str, cap_bytes: int, make: Callable[[int], torch.Tensor]) -> None:
        self.backend, self.cap_bytes = backend, cap_bytes
        self._make = make
        self._views: dict[tuple[torch.dtype, torch.Size], torch.Tensor] = {}
        self._made: list[torch.Tensor] = []
        self.size_bytes = 0
        self.reserve(min(FIRST_BYTES, cap_bytes))

    def reserve(self, size_bytes: int) -> None:
        """Have room for so many bytes. Collective where there is less. Raises CollectiveError above the cap."""
        if size_bytes <= self.size_bytes:
            return
        if size_bytes > self.cap_bytes:
            raise CollectiveError(
                f"{self.backend}: {format_size(size_bytes)} do not fit its buffer, which grows to "
                f"{format_size(self.cap_bytes)}"
            )
        grown = min(self.cap_bytes, 1 << (size_bytes - 1).bit_length())
        self._made.append(self._make(grown))
        self._views.clear()
        self.size_bytes = grown

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The front of the memory with a tensor's shape and dtype; the same object for every call alike."""
        key = (tensor.dtype, tensor.shape)
        view = self._views.get(key)
        return self._view(key, tensor) if view is None else view

    def _view(self, key: tuple[torch.dtype, torch.Size], tensor: torch.Tensor) -> torch.Tensor:
        self.reserve(tensor.numel() * tensor.element_size())
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        view = self._views[key] = front(self._made[-1], tensor)
        return view

    def release(self) -> None:
        """Let go of all memory."""
        self._views.clear()
        self._made.clear()
        self.size_bytes = 0
