"""How a sweep's points are measured: what the plan hands to every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

CAPACITY = 1 << 14  # samples that a block can hold


@dataclass(frozen=True, slots=True)
class Settings:
    """How every point of a launch is measured.

    target_ci: relative half-width of the median's interval to stop at. max_time_per_point_s: sampling and warm-up time
    of one point in one launch. budget_s: time for all points of one launch (None: no limit). sync: how iterations start
    (gate.SYNCS). loop: python, or native where the backend can be called from compiled code. skew_rank starts every
    iteration late by skew_s (None: no rank does). device: cpu, cuda, xpu, hpu, npu. backends: those to set up beside
    the policies'. tp, pp, ep: sizes of the groups (tp 0: all ranks). ca_provider: whose custom all-reduce to run, ""
    for the first that is installed. patience_s: how long ranks wait for each other before they give up by themselves;
    longer than the watching command, which can say who stopped. graph_timing: isolated or chained (graph.KINDS).
    share_device: ranks may share a device where there are fewer devices than ranks. weight_numels, bucket_bytes:
    elements of each tensor of a model, for weight_update (none: some of unlike sizes), and how many bytes travel at
    once.
    """

    seed: int = 0
    target_ci: float = 0.01
    max_time_per_point_s: float = 1.0
    budget_s: float | None = None
    sync: str = "window"
    device: str = "cpu"
    loop: str = "python"
    skew_rank: int | None = None
    skew_s: float = 0.0
    backends: tuple[str, ...] = ()
    tp: int = 0
    pp: int = 1
    ep: int = 1
    ca_provider: str = ""
    patience_s: float = 60.0
    graph_timing: str = "isolated"
    share_device: bool = False
    weight_numels: tuple[int, ...] = ()
    bucket_bytes: int = 64 << 20

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Settings:
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        for name in ("backends", "weight_numels"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)
