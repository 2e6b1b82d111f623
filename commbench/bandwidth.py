"""Bandwidth formulas, in one table.

Message size S is the total array (nccl-tests' convention: for all_gather, reduce_scatter,
all_to_all, gather and scatter the sum over ranks). algbw = S / t; busbw = algbw × factor, where
the factor is the traffic that a ring algorithm puts on each link, per byte of S
(nccl-tests, doc/PERFORMANCE.md). Algorithms that use the network otherwise (NVLS, shared memory)
can exceed the line rate in busbw: the factor is for rings.
"""

from __future__ import annotations

from collections.abc import Callable

BUSBW_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
    "all_gatherv": lambda n: (n - 1) / n,
    "all_gatherv_skewed": lambda n: (n - 1) / n,
    "reduce_scatterv": lambda n: (n - 1) / n,
    "reduce_scatterv_skewed": lambda n: (n - 1) / n,
    "send_object": lambda n: 1.0,
    "broadcast_object": lambda n: 1.0,
    "queue_broadcast": lambda n: 1.0,
    "send_tensor_dict": lambda n: 1.0,
    "send_tensor_dict_async": lambda n: 1.0,
    "send_tensor_dict_split": lambda n: 1.0,
    "broadcast_tensor_dict": lambda n: 1.0,
    "weight_update": lambda n: 1.0,
}


def algbw_gb_per_s(size_bytes: int, latency_s: float) -> float | None:
    """Size over time in 1e9 bytes per second; None where there is no size or no time."""
    if size_bytes <= 0 or not latency_s > 0:
        return None
    return size_bytes / latency_s / 1e9


def busbw_gb_per_s(collective: str, size_bytes: int, latency_s: float, world_size: int) -> float | None:
    """algbw × the ring factor; None for collectives without one (barrier)."""
    factor = BUSBW_FACTOR.get(collective)
    algbw = algbw_gb_per_s(size_bytes, latency_s)
    if factor is None or algbw is None:
        return None
    return algbw * factor(world_size)
