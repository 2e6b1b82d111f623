"""Faults that a sweep survives, each injected for real. docs/faults.md has the table; its rows are these tests.

After every one the helper checks that no process, shared memory or temporary file is left, and that the folder is
readable; most go on with ``--resume`` to show that it can.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from commbench.errors import SpecError
from commbench.harness.launchers.mpirun import find_mpirun
from commbench.harness.order import shuffled
from commbench.harness.resume import unfinished
from commbench.harness.run import new_manifest, prepare
from commbench.harness.supervision.supervisor import kills_for_memory
from commbench.native import segment
from commbench.store.run import Plan, PointLog, create, open_run, row_of
from commbench.sweep import make_spec
from commbench.types import Point
from tests.harness.faults import DRIVER, DURATION_S, SPEC, Sweep, can_unshare, events, quick_stacks

needs_namespaces = pytest.mark.skipif(not can_unshare(), reason="this system lets no process have mounts of its own")
MIDDLE = 30  # a call in the middle of blocks of samples: what is checked first is over


def only_on(rank: int, **what: str) -> dict[str, Any]:
    return {event: {"rank": rank, "collective": where, "call": MIDDLE} for event, where in what.items()}


# ---- faults of one rank at one point ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """One sweep of six points, four of which go wrong in four ways on rank 1; it needs four jobs, and a fifth where a
    good point is left when the last one has gone wrong."""
    sweep = Sweep(tmp_path_factory.mktemp("faults"))
    sweep.script = only_on(1, die="broadcast", segv="all_gather", stop="reduce_scatter", hang="all_to_all")
    code, stderr = sweep.run(collectives="all_reduce,broadcast,all_gather,reduce_scatter,all_to_all,scatter")
    assert code == 0, stderr  # the driver; the command line makes 1 of points that went wrong
    return sweep


def test_bad_points_cost_themselves_and_nothing_else(survived: Sweep) -> None:
    rows = survived.rows()
    assert len(rows) == 6
    assert rows["all_reduce"]["status"] == rows["scatter"]["status"] == "ok"
    run = open_run(survived.directory)
    assert run.manifest["outcome"] == "complete"
    assert len(run.manifest["launches"][0]["startups_s"]) in (4, 5)
    assert len(run.manifest["launches"][0]["deaths"]) == 4


@pytest.mark.parametrize(
    ("collective", "reason"),
    [("broadcast", "rank 1 was killed by SIGKILL"), ("all_gather", "rank 1 was killed by SIGSEGV")],
)
def test_a_rank_that_dies_is_named_with_how(survived: Sweep, collective: str, reason: str) -> None:
    row = survived.rows()[collective]
    assert (row["status"], row["reason"]) == ("failed", reason)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """One sweep whose rank 1 is slow everywhere, has wrong elements in what it gets, raises in one point and finds no
    memory in another. In its shared memory lies what an earlier one left."""
    sweep = Sweep(tmp_path_factory.mktemp("told"))
    sweep.script = {
        "slow": {"rank": 1, "factor": 100},
        "wrong": {"rank": 1, "elements": 2},
        "fail": {"rank": 1, "collective": "all_reduce"},
        "out_of_memory": {"rank": 1, "collective": "broadcast"},
    }
    shm = sweep.folder / "segments"
    shm.mkdir()
    left = shm / f"commbench-{'0' * 32}"
    left.write_bytes(bytes(64))
    os.utime(left, (time.time() - 60, time.time() - 60))
    sweep.variables = {segment.DIR_VARIABLE: str(shm)}
    collectives = "all_reduce,broadcast,all_gather,barrier"
    code, stderr = sweep.run(collectives=collectives, max_time_per_point=0.5, point_timeout=20)
    assert code == 0, stderr
    return sweep


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collective", "reason", "memory"),
    [
        ("all_reduce", "rank 1: scripted failure in all_reduce on rank 1", False),
        ("broadcast", "rank 1: broadcast failed on rank 1", True),
    ],
)
def test_a_rank_that_raises_or_has_no_memory_is_named_with_its_own_words(
    told: Sweep, collective: str, reason: str, memory: bool
) -> None:
    row = told.rows()[collective]
    assert row["status"] == "failed"
    assert row["reason"].startswith(reason)
    assert ("can't allocate memory" in row["reason"]) == memory


@pytest.mark.slow
def test_a_slow_rank_is_no_fault_and_a_wrong_one_is_told(told: Sweep) -> None:
    rows = told.rows()
    assert rows["all_gather"]["status"] == "wrong"
    assert rows["barrier"]["latency_median_s"] == pytest.approx(100 * DURATION_S, rel=0.2)


@pytest.mark.slow
def test_the_next_sweep_removes_what_a_killed_one_left_in_shared_memory(told: Sweep) -> None:
    assert list((told.folder / "segments").iterdir()) == []


def test_a_segmentation_fault_leaves_its_stack_in_the_ranks_log(survived: Sweep) -> None:
    log = (survived.directory / "logs" / "launch-0.rank-1.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert "fake.py" in log


@pytest.mark.parametrize(
    ("collective", "what", "why"),
    [
        ("reduce_scatter", "rank 1 has been stopped for 2 s", "it is stopped (SIGSTOP)"),
        ("all_to_all", "no result within 2 s", "the others are past where it stands"),
    ],
)
def test_a_rank_that_hangs_is_named_with_all_that_is_known(
    survived: Sweep, collective: str, what: str, why: str
) -> None:
    row = survived.rows()[collective]
    assert row["status"] == "timeout"
    assert re.search(
        rf"{what}; rank 1 stopped first, in (warm-up|sample), iteration \d+ of {collective}", row["reason"]
    )
    assert "64 B float32, backend fake" in row["reason"]
    assert why in row["reason"]
    assert row["backend_picked"] == "fake"


def test_a_hang_leaves_the_stacks_of_every_rank_also_of_one_that_is_stopped_or_blocked_in_c(survived: Sweep) -> None:
    reports = sorted((survived.directory / "logs").glob("launch-0.stacks-*.txt"))
    assert len(reports) == 2
    for report in reports:
        text = report.read_text()
        assert text.count("most recent call first") >= 2
        for rank in (0, 1):
            part = text.partition(f"==== rank {rank},")[2].partition("====")[0]
            assert "worker.py" in part
            assert "fake.py" in part or "gate.py" in part
            assert "Native stacks:" in part
    hang = next(r.read_text() for r in reports if "all_to_all" in r.read_text().splitlines()[0])
    assert "in _happen" in hang.partition("==== rank 1,")[2]


def test_a_death_is_noticed_within_two_seconds_and_a_hang_within_two_of_its_limit(survived: Sweep) -> None:
    visits = events(survived.directory, "visit")
    for trouble in events(survived.directory, "trouble"):
        last = max(v["time_s"] for v in visits if v["time_s"] <= trouble["time_s"])
        assert trouble["time_s"] - last < (2.0 if trouble["kind"] == "dead" else SPEC["point_timeout"] + 2.0)


def test_samples_of_a_point_that_was_begun_twice_are_those_of_its_row(survived: Sweep) -> None:
    run = open_run(survived.directory)
    for row in run.rows():
        if row["status"] == "ok":
            samples = run.samples(row["point_id"])
            assert len(samples) == 2 * (row["n_samples"] + row["n_invalid"])
            assert not samples.duplicated(["rank", "iteration"]).any()


@pytest.mark.slow
def test_what_went_wrong_can_be_repeated(survived: Sweep) -> None:
    survived.script = {}
    code, stderr = survived.run("--resume", "failed", "timeout")
    assert code == 0, stderr
    rows = survived.rows()
    assert len(rows) == 6
    assert {row["status"] for row in rows.values()} == {"ok"}


@pytest.mark.slow
def test_of_four_ranks_the_one_that_stopped_first_is_named(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, variables=quick_stacks(tmp_path))
    sweep.script = only_on(2, stop="all_reduce", hang="broadcast")
    sweep.script["hang"]["call"] = 0  # in the first call of all: before anyone is past it
    code, stderr = sweep.run(tp=4, collectives="all_reduce,broadcast", point_timeout=4)
    assert code == 0, stderr
    rows = sweep.rows()
    assert "rank 2 stopped first" in rows["all_reduce"]["reason"]
    assert "rank 2 stopped first, in check" in rows["broadcast"]["reason"]
    assert "while the others wait" in rows["broadcast"]["reason"]


@pytest.mark.slow
def test_a_point_that_ended_two_jobs_is_not_tried_a_third_time(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, only_on(0, die="broadcast"))
    code, stderr = sweep.run(collectives="broadcast", launches=3)
    assert code == 0, stderr
    rows = {r["launch"]: r for r in open_run(sweep.directory).rows()}
    assert [rows[k]["status"] for k in range(3)] == ["failed"] * 3
    assert rows[1]["reason"] == "rank 0 was killed by SIGKILL"
    assert rows[2]["reason"].startswith("not tried again: it ended 2 jobs, in launch 0 and 1 (rank 0 was killed")
    deaths = [len(record["deaths"]) for record in open_run(sweep.directory).manifest["launches"]]
    assert deaths == [1, 1, 0]


# ---- faults of what starts and watches -----------------------------------------------------------------------------

# An interval that no point reaches: each takes its whole time, so that whatever is to happen in the middle does, on any
# machine.
MANY = {"sizes": "8:256:x2", "collectives": "all_reduce,broadcast", "max_time_per_point": 0.3, "target_ci": 1e-9,
        "point_timeout": 20}  # fmt: skip


def test_no_rank_outlives_a_supervisor_that_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path).start(**MANY).wait_for_points(2)
    assert len(sweep.ranks) >= 3
    sweep.supervisor.kill()
    assert sweep.process is not None
    sweep.process.communicate()
    _, alive = psutil.wait_procs(sweep.ranks, timeout=3)
    assert not alive
    kept = open_run(sweep.directory).rows()
    assert len(kept) >= 2
    sweep.resumed()
    after = {(r["launch"], r["point_id"]): r for r in open_run(sweep.directory).rows()}
    assert all(after[r["launch"], r["point_id"]] == r for r in kept)  # not one was measured again
    sweep.nothing_is_left()


@pytest.mark.slow
def test_a_launcher_that_is_killed_or_asked_to_end_by_somebody_else_costs_no_point(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path).start(**MANY)
    for job, sign in enumerate((signal.SIGKILL, signal.SIGTERM), 1):
        sweep.wait_for_visits_of_job(job)
        (launcher,) = sweep.supervisor.children()
        launcher.send_signal(sign)
    code, stderr = sweep.end()
    assert code == 0, stderr
    run = open_run(sweep.directory)
    assert {row["status"] for row in run.rows()} <= {"ok", "unsteady"}  # the latter: something else was busy
    assert run.manifest["launches"][0]["deaths"] == [
        "torchrun was killed by SIGKILL",
        "torchrun was ended from outside by SIGTERM",
    ]


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path).start(**MANY).wait_for_points(1)
    sweep.supervisor.send_signal(signal.SIGINT)
    time.sleep(0.05)
    sweep.supervisor.send_signal(signal.SIGINT)
    asked = time.monotonic()
    code, _ = sweep.end()
    assert code == 130
    assert time.monotonic() - asked < 4
    assert open_run(sweep.directory).manifest["outcome"] == "interrupted"


@pytest.mark.slow
def test_being_asked_to_stop_keeps_finished_points_and_goes_on_later(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path).start(**MANY).wait_for_points(1)
    kept = 1
    for job, sign in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), 1):
        sweep.wait_for_visits_of_job(job)
        sweep.supervisor.send_signal(sign)
        code, _ = sweep.end()
        assert code == 130
        run = open_run(sweep.directory)
        assert run.manifest["outcome"] == "interrupted"
        assert kept <= len(run.rows()) < run.manifest["points_planned"]
        assert len(run.points()) == len(run.rows())
        assert (sweep.directory / "points.parquet").exists()
        kept = len(run.rows())
        if job < 3:
            (sweep.directory / "points.parquet").unlink()
            sweep.start("--resume")
    sweep.resumed()


@pytest.mark.slow
def test_a_closed_terminal_ends_the_sweep_as_ctrl_c_does(tmp_path: Path) -> None:
    """The real thing: a terminal of its own, whose other end is closed."""
    import pty

    out = tmp_path / "run"
    arguments = [sys.executable, "-m", "commbench", "sweep", "--out", str(out), "--sizes", "8:16KiB:x2",
                 "--backends", "fake", "--max-time-per-point", "300ms", "--dtypes", "float32"]  # fmt: skip
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(arguments[0], arguments, {**os.environ, "COMMBENCH_FAKE": '{"duration_s": 2e-4}'})
    os.set_blocking(terminal, False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (out / "points.jsonl").exists() and (out / "points.jsonl").read_text().count("\n") >= 2:
            break
        try:
            os.read(terminal, 1 << 16)
        except BlockingIOError:
            time.sleep(0.05)
    family = psutil.Process(pid).children(recursive=True)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert not psutil.wait_procs(family, timeout=3)[1]
    assert open_run(out).manifest["outcome"] == "interrupted"


def test_a_launch_that_cannot_start_says_so_in_the_ranks_own_words(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, variables={"GLOO_SOCKET_IFNAME": "nowhere0"})
    started = time.monotonic()
    code, stderr = sweep.run(collectives="all_reduce")
    assert code == 1
    assert stderr.startswith("error: launch 0 could not start: rank ")
    assert "nowhere0" in stderr
    assert stderr.count("\n") == 1
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_a_launch_that_takes_longer_than_its_limit_is_ended_and_the_rest_can_go_on(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, {"duration_s": 2.0}, quick_stacks(tmp_path))  # each point takes many such calls
    code, stderr = sweep.run(**MANY | {"sizes": "8", "launch_timeout": 8})
    assert code == 1
    assert "launch took longer than its limit of 8 s" in stderr
    assert "sweep --resume" in stderr
    sweep.resumed()


# ---- faults of the machine -------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_namespaces
def test_a_full_disk_keeps_finished_points_and_is_named(tmp_path: Path) -> None:
    """The run's folder is a small file system, which is copied out before it goes with its namespace."""
    small = tmp_path / "small"
    small.mkdir()
    sweep = Sweep(tmp_path, before=f"mount -t tmpfs -o size=8m none {small}")
    fill = f"dd if=/dev/zero of={small}/fill bs=4k 2>/dev/null"
    code, stderr = _run_inside(sweep, small, MANY, after_a_point=fill)
    assert code == 2
    assert stderr.startswith(f"error: {small}/run")
    assert "No space left on device" in stderr
    assert "finished points are kept" in stderr
    assert f"--resume {small}/run" in stderr
    assert stderr.count("\n") == 1
    run = open_run(sweep.directory)
    assert len(run.rows()) >= 1
    sweep.resumed()


def _run_inside(sweep: Sweep, small: Path, spec: dict[str, Any], after_a_point: str) -> tuple[int, str]:
    """Measure into ``small``/run inside the namespace and do something to it as soon as a point is finished; afterwards
    what is there becomes the sweep's run."""
    command = shlex.join([sys.executable, str(DRIVER), f"{small}/run", json.dumps(SPEC | spec)])
    save = f"cp -r {small}/run {sweep.directory}"
    wait = f"while [ ! -s {small}/run/points.jsonl ]; do sleep 0.05; done"
    sweep.before = f"{sweep.before} && {{ {command} & {wait}; {after_a_point}; wait $!; code=$?; {save}; exit $code; }}"
    return sweep.start().end()


@needs_namespaces
@pytest.mark.slow
def test_a_folder_that_cannot_be_written_midway_keeps_finished_points_and_is_named(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    sweep = Sweep(tmp_path, before="true", may_be_half_written=True)
    close = f"mount --bind -o ro {small} {small} && mount -o bind,remount,ro {small}"
    code, stderr = _run_inside(sweep, small, MANY, after_a_point=close)
    assert code == 2, stderr
    assert "Read-only file system" in stderr
    assert "finished points are kept" in stderr
    assert len(open_run(sweep.directory).rows()) >= 1
    sweep.resumed()


@needs_namespaces
def test_shared_memory_that_is_too_small_is_named_with_what_to_do(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, before="mount -t tmpfs -o size=64k none /dev/shm")
    code, stderr = sweep.run(collectives="all_reduce")
    assert code == 1
    assert "no room for" in stderr
    assert "/dev/shm" in stderr
    assert "--shm-size" in stderr
    assert stderr.count("\n") == 1


def test_what_a_killed_process_left_in_shared_memory_is_removed_and_what_a_living_one_holds_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(segment.DIR_VARIABLE, str(tmp_path))
    fd, mine = segment.create_file(4096)
    left_by = os.fork()
    if left_by == 0:
        segment.create_file(4096)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(left_by, 0)
    (tmp_path / "commbench-notes").write_text("somebody else's")
    theirs = next(p for p in tmp_path.glob("commbench-*") if p not in (mine, tmp_path / "commbench-notes"))
    assert segment.stale(tmp_path) == []  # its maker may be about to lock it
    for path in (mine, theirs):
        os.utime(path, (time.time() - 60, time.time() - 60))
    assert segment.stale(tmp_path) == [theirs]
    assert segment.remove_stale() == [theirs]
    assert mine.exists()
    os.close(fd)
    mine.unlink()


@pytest.mark.slow
def test_a_clock_that_leaps_changes_no_result_and_ends_no_point(tmp_path: Path) -> None:
    """Every process sees the wall clock leap an hour ahead, and then two back, through a library that is loaded before
    libc, once a file is there."""
    source, library, ahead, back = (tmp_path / name for name in ("leap.c", "leap.so", "ahead", "back"))
    source.write_text(LEAP % (ahead, back))
    built = subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], capture_output=True)
    if built.returncode != 0:
        pytest.skip("no C compiler")
    sweep = Sweep(tmp_path, variables={"LD_PRELOAD": str(library)})
    sweep.start(**MANY).wait_for_visits(2)
    ahead.touch()
    seen = len(events(sweep.directory, "visit"))
    sweep.wait_for_visits(seen + 2)
    back.touch()
    code, stderr = sweep.end()
    assert code == 0, stderr
    run = open_run(sweep.directory)
    times = [e["time_s"] for e in events(sweep.directory, "visit")]
    steps = [b - a for a, b in pairwise(times)]
    assert max(steps) > 3000  # it did leap
    assert min(steps) < -6000
    assert {row["status"] for row in run.rows()} <= {"ok", "unsteady"}  # the latter: something else was busy
    assert run.manifest["launches"][0]["deaths"] == []
    assert 0 < run.manifest["launches"][0]["startup_s"] < 60


LEAP = """
#define _GNU_SOURCE
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
int clock_gettime(clockid_t id, struct timespec *t) {
    long done = syscall(SYS_clock_gettime, id, t);
    if (id == CLOCK_REALTIME && done == 0 && access("%s", F_OK) == 0) t->tv_sec += 3600;
    if (id == CLOCK_REALTIME && done == 0 && access("%s", F_OK) == 0) t->tv_sec -= 7200;
    return (int)done;
}
"""


@pytest.mark.slow
def test_a_rendezvous_port_that_is_taken_is_named(tmp_path: Path) -> None:
    needs_mpirun()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        sweep = Sweep(tmp_path, variables={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        started = time.monotonic()
        code, stderr = sweep.run(collectives="all_reduce", launcher="mpirun")
    assert code == 1
    assert "could not start" in stderr
    assert port in stderr
    assert time.monotonic() - started < 30


# ---- faults of the files -----------------------------------------------------------------------------------------


def test_a_last_line_that_cannot_be_read_costs_that_point_which_is_measured_again(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    points = left_behind(sweep.directory, rows=2, collectives="all_reduce,broadcast")
    path = sweep.directory / "points.jsonl"
    first, last, _ = path.read_text().split("\n")
    for damaged in (f"\0\0{last[2:]}\n", last[: len(last) // 2]):
        path.write_text(f"{first}\n{damaged}")
        run = open_run(sweep.directory)
        assert len(run.rows()) == 1
        assert run.problems == ["points.jsonl line 2 is not readable and was skipped"]
        assert unfinished(sweep.directory).left == {0: [1]}
    rows = sweep.resumed()
    assert set(rows) == {p.collective for p in points}
    assert rows[points[0].collective]["latency_median_s"] == 1e-5  # not measured again
    assert rows[points[1].collective]["n_samples"] > 0


def left_behind(directory: Path, rows: int, **spec: Any) -> list[Point]:
    """An interrupted run whose first points have rows; gives its points in their order."""
    made = make_spec(SPEC | spec, {})
    expansion, settings = prepare(made)
    create(directory, new_manifest(made, expansion, settings, directory), Plan(expansion.points, settings.to_dict()))
    ordered = shuffled(expansion.points, settings.seed, 0)
    log = PointLog(directory)
    for order, point in ordered[:rows]:
        values = {"run_id": "run", "launch": 0, "order": order, "status": "ok", "reason": "", "latency_median_s": 1e-5}
        log.append(row_of(point, values))
    log.close()
    return [point for _, point in ordered]


# ---- under mpirun, and for want of memory ------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_that_mpirun_started_are_watched_and_ended_as_well(tmp_path: Path) -> None:
    needs_mpirun()
    sweep = Sweep(tmp_path, only_on(1, hang="broadcast", die="all_gather"), quick_stacks(tmp_path))
    code, stderr = sweep.run(collectives="broadcast,all_gather", launcher="mpirun")
    assert code == 0, stderr
    rows = sweep.rows()
    assert "rank 1 stopped first, in " in rows["broadcast"]["reason"]
    # MPICH ends the others by the same signal, and names any of them
    assert re.match(r"(rank 1|a rank) was killed by SIGKILL", rows["all_gather"]["reason"])


def needs_mpirun() -> None:
    try:
        find_mpirun()
    except SpecError as error:
        pytest.skip(str(error))


GREEDY = "a = []\nfor _ in range(400): a.append(bytearray(b'x') * (1 << 20))"


@pytest.mark.slow
def test_a_process_that_the_kernel_kills_for_want_of_memory_is_counted() -> None:
    """In a control group of its own, where the system lets us make one."""
    folders = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
    made = None
    for folder, limit in folders.items():
        try:
            made = folder / f"commbench-test-{os.getpid()}"
            made.mkdir()
            (made / limit).write_text(str(64 << 20))
            break
        except OSError:
            if made is not None and made.is_dir():
                made.rmdir()
            made = None
    if made is None:
        pytest.skip("this system lets us make no control group for memory")
    try:
        before = kills_for_memory()
        join = f"import os; open({str(made / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        done = subprocess.run([sys.executable, "-c", join + GREEDY], capture_output=True)
        assert done.returncode == -signal.SIGKILL
        assert kills_for_memory() > before
    finally:
        made.rmdir()
