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


class Views(dict[torch.Size, torch.Tensor]):
    """``views[shape]``: the front of some memory (uint8) in one dtype, the same object every time.

    memory(size_bytes): memory of that many bytes or more; asked when a shape is new.
    """

    def __init__(self, dtype: torch.dtype, memory: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._dtype, self._memory = dtype, memory

    def __missing__(self, shape: torch.Size) -> torch.Tensor:
        size_bytes = shape.numel() * self._dtype.itemsize
        memory = self._memory(size_bytes)
        if len(self) >= _MOST_VIEWS:
            self.clear()
        view = self[shape] = memory[:size_bytes].view(self._dtype).view(shape)
        return view


class Staging:
    """Memory of one rank that all ranks of the group have beside each other; ``views(dtype)`` are its front.

    make(size_bytes): a uint8 tensor of that many bytes in such memory; collective, raises the same on all ranks. What
    was made before stays: kernels of other ranks may still read it. Ranks ask for the same sizes in the same order,
    as their calls are alike.
    """

    def __init__(self, backend: str, cap_bytes: int, make: Callable[[int], torch.Tensor]) -> None:
        self.backend, self.cap_bytes = backend, cap_bytes
        self._make = make
        self._made: list[torch.Tensor] = []
        self._views: dict[torch.dtype, Views] = {}
        self.size_bytes = 0
        self.reserve(min(FIRST_BYTES, cap_bytes))

    def views(self, dtype: torch.dtype) -> Views:
        """Shape → the front of the memory, which grows where it is not enough; the same object every time."""
        if dtype not in self._views:
            self._views[dtype] = Views(dtype, self._room)
        return self._views[dtype]

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
        self._forget_views()
        self.size_bytes = grown

    def _room(self, size_bytes: int) -> torch.Tensor:
        self.reserve(size_bytes)
        return self._made[-1]

    def _forget_views(self) -> None:
        for views in self._views.values():
            views.clear()

    def release(self) -> None:
        """Let go of all memory."""
        self._forget_views()
        self._made.clear()
        self.size_bytes = 0
