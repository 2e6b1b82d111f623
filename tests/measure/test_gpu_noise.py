"""SM clock and throttle reasons, over an NVML that is made up."""

from __future__ import annotations

from typing import Any

import pytest

from commbench.measure.gpu_noise import GpuState, reader, reader_over, reasons_of
from commbench.measure.noise import Noise, NoiseMeter, between, combine, from_dict, marks, record, to_dict


class Nvml:
    """As much of pynvml as is used. answers: (MHz, reasons) one after the other."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, answers: list[tuple[int, int]], knows: str = "GPU-7f") -> None:
        self._answers, self._knows = answers, knows

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self._knows:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        if not self._answers:
            raise self.NVMLError("not supported")
        return self._answers[0][0]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self._answers.pop(0)[1]


def noise(*answers: tuple[int, int]) -> Noise:
    """One rank's noise between two readings."""
    now = iter([1.0, 2.0])
    with NoiseMeter(clock=lambda: next(now), gpu=reader_over(Nvml(list(answers)), "7f")) as meter:
        before, after = meter.snapshot(), meter.snapshot()
    return between(before, after)


def words(*answers: tuple[int, int]) -> list[str]:
    return [m for m in marks([noise(*answers)], 10**9) if "GPU" in m]


def test_a_clock_that_is_held_down_is_named_with_the_reason() -> None:
    assert words((1980, 0), (1980, 0x4 | 0x40)) == ["a GPU's clock was held down: power cap, hardware thermal slowdown"]


def test_a_clock_that_changes_is_marked_beyond_five_percent_but_not_when_the_gpu_wakes_up() -> None:
    assert words((2000, 0), (1800, 0)) == ["a GPU's SM clock changed by -10.0%"]
    assert words((2000, 0), (1960, 0)) == []
    assert words((345, 0x1), (1980, 0)) == []


def test_a_quiet_gpu_marks_nothing_also_with_clocks_that_somebody_has_set() -> None:
    assert words((1980, 0x2), (1980, 0x2)) == []
    assert reasons_of(0x2 | 0x1) == []


def test_the_record_names_the_reasons_and_blocks_add_up() -> None:
    both = combine([noise((1980, 0), (1980, 0x20)), noise((1980, 0x80), (1900, 0))])
    assert from_dict(to_dict(both)) == both
    found = record([both], 100)
    assert found["gpu_throttle"] == ["software thermal slowdown", "power brake"]
    assert found["sm_clock_change"] == pytest.approx(1900 / 1980 - 1, abs=1e-6)
    assert "gpu_throttle" not in record([noise()], 100)


def test_a_gpu_that_does_not_tell_marks_nothing() -> None:
    nothing: list[Any] = [noise().gpu_throttle, noise().sm_clock_change]
    assert nothing == [None, None]
    assert reader_over(Nvml([]), "other") is None


def test_the_newer_name_of_the_reasons_is_used_where_it_is() -> None:
    nvml = Nvml([(1000, 0x4)])
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0x8  # type: ignore[attr-defined]
    read = reader_over(nvml, "GPU-7f")
    assert read is not None
    assert read() == GpuState(1e9, 0x8)


def test_without_nvml_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert reader("7f") is None
