"""What disturbed a block: counters, their differences and the rule that marks a point."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from commbench.measure import noise
from commbench.measure.noise import Noise, NoiseMeter, Snapshot, between, marks, record

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
QUIET = Noise(
    duration_s=10.0,
    cpus=2,
    place="host:0,1",
    own_cpu_s=10.0,
    busy_s=20.0,
    steal_s=0.0,
    steal_share=0.0,
    involuntary_switches=0,
    run_delay_share=0.0,
    psi_cpu_share=0.0,
    psi_memory_share=0.0,
    psi_io_share=0.0,
    throttled_share=0.0,
    frequency_change=0.0,
)


class Machine:
    """A /proc and /sys of two CPUs that a test can write to."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        (self.proc / "thread-self").mkdir(parents=True)
        (self.proc / "pressure").mkdir()
        (self.sys / "fs" / "cgroup").mkdir(parents=True)
        for cpu in (0, 1):
            (self.sys / f"devices/system/cpu/cpu{cpu}/cpufreq").mkdir(parents=True)
        self.now_s = 100.0
        self.write()

    def write(
        self,
        busy: tuple[int, int] = (0, 0),
        steal: tuple[int, int] = (0, 0),
        run_delay_ns: int = 0,
        psi_us: int = 0,
        throttled_us: int = 0,
        cpu: int = 1,
        khz: int = 2_000_000,
    ) -> None:
        lines = [f"cpu{i} {busy[i]} 0 0 500 7 0 0 {steal[i]} 0 0" for i in (0, 1)]
        lines = [f"cpu {sum(busy)} 0 0 1000 14 0 0 {sum(steal)} 0 0", *lines, "intr 12345 0 0", "ctxt 1"]
        (self.proc / "stat").write_text("\n".join(lines) + "\n")
        (self.proc / "thread-self" / "schedstat").write_text(f"5000 {run_delay_ns} 3\n")
        state = " ".join(["R", *("0" for _ in range(35)), str(cpu), "0", "0"])
        (self.proc / "thread-self" / "stat").write_text(f"77 (a name (with) brackets) {state}\n")
        for name in ("cpu", "memory", "io"):
            text = f"some avg10=1.00 avg60=0.00 avg300=0.00 total={psi_us}\nfull avg10=0.00 avg60=0.00 total=99\n"
            (self.proc / "pressure" / name).write_text(text)
        (self.sys / "fs/cgroup/cpu.stat").write_text(f"usage_usec 5\nnr_throttled 1\nthrottled_usec {throttled_us}\n")
        (self.sys / f"devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq").write_text(f"{khz}\n")

    def meter(self, cpus: frozenset[int] = frozenset({0, 1})) -> NoiseMeter:
        return NoiseMeter(self.proc, self.sys, lambda: self.now_s, cpus)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_block_reports_how_far_each_counter_of_the_kernel_moved(machine: Machine) -> None:
    with machine.meter() as meter:
        before = meter.snapshot()
        machine.now_s += 2.0
        machine.write((100, 150), (3, 5), 500_000_000, 200_000, 20_000, khz=1_500_000)
        found = between(before, meter.snapshot())
    assert found.duration_s == 2.0
    assert found.busy_s == pytest.approx(250 * TICK_S)
    assert found.steal_s == pytest.approx(8 * TICK_S)
    assert found.steal_share == pytest.approx(8 * TICK_S / (2.0 * 2))
    assert found.run_delay_share == pytest.approx(0.25)
    assert found.psi_cpu_share == found.psi_memory_share == found.psi_io_share == pytest.approx(0.1)
    assert found.throttled_share == pytest.approx(0.01)
    assert found.frequency_change == pytest.approx(-0.25)


def test_only_the_cpus_that_the_process_may_use_count(machine: Machine) -> None:
    with machine.meter(frozenset({1})) as meter:
        before = meter.snapshot()
        machine.now_s += 1.0
        machine.write(busy=(100, 4), steal=(50, 2))
        found = between(before, meter.snapshot())
    assert found.busy_s == pytest.approx(4 * TICK_S)
    assert found.steal_share == pytest.approx(2 * TICK_S)


def test_the_frequency_is_that_of_the_cpu_the_thread_moved_to(machine: Machine) -> None:
    with machine.meter() as meter:
        assert meter.snapshot().frequency_hz == 2e9
        machine.write(cpu=0, khz=3_000_000)
        assert meter.snapshot().frequency_hz == 3e9


def test_the_containers_own_pressure_is_read_where_the_kernel_offers_it(machine: Machine) -> None:
    (machine.sys / "fs/cgroup/cpu.pressure").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=4000000\n")
    with machine.meter() as meter:
        taken = meter.snapshot()
    assert taken.psi_cpu_s == 4.0
    assert taken.psi_memory_s == 0.0


def test_throttling_is_read_from_version_1_of_control_groups_too(machine: Machine) -> None:
    (machine.sys / "fs/cgroup/cpu.stat").unlink()
    (machine.sys / "fs/cgroup/cpu").mkdir()
    (machine.sys / "fs/cgroup/cpu/cpu.stat").write_text("nr_periods 0\nthrottled_time 3000000000\n")
    with machine.meter() as meter:
        assert meter.snapshot().throttled_s == 3.0


def test_a_machine_that_offers_no_counters_gives_none_and_marks_nothing(tmp_path: Path) -> None:
    now = iter((1.0, 2.0))
    with NoiseMeter(tmp_path, tmp_path, lambda: next(now), frozenset({0})) as meter:
        found = between(meter.snapshot(), meter.snapshot())
    assert (
        found.steal_s is found.busy_s is found.run_delay_share is found.psi_cpu_share is found.frequency_change is None
    )
    kept = record([replace(found, involuntary_switches=0)], iterations=100)
    assert kept["marks"] == []
    assert "steal_share" not in kept
    assert "other_cpu_share" not in kept


def test_a_counter_that_steps_back_is_no_negative_noise() -> None:
    found = between(Snapshot(1.0, 1, steal_s=0.5), Snapshot(2.0, 1, steal_s=0.4))
    assert found.steal_share == 0.0


def test_snapshots_in_the_wrong_order_are_an_error() -> None:
    with pytest.raises(ValueError, match="before the first"):
        between(Snapshot(2.0, 1), Snapshot(1.0, 1))


def test_a_meter_closes_all_its_files_once(machine: Machine) -> None:
    opened = open_files()
    meter = machine.meter()
    meter.snapshot()
    assert open_files() > opened
    meter.close()
    meter.close()
    assert open_files() == opened
    assert meter.snapshot().steal_s is None


def test_on_this_machine_a_busy_thread_is_seen_as_the_ranks_own_work() -> None:
    with NoiseMeter() as meter:
        before = meter.snapshot()
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        found = between(before, meter.snapshot())
    assert 0.05 <= found.own_cpu_s <= found.duration_s * max(2, found.cpus)
    assert found.involuntary_switches is not None
    assert found.involuntary_switches >= 0


def test_a_quiet_block_has_no_marks() -> None:
    assert marks([QUIET, QUIET], iterations=1000) == []


@pytest.mark.parametrize(
    ("disturbance", "says"),
    [
        ({"steal_s": 0.5, "steal_share": 0.025}, "2.5% of the CPU time (steal)"),
        ({"throttled_share": 0.02}, "CPU quota"),
        ({"psi_memory_share": 0.02}, "memory for 2.0%"),
        ({"frequency_change": -0.2}, "-20.0%"),
        ({"involuntary_switches": 11}, "11 involuntary context switches in 1000 iterations"),
        ({"run_delay_share": 0.02}, "waited for a CPU for 2.0%"),
        ({"psi_cpu_share": 0.3}, "30.0% of the time (PSI)"),
    ],
)
def test_one_disturbed_rank_marks_the_point_and_the_mark_says_by_what(disturbance: dict[str, float], says: str) -> None:
    found = marks([QUIET, replace(QUIET, **disturbance)], iterations=1000)  # type: ignore[arg-type]
    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    "harmless",
    [
        {"steal_s": TICK_S, "steal_share": 0.5},  # one tick in a very short block
        {"involuntary_switches": 10},
        {"frequency_change": 0.04},
        {"psi_io_share": 0.9},  # somebody's disk: ranks do no input or output while measured
    ],
)
def test_what_stays_under_its_threshold_marks_nothing(harmless: dict[str, float]) -> None:
    assert marks([QUIET, replace(QUIET, **harmless)], iterations=1000) == []  # type: ignore[arg-type]


def test_the_work_of_other_processes_is_what_the_ranks_did_not_use_themselves() -> None:
    ranks = [replace(QUIET, own_cpu_s=8.0), replace(QUIET, own_cpu_s=6.0)]
    assert noise.other_cpu_share(ranks) == pytest.approx((20.0 - 14.0) / (10.0 * 2))
    assert marks(ranks, iterations=1000) == ["other processes used 30.0% of the CPU time"]


def test_cpus_of_pinned_ranks_are_summed_and_shared_ones_count_once() -> None:
    pinned = [
        replace(QUIET, place=f"host:{cpu}", cpus=1, busy_s=10.0, own_cpu_s=own) for cpu, own in ((0, 9.0), (1, 8.0))
    ]
    assert noise.other_cpu_share(pinned) == pytest.approx(3.0 / 20.0)
    assert noise.other_cpu_share([replace(QUIET, own_cpu_s=17.0)] * 1) == pytest.approx(3.0 / 20.0)


def test_a_short_block_needs_more_foreign_work_to_be_marked_since_the_kernel_samples_it() -> None:
    def with_a_tenth_of_others(duration_s: float) -> list[Noise]:
        return [
            replace(QUIET, duration_s=duration_s, busy_s=2 * duration_s, own_cpu_s=0.9 * duration_s) for _ in range(2)
        ]

    assert marks(with_a_tenth_of_others(10.0), iterations=10_000) != []
    assert marks(with_a_tenth_of_others(0.1), iterations=10_000) == []


def test_ranks_that_push_each_other_off_by_design_are_not_marked_for_it_but_for_others() -> None:
    own_doing = {"involuntary_switches": 5000, "run_delay_share": 0.3, "psi_cpu_share": 0.6}
    with_helpers = replace(QUIET, helper_cpu_share=0.4, **own_doing)  # type: ignore[arg-type]
    oversubscribed = [replace(QUIET, own_cpu_s=5.0, **own_doing)] * 4  # type: ignore[arg-type]
    assert marks([with_helpers, with_helpers], iterations=1000) == []
    assert marks(oversubscribed, iterations=1000) == []
    disturbed = [replace(rank, own_cpu_s=2.0) for rank in oversubscribed]
    assert marks(disturbed, iterations=1000) == ["other processes used 60.0% of the CPU time"]
    on_many_cpus = replace(with_helpers, cpus=64)
    assert len(marks([on_many_cpus, on_many_cpus], iterations=1000)) == 3


def test_the_noise_column_holds_the_worst_rank_and_survives_json() -> None:
    kept = json.loads(json.dumps(record([QUIET, replace(QUIET, run_delay_share=0.04, frequency_change=-0.5)], 1000)))
    assert kept["run_delay_share"] == 0.04
    assert kept["frequency_change"] == -0.5
    assert kept["other_cpu_share"] == 0.0
    assert kept["crowded"] is False
    assert len(kept["marks"]) == 2


def test_no_ranks_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="every rank"):
        record([], iterations=1)
