"""Ask the real SGLang 0.5.3 for its decisions, on a CPU: run by test_sglang_dispatch.py in an environment of its own.

Its communicators' own constructors, its predicates and its order run as released. Made up are the probes of the
machine (capability, NVLink, nodes, multicast), the packages that it imports and does not use here, and the kernels.
Tensors are on the meta device, so no size takes memory. Prints CSV in the columns of recorded decisions.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.abc
import importlib.machinery
import os
import random
import sys
import types
from typing import Any, ClassVar
from unittest import mock

import numpy  # noqa: F401 - before the stand-ins, which must not stand in for what it imports
import torch
import torch._dynamo
import torch.distributed as dist

MIB = 1 << 20
COLUMNS = (
    "arch", "cc_major", "cc_minor", "world_size", "nnodes", "nvlink", "multicast", "requested", "qr_level",
    "qr_fp16_cast", "mode", "dtype", "layout", "contiguous", "shape", "size_bytes", "pynccl", "picked",
)  # fmt: skip


class StandIn(types.ModuleType):
    """A module that is not installed: any name in it is a mock."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in the path: what nothing else finds and is not SGLang's own becomes a stand-in."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        # an installed requests looks for simplejson, and does well without it
        if name.split(".")[0] in (*sys.stdlib_module_names, "sglang", "torch", "numpy", "simplejson"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def load(arch: str) -> Any:
    """SGLang's parallel_state, as it loads on a machine with CUDA or ROCm."""
    torch.version.cuda, torch.version.hip = ("12.8", None) if arch == "cuda" else (None, "6.4")
    torch.cuda.is_available = lambda: True
    sys.meta_path.append(StandIns())
    import sglang.srt.distributed.parallel_state as parallel_state

    return parallel_state


class Recorder:
    """Stands where the custom ops are: keeps the method that the coordinator chose."""

    def __init__(self) -> None:
        self.picked = ""

    def outplace_all_reduce(self, tensor: Any, group_name: str, outplace_all_reduce_method: str) -> Any:
        self.picked = outplace_all_reduce_method
        return tensor

    def inplace_all_reduce(self, tensor: Any, group_name: str) -> None:
        self.picked = "inplace"


@contextlib.contextmanager
def machine(facts: dict[str, Any]) -> Any:
    """The probes of a machine, made up."""
    from sglang.srt.distributed.device_communicators import custom_all_reduce, quick_all_reduce, symm_mem

    n, nodes = facts["world_size"], facts["nnodes"]
    same_node = lambda group, source_rank=0: [nodes == 1] * n  # noqa: E731
    linked = lambda ids, size: bool(facts["nvlink"])  # noqa: E731
    symmetric = mock.MagicMock()
    symmetric.rendezvous.return_value.multicast_ptr = facts["multicast"]
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (dist, "get_backend", lambda group=None: "gloo"),
            (dist, "get_rank", lambda group=None: 0),
            (dist, "get_world_size", lambda group=None: n),
            (dist, "all_gather", lambda *a, **k: None),
            (dist, "all_gather_object", lambda *a, **k: None),
            (dist, "broadcast_object_list", lambda *a, **k: None),
            (dist, "get_process_group_ranks", lambda group=None: list(range(n))),
            (torch, "empty", mock.MagicMock()),
            (torch.cuda, "set_device", lambda device: None),
            (torch.cuda, "device_count", lambda: n // nodes),
            (torch.cuda, "get_device_capability", lambda device=None: (facts["cc_major"], facts["cc_minor"])),
            (custom_all_reduce, "in_the_same_node_as", same_node),
            (custom_all_reduce, "is_full_nvlink", linked),
            (custom_all_reduce, "_can_p2p", lambda rank, size: True),
            (custom_all_reduce, "ops", mock.MagicMock()),
            (custom_all_reduce, "custom_ar", True),
            (custom_all_reduce.CustomAllreduce, "create_shared_buffer", lambda *a, **k: [0] * n),
            (custom_all_reduce.CustomAllreduce, "_gather_ipc_meta", lambda *a, **k: ([], [])),
            (custom_all_reduce.CustomAllreduce, "register_buffer", lambda *a, **k: None),
            (quick_all_reduce, "in_the_same_node_as", same_node),
            (quick_all_reduce, "is_full_nvlink", linked),
            (quick_all_reduce, "qr_rocm_arch_available", lambda: facts["arch"] == "hip"),
            (quick_all_reduce, "quick_ar", facts["arch"] == "hip"),
            (quick_all_reduce.ops, "qr_max_size", lambda: 2048 * MIB),
            (symm_mem, "torch_symm_mem", symmetric),
        ):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        yield


def coordinator(parallel_state: Any, facts: dict[str, Any]) -> Any:
    """A GroupCoordinator whose communicators were made by their own constructors."""
    from sglang.srt.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    from sglang.srt.distributed.device_communicators.pymscclpp import PyMscclppCommunicator
    from sglang.srt.distributed.device_communicators.quick_all_reduce import QuickAllReduce
    from sglang.srt.distributed.device_communicators.symm_mem import SymmMemCommunicator

    device, group = torch.device("cuda:0"), mock.MagicMock()
    wanted = facts["requested"].split("+")
    made = object.__new__(parallel_state.GroupCoordinator)
    made.world_size, made.unique_name = facts["world_size"], "tp:0"
    made.hpu_communicator = made.xpu_communicator = made.npu_communicator = None
    made.pynccl_comm = mock.MagicMock()
    made.ca_comm = made.qr_comm = made.pymscclpp_comm = made.symm_mem_comm = None
    with machine(facts), mock.patch.object(PyMscclppCommunicator, "pre_tune_config"):
        if "ca_v1" in wanted:
            made.ca_comm = CustomAllreduce(group, device)
        if "qr" in wanted:
            os.environ["ROCM_QUICK_REDUCE_QUANTIZATION"] = facts["qr_level"]
            os.environ["ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16"] = str(facts["qr_fp16_cast"])
            made.qr_comm = QuickAllReduce(group, device)
        if "pymscclpp" in wanted:
            made.pymscclpp_comm = PyMscclppCommunicator(group, device)
        if "symm_mem" in wanted:
            made.symm_mem_comm = SymmMemCommunicator(group, device)
    for communicator in (made.ca_comm, made.qr_comm):
        if communicator is not None:
            type(communicator).__del__ = lambda self: None  # nothing real to free
    return made


def tensor(dtype: str, numel: int, layout: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if layout == "strided":
        return torch.empty(2 * numel, dtype=kind, device="meta")[::2]
    if layout == "dense_t":
        return torch.empty((numel // 8, 8), dtype=kind, device="meta").t()
    return torch.empty(numel, dtype=kind, device="meta")


def decide(parallel_state: Any, made: Any, mode: str, value: torch.Tensor) -> str:
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.ops, "sglang", recorder, create=True))
        if mode == "graph" and made.pymscclpp_comm is not None:
            stack.enter_context(made.pymscclpp_comm.change_state(enable=True))
        try:
            made.all_reduce(value)
        except AttributeError as error:
            return f"raise {type(error).__name__}"
    return recorder.picked


def scenes(arch: str, chance: random.Random, count: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(count):
        nodes = chance.choice([1, 1, 1, 2])
        capability = (9, 4) if arch == "hip" else chance.choice([(8, 0), (9, 0), (10, 0)])
        wanted = ["ca_v1", "qr"] if arch == "hip" else ["ca_v1", "pymscclpp", "symm_mem"]
        found.append(
            {
                "arch": arch,
                "cc_major": capability[0],
                "cc_minor": capability[1],
                "world_size": chance.choice([8, 16] if nodes == 2 else [2, 3, 4, 5, 6, 8, 16]),
                "nnodes": nodes,
                "nvlink": chance.choice([1, 1, 0]),
                "multicast": chance.choice([1, 1, 0]),
                "requested": "+".join(w for w in wanted if chance.random() < 0.7),
                "qr_level": chance.choice(["FP", "INT8", "INT6", "INT4", "NONE"]) if arch == "hip" else "",
                "qr_fp16_cast": chance.choice([0, 1]) if arch == "hip" else "",
                "pynccl": 1,
            }
        )
    return found


def main(arch: str, seed: int, groups: int, calls: int) -> None:
    chance = random.Random(seed)
    parallel_state = load(arch)
    out = csv.DictWriter(sys.stdout, COLUMNS)
    out.writeheader()
    sizes = [16, 4096, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 2048 * MIB]
    for facts in scenes(arch, chance, groups):
        made = coordinator(parallel_state, facts)
        for _ in range(calls):
            dtype = chance.choice(["bfloat16", "bfloat16", "float16", "float32"])
            itemsize = 4 if dtype == "float32" else 2
            numel = max(1, chance.choice(sizes) // itemsize + chance.choice([-16, -8, -4, -2, -1, 0, 0, 0, 1, 2, 4, 8]))
            layout = chance.choice(["contig", "contig", "contig", "strided", "dense_t"])
            if layout == "dense_t":
                numel = numel // 8 * 8 or 8
            value = tensor(dtype, numel, layout)
            mode = chance.choice(["eager", "graph"])
            row = {"mode": mode, "dtype": dtype, "layout": layout, "size_bytes": numel * itemsize}
            row["contiguous"] = int(value.is_contiguous())
            shape = "x".join(map(str, value.shape))
            out.writerow({**facts, **row, "shape": shape, "picked": decide(parallel_state, made, mode, value)})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
