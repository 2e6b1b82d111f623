"""How an engine starts and ends: in every way, nothing is left running."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from commbench import Engine
from commbench.errors import (
    CommbenchError,
    EngineError,
    LaunchError,
    PeerLost,
    PolicyError,
    SpecError,
    UnknownName,
    UsageError,
)
from commbench.harness.engine import calls, channel, job
from commbench.harness.launchers.commands import Program
from tests.engine.processes import all_gone, children, folder_of

ROOT = Path(__file__).resolve().parents[2]
A = np.ones(4)


def launcher_of(engine: Engine) -> int:
    return psutil.Process(engine.pids[0]).ppid()


@pytest.mark.slow
def test_of_two_engines_one_dies_with_its_rank_and_the_other_goes_on_until_it_is_collected() -> None:
    first, second = Engine(tp=2, device="cpu"), Engine(tp=2, device="cpu")
    assert set(first.pids).isdisjoint(second.pids)
    processes = [*first.pids, launcher_of(first)]
    folder = folder_of(launcher_of(first))
    os.kill(first.pids[1], signal.SIGKILL)
    time.sleep(0.3)
    with pytest.raises(PeerLost, match="rank 1 was killed by SIGKILL") as told:
        first.all_reduce(A)
    assert told.value.rank == 1
    with pytest.raises(EngineError, match="has ended: rank 1 was killed by SIGKILL; start another"):
        first.barrier()
    assert all_gone(processes)
    assert not folder.exists()
    assert second.all_reduce(A)[0][0] == 2

    processes = [*second.pids, launcher_of(second)]
    del second
    gc.collect()
    assert all_gone(processes, within_s=1)  # collection waits for them


@pytest.mark.slow
def test_a_rank_that_dies_in_the_middle_of_a_call_is_named_by_it() -> None:
    engine = Engine(tp=2, device="cpu")
    processes = [*engine.pids, launcher_of(engine)]
    killer = threading.Timer(0.5, os.kill, (engine.pids[0], signal.SIGKILL))
    killer.start()
    with pytest.raises(PeerLost, match="rank 0 was killed by SIGKILL"):
        engine.measure(
            collectives=["all_reduce"], dtypes=["float32"], sizes="8:1MiB:x2", max_time_per_point="1s", sync="barrier"
        )
    killer.join()
    assert all_gone(processes)
    assert engine.closed


def test_closing_ends_the_ranks_and_later_calls_say_so() -> None:
    engine = Engine(tp=2, device="cpu")
    processes = [*engine.pids, launcher_of(engine)]

    def work() -> None:
        with engine:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert all_gone(processes, within_s=1)
    engine.close()
    for call in (engine.barrier, engine.start_profile, lambda: engine.measure("quick"), engine.__enter__):
        with pytest.raises(EngineError, match="has ended: it was closed; start another"):
            call()


@pytest.mark.slow
def test_a_thread_that_waits_in_a_call_hears_when_another_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (calls, job):
        monkeypatch.setattr(module, "GRACE_S", 0.5)
    engine = Engine(tp=2, device="cpu")
    processes = [*engine.pids, launcher_of(engine)]
    heard: list[BaseException] = []

    def measure() -> None:
        try:
            engine.measure(collectives=["all_reduce"], sizes="8:1MiB:x2", max_time_per_point="5s")
        except CommbenchError as error:
            heard.append(error)

    thread = threading.Thread(target=measure)
    thread.start()
    time.sleep(0.5)
    engine.close()
    thread.join(timeout=30)
    (error,) = heard
    assert isinstance(error, EngineError)
    assert str(error) == "this engine has ended: it was closed; start another"
    assert all_gone(processes)


def test_an_end_that_is_interrupted_ends_the_ranks_at_once_and_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(tp=2, device="cpu")
    processes = [*engine.pids, launcher_of(engine)]
    folder = folder_of(launcher_of(engine))
    assert engine._job is not None
    process, wait = engine._job.process, engine._job.process.wait
    to_come = [KeyboardInterrupt]

    def interrupted_once(timeout: float | None = None) -> int:
        if to_come:
            raise to_come.pop()
        return wait(timeout)

    monkeypatch.setattr(process, "wait", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert engine.closed
    assert all_gone(processes, within_s=5)
    assert not folder.exists()
    engine.close()
    with pytest.raises(EngineError, match="has ended: it was closed"):
        engine.barrier()


def test_a_rank_that_cannot_start_is_told_with_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "def broken(pid):\n    raise RuntimeError('this rank sees no cores')\n"
        "if os.environ.get('RANK') == '1':\n    os.sched_getaffinity = broken\n"
    )
    before = children(os.getpid())
    with pytest.raises(LaunchError, match="could not start: rank 1: RuntimeError: this rank sees no cores") as told:
        Engine(tp=2, device="cpu", environment={"PYTHONPATH": str(tmp_path)})
    assert "output of rank 1" in told.value.__notes__[-1]
    assert "Traceback" in told.value.__notes__[-1]
    assert all_gone(set(children(os.getpid())) - set(before), within_s=1)


def test_ranks_that_are_late_are_named_and_ended() -> None:
    before = children(os.getpid())
    with pytest.raises(LaunchError, match="ranks 0, 1 did not report in time"):
        Engine(tp=2, device="cpu", startup_timeout_s=0.2)
    assert all_gone(set(children(os.getpid())) - set(before), within_s=5)


def test_what_cannot_be_asked_for_is_named_before_anything_starts() -> None:
    for keywords, kind, told in (
        ({"tp": 0}, SpecError, "Engine: tp: 0 ranks"),
        ({"tp": 1}, SpecError, "1 ranks cannot hold a collective"),
        ({"tp": 2, "ep": 3}, SpecError, "3 does not divide tp"),
        ({"device": "tpu"}, SpecError, "Engine: device: 'tpu' is no device"),
        ({"policy": "nosuch"}, UnknownName, "nosuch"),
        ({"policy": "nosuch.toml"}, PolicyError, r"'nosuch\.toml' does not exist"),
        ({"backends": ["warp"]}, CommbenchError, "warp"),
        ({"backends": "shm,warp"}, CommbenchError, "unknown backend 'warp'"),
        ({"tp": "2"}, SpecError, "Engine: tp: '2' is not a whole number"),
        ({"pp": 0}, SpecError, "Engine: pp: 0 ranks"),
        ({"ep": True}, SpecError, "Engine: ep: True is not a whole number"),
        ({"startup_timeout_s": "soon"}, UsageError, "startup_timeout_s='soon' is no time"),
        ({"environment": {"A=B": "1"}}, UsageError, "variable 'A=B', which no environment can hold"),
        ({"environment": {"A": 1}}, UsageError, "environment: A=1 is no text"),
    ):
        before = children(os.getpid())
        with pytest.raises(kind, match=told):
            Engine(**keywords)
        assert children(os.getpid()) == before


@pytest.mark.slow
def test_the_groups_of_an_engine_work_at_once_and_are_measured() -> None:
    each = [np.full(2, 10.0**rank) for rank in range(4)]
    with Engine(tp=2, pp=2, device="cpu") as engine:
        in_tp = [float(result[0]) for result in engine.all_reduce(each, group="tp")]
        in_pp = [float(result[0]) for result in engine.all_reduce(each, group="pp")]
        found = engine.measure(
            collectives=["all_reduce"], dtypes=["float32"], sizes="64", group=["tp", "pp:0"], sync="barrier",
            max_time_per_point="50ms",
        )  # fmt: skip
    assert in_tp == [11, 11, 1100, 1100]
    assert in_pp == [101, 1010, 101, 1010]
    assert {(row["group"], row["world_size"], row["wrong_count"]) for row in found} == {("tp", 2, 0), ("pp:0", 2, 0)}


def run_script(text: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


AT_THE_END = """
import os, commbench, numpy
engine = commbench.Engine(tp=2, device="cpu")
print(*engine.pids, flush=True)
child = os.fork()
if child == 0:
    try:
        engine.barrier()
    except commbench.errors.EngineError as error:
        print(error, flush=True)
    raise SystemExit(0)  # with all that a process does at its end
os.waitpid(child, 0)
print(engine.all_reduce(numpy.ones(1))[1][0], flush=True)
"""


@pytest.mark.slow
def test_the_end_of_the_interpreter_ends_the_ranks_and_that_of_a_forked_child_does_not() -> None:
    script = run_script(AT_THE_END)
    out, problems = script.communicate(timeout=60)
    pids, child, result = out.splitlines()
    assert script.returncode == 0, problems
    assert problems == ""
    assert "belongs to process" in child
    assert result == "2.0"
    assert all_gone([int(pid) for pid in pids.split()], within_s=1)


KILLED = """
import os, time, commbench
engine = commbench.Engine(tp=2, device="cpu")
print(*engine.pids, flush=True)
engine.measure(collectives=["all_reduce"], dtypes=["float32"], sizes="8:1MiB:x2", max_time_per_point="5s")
"""


def test_ranks_end_with_a_driver_that_is_killed_in_the_middle_of_a_call() -> None:
    script = run_script(KILLED)
    assert script.stdout is not None
    assert script.stderr is not None
    pids = [int(pid) for pid in script.stdout.readline().split()]
    processes = [*pids, psutil.Process(pids[0]).ppid()]
    folder = folder_of(processes[-1])
    time.sleep(0.3)
    script.kill()
    script.wait()
    script.stdout.close()
    script.stderr.close()
    assert all_gone(processes)
    assert not folder.exists()


EARLY = """
import commbench
print(flush=True)
commbench.Engine(tp=2, device="cpu")
"""


@pytest.mark.parametrize(
    "after_s", [pytest.param(0.3, marks=pytest.mark.slow), 1.5, pytest.param(3.0, marks=pytest.mark.slow)]
)
def test_nothing_is_left_of_an_engine_whose_driver_is_killed_while_ranks_start(after_s: float, tmp_path: Path) -> None:
    script = run_script(EARLY, TMPDIR=str(tmp_path))
    assert script.stdout is not None
    script.stdout.readline()
    time.sleep(after_s)
    processes = children(script.pid)
    script.kill()
    script.communicate()
    assert all_gone(processes, within_s=60)
    # what ranks that were not there yet could not remove, the next engine or sweep does
    assert all(left.name.startswith("commbench-engine-") for left in tmp_path.iterdir())
    code = "from commbench.harness.supervision.scratch import remove_stale_folders as r; r()"
    assert run_script(code, TMPDIR=str(tmp_path)).communicate() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_nobody_could_reach_is_not_started_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_door(folder: Path) -> None:
        assert folder.parent == temporary
        raise OSError("no socket")

    temporary = tmp_path_factory.mktemp("t")  # short, as a socket's path must be
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(job, "Door", no_door)
    descriptors = psutil.Process().num_fds()
    with pytest.raises(OSError, match="no socket"):
        job.Job.start(2, {})
    assert list(temporary.iterdir()) == []
    assert psutil.Process().num_fds() == descriptors


def test_a_launcher_that_was_killed_is_told_with_the_signal(tmp_path: Path) -> None:
    folder = tmp_path / "e"
    folder.mkdir()
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    launcher.kill()
    ranks = job.Job(2, Program(), folder, os.open(folder, os.O_RDONLY), channel.Door(folder), launcher)
    assert ranks.cause() == "torchrun was killed by SIGKILL"
    ranks.end()
    assert not folder.exists()


def test_the_token_stands_on_no_command_line(engine: Engine) -> None:
    words = " ".join(w for pid in [*engine.pids, launcher_of(engine)] for w in psutil.Process(pid).cmdline())
    assert engine._job is not None
    assert engine._job.door.token not in words
    assert (folder_of(launcher_of(engine)).stat().st_mode & 0o777) == 0o700


def test_a_caller_without_the_token_is_turned_away(tmp_path: Path) -> None:
    door = channel.Door(tmp_path)
    try:
        outcome: list[object] = []

        def call(token: str) -> None:
            os.environ[channel.TOKEN_VARIABLE] = token
            try:
                outcome.append(channel.enter(tmp_path))
            except channel.Gone as error:
                outcome.append(error)

        stranger = threading.Thread(target=call, args=("00" * 32,))
        stranger.start()
        assert door.accept(5) is None
        stranger.join()
        assert isinstance(outcome.pop(), channel.Gone)
        rank = threading.Thread(target=call, args=(door.token,))
        rank.start()
        link = door.accept(5)
        rank.join()
        assert isinstance(link, channel.Link)
        (other,) = outcome
        assert isinstance(other, channel.Link)
        other.send({"hello": 1}, [b"abc", memoryview(b"")])
        assert link.receive() == ({"hello": 1}, [b"abc", b""])
        assert channel.TOKEN_VARIABLE not in os.environ  # a rank's own children do not inherit it
        other.close()
        with pytest.raises(channel.Gone):
            link.receive()
        link.close()
    finally:
        door.close()
