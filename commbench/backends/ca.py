"""Custom all-reduce: the engines' kernels that read the other GPUs' memory through CUDA or HIP IPC.

Providers (COMMBENCH_CA_PROVIDER, --ca-provider; else the first that is installed): ``sgl_kernel``, ``vllm``,
``flashinfer``. They share one design. Every rank opens every other's buffers. Outside of graphs the input is copied
into the rank's buffer first. In a graph the kernel reads inputs where they are: after the capture all ranks exchange
their addresses (``capture`` does it, before any replay). COMMBENCH_CA_MAX_BYTES (8MiB, on ROCm 16MiB) is the largest
message. On ROCm the provider is ``sgl_kernel``, whose kernels take tensors and handles in place of addresses.
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
from commbench.backends.base import Availability, Backend, Group, beyond_kernels, beyond_sizes, together
from commbench.backends.staging import bytes_from_environment
from commbench.errors import BackendUnavailable, CollectiveError
from commbench.types import CallSignature

PROVIDER_VARIABLE = "COMMBENCH_CA_PROVIDER"
MAX_BYTES_VARIABLE = "COMMBENCH_CA_MAX_BYTES"
DEFAULT_MAX_BYTES = {"cuda": 8 << 20, "hip": 16 << 20}  # what engines give it
WORLD_SIZES = (2, 4, 6, 8)  # what the kernels are compiled for
DTYPE_NAMES = ("float32", "float16", "bfloat16")
PACK = 16  # bytes that a thread moves at once: sizes are multiples of it, addresses lie on it
RANK_DATA_BYTES = 8 << 20  # addresses of registered buffers, 64 bytes each
FLASHINFER_CTAS = 36  # the most that its kernel takes, and what vLLM's own launches

# ---- providers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Functions:
    """A provider's functions, called alike. fa: the handle that ``init`` gives. Memory that all ranks share is what
    ``share`` makes: ``pointers`` of all ranks, ``own`` of this one, as the other functions take them."""

    init: Callable[..., int]  # (pointers of the flags, rank data, rank, NVLink) → fa
    all_reduce: Callable[..., None]  # (fa, input, output, own buffer or 0, its bytes or 0)
    register_buffer: Callable[..., None]  # (fa, pointers of the buffers)
    graph_meta: Callable[..., Any]  # (fa) → handle bytes, offsets
    register_graph: Callable[..., None]  # (fa, handles of all ranks, offsets of all ranks)
    meta_size: Callable[..., int]
    dispose: Callable[..., None]
    share: Callable[[Group, int, bool], Any] = lambda group, size, _: SharedBuffers(group, "ca", load_runtime(), size)


def _sgl_kernel() -> Functions:
    m = importlib.import_module("sgl_kernel.allreduce")
    if devices.kind("cuda") == "hip":
        return _sgl_kernel_on_rocm(m)
    return Functions(
        m.init_custom_ar, m.all_reduce, m.register_buffer, m.get_graph_buffer_ipc_meta, m.register_graph_buffers,
        m.meta_size, m.dispose,
    )  # fmt: skip


def _sgl_kernel_on_rocm(m: Any) -> Functions:
    """Shared memory is a tensor of this rank and the handles of all; the kernels open them at offset 0."""

    def init(flags: RocmPointers, rank_data: torch.Tensor, rank: int, linked: bool) -> int:
        own, handles = flags
        fa: int = m.init_custom_ar(own, rank_data, handles, [0] * len(handles), rank, linked)
        return fa

    def all_reduce(fa: int, input: torch.Tensor, output: torch.Tensor, buffer: torch.Tensor | int, _: int) -> None:
        if isinstance(buffer, int):
            m.all_reduce_reg(fa, input, output)
        else:
            m.all_reduce_unreg(fa, input, buffer, output)

    def register_buffer(fa: int, buffers: RocmPointers) -> None:
        own, handles = buffers
        m.register_buffer(fa, own, handles, [0] * len(handles))

    def graph_meta(fa: int) -> tuple[list[int], list[int]]:
        handles, offsets = m.get_graph_buffer_ipc_meta(fa)
        return handles.tolist(), offsets

    def register_graph(fa: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
        m.register_graph_buffers(fa, [bytes(handle) for handle in handles], offsets)

    return Functions(
        init, all_reduce, register_buffer, graph_meta, register_graph, m.meta_size, m.dispose,
        lambda group, size, is_flags: RocmBuffers(group, m, size, is_flags),
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
    """module: what must be importable; package: what to install. kinds: of GPUs that it has kernels for."""

    module: str
    package: str
    load: Callable[[], Functions]
    kinds: tuple[str, ...] = ("cuda",)


PROVIDERS: dict[str, Provider] = {
    "sgl_kernel": Provider("sgl_kernel", "sgl-kernel", _sgl_kernel, ("cuda", "hip")),
    "vllm": Provider("vllm", "vllm", _vllm),
    "flashinfer": Provider("flashinfer", "flashinfer-python", _flashinfer),
}


def choose_provider() -> str:
    """The provider asked for, or the first installed. Raises BackendUnavailable."""
    asked, kind = os.environ.get(PROVIDER_VARIABLE, ""), devices.kind("cuda")
    fitting = [name for name, provider in PROVIDERS.items() if kind in provider.kinds]
    known = ", ".join(fitting)
    if asked and asked not in PROVIDERS:
        raise BackendUnavailable("ca", f"{PROVIDER_VARIABLE}={asked} is no provider", f"choose one of {known}")
    if asked and asked not in fitting:
        raise BackendUnavailable("ca", f"{asked} has none of these kernels on {kind}", f"choose one of {known}")
    for name in [asked] if asked else fitting:
        if importlib.util.find_spec(PROVIDERS[name].module) is not None:
            return name
    packages = [PROVIDERS[name].package for name in ([asked] if asked else fitting)]
    what = packages[0] if len(packages) == 1 else f"one of {', '.join(packages)}"
    how = f"pip install {what}" if kind == "cuda" else f"build {what} from its sources for ROCm"
    raise BackendUnavailable("ca", f"{asked} is not installed" if asked else f"no provider is installed ({known})", how)


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
        try:
            handles = together(group, backend, lambda: self._allocate(size_bytes))
            together(group, backend, lambda: self._open(handles))
        except BackendUnavailable:
            self.close()
            raise

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


RocmPointers = tuple[torch.Tensor, list[bytes]]  # this rank's memory, the IPC handles of all ranks'


class RocmBuffers:
    """As SharedBuffers, of the provider's memory (for flags, which caches must not keep back) or torch's."""

    def __init__(self, group: Group, module: Any, size_bytes: int, is_flags: bool) -> None:
        """Collective, all ranks or none."""
        self._module = module
        self.own = torch.empty(0, dtype=torch.uint8)
        handles = together(group, "ca", lambda: self._allocate(size_bytes, is_flags, group.device))
        self.pointers: RocmPointers = self.own, handles

    def _allocate(self, size_bytes: int, is_flags: bool, device: torch.device) -> bytes:
        if is_flags:
            self.own = self._module.allocate_meta_buffer(size_bytes)
        else:
            self.own = devices.whole_allocation(size_bytes, device)
        return bytes(self._module.get_meta_buffer_ipc_handle(self.own).tolist())

    def close(self) -> None:
        self.own = torch.empty(0, dtype=torch.uint8)
        self.pointers = self.own, []


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
        on_rocm = devices.kind(group.device.type) == "hip"
        if (group.world_size > 2 or on_rocm) and not self.nvlink:
            links = "XGMI" if on_rocm else "NVLink"
            raise BackendUnavailable(self.name, f"{group.world_size} GPUs are not all linked by {links}", "use pynccl")
        self._functions = together_load(group, self.provider_name)
        self.provider = provider_version(self.provider_name)
        size = self._functions.meta_size() + self.max_bytes  # flags, then room for two-shot's intermediate results
        self._flags = self._functions.share(group, size, True)
        try:
            self._buffers = self._functions.share(group, self.max_bytes, False)
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
        problem = devices.missing(device, "cuda", "hip")
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
        default = DEFAULT_MAX_BYTES.get(devices.kind(group.device.type), DEFAULT_MAX_BYTES["cuda"])
        cap = bytes_from_environment(self.name, MAX_BYTES_VARIABLE, default)
        return choose_provider(), cap, gpu_links.identity(group.device)

    def _links(self, gpus: list[str]) -> bool:
        """Whether this GPU has NVLink (XGMI) to all others. Raises BackendUnavailable without peer access."""
        if len(set(gpus)) == 1:
            return True  # ranks that share one GPU read their own memory
        if devices.kind(self.group.device.type) == "hip":
            return devices.architecture(self.group.device).startswith(devices.XGMI_ARCHITECTURES)
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

    # ---- calls ------------------------------------------------------------------------------------------------

    def declines(self, call: CallSignature) -> str | None:
        refused = super().declines(call) or beyond_kernels(call, DTYPE_NAMES)
        return refused or beyond_sizes(call, PACK, self.max_bytes, MAX_BYTES_VARIABLE)

    def bound(self, call: CallSignature) -> Callable[..., None]:
        return self._path(in_place=call.placement == "in", eager=call.mode == "eager")

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self._path(in_place=False, eager=False)(input, output, op)

    def _path(self, *, in_place: bool, eager: bool) -> Callable[..., None]:
        """all_reduce. in_place: the output is always the input, which is dense. eager: outside of captures only."""
        operation, own, max_bytes = self._functions.all_reduce, self._own, self.max_bytes

        def all_reduce(input: torch.Tensor, output: torch.Tensor, op: str) -> None:
            self.calls += 1
            # the kernel writes whole packs
            if output.data_ptr() % PACK or not (in_place or output.is_contiguous()):
                target = torch.empty_like(input)
                self._reduce(input, target)
                output.copy_(target.view(output.shape))
            elif eager or not self._capturing:
                operation(self._handle, input, output, own, max_bytes)
            else:
                self._reduce(input, output)

        return all_reduce

    def _reduce(self, input: torch.Tensor, output: torch.Tensor) -> None:
        # In place the others would read what this rank has already written, so the input is copied there too.
        if (
            self._register
            and self._capturing
            and input.data_ptr() != output.data_ptr()
            and not input.data_ptr() % PACK
            and devices.is_capturing()
        ):
            self._functions.all_reduce(self._handle, input, output, 0, 0)
        else:
            self._functions.all_reduce(self._handle, input, output, self._own, self.max_bytes)

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
    """Whether torch allocates in a way that CUDA IPC cannot share (which it reads from several variables)."""
    variables = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:true" in os.environ.get(v, "").lower() for v in variables)


def together_load(group: Group, provider: str) -> Functions:
    """The provider's functions, where every rank can import them."""
    loaded: list[Functions] = []
    together(group, "ca", lambda: loaded.append(PROVIDERS[provider].load()))
    return loaded[0]
