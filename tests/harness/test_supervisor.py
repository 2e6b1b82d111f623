"""What the watching command concludes from pulses and a clock, without processes; and the page they stand in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commbench.harness.launch import Launch, Tail
from commbench.harness.launchers.commands import Program
from commbench.harness.ranks.rank import STACK_SIGNAL, log_path
from commbench.harness.supervision import stacks
from commbench.harness.supervision.heartbeat import (
    BETWEEN,
    CALIBRATING,
    DONE,
    FATAL,
    POINT_LOST,
    STARTING,
    VISITING,
    Heartbeat,
    Page,
    Pulse,
    join,
)
from commbench.harness.supervision.stacks import RankState, collect, first_stopped, process_state
from commbench.harness.supervision.supervisor import (
    FOREIGN_S,
    LEAST_POINT_S,
    LINGER_S,
    PATIENCE_S,
    START_S,
    Limits,
    StopAtOnce,
    Trouble,
    Watchdog,
    end_job,
    interruptible,
)
from commbench.measure.loop import Block
from commbench.measure.observer import BlockSeen
from commbench.types import Point
from tests.harness.faults import quick_stacks

POINT = Point("all_reduce", "sum", "float32", 64, 2, backend="fake")


def pulse(rank: int = 0, **changes: Any) -> Pulse:
    facts: dict[str, Any] = {
        "pid": 100 + rank, "born": 1, "steps": 5, "stage": VISITING, "phase": "sample", "order": 3, "iteration": 7,
        "warming": False, "picked": "fake", "error": "", "error_kind": FATAL, "error_ns": 0,
    }  # fmt: skip
    facts.update(changes)
    if facts["stage"] != VISITING:
        facts["order"] = facts["iteration"] = None
    return Pulse(rank, **facts)


class Watched:
    """A watchdog that looks every 0.2 s of a clock of its own."""

    def __init__(self, **limits: float) -> None:
        self.dog = Watchdog(Limits(**limits), 2, {3: POINT, 4: POINT}, 0.5)
        self.now = 100.0

    def after(self, seconds: float, pulses: list[Pulse], states: dict[int, str] | None = None) -> Trouble | None:
        """The first trouble within so many seconds of unchanged pulses."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += 0.2
            trouble = self.dog.look(pulses, self.now, lambda p: (states or {}).get(p.rank, "S"))
            if trouble is not None:
                return trouble
        return None


# ---- when something is wrong -------------------------------------------------------------------------------------


def test_a_point_may_take_its_limit_and_no_longer() -> None:
    watched = Watched(point_s=3.0)
    assert watched.after(3.0, [pulse(0), pulse(1)]) is None
    trouble = watched.after(0.6, [pulse(0), pulse(1)])
    assert trouble is not None
    assert (trouble.kind, trouble.order, trouble.text) == ("hang", 3, "no result within 3 s")


def test_the_visits_of_a_point_count_together_and_other_points_do_not() -> None:
    watched = Watched(point_s=3.0)
    other = [pulse(0, order=4), pulse(1, order=4)]
    assert watched.after(2.0, [pulse(0), pulse(1)]) is None
    assert watched.after(2.0, other) is None
    assert watched.after(0.8, [pulse(0), pulse(1)]) is None
    trouble = watched.after(0.6, [pulse(0), pulse(1)])
    assert trouble is not None
    assert trouble.order == 3


def test_without_a_limit_large_points_get_more_time_than_small_ones() -> None:
    large = Point("all_reduce", "sum", "float32", 1 << 30, 8)
    assert Limits().of_point(POINT, 0.5) == pytest.approx(LEAST_POINT_S + 5, rel=1e-3)
    assert Limits().of_point(large, 0.5) > 500
    assert Limits(point_s=2.0).of_point(large, 0.5) == 2.0


def test_ranks_wait_for_each_other_longer_than_any_point_may_take() -> None:
    large = Point("all_reduce", "sum", "float32", 1 << 30, 8)
    assert Limits(point_s=9.0).patience_s([POINT, large], 0.5) == 9.0 + PATIENCE_S
    assert Limits().patience_s([POINT, large], 0.5) == Limits().of_point(large, 0.5) + PATIENCE_S
    assert Limits().patience_s([], 0.5) == 2 * PATIENCE_S


def test_time_in_which_the_watcher_did_not_run_does_not_count() -> None:
    watched = Watched(point_s=3.0)
    assert watched.after(1.0, [pulse(0), pulse(1)]) is None
    watched.now += 3600  # suspended, or Ctrl-Z
    assert watched.after(0.2, [pulse(0), pulse(1)]) is None
    assert watched.dog.lasted_s < 1.2 + FOREIGN_S


def test_a_dead_rank_is_noticed_at_the_next_look() -> None:
    watched = Watched(point_s=3.0)
    trouble = watched.after(0.2, [pulse(0), pulse(1)], {1: ""})
    assert trouble == Trouble("dead", "rank 1 is gone", (1,), 3)


def test_ranks_that_are_done_may_end() -> None:
    watched = Watched(point_s=3.0)
    done = [pulse(0, stage=DONE), pulse(1, stage=DONE)]
    assert watched.after(LINGER_S, done, {0: "", 1: ""}) is None
    trouble = watched.after(1.0, done, {0: "", 1: ""})
    assert trouble is not None
    assert trouble.kind == "linger"


def test_ranks_have_minutes_to_come_up_unless_the_launch_has_less() -> None:
    starting = [pulse(0, stage=STARTING), pulse(1, stage=CALIBRATING)]
    assert Watched(point_s=3.0).after(START_S, starting) is None
    trouble = Watched(launch_s=10.0).after(12, starting)
    assert trouble is not None
    assert (trouble.kind, trouble.text) == ("start", "the launch did not come up within 10 s")
    trouble = Watched().after(START_S + 1, [])
    assert trouble is not None
    assert trouble.kind == "start"


def test_a_launch_that_works_on_past_its_limit_is_told() -> None:
    watched = Watched(launch_s=10.0, point_s=8.0)
    assert watched.after(5, [pulse(0), pulse(1)]) is None
    trouble = watched.after(7, [pulse(0, order=4), pulse(1, order=4)])
    assert trouble is not None
    assert (trouble.kind, trouble.order) == ("launch", 4)


def test_the_limit_of_a_launch_counts_its_earlier_jobs_and_is_named_in_full() -> None:
    dog = Watchdog(Limits(launch_s=10.0), 2, {3: POINT}, 0.5, already_s=9.0)
    starting = [pulse(0, stage=STARTING), pulse(1, stage=STARTING)]
    assert dog.look(starting, 0.0, lambda p: "S") is None
    assert dog.look(starting, 0.9, lambda p: "S") is None
    trouble = dog.look(starting, 1.8, lambda p: "S")
    assert trouble is not None
    assert (trouble.kind, trouble.text) == ("launch", "the launch took longer than its limit of 10 s")
    assert dog.lasted_s == 1.8


def test_ranks_that_all_run_on_other_hosts_have_the_limit_of_the_launch_only() -> None:
    for limits, kinds in ((Limits(), [None, "start"]), (Limits(launch_s=400.0), ["launch", "start"])):
        for heard, kind in zip((True, False), kinds, strict=True):
            dog = Watchdog(limits, 2, {3: POINT}, 0.5)
            looks = [dog.look([], float(t), lambda p: "S", heard=heard) for t in range(500)]
            trouble = next((found for found in looks if found is not None), None)
            assert (None if trouble is None else trouble.kind) == kind


def test_a_rank_that_is_stopped_before_its_first_point_is_not_waited_for_as_long_as_one_that_starts() -> None:
    trouble = Watched(point_s=3.0).after(4, [pulse(0, stage=STARTING), pulse(1, stage=STARTING)], {1: "T"})
    assert trouble is not None
    assert (trouble.kind, trouble.text) == ("start", "rank 1 has been stopped for 3 s")


def test_ranks_that_do_not_reach_the_next_point_hang() -> None:
    watched = Watched(point_s=3.0)
    between = [pulse(0, stage=BETWEEN), pulse(1, stage=BETWEEN)]
    assert watched.after(LEAST_POINT_S, between) is None
    trouble = watched.after(1.0, between)
    assert trouble is not None
    assert (trouble.kind, trouble.order) == ("hang", None)


# ---- who stopped first ----------------------------------------------------------------------------------------------


def stack(file: str, function: str) -> str:
    return (
        "Thread 0x00007f0000000001 (most recent call first):\n"
        '  File "/lib/threading.py", line 5 in wait\n\n'
        "Current thread 0x00007f0000000002 (most recent call first):\n"
        f'  File "/site/{file}", line 12 in {function}\n'
        '  File "/site/commbench/harness/ranks/rank.py", line 9 in <module>\n'
    )


WAITS = stack("torch/distributed/distributed_c10d.py", "all_reduce")


def state(rank: int, letter: str = "S", python: str = WAITS, **changes: Any) -> RankState:
    return RankState(pulse(rank, **changes), letter, python)


@pytest.mark.parametrize(
    ("states", "rank", "why"),
    [
        ([state(0), state(1, "T")], 1, "it is stopped"),
        ([state(0), state(1, "", "")], 1, "it is gone"),
        ([state(0, iteration=8), state(1)], 1, "the others are past where it stands"),
        ([state(0, steps=6, iteration=0), state(1, iteration=500)], 1, "the others are past"),
        ([state(0), state(1, python=stack("kernels/mine.py", "launch"))], 1, "it is in launch (mine.py:12) while the"),
        ([state(r, python=stack("measure/team.py", "recv" if r == 2 else "x")) for r in range(4)], 2, "it alone is in"),
        ([state(0), state(1)], None, "no rank stands out"),
        ([], None, "no rank has come up"),
    ],
)  # fmt: skip
def test_the_rank_that_stopped_first_stands_out(states: list[RankState], rank: int | None, why: str) -> None:
    found = first_stopped(states)
    assert found[0] == rank
    assert why in found[1]


@pytest.mark.parametrize("as_module", [True, False])
def test_a_stopped_rank_is_seen_as_it_was_and_goes_no_further_than_its_stacks(
    tmp_path: Path, as_module: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is continued to write them; then it is stopped again, so that what hangs does not end well after all."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("PATH", quick_stacks(tmp_path)["PATH"])
    (tmp_path / "stopping.py").write_text(STOPPING)
    with log_path(tmp_path, 0, 1).open("wb") as log:
        rank = subprocess.Popen(
            [sys.executable, *(["-m", "stopping"] if as_module else ["stopping.py"])],
            stderr=log, stdout=subprocess.PIPE, cwd=tmp_path,
        )  # fmt: skip
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
        monkeypatch.setattr(stacks, "STACKS_WITHIN_S", 60.0)
        began = time.monotonic()
        (seen,) = collect(tmp_path, 0, [pulse(1, pid=rank.pid, born=0)])
        assert time.monotonic() - began < 30, "it is known when the stacks are whole"
        assert seen.state == "T"
        assert "in <module>" in seen.python
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(rank.pid, 0) == "T"
    finally:
        rank.kill()
        rank.communicate()


STOPPING = f"""
import faulthandler, os, signal, time
faulthandler.register({STACK_SIGNAL.value})
print(1, flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""


def test_a_process_number_that_is_another_processs_by_now_is_a_dead_rank() -> None:
    assert process_state(os.getpid(), 0) != ""
    assert process_state(os.getpid(), 1) == ""


# ---- the page -----------------------------------------------------------------------------------------------------


@pytest.fixture
def page() -> Any:
    made = Page.create(2, 64)
    yield made
    made.close()


def test_what_a_rank_says_is_read_by_the_watcher(page: Page) -> None:
    heartbeat = Heartbeat(Page.open(page.path), 1)
    block = Block(64, heartbeat.room)
    assert [p.rank for p in page.pulses()] == [1]
    heartbeat.visit(3, POINT, 0)
    heartbeat.decided("shm")
    heartbeat.phase("warm-up")
    times = np.zeros((2, 10), dtype=np.int64)
    heartbeat.block(BlockSeen(times, times, times.astype(np.uint8), 1, False, 0))
    heartbeat.phase("sample")
    heartbeat.block(BlockSeen(times, times, times.astype(np.uint8), 1, True, 0))
    block.ends[:4] = 17  # four samples of the next block are finished
    (seen,) = page.pulses()
    assert (seen.order, seen.phase, seen.iteration, seen.picked, seen.pid) == (3, "sample", 14, "shm", os.getpid())
    assert seen.where() == "sample, iteration 14"
    heartbeat.left("ok", "")
    (seen,) = page.pulses()
    assert (seen.stage, seen.iteration) == (BETWEEN, None)


def test_ranks_that_did_the_same_have_the_same_number_of_steps_also_after_a_point_that_failed_on_one(
    page: Page,
) -> None:
    ranks = [Heartbeat(Page.open(page.path), rank) for rank in (0, 1)]
    for heartbeat in ranks:
        heartbeat.visit(0, POINT, 0)
        heartbeat.phase("prepare")
    ranks[0].phase("check")
    ranks[1].failed("no memory")
    assert page.pulses()[1].error == "no memory"
    assert page.pulses()[1].error_kind == POINT_LOST
    for heartbeat in ranks:
        heartbeat.left("failed", "no memory")
        heartbeat.visit(1, POINT, 0)
    first, second = page.pulses()
    assert first.steps == second.steps
    assert second.error == ""


def test_a_rank_that_comes_too_late_cannot_join(page: Page) -> None:
    page.refuse()
    with pytest.raises(OSError, match="given this launch up"):
        join(0, {"COMMBENCH_HEARTBEAT": page.path})
    assert join(0, {}) is None


def test_a_path_that_is_something_else_on_this_host_is_no_page(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(1 << 16))
    with other.open("rb") as file, pytest.raises(OSError, match="no heartbeat"):
        Page.open(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    assert other.read_bytes() == bytes(1 << 16)


def test_a_page_leaves_nothing_behind() -> None:
    made = Page.create(2, 64)
    made.close()
    assert not Path(made.path).exists()
    with pytest.raises(OSError):
        join(0, {"COMMBENCH_HEARTBEAT": made.path})


# ---- ending ------------------------------------------------------------------------------------------------------

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import os,time; os.setsid(); print(1, flush=True); time.sleep(600)"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_job_that_ignores_being_asked_is_ended_with_its_ranks_in_sessions_of_their_own(stopped: bool) -> None:
    job = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    assert job.stdout is not None
    rank = int(job.stdout.readline())
    if stopped:
        os.kill(rank, signal.SIGSTOP)
    end_job(job, [pulse(0, pid=rank, born=0)], grace_s=0.3)
    assert job.returncode == -signal.SIGKILL
    assert process_state(rank, 0) == ""
    job.stdout.close()


def test_being_asked_to_stop_twice_ends_the_running_job_at_once() -> None:
    ended: list[int] = []
    with interruptible() as stopping:
        stopping.at_once.append(lambda: ended.append(1))
        with pytest.raises(KeyboardInterrupt) as once:
            os.kill(os.getpid(), signal.SIGTERM)
        assert once.type is not StopAtOnce
        assert ended == []
        with pytest.raises(StopAtOnce):
            os.kill(os.getpid(), signal.SIGHUP)
        stopping.at_once.clear()
    assert ended == [1]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_one_command_inside_another_is_asked_to_stop_once_for_both() -> None:
    with interruptible() as outer:
        with pytest.raises(KeyboardInterrupt), interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
        assert outer.count == 1
        with pytest.raises(StopAtOnce):
            os.kill(os.getpid(), signal.SIGINT)
    assert outer.count == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


# ---- why it ended ------------------------------------------------------------------------------------------------

AGENT = (
    "W1130 10:00:00.0 77 torch/distributed/elastic/agent/server/api.py:753] Received {} death signal, shutting down "
    "workers\nW1130 10:00:00.1 77 api.py:1029] Sending process 78 closing signal SIGTERM\n"
)
RAISED = "    raise SignalException(\ntorch.multiprocessing.api.SignalException: Process 77 got signal: {}\n"


@pytest.mark.parametrize("said", [AGENT, RAISED, AGENT + RAISED])
@pytest.mark.parametrize("name", ["15", "Signals.SIGTERM"])  # as one Python prints it, and as another
def test_a_launcher_that_was_asked_to_end_is_named_and_not_what_its_ranks_said_then(
    tmp_path: Path, said: str, name: str
) -> None:
    launch = ended_launch(tmp_path, said.format(name, name))
    launch.pulses = [pulse(0, error="[gloo] Connection closed by peer", error_ns=5), pulse(1)]
    assert launch.failure() == "torchrun was ended from outside by SIGTERM"


def test_what_an_earlier_job_of_the_launch_told_does_not_count(tmp_path: Path) -> None:
    launch = ended_launch(tmp_path, "a word\n", before=AGENT.format(15))
    assert launch.asked is None
    assert launch.failure() == "a word"


@pytest.mark.parametrize(
    ("number", "gone", "why"),
    [
        (9, (1,), "rank 1 was killed by SIGKILL"),
        (9, (0, 1), "a rank was killed by SIGKILL; mpirun does not tell which one was the first"),
        (11, (0, 1), "rank 0 was killed by SIGSEGV"),
    ],
)
def test_mpich_which_ends_the_others_by_sigkill_is_not_believed_who_was_killed_first(
    tmp_path: Path, number: int, gone: tuple[int, ...], why: str
) -> None:
    said = f"=   PID 100 RUNNING AT vm\nTERMINATED WITH THE EXIT STRING: Killed (signal {number})\n"
    launch = ended_launch(tmp_path, said, launcher="mpirun")
    launch.pulses = [pulse(0), pulse(1)]
    launch.trouble = Trouble("dead", "they are gone", gone, 3)
    assert launch.failure() == why


def ended_launch(tmp_path: Path, said: str, before: str = "", launcher: str = "torchrun") -> Launch:
    """A launch whose launcher has ended, as its log tells. before: what the log held when the job began."""
    log = tmp_path / "logs" / f"launch-0.{launcher}.log"
    log.parent.mkdir()
    log.write_text(before + said)
    launch = Launch(tmp_path, 0, 2, {3: POINT}, Program(launcher=launcher), code=1)
    launch._logs_from = {log: len(before)}
    launch.asked = launch._signal_told()
    return launch


def test_a_hang_up_is_ignored_where_the_user_asked_for_that() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible() as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stopping.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_lines_that_a_killed_writer_left_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_text('{"event": "visit"}\n{"event": "po{"event": "done"}\n[1]\n{"event": "late"}')
    assert [e["event"] for e in tail.read()] == ["visit"]
    with path.open("a") as stream:
        stream.write("\n")
    assert [e["event"] for e in tail.read()] == ["late"]
