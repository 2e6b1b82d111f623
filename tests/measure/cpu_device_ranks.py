"""What ranks do that drive a whole ``Meter`` on the scripted ``CpuDevice``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from commbench.types import Point
from tests.measure.cpu_device import MICROSECOND, CpuDevice, DeviceBackend
from tests.ranks import world


@dataclass
class Script:
    """One launch: the points, what the backend does on each rank, and what the device can."""

    points: list[Point]
    eager_us: tuple[float, ...] = (20.0,)
    graph_us: tuple[float, ...] = (12.0,)
    settings: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] | None = field(default_factory=dict)
    fail_at: int | None = None
    frozen: bool = False
    identities: tuple[str, ...] = ("cpu0", "cpu1")


def launch(rank: int, size: int, script: Script) -> dict[str, Any]:
    from commbench.coordinator.alone import AloneBackend
    from commbench.coordinator.group import GroupCoordinator
    from commbench.coordinator.world import local_platform
    from commbench.harness.ranks.worker import Objects
    from commbench.measure.session import Meter
    from commbench.measure.settings import Settings
    from commbench.measure.team import PageTeam
    from commbench.policy import load_policy
    from commbench.registry import BACKENDS

    BACKENDS["scripted_device"] = "tests.measure.cpu_device:DeviceBackend"
    device = None if script.device is None else CpuDevice(script.identities[rank], **script.device)
    if device is not None:
        DeviceBackend.device = device
    DeviceBackend.eager_ns = round(script.eager_us[rank % len(script.eager_us)] * MICROSECOND)
    DeviceBackend.graph_ns = round(script.graph_us[rank % len(script.graph_us)] * MICROSECOND)
    DeviceBackend.fail_at, DeviceBackend.frozen = script.fail_at, script.frozen

    group = world()
    coordinator = GroupCoordinator(
        group, load_policy("commbench"), local_platform(group.device), backends=["scripted_device"]
    )
    if size == 1:
        coordinator._set.ready[AloneBackend.name] = backend = DeviceBackend(group)
    else:
        backend = coordinator.backend("scripted_device")
    team = PageTeam.form(rank, size, Objects(group.cpu_group), oversubscribed=size > (os.cpu_count() or 1))
    settings = Settings(max_time_per_point_s=0.3, **script.settings)
    kept: list[tuple[int, list[list[int]], list[list[int]], bool]] = []

    def keep(point_id: str, first: int, starts: Any, ends: Any, valid: Any) -> None:
        kept.append((first, starts.tolist(), ends.tolist(), bool(valid.all())))

    meter = Meter(coordinator, team, settings, cache_bytes=1 << 20, keep=keep, device=device)
    rows = [row["values"] for row in meter.measure(list(enumerate(script.points)))]
    found = {
        "rows": {row["order"]: row for row in rows},
        "kept": kept,
        "log": [] if device is None else device.log,
        "rejoined": 0 if device is None else device.rejoined,
        "captures": (backend.entered, backend.left),
        "mode": coordinator._mode,
        "opened": [tensor.numel() for tensor in meter._opened],
    }
    team.close()
    return found
