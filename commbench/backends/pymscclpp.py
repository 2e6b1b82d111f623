"""MSCCL++ all-reduce of sgl-kernel: low-latency packets between the GPUs of one node, or of two.

Which launch is fastest depends on the size: all ranks time every candidate at every power of two, and rank 0 hands the
choice to all. Outside of graphs the kernel reads its input through one set of addresses, which a call with another
input changes while an earlier one may still run; so there inputs are copied to a place that stays.
COMMBENCH_MSCCLPP_MAX_BYTES (1MiB) is the largest message. NOT RUN ON HARDWARE.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch

from commbench.backends import device as devices
from commbench.backends.base import Availability, Backend, Group, beyond_kernels, beyond_sizes, together
from commbench.backends.staging import Views, bytes_from_environment
from commbench.errors import BackendUnavailable
from commbench.types import CallSignature

MAX_BYTES_VARIABLE = "COMMBENCH_MSCCLPP_MAX_BYTES"
DEFAULT_MAX_BYTES = 1 << 20
NODE = 8  # GPUs of a node: the kernels know no other number
WORLD_SIZES = (NODE, 2 * NODE)
DTYPE_NAMES = ("float32", "float16", "bfloat16")
PACKET = 8  # bytes of data in a packet; a rank reduces whole packets, and what is left over would not be reduced at all
ONE_NODE, TWO_NODES = 1, 2  # the provider's context_selection
SMALLEST_TUNED = 1 << 10
THREADS, BLOCKS = (256, 512, 1024), (21, 42, 84)  # candidates; blocks are multiples of the seven peers
TUNING_ITERATIONS, TUNING_LIMIT_S = 10, 10.0
SCRATCH = 8  # times the largest message: packets are twice the data, and lie there twice for input and result

Launch = tuple[int, int]  # threads of a block, blocks


def sizes_to_tune(max_bytes: int) -> list[int]:
    """Powers of two from SMALLEST_TUNED up to the first that is not below max_bytes."""
    sizes = [SMALLEST_TUNED]
    while sizes[-1] < max_bytes:
        sizes.append(2 * sizes[-1])
    return sizes


def best_launches(times_s: Sequence[Mapping[tuple[int, Launch], float]]) -> dict[int, Launch]:
    """For each size the launch whose slowest rank is the fastest. times_s: one mapping for each rank, all with the same
    keys; a tie goes to the smaller launch."""
    best: dict[int, tuple[float, Launch]] = {}
    for size, launch in times_s[0]:
        slowest = max(rank[size, launch] for rank in times_s)
        if size not in best or (slowest, launch) < best[size]:
            best[size] = (slowest, launch)
    return {size: launch for size, (_, launch) in best.items()}


class MscclppBackend(Backend):
    """See the module's text."""

    name = "pymscclpp"
    collectives = frozenset({"all_reduce"})

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._context = 0
        self._module: Any = None
        facts = together(group, self.name, self._check)
        self.max_bytes = min(cap for cap, _ in facts)
        hosts = [host for _, host in facts]
        nodes = [set(hosts[first : first + NODE]) for first in range(0, len(hosts), NODE)]
        if any(len(node) > 1 for node in nodes) or len(set(hosts)) != len(nodes):
            raise BackendUnavailable(self.name, f"its kernels are for nodes of {NODE} GPUs in rank order", "use pynccl")
        first = group.rank == 0
        names = together(group, self.name, lambda: self._load().mscclpp_generate_unique_id() if first else None)
        self._memory: dict[str, torch.Tensor] = {}
        together(group, self.name, self._allocate)
        # the provider's ranks connect to each other in here; it has a timeout of its own
        together(group, self.name, lambda: self._connect(names[0]))
        self._operation: Callable[..., None] = self._load().mscclpp_allreduce
        self._capturing = False
        self._launches: dict[int, Launch] = {}
        times = together(group, self.name, self._time)
        chosen = together(group, self.name, lambda: best_launches(times) if first else {})
        self._set(chosen[0])
        self.provider = f"{self.provider_version()} mscclpp"

    @classmethod
    def availability(cls, device: str) -> Availability:
        problem = devices.missing(device, "cuda")
        if problem is not None:
            return Availability(False, *problem)
        if importlib.util.find_spec("sgl_kernel") is None:
            return Availability(False, "sgl_kernel is not installed", "pip install 'sgl-kernel>=0.3.14,<0.4'")
        return Availability(True, provider=f"{cls.provider_version()} mscclpp")

    @staticmethod
    def provider_version() -> str:
        try:
            return f"sgl_kernel {metadata.version('sgl-kernel')}"
        except metadata.PackageNotFoundError:
            return "sgl_kernel"

    # ---- set-up -----------------------------------------------------------------------------------------------

    def _check(self) -> tuple[int, str]:
        """(cap, host) of this rank, after what can be checked without the others."""
        group = self.group
        if group.world_size not in WORLD_SIZES:
            raise BackendUnavailable(
                self.name, f"world size {group.world_size} is none of {', '.join(map(str, WORLD_SIZES))}", "use pynccl"
            )
        if list(group.ranks) != list(range(group.ranks[0], group.ranks[0] + group.world_size)):
            raise BackendUnavailable(self.name, "the group's ranks are not consecutive", "use pynccl")
        if group.world_size == NODE and not group.one_host:
            raise BackendUnavailable(self.name, "nothing has proven that all ranks share one host", "use pynccl")
        if not hasattr(self._load(), "mscclpp_allreduce"):
            raise BackendUnavailable(
                self.name, f"{self.provider_version()} has no mscclpp", "pip install 'sgl-kernel>=0.3.14,<0.4'"
            )
        devices.activate(group.device)
        return bytes_from_environment(self.name, MAX_BYTES_VARIABLE, DEFAULT_MAX_BYTES), socket.gethostname()

    def _load(self) -> Any:
        if self._module is None:
            self._module = importlib.import_module("sgl_kernel.allreduce")
        return self._module

    def _allocate(self) -> None:
        def memory(size_bytes: int) -> torch.Tensor:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self.group.device)

        room = sizes_to_tune(self.max_bytes)[-1]
        self._memory = {
            "scratch": memory(room * SCRATCH),
            "put": memory(room * SCRATCH // NODE),
            "input": memory(room).zero_(),
        }

    def _connect(self, unique_id: Any) -> None:
        n, rank = self.group.world_size, self.group.rank
        nodes = [r // NODE for r in range(n)]
        adapters = [rank % NODE] * n  # this rank's own network adapter carries all its links to the other node
        self._context = self._module.mscclpp_init_context(
            unique_id, rank, n, self._memory["scratch"], self._memory["put"], NODE, nodes, adapters,
            ONE_NODE if n == NODE else TWO_NODES,
        )  # fmt: skip

    def _time(self) -> dict[tuple[int, Launch], float]:
        """Seconds of a call for every size and launch, on this rank. The kernels of all ranks wait for each other."""
        times = {}
        dtype = torch.bfloat16
        for size in sizes_to_tune(self.max_bytes):
            source = self._memory["input"][:size].view(dtype)
            target = torch.empty_like(source)
            for threads in THREADS:
                for blocks in BLOCKS:

                    def call(source: Any = source, target: Any = target, t: int = threads, b: int = blocks) -> None:
                        self._operation(self._context, source, target, t, b)

                    times[size, (threads, blocks)] = devices.timed(
                        self.group.device, call, TUNING_ITERATIONS, TUNING_LIMIT_S
                    )
        return times

    def _set(self, launches: dict[int, Launch]) -> None:
        self._launches = dict(sorted(launches.items()))
        # by the bit length of size − 1, so that a call finds the next power of two without a search
        self._by_bits = {(size - 1).bit_length(): launch for size, launch in self._launches.items()}
        for bits in range(min(self._by_bits)):
            self._by_bits[bits] = self._launches[min(self._launches)]

    @property
    def launches(self) -> dict[int, Launch]:
        """Size in bytes → (threads, blocks) that it and smaller sizes are launched with."""
        return dict(self._launches)

    # ---- calls ------------------------------------------------------------------------------------------------

    def declines(self, call: CallSignature) -> str | None:
        refused = super().declines(call) or beyond_kernels(call, DTYPE_NAMES)
        whole, what = PACKET * self.group.world_size, f"a packet of {PACKET} for each rank"
        return refused or beyond_sizes(call, whole, self.max_bytes, MAX_BYTES_VARIABLE, what)

    def bound(self, call: CallSignature) -> Callable[..., None]:
        return self._path(getattr(torch, call.dtype), call.size_bytes, eager=call.mode == "eager")

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self._path(input.dtype, input.nbytes, eager=False)(input, output, op)

    def _path(self, dtype: torch.dtype, size_bytes: int, *, eager: bool) -> Callable[..., None]:
        """all_reduce of so many bytes of one dtype. eager: it is called outside of captures only."""
        operation, context = self._operation, self._context
        threads, blocks = self._by_bits[(size_bytes - 1).bit_length()]
        inputs = Views(dtype, lambda _: self._memory["input"])

        def all_reduce(input: torch.Tensor, output: torch.Tensor, op: str) -> None:
            self.calls += 1
            if eager or not (self._capturing and devices.is_capturing()) or input.data_ptr() % PACKET:
                source = inputs[input.shape]
                source.copy_(input)
            else:
                source = input
            if not output.data_ptr() % PACKET and output.is_contiguous():
                operation(context, source, output, threads, blocks)
                return
            target = torch.empty_like(input)
            operation(context, source, target, threads, blocks)
            output.copy_(target.view(output.shape))

        return all_reduce

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def close(self) -> None:
        self._memory.clear()  # the provider has no function that ends a context; it goes with the process
