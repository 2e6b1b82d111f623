"""What is known of one point while it is measured, on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from commbench.measure.buffers import Buffers
from commbench.measure.correctness import Check
from commbench.measure.loop import Call
from commbench.measure.noise import Noise
from commbench.measure.numerics import Numerics
from commbench.measure.places import Place
from commbench.measure.stopping import Progress
from commbench.statistics import Array
from commbench.types import Point

if TYPE_CHECKING:
    from commbench.backends.base import Backend
    from commbench.measure.device import Graph
    from commbench.measure.graph import Graphs


@dataclass(slots=True)
class PointState:
    """Latencies and what belongs to them are filled on rank 0 only."""

    order: int
    point: Point
    place: Place
    buffers: list[Buffers] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    native: list[Any] = field(default_factory=list)  # the same, bound in compiled code, where loop is native
    backend: Backend | None = None  # whose counter native calls are added to
    seed: int = 0
    visits: int = 0
    batch: int = 1
    overhead_s: float = 0.0
    block_n: int = 6
    delta_ns: int = 0
    local: bool = False  # the clocks of hosts are not known well enough: local durations count
    each_s: float = 0.0  # wall time of a sample, its start included, in the last block
    iteration: int = 0
    warmup_iterations: int = 0
    steady: bool = False
    elapsed_s: float = 0.0
    latencies: list[Array] = field(default_factory=list)
    t_win: list[Array] = field(default_factory=list)
    skew: list[Array] = field(default_factory=list)
    n_invalid: int = 0
    calls_made: int = 0
    calls_counted: dict[str, int] = field(default_factory=dict)
    check: Check = field(default_factory=Check)
    checked: bool = False
    numerics: Numerics | None = None
    quantised: str = ""  # the level at which the picked backend's data travel
    decision: str = ""
    noises: list[Noise] = field(default_factory=list)
    progress: Progress | None = None
    enqueue: list[Array] = field(default_factory=list)  # the host's time in a sample's calls, on a device
    graphs: Graphs | None = None  # those that are timed, in mode graph
    one_call: Graph | None = None  # a graph with one call of the first buffers, for checks
    void: str = ""  # why a block of slopes meant nothing, the last time
    status: str = ""
    reason: str = ""

    def all_latencies(self) -> Array:
        return np.concatenate(self.latencies) if self.latencies else np.empty(0)

    def release(self) -> None:
        """Give back what only measuring needs."""
        self.buffers, self.calls, self.native = [], [], []
        self.graphs = self.one_call = None
