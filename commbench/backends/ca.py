"""Custom all-reduce: the engines' kernels that read the other GPUs' memory through CUDA IPC.

Providers (COMMBENCH_CA_PROVIDER, --ca-provider; else the first that is installed): ``sgl_kernel``, ``vllm``,
``flashinfer``. They share one design. Every rank opens every other's buffers. Outside of graphs the input is copied
into the rank's buffer first. In a graph the kernel reads inputs where they are: after the capture all ranks exchange
their addresses (``capture`` does it, before any replay). COMMBENCH_CA_MAX_BYTES (8MiB) is the largest message.
NOT RUN ON HARDWARE.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from commbench.backends import device as devices
from commbench.backends import gpu_links
from commbench.backends.base import Availability, Backend, Group, beyond_cap, beyond_kernels, together
from commbench.backends.staging import bytes_from_environment
from commbench.errors import BackendUnavailable, CollectiveError
from commbench.types import CallSignature

PROVIDER_VARIABLE = "COMMBENCH_CA_PROVIDER"
MAX_BYTES_VARIABLE = "COMMBENCH_CA_MAX_BYTES"
DEFAULT_MAX_BYTES = 8 << 20  # what engines give it
WORLD_SIZES = (2, 4, 6, 8)  # what the kernels are compiled for
DTYPE_NAMES = ("float32", "float16", "bfloat16")
PACK = 16  # bytes that a thread moves at once: sizes are multiples of it, addresses lie on it
RANK_DATA_BYTES = 8 << 20  # addresses of registered buffers, 64 bytes each
FLASHINFER_CTAS = 36  # the most that its kernel takes, and what vLLM's own launches

# ---- providers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Functions:
    """A provider's functions, called alike. fa: the handle that ``init`` gives."""

    init: Callable[..., int]  # (ipc pointers of all ranks, rank data, rank, NVLink) → fa
    all_reduce: Callable[..., None]  # (fa, input, output, own buffer's address or 0, its bytes or 0)
    register_buffer: Callable[..., None]  # (fa, ipc pointers of all ranks)
    graph_meta: Callable[..., Any]  # (fa) → handle bytes, offsets
    register_graph: Callable[..., None]  # (fa, handles of all ranks, offsets of all ranks)
    meta_size: Callable[..., int]
    dispose: Callable[..., None]


def _sgl_kernel() -> Functions:
    m = importlib.import_module("sgl_kernel.allreduce")
    return Functions(
        m.init_custom_ar, m.all_reduce, m.register_buffer, m.get_graph_buffer_ipc_meta, m.register_graph_buffers,
        m.meta_size, m.dispose,
    )  # fmt: skip


def _vllm() -> Functions:
    m = importlib.import_module("vllm._custom_ops")
    return Functions(
        m.init_custom_ar, m.all_reduce, m.register_buffer, m.get_graph_buffer_ipc_meta, m.register_graph_buffers,
        m.meta_size, m.dispose,
    )  # fmt: skip


def _flashinfer() -> Functions:
    m = importlib.import_module("flashinfer.comm")
    return Functions(
        m.vllm_init_custom_ar, functools.partial(m.vllm_all_reduce, num_ctas=FLASHINFER_CTAS), m.vllm_register_buffer,
        m.vllm_get_graph_buffer_ipc_meta, m.vllm_register_graph_buffers, m.vllm_meta_size, m.vllm_dispose,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Provider:
    """module: what must be importable; package: what to install."""

    module: str
    package: str
    load: Callable[[], Functions]


PROVIDERS: dict[str, Provider] = {
    "sgl_kernel": Provider("sgl_kernel", "sgl-kernel", _sgl_kernel),
    "vllm": Provider("vllm", "vllm", _vllm),
    "flashinfer": Provider("flashinfer", "flashinfer-python", _flashinfer),
}


def choose_provider() -> str:
    """The provider asked for, or the first installed. Raises BackendUnavailable."""
    asked = os.environ.get(PROVIDER_VARIABLE, "")
    known = ", ".join(PROVIDERS)
    if asked and asked not in PROVIDERS:
        raise BackendUnavailable("ca", f"{PROVIDER_VARIABLE}={asked} is no provider", f"choose one of {known}")
    for name in [asked] if asked else PROVIDERS:
        if importlib.util.find_spec(PROVIDERS[name].module) is not None:
            return name
    if asked:
        raise BackendUnavailable("ca", f"{asked} is not installed", f"pip install {PROVIDERS[asked].package}")
    packages = ", ".join(p.package for p in PROVIDERS.values())
    raise BackendUnavailable("ca", f"no provider is installed ({known})", f"pip install one of {packages}")


def provider_version(provider: str) -> str:
    """``sgl_kernel 0.3.14``."""
    packages = metadata.packages_distributions().get(PROVIDERS[provider].module, [PROVIDERS[provider].package])
    try:
        return f"{provider} {metadata.version(packages[0])}"
    except metadata.PackageNotFoundError:
        return provider


# ---- memory that other processes open: CUDA's runtime -----------------------------------------------------------


class IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * 64)]


_INT, _POINTER, _SIZE = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
RUNTIME_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "cudaMalloc": (_INT, (ctypes.POINTER(_POINTER), _SIZE)),
    "cudaFree": (_INT, (_POINTER,)),
    "cudaMemset": (_INT, (_POINTER, _INT, _SIZE)),
    "cudaDeviceSynchronize": (_INT, ()),
    "cudaIpcGetMemHandle": (_INT, (ctypes.POINTER(IpcHandle), _POINTER)),
    "cudaIpcOpenMemHandle": (_INT, (ctypes.POINTER(_POINTER), IpcHandle, ctypes.c_uint)),
    "cudaIpcCloseMemHandle": (_INT, (_POINTER,)),
    "cudaGetErrorString": (ctypes.c_char_p, (_INT,)),
}


def load_runtime() -> Any:
    """The CUDA runtime that torch has loaded into this process, with typed functions. Raises OSError."""
    library = ctypes.CDLL(_runtime_path())
    for name, (result, arguments) in RUNTIME_FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _runtime_path() -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith("libcudart"):
            return path
    return f"libcudart.so.{(torch.version.cuda or '12').partition('.')[0]}"


class SharedBuffers:
    """One buffer on each rank, each opened by all: ``pointers[i]`` is rank i's as this process sees it."""

    def __init__(self, group: Group, backend: str, runtime: Any, size_bytes: int) -> None:
        """Collective, all ranks or none."""
        self._runtime, self._rank = runtime, group.rank
        self.own = 0
        self.pointers: list[int] = []
        self._opened: list[int] = []
        handles = together(group, backend, lambda: self._allocate(size_bytes))
        together(group, backend, lambda: self._open(handles))

    def _allocate(self, size_bytes: int) -> bytes:
        memory, handle = ctypes.c_void_p(), IpcHandle()
        self._call("cudaMalloc", ctypes.byref(memory), size_bytes)
        self.own = int(memory.value or 0)
        self._call("cudaMemset", memory, 0, size_bytes)  # flags in it count from zero
        self._call("cudaDeviceSynchronize")
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), memory)
        return bytes(handle)

    def _open(self, handles: list[bytes]) -> None:
        for rank, handle in enumerate(handles):
            if rank == self._rank:
                self.pointers.append(self.own)
                continue
            memory = ctypes.c_void_p()
            self._call(
                "cudaIpcOpenMemHandle", ctypes.byref(memory), IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
            )
            self._opened.append(int(memory.value or 0))
            self.pointers.append(self._opened[-1])

    def _call(self, name: str, *arguments: Any) -> None:
        problem = getattr(self._runtime, name)(*arguments)
        if problem:
            text = (self._runtime.cudaGetErrorString(problem) or b"?").decode()
            raise BackendUnavailable("ca", f"{name} failed: {text} ({problem})")

    def close(self) -> None:
        for pointer in self._opened:
            self._runtime.cudaIpcCloseMemHandle(pointer)
        if self.own:
            self._runtime.cudaFree(self.own)
        self._opened, self.pointers, self.own = [], [], 0


# ---- the backend ---------------------------------------------------------------------------------------------


class CustomAllReduceBackend(Backend):
    """See the module's text."""

    name = "ca"
    collectives = frozenset({"all_reduce"})
    opens_inputs = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        facts = together(group, self.name, self._facts)
        if len({f[0] for f in facts}) > 1:
            raise BackendUnavailable(self.name, f"the ranks have different providers: {', '.join(f[0] for f in facts)}")
        self.provider_name, self.max_bytes = facts[0][0], min(f[1] for f in facts)
        gpus = [f[2] for f in facts]
        answers = together(group, self.name, lambda: self._links(gpus))
        self.nvlink = all(answers)
        if group.world_size > 2 and not self.nvlink:
            raise BackendUnavailable(self.name, f"{group.world_size} GPUs are not all linked by NVLink", "use pynccl")
        self._functions = together_load(group, self.provider_name)
        self.provider = provider_version(self.provider_name)
        self._runtime = load_runtime()
        size = self._functions.meta_size() + self.max_bytes  # flags, then room for two-shot's intermediate results
        self._flags = SharedBuffers(group, self.name, self._runtime, size)
        try:
            self._buffers = SharedBuffers(group, self.name, self._runtime, self.max_bytes)
        except BackendUnavailable:
            self._flags.close()
            raise
        self._own = self._buffers.own
        self._handle = 0
        self._rank_data = torch.empty(0)
        self._old: list[tuple[int, torch.Tensor]] = []
        self._register = not _expandable_segments()
        self._capturing = False
        try:
            together(group, self.name, self._start)
        except BackendUnavailable:
            self.close()
            raise

    @classmethod
    def availability(cls, device: str) -> Availability:
        problem = devices.missing(device, "cuda")
        if problem is not None:
            return Availability(False, *problem)
        try:
            return Availability(True, provider=provider_version(choose_provider()))
        except BackendUnavailable as error:
            return Availability(False, error.reason, error.remedy)

    # ---- set-up -----------------------------------------------------------------------------------------------

    def _facts(self) -> tuple[str, int, str]:
        """(provider, largest message, GPU) of this rank, after what can be checked without the others."""
        group = self.group
        if group.world_size not in WORLD_SIZES:
            raise BackendUnavailable(
                self.name, f"world size {group.world_size} is none of {', '.join(map(str, WORLD_SIZES))}", "use pynccl"
            )
        if not group.one_host:
            raise BackendUnavailable(self.name, "nothing has proven that all ranks share one host", "use pynccl")
        devices.activate(group.device)
        cap = bytes_from_environment(self.name, MAX_BYTES_VARIABLE, DEFAULT_MAX_BYTES)
        return choose_provider(), cap, gpu_links.identity(group.device)

    def _links(self, gpus: list[str]) -> bool:
        """Whether this GPU has NVLink to all others. Raises BackendUnavailable without peer access."""
        if len(set(gpus)) == 1:
            return True  # ranks that share one GPU read their own memory
        peer, nvlink = gpu_links.links(gpus[self.group.rank], gpus)
        if not peer:
            raise BackendUnavailable(self.name, "peer-to-peer access between the GPUs does not work", "use pynccl")
        return nvlink

    def _start(self) -> None:
        """A handle of the provider's, on the shared buffers."""
        if self._handle:
            self._old.append((self._handle, self._rank_data))  # graphs that are captured go on using it
        self._rank_data = torch.empty(RANK_DATA_BYTES, dtype=torch.uint8, device=self.group.device)
        self._handle = self._functions.init(self._flags.pointers, self._rank_data, self.group.rank, self.nvlink)
        self._functions.register_buffer(self._handle, self._buffers.pointers)
        self._all_reduce = self._functions.all_reduce

    # ---- calls ------------------------------------------------------------------------------------------------

    def declines(self, call: CallSignature) -> str | None:
        refused = super().declines(call) or beyond_kernels(call, DTYPE_NAMES)
        if refused is not None:
            return refused
        if call.size_bytes == 0:
            return "the tensor is empty"
        if call.size_bytes % PACK:
            return f"{call.size_bytes} bytes is not a multiple of {PACK}"
        return beyond_cap(call, self.max_bytes, MAX_BYTES_VARIABLE)

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self.calls += 1
        if output.data_ptr() % PACK or not output.is_contiguous():  # the kernel writes whole packs
            target = torch.empty_like(input)
            self._reduce(input, target)
            output.copy_(target.view(output.shape))
        elif self._capturing:
            self._reduce(input, output)
        else:
            self._all_reduce(self._handle, input, output, self._own, self.max_bytes)

    def _reduce(self, input: torch.Tensor, output: torch.Tensor) -> None:
        # In place the others would read what this rank has already written, so the input is copied there too.
        if (
            self._register
            and self._capturing
            and input.data_ptr() != output.data_ptr()
            and not input.data_ptr() % PACK
            and devices.is_capturing()
        ):
            self._all_reduce(self._handle, input, output, 0, 0)
        else:
            self._all_reduce(self._handle, input, output, self._own, self.max_bytes)

    # ---- graphs -----------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._capturing = True
        failed = True
        try:
            yield
            failed = False
        finally:
            self._capturing = False
            self._exchange_addresses(failed)

    def _exchange_addresses(self, failed: bool) -> None:
        """Tell all ranks where the captured inputs lie. Collective, also for a rank whose capture failed."""

        def mine() -> tuple[list[int], list[int]]:
            if failed:
                raise CollectiveError("its capture failed")
            handles, offsets = self._functions.graph_meta(self._handle)
            return list(handles), list(offsets)

        try:
            everyone = together(self.group, self.name, mine)
            if len({len(offsets) for _, offsets in everyone}) > 1:
                counts = [len(offsets) for _, offsets in everyone]
                raise CollectiveError(f"{self.name}: the ranks captured different numbers of calls: {counts}")
            if everyone[0][1]:
                handles, offsets = [e[0] for e in everyone], [e[1] for e in everyone]
                together(self.group, self.name, lambda: self._functions.register_graph(self._handle, handles, offsets))
        except (BackendUnavailable, CollectiveError) as error:
            self._start()  # the old handle still waits for addresses that nobody will give
            if failed:
                return  # this rank's own error is on its way
            raise CollectiveError(f"{self.name}: the graph must not be replayed: {error}") from error

    def close(self) -> None:
        for handle, _ in [*self._old, (self._handle, None)]:
            if handle:
                self._functions.dispose(handle)
        self._old, self._handle = [], 0
        self._buffers.close()
        self._flags.close()


def _expandable_segments() -> bool:
    """Whether torch allocates in a way that CUDA IPC cannot share (which torch 2.9 reads from a second variable)."""
    variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(v, "").lower() for v in variables)


def together_load(group: Group, provider: str) -> Functions:
    """The provider's functions, where every rank can import them."""
    loaded: list[Functions] = []
    together(group, "ca", lambda: loaded.append(PROVIDERS[provider].load()))
    return loaded[0]
