"""Providers that are played on CPU tensors: with their published signatures, over gloo, in real processes.

A call that does not fit the signature in tests/backends/signatures fails, and so does one that the provider's own
checks would reject. What the kernels do is done here on the host: ranks exchange their data, so results can be checked.
Between ``Graph``'s ``with`` and its ``replay`` work is kept and not done, as on a GPU.
"""

from __future__ import annotations

import ast
import copy
import ctypes
import datetime
import importlib.machinery
import inspect
import os
import secrets
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.backends.record_signatures import load

PACK = 16
STREAM = 0x5
NCCL_CODE = 23203
MEETING_S = 4.0  # for the ranks of the played NCCL to meet: above what the tests' COMMBENCH_NCCL_TIMEOUT allows


class ProviderError(RuntimeError):
    """What a provider's own check raises, or a script."""


# ---- signatures ----------------------------------------------------------------------------------------------------


def fits(value: Any, annotation: str) -> bool:
    """Whether a value is of the annotated type. Types that are the provider's own are not looked into."""
    return not annotation or _fits(value, ast.parse(annotation, mode="eval").body)


def _fits(value: Any, node: ast.expr) -> bool:
    plain = {"int": int, "bool": bool, "str": str, "float": float, "bytes": bytes, "torch.Tensor": torch.Tensor,
             "torch.dtype": torch.dtype, "None": type(None)}  # fmt: skip
    text = ast.unparse(node)
    if text in plain:
        return isinstance(value, plain[text]) and not (text == "int" and isinstance(value, bool))
    if isinstance(node, ast.Subscript):
        outer, inner = ast.unparse(node.value).lower(), node.slice
        options = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if outer == "list":
            return isinstance(value, list) and all(_fits(v, inner) for v in value)
        if outer == "optional":
            return value is None or _fits(value, inner)
        if outer == "union":
            return any(_fits(value, option) for option in options)
        if outer == "literal":
            return value in [ast.literal_eval(option) for option in options]
        raise AssertionError(f"the type {text} is not known here")
    return value is not None


def schema_types(schema: str) -> list[str]:
    """``(int[] a, Tensor! b)`` → Python annotations, in order."""
    words = {"int": "int", "Tensor": "torch.Tensor", "Tensor!": "torch.Tensor", "bool": "bool", "str": "str",
             "int[]": "list[int]", "int[][]": "list[list[int]]", "str[]": "list[str]"}  # fmt: skip
    inside = schema.partition("(")[2].rpartition(") ->")[0]
    return [words[part.split()[0]] for part in inside.split(",") if part.strip()]


class World:
    """One rank's view: what was called, what is being captured, and what fails by script."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.calls: list[str] = []
        self.arguments: dict[str, dict[str, Any]] = {}
        self.graph: Graph | None = None
        self.fail: tuple[int, str] | None = None  # (rank, function): it fails there
        self.records: dict[str, Any] = {}
        self.renew()

    def renew(self, timeout_s: float = 3.0) -> None:
        """The way on which kernels' data go. Collective; needed after a rank has failed on it."""
        self._way = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))

    def record(self, provider: str) -> dict[str, Any]:
        if provider not in self.records:
            self.records[provider] = copy.deepcopy(load(provider))
        return dict(self.records[provider])

    def note(self, name: str, arguments: dict[str, Any]) -> bool:
        """Record a call; whether the script lets it fail."""
        self.calls.append(name)
        self.arguments[name] = arguments
        return self.fail == (self.rank, name)

    def do(self, work: Callable[[], None]) -> None:
        """Do it on the stream: now, or when the graph is replayed."""
        if self.graph is not None:
            self.graph.work.append(work)
        else:
            work()

    def exchange(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._way)
        except RuntimeError as error:
            raise TimeoutError("another rank's kernel did not run") from error
        return values

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self.exchange(tensor.detach().clone())
        return torch.stack([p.double() for p in parts]).sum(0).to(tensor.dtype)

    def function(
        self,
        name: str,
        record: Mapping[str, Any],
        behaviour: Callable[..., Any],
        schema: str | None = None,
        skip: int = 0,
    ) -> Callable[..., Any]:
        """A Python function with the recorded signature. schema: of the operator behind it, whose types count."""
        recorded = record["parameters"][skip:]
        kinds = inspect.Parameter
        signature = inspect.Signature(
            [
                kinds(
                    p["name"], kinds.KEYWORD_ONLY if p.get("keyword_only") else kinds.POSITIONAL_OR_KEYWORD,
                    default=... if p["optional"] else kinds.empty,
                )
                for p in recorded
            ]
        )  # fmt: skip
        annotations = [p["type"] for p in recorded]
        if schema is not None:
            annotations = schema_types(schema)
            assert len(annotations) == len(recorded), f"{name}: {schema} is not what its wrapper takes"
        types_of = {p["name"]: a for p, a in zip(recorded, annotations, strict=True)}

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)  # TypeError where it does not fit
            for parameter, value in bound.arguments.items():
                if not (value is None and signature.parameters[parameter].default is ...):
                    assert fits(value, types_of[parameter]), (
                        f"{name}: {parameter}={value!r} is no {types_of[parameter]}"
                    )
            if self.note(name, dict(bound.arguments)):
                raise ProviderError(f"scripted failure of {name}")
            return behaviour(*bound.args, **bound.kwargs)

        return call


class Graph(TorchDispatchMode):
    """Work that is captured: what would change memory is kept for ``replay``."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.work: list[Callable[[], Any]] = []

    def __enter__(self) -> Graph:
        self.world.graph = self
        return super().__enter__()  # type: ignore[return-value]

    def __exit__(self, *error: Any) -> None:
        self.world.graph = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        self.work.append(lambda: func(*args, **kwargs))
        written = [
            i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        ]
        return args[written[0]]

    def replay(self) -> None:
        for work in self.work:
            work()


# ---- modules and libraries -----------------------------------------------------------------------------------------


def module(name: str, **members: Any) -> types.ModuleType:
    """A module that can be imported and found."""
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    made.__path__ = []
    vars(made).update(members)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            module(parent)
        setattr(sys.modules[parent], child, made)
    return made


_C_TYPES: dict[str, Any] = {
    "int": ctypes.c_int, "unsigned int": ctypes.c_uint, "size_t": ctypes.c_size_t, "char*": ctypes.c_char_p,
    "ncclResult_t": ctypes.c_int, "ncclDataType_t": ctypes.c_int, "ncclRedOp_t": ctypes.c_int,
    "cudaError_t": ctypes.c_int, "void*": ctypes.c_void_p, "ncclComm_t": ctypes.c_void_p,
    "cudaStream_t": ctypes.c_void_p, "ncclWindow_t": ctypes.c_void_p,
    "int*": ctypes.POINTER(ctypes.c_int), "ncclResult_t*": ctypes.POINTER(ctypes.c_int),
    "void**": ctypes.POINTER(ctypes.c_void_p), "ncclComm_t*": ctypes.POINTER(ctypes.c_void_p),
    "ncclWindow_t*": ctypes.POINTER(ctypes.c_void_p),
}  # fmt: skip
_C_STRUCTURES = {"ncclUniqueId": 128, "cudaIpcMemHandle_t": 64, "ncclConfig_t": 0}  # bytes, 0: it tells its own size


def is_c_type(declared: Any, recorded: str) -> bool:
    """Whether a ctypes type is what the header says."""
    if recorded in _C_TYPES:
        return bool(declared is _C_TYPES[recorded])
    name, pointer = recorded.rstrip("*"), recorded.endswith("*")
    assert name in _C_STRUCTURES, f"the C type {recorded} is not known here"
    inner = getattr(declared, "_type_", None) if pointer else declared
    if not (isinstance(inner, type) and issubclass(inner, ctypes.Structure)):
        return False
    return _C_STRUCTURES[name] in (0, ctypes.sizeof(inner))


class CFunction:
    """A function of a shared library; ``restype`` and ``argtypes`` must be those of its prototype."""

    def __init__(self, world: World, name: str, record: Mapping[str, Any], behaviour: Callable[..., Any]) -> None:
        self._world, self._name, self._record, self._behaviour = world, name, record, behaviour
        self.restype: Any = None
        self.argtypes: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> Any:
        recorded = [p["type"] for p in self._record["parameters"]]
        declared = list(self.argtypes)
        assert is_c_type(self.restype, self._record["returns"]), f"{self._name} returns {self._record['returns']}"
        assert len(declared) == len(recorded), f"{self._name} takes {recorded}, declared are {declared}"
        for ours, theirs in zip(declared, recorded, strict=True):
            assert is_c_type(ours, theirs), f"{self._name}: {theirs} is declared as {ours}"
        assert len(args) == len(recorded), f"{self._name} takes {len(recorded)} arguments, {len(args)} are given"
        for value, kind in zip(args, declared, strict=True):
            kind.from_param(value)  # ctypes.ArgumentError where C could not take it
        if self._world.note(self._name, dict(enumerate(args))):
            return 2
        return self._behaviour(*args)


class CLibrary:
    """Has the recorded functions and no other."""

    def __init__(
        self, world: World, functions: Mapping[str, Any], behaviours: Mapping[str, Callable[..., Any]]
    ) -> None:
        for name, record in functions.items():
            setattr(self, name, CFunction(world, name, record, behaviours[name]))


def memory(address: Any, size_bytes: int) -> torch.Tensor:
    """Memory of this process as bytes."""
    address = getattr(address, "value", address)
    return torch.frombuffer((ctypes.c_byte * size_bytes).from_address(address), dtype=torch.uint8)


# ---- the device ----------------------------------------------------------------------------------------------------


def play_device(world: World, *, multicast: bool = True, nvlink: bool = True, hip: bool = False) -> None:
    """One GPU for each rank, as far as backends ask."""
    from commbench.backends import device, gpu_links

    class Mark:
        def query(self) -> bool:
            return True

    def timed(_: Any, call: Callable[[], object], iterations: int, limit_s: float) -> float:
        call()
        launch = world.arguments["mscclpp_allreduce"]
        # blocks of 256 threads are slow on the last rank only: what rank 0 times alone would mislead it
        slow = launch["nthreads"] == 256 and world.rank == world.size - 1
        return (9e-6 if slow else 1e-6) * launch["nthreads"] / 256

    made: dict[str, Any] = {
        "missing": lambda kind, *wanted: None if ("hip" in wanted) or not hip else ("it is an AMD GPU", ""),
        "raw_stream": lambda _: lambda: STREAM,
        "is_capturing": lambda: world.graph is not None,
        "capability": lambda _: (9, 0),
        "architecture": lambda _: "gfx942",
        "activate": lambda _: None,
        "mark": lambda _: Mark(),
        "timed": timed,
        "has_multicast": lambda _: multicast,
        "kind": lambda kind: "hip" if hip else kind,
        "whole_allocation": lambda size_bytes, _: torch.empty(size_bytes, dtype=torch.uint8),
        "at_address": lambda address, size_bytes, _: memory(address, size_bytes),
    }
    for name, replacement in made.items():
        assert hasattr(device, name)
        setattr(device, name, replacement)
    gpu_links.identity = lambda _: f"GPU-{world.rank}"
    gpu_links.links = lambda mine, everyone: (True, nvlink)


# ---- custom all-reduce ---------------------------------------------------------------------------------------------


class CudaRuntime:
    """libcudart: memory with addresses, and handles by which other ranks open it."""

    def __init__(self, world: World) -> None:
        self.blocks: dict[int, Any] = {}
        self.opened: set[int] = set()
        record = world.record("cudart")
        self.library = CLibrary(
            world,
            record["functions"],
            {
                "cudaMalloc": self._malloc, "cudaFree": self._free, "cudaMemset": self._memset,
                "cudaDeviceSynchronize": lambda: 0, "cudaIpcGetMemHandle": self._handle,
                "cudaIpcOpenMemHandle": self._open, "cudaIpcCloseMemHandle": self._close,
                "cudaGetErrorString": lambda code: b"scripted failure",
            },
        )  # fmt: skip
        self._rank = world.rank
        self._lazy = record["constants"]["cudaIpcMemLazyEnablePeerAccess"]

    def _malloc(self, pointer: Any, size: int) -> int:
        block = ctypes.create_string_buffer(b"\xff" * size, size)
        pointer._obj.value = ctypes.addressof(block)
        self.blocks[pointer._obj.value] = block
        return 0

    def _free(self, address: Any) -> int:
        del self.blocks[getattr(address, "value", address)]
        return 0

    def _memset(self, address: Any, value: int, size: int) -> int:
        memory(address, size).fill_(value)
        return 0

    def _handle(self, handle: Any, address: Any) -> int:
        text = f"{self._rank}:{getattr(address, 'value', address)}".encode()
        ctypes.memmove(ctypes.addressof(handle._obj), text.ljust(64, b"\0"), 64)
        return 0

    def _open(self, pointer: Any, handle: Any, flags: int) -> int:
        rank, _, address = bytes(handle).rstrip(b"\0").decode().partition(":")
        if int(rank) == self._rank or flags != self._lazy:
            return 1  # a process cannot open its own memory
        pointer._obj.value = (int(rank) + 1) << 50 | int(address) & ((1 << 50) - 1)
        self.opened.add(pointer._obj.value)
        return 0

    def _close(self, address: Any) -> int:
        self.opened.remove(getattr(address, "value", address))
        return 0


class CustomAllReduce:
    """The kernels behind ``ca``, whose providers name their functions alike."""

    META = 4096

    def __init__(self, world: World, runtime: CudaRuntime) -> None:
        self.world, self.runtime = world, runtime
        self.handles: dict[int, dict[str, Any]] = {}
        self.made = 0

    def init_custom_ar(self, pointers: list[int], rank_data: torch.Tensor, rank: int, nvlink: bool) -> int:
        self._check_pointers(pointers)
        assert rank == self.world.rank
        flags = memory(pointers[rank], self.META)
        if int(flags.max()):
            raise ProviderError("the flags do not begin at zero")
        self.made += 1
        self.handles[self.made] = {"own": 0, "waiting": [], "registered": set(), "data": rank_data, "inputs": {}}
        return self.made

    def _check_pointers(self, pointers: list[int]) -> None:
        assert len(pointers) == self.world.size
        for rank, pointer in enumerate(pointers):
            known = self.runtime.blocks if rank == self.world.rank else self.runtime.opened
            assert pointer in known, f"rank {rank}'s pointer {pointer:#x} was not opened"

    def register_buffer(self, fa: int, pointers: list[int]) -> None:
        self._check_pointers(pointers)
        self.handles[fa]["own"] = pointers[self.world.rank]

    def all_reduce(
        self, fa: int, inp: torch.Tensor, out: torch.Tensor, buffer: int, buffer_bytes: int, *_: int
    ) -> None:
        state = self.handles[fa]
        size = inp.numel() * inp.element_size()
        for tensor in (inp, out):
            if not tensor.is_contiguous():
                raise ProviderError("tensors must be dense")
        if size % PACK or size == 0 or inp.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ProviderError(f"custom allreduce does not take {size} bytes of {inp.dtype}")
        if out.data_ptr() % PACK:
            raise ProviderError("misaligned address")
        if buffer:
            if buffer != state["own"] or size > buffer_bytes:
                raise ProviderError("the buffer is not registered, or too small")
            self.world.do(lambda: out.copy_(self.world.sum(inp)))
            return
        if inp.data_ptr() % PACK:
            raise ProviderError("misaligned address")
        if self.world.graph is None:
            raise ProviderError("the input's address is not registered")
        if inp.data_ptr() == out.data_ptr():
            raise ProviderError("a rank would read what another has already overwritten")
        state["waiting"].append(inp.data_ptr())

        def replayed(address: int = inp.data_ptr()) -> None:
            if address not in state["registered"]:
                raise ProviderError("the graph is replayed before its addresses were registered")
            out.copy_(self.world.sum(inp))

        self.world.do(replayed)

    def get_graph_buffer_ipc_meta(self, fa: int) -> tuple[list[int], list[int]]:
        waiting = self.handles[fa]["waiting"]
        return [self.world.rank] * (64 * len(waiting)), list(range(len(waiting)))

    def register_graph_buffers(self, fa: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
        state = self.handles[fa]
        assert len(handles) == len(offsets) == self.world.size
        for rank, (handle, offset) in enumerate(zip(handles, offsets, strict=True)):
            if len(offset) != len(state["waiting"]) or handle != [rank] * (64 * len(offset)):
                raise ProviderError("the ranks' addresses do not belong together")
        state["registered"] |= set(state["waiting"])
        state["waiting"].clear()

    def meta_size(self) -> int:
        return self.META

    def dispose(self, fa: int) -> None:
        del self.handles[fa]


_CA_FUNCTIONS = (
    "init_custom_ar", "all_reduce", "register_buffer", "get_graph_buffer_ipc_meta", "register_graph_buffers",
    "meta_size", "dispose",
)  # fmt: skip


def play_ca(world: World, provider: str) -> CustomAllReduce:
    runtime = CudaRuntime(world)
    kernels = CustomAllReduce(world, runtime)
    real = ctypes.CDLL
    ctypes.CDLL = lambda path, *rest: runtime.library if "cudart" in str(path) else real(path, *rest)  # type: ignore
    record = world.record(provider)
    file = {
        "sgl_kernel": "sgl_kernel/allreduce.py",
        "vllm": "vllm/_custom_ops.py",
        "flashinfer": "flashinfer/comm/vllm_ar.py",
    }
    recorded, schemas = record["files"][file[provider]], record.get("schemas", {})
    functions = {
        name: world.function(name, recorded[name], getattr(kernels, name), schemas.get(name)) for name in _CA_FUNCTIONS
    }
    if provider == "flashinfer":
        exports = {new: old.partition(".")[2] for new, old in record["exports"].items() if old.startswith("vllm_ar.")}
        module("flashinfer.comm", **{new: functions[old] for new, old in exports.items()})
    else:
        module(file[provider].removesuffix(".py").replace("/", "."), **functions)
    return kernels


class RocmCustomAllReduce(CustomAllReduce):
    """The same on ROCm: memory comes as tensors and the handles of all ranks, at offset 0."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.handles = {}
        self.made = 0

    def allocate_meta_buffer(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int8)

    def get_meta_buffer_ipc_handle(self, inp: torch.Tensor) -> torch.Tensor:
        text = f"{self.world.rank}:{inp.data_ptr()}".encode()
        return torch.frombuffer(bytearray(text.ljust(64, b"\0")), dtype=torch.uint8)

    def _check(self, own: torch.Tensor, handles: list[bytes], offsets: list[int]) -> None:
        assert offsets == [0] * self.world.size
        assert [int(handle.partition(b":")[0]) for handle in handles] == list(range(self.world.size))
        assert handles[self.world.rank] == bytes(self.get_meta_buffer_ipc_handle(own).tolist())

    def init_custom_ar(  # type: ignore[override]
        self, meta: torch.Tensor, rank_data: torch.Tensor, handles: list[bytes], offsets: list[int], rank: int,
        full_nvlink: bool,
    ) -> int:  # fmt: skip
        self._check(meta, handles, offsets)
        assert rank == self.world.rank
        if not full_nvlink or int(meta[: self.META].max()):
            raise ProviderError("the flags do not begin at zero, or the GPUs are not linked")
        self.made += 1
        self.handles[self.made] = {"own": 0, "waiting": [], "registered": set(), "data": rank_data, "memory": meta}
        return self.made

    def register_buffer(  # type: ignore[override]
        self, fa: int, t: torch.Tensor, handles: list[bytes], offsets: list[int]
    ) -> None:
        self._check(t, handles, offsets)
        self.handles[fa]["own"] = t.data_ptr()

    def all_reduce_reg(self, fa: int, inp: torch.Tensor, out: torch.Tensor) -> None:
        self.all_reduce(fa, inp, out, 0, 0)

    def all_reduce_unreg(self, fa: int, inp: torch.Tensor, reg_buffer: torch.Tensor, out: torch.Tensor) -> None:
        self.all_reduce(fa, inp, out, reg_buffer.data_ptr(), reg_buffer.numel())

    def get_graph_buffer_ipc_meta(self, fa: int) -> tuple[torch.Tensor, list[int]]:  # type: ignore[override]
        handles, offsets = super().get_graph_buffer_ipc_meta(fa)
        return torch.tensor(handles, dtype=torch.uint8), offsets

    def register_graph_buffers(  # type: ignore[override]
        self, fa: int, handles: list[bytes], offsets: list[list[int]]
    ) -> None:
        super().register_graph_buffers(fa, [list(handle) for handle in handles], offsets)


def play_ca_on_rocm(world: World) -> None:
    play_device(world, hip=True)
    kernels = RocmCustomAllReduce(world)
    recorded = world.record("sgl_kernel")["files"]["sgl_kernel/allreduce.py"]
    functions = {}
    for name in (*_CA_FUNCTIONS, "all_reduce_reg", "all_reduce_unreg", "allocate_meta_buffer",
                 "get_meta_buffer_ipc_handle"):  # fmt: skip
        if name == "all_reduce":
            continue
        signature = copy.deepcopy(recorded[f"{name}@hip"])
        for parameter in signature["parameters"]:  # the operator takes bytes for text, and a handle is no text
            parameter["type"] = parameter["type"].replace("List[str]", "list[bytes]")
        functions[name] = world.function(name, signature, getattr(kernels, name))
    module("sgl_kernel.allreduce", **functions)


# ---- quick all-reduce ----------------------------------------------------------------------------------------------


def play_qr(world: World, provider: str) -> None:
    record = world.record(provider)
    handles: dict[int, bool] = {}

    def init(rank: int, world_size: int, qr_max_size: int | None = None) -> int:
        if provider == "sgl_kernel":  # its wrapper hands them on in the other order
            rank, world_size = world_size, rank
        if world_size not in (2, 4, 8) or not 0 <= rank < world_size:
            raise ProviderError("invalid rank passed in")
        handles[77] = False
        return 77

    def open_handles(fa: int, theirs: list[torch.Tensor]) -> None:
        assert [int(h[0]) for h in theirs] == list(range(world.size))
        handles[fa] = True

    def all_reduce(fa: int, *rest: Any) -> None:
        inp, out, level, cast = rest
        assert isinstance(inp, torch.Tensor)
        assert isinstance(out, torch.Tensor)
        assert isinstance(level, int)
        assert isinstance(cast, bool)
        if not handles[fa]:
            raise ProviderError("the others' buffers are not open")
        if inp.dtype not in (torch.float16, torch.bfloat16):
            raise ProviderError("quick allreduce only supports float16 and bfloat16")
        if inp.data_ptr() % PACK or out.data_ptr() % PACK:
            raise ProviderError("misaligned address")
        world.do(lambda: out.copy_(world.sum(inp.half()) if cast else world.sum(inp)))

    behaviours: dict[str, Callable[..., Any]] = {
        "init_custom_qr": init,
        "qr_get_handle": lambda fa: torch.full((64,), world.rank, dtype=torch.uint8),
        "qr_open_handles": open_handles,
        "qr_all_reduce": all_reduce,
        "qr_max_size": lambda: 1 << 31,
        "qr_destroy": lambda fa: handles.pop(fa),
    }
    file, suffix = {
        "sgl_kernel": ("sgl_kernel/allreduce.py", "@hip"), "aiter": ("aiter/ops/quick_all_reduce.py", "")
    }[provider]  # fmt: skip
    functions = {}
    for name, behaviour in behaviours.items():
        signature = copy.deepcopy(record["files"][file][name + suffix])
        if (provider, name) == ("sgl_kernel", "qr_all_reduce"):
            # its wrapper's annotations are in another order than the operator's arguments; it passes on what comes
            for parameter in signature["parameters"]:
                parameter["type"] = ""
        functions[name] = world.function(name, signature, behaviour)
    module(file.removesuffix(".py").replace("/", "."), **functions)


# ---- MSCCL++ -------------------------------------------------------------------------------------------------------


def play_mscclpp(world: World) -> None:
    """A node of as many GPUs as there are ranks: the launches and the packets are those of eight."""
    from commbench.backends import pymscclpp

    pymscclpp.NODE, pymscclpp.WORLD_SIZES = world.size, (world.size,)
    record = world.record("sgl_kernel")
    state: dict[str, Any] = {"queued": None}

    def init(unique_id: torch.Tensor, rank: int, n: int, scratch: torch.Tensor, put: torch.Tensor, per_node: int,
             nodes: list[int], adapters: list[int], selection: int) -> int:  # fmt: skip
        assert unique_id.numel() == 128
        assert (rank, n, per_node) == (world.rank, world.size, world.size)
        assert nodes == [0] * n
        assert len(adapters) == n
        assert selection == 1
        state.update(scratch=scratch.numel(), queued=None)
        return 5

    def all_reduce(context: int, inp: torch.Tensor, out: torch.Tensor, nthreads: int, nblocks: int) -> None:
        size = inp.numel() * inp.element_size()
        assert context == 5
        assert nblocks % 7 == 0
        if 8 * size > state["scratch"] or size % (8 * world.size) or not (inp.is_contiguous() and out.is_contiguous()):
            raise ProviderError("it would write beyond its scratch memory, or leave elements unreduced")
        if world.graph is None:
            if state["queued"] not in (None, inp.data_ptr()):
                raise ProviderError("the addresses of an earlier call, which may still run, are overwritten")
            state["queued"] = inp.data_ptr()
        world.do(lambda: out.copy_(world.sum(inp)))

    behaviours: dict[str, Callable[..., Any]] = {
        "mscclpp_generate_unique_id": lambda: torch.frombuffer(bytearray(secrets.token_bytes(128)), dtype=torch.uint8),
        "mscclpp_init_context": init,
        "mscclpp_allreduce": all_reduce,
    }
    recorded = record["files"]["sgl_kernel/allreduce.py"]
    module(
        "sgl_kernel.allreduce",
        **{
            name: world.function(name, recorded[name], behaviour, record.get("schemas", {}).get(name))
            for name, behaviour in behaviours.items()
        },
    )  # fmt: skip


# ---- FlashInfer ----------------------------------------------------------------------------------------------------


def play_flashinfer(world: World) -> None:
    record = world.record("flashinfer")
    files = record["files"]

    class Workspace:
        backend = "trtllm"

        def __init__(self, elements: int, wide: bool) -> None:
            self.elements, self.wide, self.alive = elements, wide, True
            file = files["flashinfer/comm/allreduce.py"]["TRTLLMAllReduceFusionWorkspace.is_buffer_size_sufficient"]
            self.is_buffer_size_sufficient = world.function("is_buffer_size_sufficient", file, self._suffices, skip=1)
            destroy = files["flashinfer/comm/workspace_base.py"]["AllReduceFusionWorkspace.destroy"]
            self.destroy = world.function("destroy", destroy, self._destroy, skip=1)

        def _suffices(self, tp_size: int, num_tokens: int, hidden_dim: int, dtype: torch.dtype) -> bool:
            fits = num_tokens * hidden_dim <= self.elements
            return fits and tp_size == world.size and self.wide == (dtype == torch.float32)

        def _destroy(self) -> None:
            assert self.alive
            self.alive = False

    def create(**a: Any) -> Workspace:
        assert (a["world_size"], a["rank"]) == (world.size, world.rank)
        assert isinstance(a["comm_backend"], Talk)
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, "workspace", group=a["comm_backend"].group)
        return Workspace(a["max_token_num"] * a["hidden_dim"], a["dtype"] == torch.float32)

    def fuse(inp: torch.Tensor, workspace: Workspace, pattern: int, output: torch.Tensor) -> torch.Tensor:
        if inp.dim() != 2 or output.shape != inp.shape or pattern != 0 or not workspace.alive:
            raise ProviderError("the input tensor must be 2D")
        if not workspace._suffices(world.size, *inp.shape, inp.dtype) or inp.shape[1] * inp.element_size() % PACK:
            raise ProviderError("workspace validation failed")
        if inp.data_ptr() % PACK or output.data_ptr() % PACK or inp.data_ptr() == output.data_ptr():
            raise ProviderError("misaligned address, or a result in place")
        world.do(lambda: output.copy_(world.sum(inp)))
        return output

    class Talk:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.group = initialise(*args, **kwargs)

    recorded = files["flashinfer/comm/comm_backend.py"]["TorchDistBackend.__init__"]
    initialise = world.function("TorchDistBackend", recorded, lambda group=None: group, skip=1)
    checked = files["flashinfer/comm/allreduce.py"]
    for name in ("create_allreduce_fusion_workspace", "allreduce_fusion", "AllReduceFusionPattern"):
        assert name in record["exports"], name

    def positional(*args: Any, **kwargs: Any) -> Any:
        names = [p["name"] for p in checked["create_allreduce_fusion_workspace"]["parameters"]]
        return create(**dict(zip(names, args, strict=False)), **kwargs)

    def fuse_all(inp: torch.Tensor, workspace: Any, pattern: int, *rest: Any, **kwargs: Any) -> Any:
        # parameters between ``pattern`` and ``output`` keep their defaults
        return fuse(inp, workspace, pattern, kwargs.get("output", rest[-1] if rest else None))

    pattern = types.SimpleNamespace(
        kAllReduce=files["flashinfer/comm/trtllm_ar.py"]["AllReduceFusionPattern.kAllReduce"]["value"]
    )
    module(
        "flashinfer.comm",
        create_allreduce_fusion_workspace=world.function(
            "create_allreduce_fusion_workspace", checked["create_allreduce_fusion_workspace"], positional
        ),
        allreduce_fusion=world.function("allreduce_fusion", checked["allreduce_fusion"], fuse_all),
        AllReduceFusionPattern=pattern,
    )
    module("flashinfer.comm.comm_backend", TorchDistBackend=Talk)


# ---- torch's symmetric memory --------------------------------------------------------------------------------------


def play_symm_mem(world: World, *, multicast: bool = True) -> None:
    """torch's own module and operator schemas; memory and kernels are played."""
    import torch.distributed._symmetric_memory as real

    allocated: dict[int, int] = {}
    rendezvoused: set[int] = set()
    meeting = inspect.signature(real.rendezvous)

    def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        if world.note("empty", {"size": size}):
            raise ProviderError("scripted failure of empty")
        made = torch.empty(*size, dtype=dtype)
        allocated[made.untyped_storage().data_ptr()] = made.untyped_storage().nbytes()
        return made

    def rendezvous(*args: Any, **kwargs: Any) -> Any:
        bound = meeting.bind(*args, **kwargs)
        if world.note("rendezvous", dict(bound.arguments)):
            raise ProviderError("scripted failure of rendezvous")
        tensor, group = bound.args
        assert group == dist.group.WORLD.group_name
        assert tensor.untyped_storage().data_ptr() in allocated
        rendezvoused.add(tensor.untyped_storage().data_ptr())
        return types.SimpleNamespace(multicast_ptr=0x7 if multicast else 0)

    for name, made in (("empty", empty), ("rendezvous", rendezvous)):
        # the real functions' parameters, as torch declares them
        theirs = set(inspect.signature(getattr(real, name)).parameters)
        ours = set(inspect.signature(made).parameters) if name == "empty" else theirs
        assert ours == theirs, f"torch's {name} has parameters {theirs}"
        setattr(real, name, made)

    def check(tensor: torch.Tensor, op: str, group: str) -> None:
        size, offset = tensor.numel() * tensor.element_size(), tensor.storage_offset() * tensor.element_size()
        least = max(4, tensor.element_size())
        if tensor.untyped_storage().data_ptr() not in rendezvoused:
            raise ProviderError("input must be allocated with empty_strided_p2p()")
        if offset + size > allocated[tensor.untyped_storage().data_ptr()]:
            raise ProviderError("overflow")
        if size % least or offset % least or not tensor.is_contiguous():
            raise ProviderError("input must be aligned and contiguous")
        if op != "sum" or group != dist.group.WORLD.group_name or tensor.dtype not in (torch.float32, torch.bfloat16):
            raise ProviderError("only sum of float32 and bfloat16")

    def in_place(name: str) -> Callable[..., torch.Tensor]:
        def kernel(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
            check(tensor, op, group)
            if world.note(name, {}) or ("multimem" in name and not multicast):
                raise ProviderError(f"{name}: multicast support is required")
            tensor.copy_(world.sum(tensor))
            return tensor

        return kernel

    def one_shot(tensor: torch.Tensor, op: str, group: str, out: torch.Tensor) -> torch.Tensor:
        check(tensor, op, group)
        world.note("one_shot_all_reduce_out", {})
        if out.shape != tensor.shape or not out.is_contiguous() or out.data_ptr() % PACK:
            raise ProviderError("input/output size mismatch, or output not aligned")
        out.copy_(world.sum(tensor))
        return out

    world.library = torch.library.Library("symm_mem", "IMPL")  # type: ignore[attr-defined]
    for name in ("multimem_all_reduce_", "two_shot_all_reduce_"):
        world.library.impl(name, in_place(name), "CPU")  # type: ignore[attr-defined]
    world.library.impl("one_shot_all_reduce_out", one_shot, "CPU")  # type: ignore[attr-defined]


# ---- NCCL ----------------------------------------------------------------------------------------------------------


class Nccl:
    """libnccl: calls that wait for all ranks, groups, windows and asynchronous errors."""

    def __init__(self, world: World) -> None:
        self.world = world
        record = world.record("nccl")
        self.constants = record["constants"]
        self.codes = {
            self.constants[name]: dtype
            for name, dtype in {
                "ncclInt8": torch.int8, "ncclUint8": torch.uint8, "ncclInt32": torch.int32, "ncclInt64": torch.int64,
                "ncclFloat16": torch.float16, "ncclFloat32": torch.float32, "ncclFloat64": torch.float64,
                "ncclBfloat16": torch.bfloat16,
            }.items()
        }  # fmt: skip
        self.ops = {self.constants[f"nccl{word.capitalize()}"]: word for word in ("sum", "prod", "max", "min", "avg")}
        self.depth, self.grouped = 0, []  # type: int, list[Any]
        self.async_error = 0
        self.alive = False
        self.blocks: dict[int, Any] = {}
        self.windows: dict[int, int] = {}
        self.meetings, self.name = 0, ""
        self.library = CLibrary(world, record["functions"], {name: getattr(self, name) for name in record["functions"]})
        self.store = dist.distributed_c10d._get_default_store()

    # set-up

    def ncclGetVersion(self, version: Any) -> int:
        version._obj.value = NCCL_CODE
        return 0

    def ncclGetUniqueId(self, unique_id: Any) -> int:
        ctypes.memmove(ctypes.addressof(unique_id._obj), secrets.token_bytes(128), 128)
        return 0

    def ncclGetErrorString(self, code: int) -> bytes:
        return b"unhandled system error"

    def ncclGetLastError(self, comm: Any) -> bytes:
        return b"scripted failure"

    def _meet(self, word: str) -> int:
        """Waits until every rank has come here: far longer than the caller should."""
        meeting = f"{self.name}/{word}/{self.meetings}"
        self.meetings += 1
        self.store.set(f"{meeting}/{self.world.rank}", b"1")
        keys = [f"{meeting}/{rank}" for rank in range(self.world.size)]
        until = time.monotonic() + MEETING_S
        while not self.store.check(keys):
            if time.monotonic() > until:
                return 2  # ncclSystemError
            time.sleep(2e-3)
        return 0

    def ncclCommInitRankConfig(self, comm: Any, n: int, unique_id: Any, rank: int, config: Any) -> int:
        made = config._obj
        assert made.size == ctypes.sizeof(made)
        assert made.magic == self.constants["NCCL_API_MAGIC"]
        assert (n, rank, made.blocking) == (self.world.size, self.world.rank, 1)
        comm._obj.value = 0xC0DE
        self.meetings, self.name = 0, bytes(unique_id).hex()
        code = self._meet("init")
        self.alive = not code
        return code

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
        assert self.alive
        state._obj.value = self.async_error
        return 0

    def ncclCommFinalize(self, comm: Any) -> int:
        return self._meet("finalize")

    def ncclCommDestroy(self, comm: Any) -> int:
        assert self.alive
        self.alive = False
        return 0

    def ncclCommAbort(self, comm: Any) -> int:
        assert self.alive
        self.alive = False
        return 0

    # windows

    def ncclMemAlloc(self, pointer: Any, size: int) -> int:
        block = ctypes.create_string_buffer(size + 4096)
        address = -(-ctypes.addressof(block) // 4096) * 4096
        self.blocks[address] = block
        pointer._obj.value = address
        return 0

    def ncclMemFree(self, address: Any) -> int:
        del self.blocks[getattr(address, "value", address)]
        return 0

    def ncclCommWindowRegister(self, comm: Any, address: int, size: int, window: Any, flags: int) -> int:
        assert address in self.blocks
        assert flags == self.constants["NCCL_WIN_COLL_SYMMETRIC"]
        self.windows[address] = size
        window._obj.value = address
        return self._meet("window")

    def ncclCommWindowDeregister(self, comm: Any, window: Any) -> int:
        del self.windows[window.value]
        return 0

    # collectives

    def _run(self, comm: Any, stream: int, work: Callable[[], None], point: Any = None) -> int:
        if not self.alive or not getattr(comm, "value", comm):
            return 4  # ncclInvalidArgument
        assert stream == STREAM
        if self.depth:
            self.grouped.append((work, point))
        elif point is not None:
            self._pairs([point])
        else:
            self.world.do(work)
        return 0

    def _typed(self, address: int, count: int, code: int) -> torch.Tensor:
        dtype = self.codes[code]
        return memory(address, count * dtype.itemsize).view(dtype) if count else torch.empty(0, dtype=dtype)

    def _reduced(self, tensor: torch.Tensor, op: int) -> torch.Tensor:
        parts = torch.stack([p.double() for p in self.world.exchange(tensor.clone())])
        word = self.ops[op]
        result = {
            "sum": lambda: parts.sum(0), "avg": lambda: parts.mean(0), "prod": lambda: parts.prod(0),
            "max": lambda: parts.amax(0), "min": lambda: parts.amin(0),
        }[word]()  # fmt: skip
        return result.to(tensor.dtype)

    def ncclAllReduce(self, send: int, recv: int, count: int, dtype: int, op: int, comm: Any, stream: int) -> int:
        def work() -> None:
            self._typed(recv, count, dtype).copy_(self._reduced(self._typed(send, count, dtype), op))

        return self._run(comm, stream, work)

    def ncclReduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, root: int, comm: Any, stream: int
    ) -> int:
        def work() -> None:
            result = self._reduced(self._typed(send, count, dtype), op)
            if root == self.world.rank:
                self._typed(recv, count, dtype).copy_(result)

        return self._run(comm, stream, work)

    def ncclReduceScatter(self, send: int, recv: int, count: int, dtype: int, op: int, comm: Any, stream: int) -> int:
        def work() -> None:
            whole = self._reduced(self._typed(send, count * self.world.size, dtype), op)
            self._typed(recv, count, dtype).copy_(whole[self.world.rank * count :][:count])

        return self._run(comm, stream, work)

    def ncclAllGather(self, send: int, recv: int, count: int, dtype: int, comm: Any, stream: int) -> int:
        def work() -> None:
            parts = self.world.exchange(self._typed(send, count, dtype).clone())
            self._typed(recv, count * self.world.size, dtype).copy_(torch.cat(parts))

        return self._run(comm, stream, work)

    def ncclBroadcast(self, send: int, recv: int, count: int, dtype: int, root: int, comm: Any, stream: int) -> int:
        def work() -> None:
            parts = self.world.exchange(self._typed(send, count, dtype).clone())
            self._typed(recv, count, dtype).copy_(parts[root])

        return self._run(comm, stream, work)

    def ncclSend(self, send: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> int:
        return self._run(comm, stream, lambda: None, ("send", peer, send, count, dtype))

    def ncclRecv(self, recv: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> int:
        return self._run(comm, stream, lambda: None, ("recv", peer, recv, count, dtype))

    def _pairs(self, points: list[Any]) -> None:
        def work() -> None:
            mine = [(p[1], self._typed(*p[2:]).clone()) for p in points if p[0] == "send"]
            sent = self.world.exchange(mine)
            for kind, peer, *where in points:
                if kind == "recv":
                    queue = [t for to, t in sent[peer] if to == self.world.rank]
                    self._typed(*where).copy_(queue[0])

        self.world.do(work)

    def ncclGroupStart(self) -> int:
        self.depth += 1
        return 0

    def ncclGroupEnd(self) -> int:
        self.depth -= 1
        grouped, self.grouped = self.grouped, []
        points = [point for _, point in grouped if point is not None]
        if points:
            self._pairs(points)
        for work, point in grouped:
            if point is None:
                self.world.do(work)
        return 0


def play_nccl(world: World) -> Nccl:
    library = Nccl(world)
    real = ctypes.CDLL
    ctypes.CDLL = lambda path, *rest: library.library if "played-nccl" in str(path) else real(path, *rest)  # type: ignore
    os.environ["COMMBENCH_NCCL_LIBRARY"] = "played-nccl.so"
    return library
