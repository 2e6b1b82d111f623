"""Types of the compiled module. Addresses are of this process; sizes are in bytes unless named count."""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

MAX_RANKS: int

def now_ns() -> int:
    """Nanoseconds of CLOCK_MONOTONIC, the clock of time.perf_counter_ns."""

def isa() -> str:
    """The instruction set chosen for reductions: avx512, avx2, neon or plain."""

def segment_bytes(n_ranks: int, chunk_bytes: int) -> int:
    """Size of the segment that a Comm needs."""

def gate_bytes(n_ranks: int) -> int:
    """Bytes of zeroed shared memory that a StartGate needs."""

class Segment:
    """A file mapped shared; owns its descriptor."""

    def __init__(self, fd: int, size_bytes: int, keep_fd: bool = True) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    def lock_rank(self, rank: int) -> None:
        """Mark that this process is ``rank`` until it dies or the segment goes."""
    def alive(self, rank: int) -> bool:
        """Whether the process that locked ``rank`` still exists."""
    def release(self) -> None:
        """Unmap and close now."""
    def bytes_view(self, offset: int, size_bytes: int) -> Any:
        """A DLPack capsule (uint8) over a piece of the segment, which it keeps mapped."""

class BoundCall:
    """A call that timed_loop repeats without Python; calling it runs it once."""

    @staticmethod
    def empty() -> BoundCall:
        """Does nothing: what the loop itself costs."""
    @staticmethod
    def busy_wait(durations_ns: Sequence[int]) -> BoundCall:
        """Takes the given times in turn, each from its own start."""
    @staticmethod
    def foreign(function: int, words: Sequence[int], keep: object = None) -> BoundCall:
        """Calls ``int function(words...)`` of another library: an address, and up to 8 integers or addresses.
        ``keep`` is held alive with it. Raises CollectiveError when the function gives anything but 0."""
    def __call__(self) -> None: ...

class StartGate:
    """The common start of an iteration for n ranks.

    address: gate_bytes(n) of zeroed shared memory, at a multiple of 64. With a locked ``segment`` a dead peer raises
    PeerLost; without one it is the timeout (CollectiveError) that ends the wait. Ctrl-C ends it too.
    """

    def __init__(
        self,
        address: int,
        n_ranks: int,
        rank: int,
        oversubscribed: bool = False,
        timeout_s: float = 60.0,
        segment: Segment | None = None,
    ) -> None: ...
    def enter(self, delta_ns: int = 0) -> bool:
        """Wait for all ranks, then for the window that rank 0 opens delta_ns later (0: a barrier only). True when
        this rank came to the window too late."""

def timed_loop(
    calls: BoundCall | Sequence[BoundCall],
    gate: StartGate | None,
    starts: NDArray[Any],
    ends: NDArray[Any],
    flags: NDArray[Any],
    delta_ns: int = 0,
    batch: int = 1,
    first: int = 0,
) -> None:
    """Fill starts, ends (int64, ns of now_ns) and flags (uint8, 1 = this rank missed the window), one sample each:
    [gate], clock, ``batch`` calls, clock. Several calls are taken in turn, beginning with number ``first``.
    Raises what the collective or the gate raises; samples before it are valid then."""

class Comm:
    """The collectives of one rank of a group; all ranks make the same calls in the same order.

    Raises PeerLost when a rank is gone, CollectiveError for a timeout or wrong use, KeyboardInterrupt on Ctrl-C;
    after any of these inside a wait the group is unusable and says so.
    """

    def __init__(
        self,
        segment: Segment,
        n_ranks: int,
        rank: int,
        chunk_bytes: int,
        oversubscribed: bool,
        timeout_s: float,
        debug: bool,
    ) -> None: ...
    def close(self) -> None: ...
    def all_reduce(self, input: int, output: int, count: int, dtype: int, op: int, threshold: int) -> None: ...
    def reduce(self, input: int, output: int, count: int, dtype: int, op: int, dst: int, threshold: int) -> None: ...
    def reduce_scatter(self, input: int, output: int, part_count: int, dtype: int, op: int) -> None: ...
    def reduce_scatterv(self, input: int, output: int, counts: Sequence[int], dtype: int, op: int) -> None: ...
    def all_gather(self, input: int, output: int, part_bytes: int) -> None: ...
    def all_gatherv(self, input: int, output: int, sizes_bytes: Sequence[int]) -> None: ...
    def broadcast(self, data: int, size_bytes: int, src: int) -> None: ...
    def all_to_all(self, input: int, output: int, part_bytes: int) -> None: ...
    def gather(self, input: int, output: int, part_bytes: int, dst: int) -> None: ...
    def scatter(self, input: int, output: int, part_bytes: int, src: int) -> None: ...
    def barrier(self) -> None: ...
    def send(self, data: int, size_bytes: int, dst: int) -> None: ...
    def recv(self, data: int, size_bytes: int, src: int) -> None: ...
    def send_recv(self, input: int, input_bytes: int, dst: int, output: int, output_bytes: int, src: int) -> None: ...
    def add_registered(self, id: int, base: int, stride: int, size_bytes: int) -> None: ...
    def remove_registered(self, id: int) -> None: ...
    def is_registered(self, data: int, size_bytes: int) -> bool: ...
    def bind(
        self,
        collective: str,
        input: int,
        output: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        threshold: int,
        keep: object,
    ) -> BoundCall:
        """A BoundCall. count: elements of one part (reduce_scatter, all_gather, all_to_all, gather, scatter) or of
        the whole array. ``keep`` is held alive with it."""

class FastAllReduce:
    """all_reduce(input, output, op) on tensors without a line of Python, through torch's DLPack C exchange API.

    What is not plain (strided, another dtype, a tensor subclass) goes to all_reduce of the class of ``backend()``.
    """

    def __init__(self, comm: Comm, tensor_type: type, backend: Callable[[], object], threshold: int) -> None: ...
    threshold: int
    @property
    def usable(self) -> bool:
        """Whether this torch has that API."""
    @property
    def calls(self) -> int: ...
    def function(self) -> Callable[[Any, Any, str], None]: ...
