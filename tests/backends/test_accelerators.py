"""Which device a rank takes, what it is called among hosts, and how times are read, on other vendors' devices. The
modules are scripted; whole sweeps over played packages are in tests/harness/test_other_devices.py."""

from __future__ import annotations

import datetime
import os
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commbench.backends import accelerators
from commbench.backends.accelerators import VENDORS, missing, number_on_host
from commbench.coordinator import world
from commbench.errors import UsageError
from commbench.measure import torch_device
from commbench.measure.torch_device import StreamDevice, identity_of


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """torch's module of any device, with four of them."""
    made = types.SimpleNamespace(
        taken=[], is_available=lambda: True, device_count=lambda: 4, current_device=lambda: 0,
        current_stream=lambda device: f"stream of {device}", synchronize=lambda: made.log.append("synchronize"), log=[],
        get_device_properties=lambda index: types.SimpleNamespace(name="a device"),
    )  # fmt: skip
    made.set_device = made.taken.append
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: made)
    monkeypatch.setattr(accelerators, "importlib", types.SimpleNamespace(import_module=lambda name: made))
    return made


@pytest.mark.parametrize(("local_rank", "visible", "share", "index"), [(2, 4, False, 2), (2, 1, False, 0),
                                                                       (5, 4, True, 1)])  # fmt: skip
def test_a_rank_takes_the_device_of_its_place_on_the_host(
    module: Any, monkeypatch: pytest.MonkeyPatch, local_rank: int, visible: int, share: bool, index: int
) -> None:
    module.device_count = lambda: visible
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert world.take_device("xpu", share=share) == torch.device("xpu", index)
    assert module.taken == [torch.device("xpu", index)]


def test_a_gaudi_is_chosen_by_its_package_and_is_number_0_in_every_process(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    device = world.take_device("hpu")
    assert (device, module.taken) == (torch.device("hpu", 0), [])
    assert identity_of(device) == f"{os.uname().nodename} hpu 3"


def test_the_cpu_is_taken_as_it_is_and_an_unknown_device_is_refused() -> None:
    assert world.take_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="tpu is no device that commbench knows; it knows cpu, cuda, hpu, xpu, npu"):
        world.take_device("tpu")


@pytest.mark.parametrize(
    ("device", "variables", "number"),
    [
        ("xpu", {}, "1"),
        ("xpu", {"ZE_AFFINITY_MASK": "4,6"}, "6"),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "7"}, "1"),  # the mask does not say: torch's own number stays
        ("hpu", {"LOCAL_RANK": "5"}, "5"),
    ],
)
def test_a_device_is_called_by_its_number_on_the_host(device: str, variables: dict[str, str], number: str) -> None:
    assert number_on_host(device, 1, variables) == number


def test_a_device_that_torch_knows_by_an_id_is_called_by_that(module: Any) -> None:
    module.get_device_properties = lambda index: types.SimpleNamespace(uuid=f"id-{index}")
    assert identity_of(torch.device("xpu", 2)).endswith(" xpu id-2")


def test_what_is_missing_is_told_step_by_step(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing("xpu") == ("torch.distributed has no xccl", VENDORS["xpu"].install)
    module.is_available = lambda: False
    monkeypatch.setattr(torch.version, "xpu", "20260101", raising=False)
    assert missing("xpu") == ("torch.xpu finds no device", "check the vendor's driver, and ZE_AFFINITY_MASK")

    def broken(name: str) -> None:
        raise OSError("libascendcl.so: cannot open shared object file\nmore")

    monkeypatch.setattr(accelerators, "importlib", types.SimpleNamespace(import_module=broken))
    reason, remedy = missing("npu") or ("", "")
    assert reason == "torch cannot use npu: libascendcl.so: cannot open shared object file"
    assert remedy == "pip install torch-npu, and CANN"


@pytest.mark.parametrize(("device", "library"), [("xpu", "xccl"), ("hpu", "hccl")])
def test_the_world_is_a_group_of_the_devices_library_beside_one_of_gloo(
    module: Any, monkeypatch: pytest.MonkeyPatch, device: str, library: str
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    made: list[tuple[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda name, **more: made.append((name, more["device_id"])))
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend, timeout: (tuple(ranks), backend))
    monkeypatch.setattr(world, "prove_one_host", lambda group: True)
    group = world.world_group(torch.device(device, 0), datetime.timedelta(seconds=1))
    assert made == [(library, None)]  # a device to bind to is for NCCL
    assert group.cpu_group == ((0, 1), "gloo")


class Event:
    """Records the module's clock, in milliseconds."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.stream, self.at_ms = "", 0.0

    def record(self, stream: str) -> None:
        self.stream, self.at_ms = stream, Event.now_ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_times_are_those_of_the_modules_events_on_its_current_stream(module: Any) -> None:
    module.Event = Event
    device = StreamDevice(torch.device("xpu", 1))
    start, end = device.event(), device.event()
    device.record(start)
    Event.now_ms += 2.5
    device.record(end)
    assert device.elapsed_s(start, end) == pytest.approx(2.5e-3)
    assert start.stream == "stream of xpu:1"
    assert "the time holds what the host needs to queue the call" in device.remark
    assert not device.graphs


def test_without_events_that_tell_times_the_host_times_what_is_done(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Untimed:  # its constructor takes no enable_timing
        pass

    module.Event = Untimed
    assert "xpu has no events that tell times, so the host timed" in StreamDevice(torch.device("xpu", 1)).remark
    del module.Event
    clock = iter([5_000, 9_000])
    monkeypatch.setattr(torch_device, "now_ns", lambda: next(clock))
    device = StreamDevice(torch.device("xpu", 1))
    start, end = device.event(), device.event()
    device.record(start)
    device.record(end)
    assert device.elapsed_s(start, end) == pytest.approx(4e-6)
    assert module.log == ["synchronize", "synchronize"]
