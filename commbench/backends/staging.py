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


Key = tuple[torch.dtype, torch.Size]


def front(memory: torch.Tensor, key: Key) -> torch.Tensor:
    """The first bytes of a uint8 tensor, with that dtype and shape."""
    dtype, shape = key
    return memory[: shape.numel() * dtype.itemsize].view(dtype).view(shape)


class Views(dict[Key, torch.Tensor]):
    """``views[dtype, shape]``: the front of some memory (uint8), the same object every time. It must be enough."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self._memory = memory

    def __missing__(self, key: Key) -> torch.Tensor:
        if len(self) >= _MOST_VIEWS:
            self.clear()
        view = self[key] = front(self._memory, key)
        return view


class Staging(dict[Key, torch.Tensor]):
    """Memory of one rank that all ranks of the group have beside each other; ``staging[dtype, shape]`` is its front.

    make(size_bytes): a uint8 tensor of that many bytes in such memory; collective, raises the same on all ranks. What
    was made before stays: kernels of other ranks may still read it. Ranks ask for the same sizes in the same order,
    as their calls are alike.
    """

    def __init__(self, backend: str, cap_bytes: int, make: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.backend, self.cap_bytes = backend, cap_bytes
        self._make = make
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
        self.clear()
        self.size_bytes = grown

    def __missing__(self, key: Key) -> torch.Tensor:
        dtype, shape = key
        self.reserve(shape.numel() * dtype.itemsize)
        if len(self) >= _MOST_VIEWS:
            self.clear()
        view = self[key] = front(self._made[-1], key)
        return view

    def release(self) -> None:
        """Let go of all memory."""
        self.clear()
        self._made.clear()
        self.size_bytes = 0
