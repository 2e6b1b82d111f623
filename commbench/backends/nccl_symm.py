"""NCCL on symmetric memory: buffers that all ranks register as a window, for which NCCL has faster kernels.

A tensor that does not lie in the window is copied into it and back. The window grows as calls need it, up to
COMMBENCH_NCCL_SYMM_MAX_BYTES (256MiB). Which kernel runs is NCCL's own choice. NOT RUN ON HARDWARE.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from commbench.backends import device as devices
from commbench.backends.base import Availability, Group, beyond_sizes, together
from commbench.backends.pynccl import DTYPE_CODES, OP_CODES, OPTIONAL, PyNcclBackend, version_text
from commbench.backends.staging import Staging, bytes_from_environment
from commbench.errors import BackendUnavailable, CollectiveError, PeerLost
from commbench.types import CallSignature
from commbench.units import format_size

MAX_BYTES_VARIABLE = "COMMBENCH_NCCL_SYMM_MAX_BYTES"
DEFAULT_MAX_BYTES = 256 << 20
LEAST_VERSION = 22703  # the first release with windows whose symmetric kernels engines use
COLL_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC of nccl.h


class NcclSymmBackend(PyNcclBackend):
    """``ncclAllReduce`` in a window of symmetric memory."""

    name = "nccl_symm"
    collectives = frozenset({"all_reduce"})

    def __init__(self, group: Group) -> None:
        together(group, self.name, lambda: _check(group))
        super().__init__(group)
        self.max_bytes = min(
            together(group, self.name, lambda: bytes_from_environment(self.name, MAX_BYTES_VARIABLE, DEFAULT_MAX_BYTES))
        )
        self._windows: list[tuple[int, ctypes.c_void_p]] = []  # address, ncclWindow_t
        try:
            self._buffer = Staging(self.name, self.max_bytes, self._make)
        except BackendUnavailable:
            self._comm.abort()
            raise
        self.provider += ", symmetric windows"

    @classmethod
    def availability(cls, device: str) -> Availability:
        problem = devices.missing(device, "cuda")
        if problem is not None:
            return Availability(False, *problem)
        found = super().availability(device)
        if not found.ok:
            return found
        library = cls.find()
        lacking = [name for name in OPTIONAL if not hasattr(library, name)]
        have = found.provider.rpartition(" ")[2]
        if lacking or tuple(map(int, have.split("."))) < (2, 27, 3):
            return Availability(
                False,
                f"NCCL {have} has no symmetric windows, {version_text(LEAST_VERSION)} has",
                "install a newer torch",
            )
        return Availability(True, provider=f"{found.provider}, symmetric windows")

    def declines(self, call: CallSignature) -> str | None:
        return super().declines(call) or beyond_sizes(call, 1, self.max_bytes, MAX_BYTES_VARIABLE)

    # ---- the window -------------------------------------------------------------------------------------------

    def _make(self, size_bytes: int) -> torch.Tensor:
        address = together(self.group, self.name, lambda: self._allocate(size_bytes))[self.group.rank]
        window = ctypes.c_void_p()
        try:
            together(self.group, self.name, lambda: self._register(address, size_bytes, window))
        except BackendUnavailable:
            if not self._comm.left:
                self._library.ncclMemFree(address)
            raise
        self._windows.append((address, window))
        self._low, self._high = address, address + size_bytes
        return devices.at_address(address, size_bytes, self.group.device)

    def _allocate(self, size_bytes: int) -> int:
        memory = ctypes.c_void_p()
        code = self._library.ncclMemAlloc(ctypes.byref(memory), size_bytes)
        if code:
            raise BackendUnavailable(self.name, f"ncclMemAlloc of {format_size(size_bytes)} failed ({code})")
        return int(memory.value or 0)

    def _register(self, address: int, size_bytes: int, window: ctypes.c_void_p) -> None:
        # NCCL's ranks meet in here, as in the set-up of the communicator
        what, handle = "ncclCommWindowRegister", self._handle
        try:
            code = self._comm.in_time(
                what,
                lambda: self._library.ncclCommWindowRegister(
                    handle, address, size_bytes, ctypes.byref(window), COLL_SYMMETRIC
                ),
            )
            if code:
                self._done(code, what)
        except PeerLost as error:
            self._comm.leave()
            self._handle = 0
            raise BackendUnavailable(self.name, str(error)) from error
        except CollectiveError as error:
            raise BackendUnavailable(self.name, str(error)) from error
        if not window.value:
            raise BackendUnavailable(
                self.name,
                "NCCL gave no window for the memory",
                "it needs NVLink between the ranks and NCCL_CUMEM_ENABLE=1",
            )

    # ---- calls ------------------------------------------------------------------------------------------------

    def _path(self, dtype: torch.dtype, numel: int, op: str, *, in_place: bool) -> Callable[..., None]:
        inside = super()._path(dtype, numel, op, in_place=in_place)
        views, dtype_code, op_code = self._buffer.views(dtype), DTYPE_CODES[dtype], OP_CODES[op]

        def all_reduce(input: torch.Tensor, output: torch.Tensor, op: str) -> None:
            low, high = self._low, self._high
            if low <= input.data_ptr() < high and low <= output.data_ptr() < high:
                inside(input, output, op)
                return
            self.calls += 1
            shared = views[input.shape]
            shared.copy_(input)
            self._reduce(shared, shared, numel, dtype_code, op_code)
            output.copy_(shared if output.shape == input.shape else shared.view(output.shape))

        return all_reduce

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._buffer.reserve(self.max_bytes)  # a capture can neither allocate nor meet the other ranks
        yield

    def close(self) -> None:
        self._buffer.release()
        for _, window in self._windows:
            if self._handle:
                self._library.ncclCommWindowDeregister(self._handle, window)
        super().close()
        for address, _ in self._windows:
            if not self._comm.left:
                self._library.ncclMemFree(address)
        self._windows.clear()


def _check(group: Group) -> None:
    if not group.one_host:
        raise BackendUnavailable("nccl_symm", "nothing has proven that all ranks share one host")
    if os.environ.get("NCCL_CUMEM_ENABLE", "") == "0":
        raise BackendUnavailable("nccl_symm", "NCCL_CUMEM_ENABLE=0 turns symmetric memory off", "unset it")
