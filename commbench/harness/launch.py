"""Launches: one job of torchrun or mpirun each, watched from outside, that measures all points in one set of
processes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from commbench.errors import LaunchError, SpecError, StoreError
from commbench.harness.hosts.nodes import launcher_ended, nearest_cause
from commbench.harness.launchers import mpirun as mpi
from commbench.harness.launchers.commands import Program, environment_of, launch_command, launcher_facts, printable
from commbench.harness.ranks.rank import log_path
from commbench.harness.ranks.work import PATIENCE_VARIABLE, remove_work, write_work
from commbench.harness.supervision.heartbeat import BETWEEN, STORE_LOST, VARIABLE, VISITING, Page, Pulse
from commbench.harness.supervision.stacks import RankState, collect, first_stopped, write_report
from commbench.harness.supervision.supervisor import (
    DEAD_GRACE_S,
    TERM_GRACE_S,
    Limits,
    Trouble,
    Watchdog,
    end_job,
    kill_job,
    kills_for_memory,
    state_of,
    stopping,
)
from commbench.measure.settings import CAPACITY
from commbench.store import schema
from commbench.store.run import Plan, PointLog, open_run, row_of, update_manifest
from commbench.types import Point
from commbench.units import format_size

PROGRESS = "progress.jsonl"
POLL_S = 0.1  # between two looks at a job that starts or ends
MEASURING_POLL_S = 0.5  # while ranks measure: they may have every core
MOST_DEATHS = 3  # jobs of a launch that may die one after the other, between points and without finishing one
MOST_JOBS_ENDED = 2  # by one point, before it is left out
_PR_SET_PDEATHSIG = 1

Event = Mapping[str, Any]


@dataclass(slots=True)
class Tail:
    """New whole lines of a growing JSONL file. A line that a killed writer left unfinished is passed over."""

    path: Path
    offset: int = 0

    def skip(self) -> None:
        """Pass over what is there already."""
        self.offset = self.path.stat().st_size if self.path.exists() else 0

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with self.path.open("rb") as stream:
                stream.seek(self.offset)
                data = stream.read()
        except FileNotFoundError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        if newline:
            self.offset += len(whole) + 1
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):
                    record = json.loads(line)
                    if isinstance(record, dict):
                        yield record


@dataclass(slots=True)
class Launch:
    """One job of a launch while it runs, and what it told."""

    directory: Path
    index: int
    ranks: int
    points: Mapping[int, Point]  # by their places in this launch's order
    program: Program = field(default_factory=Program)
    limits: Limits = field(default_factory=Limits)
    max_time_per_point_s: float = 1.0
    already_s: float = 0.0  # what earlier jobs of this launch have taken of its time
    ready: dict[str, Any] = field(default_factory=dict)
    startup_s: float | None = None
    visiting: dict[str, Any] = field(default_factory=dict)
    canaries: dict[str, dict[str, float]] = field(default_factory=dict)  # start, end → canary → seconds
    finished: int = 0
    done: bool = False
    lasted_s: float = 0.0
    trouble: Trouble | None = None
    pulses: list[Pulse] = field(default_factory=list)
    stopped: str = ""  # the rank that stopped first, what it was doing, and what tells; after a hang
    report: Path | None = None  # where the stacks are
    out_of_memory: bool = False
    code: int | None = None  # the launcher's exit status
    ended_here: bool = False  # the job was ended by this command
    asked: signal.Signals | None = None  # what torchrun was asked to end with, by somebody else
    _logs_from: dict[Path, int] = field(default_factory=dict)  # sizes of the logs when this job began
    elsewhere: str = ""  # why the job failed on another host, where it did

    @property
    def _log(self) -> Path:
        return self.directory / schema.LOGS_DIR / f"launch-{self.index}.{self.program.launcher}.log"

    @property
    def _scratch(self) -> Path:
        """Where torchrun makes folders, which it would leave in the temporary one."""
        return self.directory / schema.LOGS_DIR / f".launch-{self.index}"

    def run(self, on_event: Callable[[Event], None]) -> int:
        """Run the job to its end and give its exit status. On any exception no process of it is left.

        Raises LaunchError where no launcher starts, OSError where the run directory cannot be written.
        """
        program, others = self.program, self.program.others
        if others is not None:
            program = replace(program, nodes=others.begin(self.index))
        command = launch_command(self.directory, self.index, self.ranks, program)
        tail = Tail(self.directory / PROGRESS)
        tail.skip()  # earlier launches' lines
        logs = [self._log, *(log_path(self.directory, self.index, rank) for rank in range(self.ranks))]
        self._logs_from = {path: path.stat().st_size for path in logs if path.exists()}
        page = Page.create(self.ranks, CAPACITY)
        kills_before = kills_for_memory()
        started = time.monotonic()
        dog = Watchdog(self.limits, self.ranks, self.points, self.max_time_per_point_s, self.already_s)
        try:
            with self._log.open("ab") as stream:
                job = self._start(command, stream, self.environment(program, page.path))
        except BaseException:
            page.close()
            raise

        def at_once() -> None:
            page.refuse()
            kill_job(job.pid, page.pulses())

        stopping.at_once.append(at_once)
        try:
            dead_since: float | None = None
            while True:
                code = job.poll()
                for event in tail.read():
                    if event.get("event") == "ready" and event.get("launch") == self.index and self.startup_s is None:
                        self.startup_s = time.monotonic() - started
                    self.note(event)
                    on_event(event)
                self.pulses = page.pulses(iterations=False)
                if code is not None:
                    self.code = code
                    if not self.ended_here:
                        self.asked = self._signal_told()
                    return code
                now = time.monotonic()
                trouble = dog.look(self.pulses, now, state_of, heard=bool(self.ready))
                self.lasted_s = dog.lasted_s
                if trouble is None and others is not None:
                    if why := others.trouble():
                        trouble = Trouble("node", why)
                    others.answer(lambda: collect(self.directory, self.index, page.pulses()))
                if trouble is not None and self.trouble is None:
                    self.trouble = trouble
                    self._tell("trouble", kind=trouble.kind, text=trouble.text, ranks=trouble.ranks)
                if trouble is not None and trouble.kind == "dead":
                    dead_since = dead_since or now
                if trouble is not None and (trouble.kind != "dead" or now - (dead_since or now) > DEAD_GRACE_S):
                    if trouble.kind in ("hang", "start", "launch"):
                        self.pulses = page.pulses()
                        self._look_at_stacks(trouble)
                    self.asked = self._signal_told()  # from here on it would be this command's own
                    self.ended_here = True
                    end_job(job, page.pulses())
                    continue
                measuring = self.trouble is None and any(p.stage in (VISITING, BETWEEN) for p in self.pulses)
                time.sleep(MEASURING_POLL_S if measuring else POLL_S)
        finally:
            page.refuse()
            try:
                end_job(job, page.pulses(), grace_s=0.0 if stopping.hurried else TERM_GRACE_S)
            finally:  # the user may ask a second time while the job ends
                job.wait()
                self.out_of_memory = kills_for_memory() > kills_before
                self.pulses = page.pulses()
                stopping.at_once.remove(at_once)
                page.close()
                shutil.rmtree(self._scratch, ignore_errors=True)
                if others is not None:
                    self.elsewhere = others.end(failed=job.returncode != 0)

    def _start(
        self, command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Raises LaunchError where the system starts no such process: the run directory is not to blame."""
        try:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the command that watches, which then ends the job
                preexec_fn=_tied_to_parent(),
            )
        except OSError as error:
            raise LaunchError(
                f"launch {self.index} could not start: {command[0]}: {error.strerror or error}"
            ) from error

    def environment(self, program: Program, page: str) -> dict[str, str]:
        """Of the launcher, which gives it to the ranks. page: the heartbeat's path."""
        return {
            **environment_of(program),
            **({VARIABLE: page} if program.watched else {}),
            PATIENCE_VARIABLE: f"{self.limits.patience_s(self.points.values(), self.max_time_per_point_s):g}",
            "PET_LOG_DIR": str(self._scratch),
        }

    def note(self, event: Event) -> None:
        """Take in what rank 0 told."""
        if event.get("launch") != self.index:
            return
        match event.get("event"):
            case "ready":
                self.ready = {k: v for k, v in event.items() if k not in ("event", "launch")}
            case "visit":
                self.visiting = dict(event)
            case "canaries":
                names = set(event) - {"event", "launch", "time_s", "when"}
                self.canaries[event["when"]] = {name: event[name] for name in sorted(names)}
            case "clocks":
                self.ready["clocks_end"] = {k: v for k, v in event.items() if k not in ("event", "launch", "time_s")}
            case "point":
                self.finished += 1
            case "done":
                self.done = True

    def _tell(self, event: str, **facts: Any) -> None:
        """A line of the watching command's own among those of rank 0."""
        record = {"time_s": time.time(), "launch": self.index, "event": event, **facts}
        with (self.directory / PROGRESS).open("a") as stream:
            stream.write(json.dumps(record) + "\n")

    def _look_at_stacks(self, trouble: Trouble) -> None:
        """Stacks of all ranks, before the job is ended, into a file of their own."""
        others = self.program.others
        if others is not None:
            others.look()
        states = collect(self.directory, self.index, self.pulses)
        if others is not None:
            states += others.looked()
        # a launch that is too long says nothing of its ranks
        self.stopped = "" if trouble.kind == "launch" else self._who_stopped(states)
        folder = self.directory / schema.LOGS_DIR
        number = len(list(folder.glob(f"launch-{self.index}.stacks-*.txt")))
        self.report = folder / f"launch-{self.index}.stacks-{number}.txt"
        who = f"; {self.stopped}" if self.stopped else ""
        write_report(self.report, f"launch {self.index}: {trouble.text}{who}", states)

    # ---- why it ended -------------------------------------------------------------------------------------

    @property
    def order(self) -> int | None:
        """Place of the point that was being visited when the job ended; None between points."""
        if self.trouble is not None and self.trouble.order is not None:
            return self.trouble.order
        if not self.pulses:  # ranks that this host does not see
            order = self.visiting.get("order")
            return None if order is None else int(order)
        first = self.pulses[0]
        return first.order if first.stage == VISITING else None

    @property
    def timed_out(self) -> bool:
        """Whether the point had no answer in time, and no rank had said why."""
        return self.trouble is not None and self.trouble.kind == "hang" and not self._errors

    @property
    def _launcher_ended(self) -> str:
        """How the launcher itself was ended, where nothing that its ranks did was the reason; "" where it was not."""
        if self.asked is not None:
            # its ranks end one after the other, and may complain of each other before their turn comes
            return f"{self.program.launcher} was ended from outside by {self.asked.name}"
        # its ranks end with it, and may have been seen dead before it was
        alone = self.trouble is None or (self.trouble.kind == "dead" and not self.ended_here)
        if alone and not self._errors and self.code is not None and self.code < 0:
            return f"{self.program.launcher} was killed by {signal.Signals(-self.code).name}"
        return ""

    def _signal_told(self) -> signal.Signals | None:
        """The signal that torchrun says it was asked to end with; it says so before it ends its ranks."""
        found = re.search(
            r"Received (?:Signals\.)?(\w+) death signal|SignalException: Process \d+ got signal: (?:Signals\.)?(\w+)",
            _text(self._log, self._logs_from),
        )
        if found is None:
            return None
        name = found[1] or found[2]
        return signal.Signals(int(name)) if name.isdigit() else signal.Signals[name]

    @property
    def store_lost(self) -> str:
        """What a rank said when it could not write the run directory any more; "" when none did."""
        return next((p.error for p in self.pulses if p.error_kind == STORE_LOST), "")

    @property
    def _errors(self) -> list[tuple[int, int, str]]:
        """What ranks said of their ends, the first one first: monotonic time, rank, words."""
        return sorted((p.error_ns, p.rank, p.error) for p in self.pulses if p.error)

    def _who_stopped(self, states: Sequence[RankState]) -> str:
        """The rank that stopped first, with what it was doing."""
        rank, why = first_stopped(states)
        state = next((s for s in states if s.pulse.rank == rank), states[0] if states else None)
        if state is None:
            return why
        pulse = state.pulse
        where = pulse.where()
        point = None if pulse.order is None or pulse.stage != VISITING else self.points.get(pulse.order)
        if point is not None:
            backend = pulse.picked or point.backend
            where += (
                f" of {point.collective}{f' {point.op}' if point.op else ''}, {format_size(point.size_bytes)}"
                f"{f' {point.dtype}' if point.dtype else ''}, backend {backend}"
            )
        if rank is None:
            return f"{why} ({where})"
        return f"rank {rank}{f' on {state.host}' if state.host else ''} stopped first, in {where}: {why}"

    def failure(self) -> str:
        """Why the job ended, in one line: who stopped, the error of the rank that failed first, or the signal that
        ended it; of several hosts, what is nearest to the cause."""
        here = self._failure_here()
        if not self.elsewhere:
            return here
        return f"{here}; {self.elsewhere}" if self.timed_out else nearest_cause(here, [self.elsewhere])

    def _failure_here(self) -> str:
        if self._launcher_ended:
            return self._launcher_ended
        if self.trouble is not None and self.trouble.kind != "dead":
            parts = [_by_rank(rank, text) for _, rank, text in self._errors[:1]] + [self.trouble.text]
            if self.trouble.kind == "node":  # which the ranks here feel sooner or later
                parts = [nearest_cause(self.trouble.text, parts)]
            if self.stopped:
                parts.append(self.stopped)
            if self.report is not None:
                parts.append(f"stacks: {schema.LOGS_DIR}/{self.report.name}")
            return "; ".join(parts)
        told = _text(self._log, self._logs_from)
        if self.program.launcher == "mpirun":
            cause, killed = mpi.cause(told), mpi.killed_process(told)
            if cause is None and killed is not None:
                seen = () if self.trouble is None else self.trouble.ranks
                if killed[1] == signal.SIGKILL and len(seen) != 1:
                    # the launcher ends the others in the same way, and may name one of them
                    memory = ", the kernel ran out of memory" if self.out_of_memory else ""
                    return f"a rank was killed by SIGKILL{memory}; mpirun does not tell which one was the first"
                named = next((p.rank for p in self.pulses if p.pid == killed[0]), None)
                first = seen[0] if len(seen) == 1 else named
                cause = None if first is None else (first, -killed[1])
        else:
            cause = _torchrun_cause(told)
        # an MPI launcher ends the other ranks by SIGTERM, and MPICH's tells of the last one only
        ended = self.program.launcher == "mpirun" and cause is not None and cause[1] == -signal.SIGTERM
        raised = self._raised() if ended else []
        if cause is not None and cause[1] < 0 and not raised:
            text = f"rank {cause[0]} was killed by {signal.Signals(-cause[1]).name}"
            if cause[1] == -signal.SIGKILL and self.out_of_memory:
                text += ": the kernel ran out of memory"
            return text
        if self._errors:
            _, rank, message = self._errors[0]
            return _by_rank(rank, message)
        gone = self.trouble.ranks if self.trouble is not None else range(self.ranks)
        for rank in raised or ([cause[0]] if cause is not None else gone):
            lines = [line for line in self._said_by(rank).splitlines() if line.strip()]
            if lines:
                # a traceback ends in "module.Error: message"; who reads the point wants the message
                message = re.sub(
                    r"^(commbench\.errors\.)?(PeerLost|PointFailed|CommbenchError): ", "", lines[-1].strip()
                )
                return _by_rank(rank, message)
        if self.trouble is not None:
            return self.trouble.text
        last = [line for line in told.splitlines() if line.strip()]
        return last[-1].strip() if last else "the job ended without a word"

    def _said_by(self, rank: int) -> str:
        return _text(log_path(self.directory, self.index, rank), self._logs_from)

    def _raised(self) -> list[int]:
        """Ranks that ended with an error of their own."""
        told = {rank for _, rank, _ in self._errors}
        return [rank for rank in range(self.ranks) if rank in told or "Traceback (most" in self._said_by(rank)]


def _by_rank(rank: int, message: str) -> str:
    return message if re.match(r"rank \d+\b", message) else f"rank {rank}: {message}"


def _tied_to_parent() -> Callable[[], None]:
    """For the new process: end with the one that started it."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def tied() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return tied


def _torchrun_cause(log: str) -> tuple[int, int] | None:
    """(rank, exit status or minus the signal): torchrun ends the other ranks itself, only what it saw first counts."""
    found = re.search(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", log.rpartition("Root Cause")[2], re.DOTALL)
    return None if found is None else (int(found[1]), int(found[2]))


def _text(path: Path, sizes: Mapping[Path, int]) -> str:
    """What this job has added to a log."""
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        stream.seek(sizes.get(path, 0))
        return stream.read().decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Again:
    """Points to measure although they have rows: (launch, point id) pairs whose rows stand before ``offset`` in
    points.jsonl. A row behind it is the repetition's."""

    pairs: frozenset[tuple[int, str]] = frozenset()
    offset: int = 0


NOTHING_AGAIN: Again = Again()


def left_over(
    directory: Path, index: int, ordered: Sequence[tuple[int, Point]], again: Again = NOTHING_AGAIN
) -> list[int]:
    """Places of a launch's points that have no result, or whose result is to be repeated."""
    run = open_run(directory)
    wanted = {point for launch, point in again.pairs if launch == index}
    done = {row.get("point_id") for row in run.rows() if row.get("launch") == index}
    if wanted:
        new = {row.get("point_id") for row in run.rows(again.offset) if row.get("launch") == index}
        done -= wanted - new
    return [order for order, point in ordered if point.point_id not in done]


def refuse_external(program: Program) -> None:
    """Raise SpecError where the ranks are those of an outside launcher: this command can start no job of them."""
    if program.launcher == "external":
        raise SpecError(
            "--launcher external: the ranks are started by somebody else, once; only a new `commbench sweep` inside "
            "them can measure so. Here take --launcher torchrun or mpirun"
        )


def run_launch(
    directory: Path,
    index: int,
    ranks: int,
    on_event: Callable[[Event], None],
    program: Program | None = None,
    *,
    limits: Limits | None = None,
    again: Again = NOTHING_AGAIN,
) -> dict[str, Any]:
    """Measure all points of the plan that have no result in this launch, starting again past a point that ends the job.

    Such a point is recorded as failed, or as timeout when the job hung, with the reason. A point that has ended two
    jobs of this run is not tried again: it is recorded with that reason, unless ``again`` names it. Gives the launch's
    record for the manifest.

    Raises LaunchError when the job cannot start, with the ranks' own error, when it dies again and again between
    points, or when the launch takes longer than its limit; StoreError when the ranks cannot write their results;
    SpecError where an outside launcher is to start the ranks, since only that can do it.
    """
    from commbench.harness.order import shuffled

    plan = Plan.load(directory)
    program, limits = program or Program(), limits or Limits()
    refuse_external(program)
    ordered = shuffled(plan.points, int(plan.settings["seed"]), index)
    points = dict(ordered)
    manifest = open_run(directory).manifest
    before: dict[str, Any] = next((r for r in manifest.get("launches", []) if r["launch"] == index), {})
    record: dict[str, Any] = {
        "started_s": time.time(),
        "deaths": [],
        "ended_by": [],
        **before,
        "launch": index,
        "command": printable(launch_command(directory, index, ranks, program)),
        **launcher_facts(ranks, program),
    }
    _refuse_deadly(directory, index, points, manifest, again)
    work = left_over(directory, index, ordered, again)
    deaths, lasted, came_up = 0, 0.0, False
    try:
        while work:
            write_work(directory, index, work)
            launch = Launch(
                directory, index, ranks, points, program, limits,
                float(plan.settings.get("max_time_per_point_s", 1.0)), lasted,
            )  # fmt: skip
            code = launch.run(on_event)
            lasted += launch.lasted_s
            record.update({k: v for k, v in launch.ready.items() if k not in ("time_s", "rank_facts")}, exit_code=code)
            if launch.ready:
                came_up = True
                record.setdefault("startup_s", launch.startup_s)
                record.setdefault("startups_s", []).append(launch.startup_s)
                if "rank_facts" in launch.ready:  # those of an earlier commbench tell less
                    _keep_rank_facts(directory, launch.ready["rank_facts"])
            record["canaries"] = {**record.get("canaries", {}), **launch.canaries}
            if launch.done and (code == 0 or (launch.trouble is not None and launch.trouble.kind == "linger")):
                return record
            if launch.store_lost:
                raise StoreError(launch.store_lost)
            why = launch.failure()
            record["deaths"].append(why)
            deaths = 1 if launch.finished else deaths + 1
            # also a point that a rank died in may have its result by now, which then stands
            work = left_over(directory, index, ordered, again)
            if launch.trouble is not None and launch.trouble.kind == "launch":
                raise LaunchError(
                    f"launch {index}: {why}; {len(work)} points have no result: sweep --resume goes on with them"
                )
            if not launch.ready and (not came_up or deaths >= MOST_DEATHS):
                raise LaunchError(
                    f"launch {index} could not start: {why}; the ranks' output is in {directory / schema.LOGS_DIR}"
                )
            blamed = None if launcher_ended(why) else _blame(directory, index, points, launch, why, work)
            if blamed is not None:
                record["ended_by"].append(blamed)
                deaths = 1
            if deaths >= MOST_DEATHS:
                raise LaunchError(
                    f"launch {index} died {deaths} times running: {why}; see {directory / schema.LOGS_DIR}"
                )
            work = left_over(directory, index, ordered, again)
        return record
    finally:
        record["ended_s"] = time.time()
        if not stopping.hurried:
            _close_launch(directory, index, record, unrepeated(directory, index, ordered, again))


def unrepeated(
    directory: Path, index: int, ordered: Sequence[tuple[int, Point]], again: Again = NOTHING_AGAIN
) -> set[str]:
    """Points that were to be measured again in this launch and have no new result: their old rows count."""
    wanted = {point for launch, point in again.pairs if launch == index}
    left = set(left_over(directory, index, ordered, again)) if wanted else set()
    return {point.point_id for order, point in ordered if order in left and point.point_id in wanted}


def _close_launch(directory: Path, index: int, record: dict[str, Any], without: Collection[str]) -> None:
    """without: points whose new samples do not count."""
    from commbench.store.samples import to_parquet  # numpy, which `sweep --dry-run` does without

    remove_work(directory)
    others = [r for r in open_run(directory).manifest.get("launches", []) if r["launch"] != index]
    update_manifest(directory, launches=sorted([*others, record], key=lambda r: int(r["launch"])))
    to_parquet(directory, index, without)


def _keep_rank_facts(directory: Path, facts: dict[str, Any]) -> None:
    """What only a rank can tell (versions of loaded libraries) belongs to the run's fingerprint."""
    fingerprint = open_run(directory).manifest["fingerprint"]
    update_manifest(directory, fingerprint={**fingerprint, "rank": facts})


def _blame(
    directory: Path, index: int, points: Mapping[int, Point], launch: Launch, why: str, work: Collection[int]
) -> dict[str, Any] | None:
    """Record the point that was being visited when the job ended; None when it was between points."""
    order = launch.order
    if order is None or order not in work:
        return None
    status = "timeout" if launch.timed_out else "failed"
    pulse = next((p for p in launch.pulses if p.order == order), None)
    picked = "" if pulse is None else pulse.picked
    _append(directory, index, order, points[order], status=status, reason=why, backend_picked=picked)
    return {"point_id": points[order].point_id, "status": status, "reason": why}


def _refuse_deadly(
    directory: Path, index: int, points: Mapping[int, Point], manifest: Mapping[str, Any], again: Again
) -> None:
    """Record the points that have ended two jobs already, so that this launch leaves them out."""
    ended: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for record in manifest.get("launches", []):
        for death in record.get("ended_by", []):
            ended.setdefault(death["point_id"], []).append((record["launch"], death))
    if not ended:
        return
    have = {row.get("point_id") for row in open_run(directory).rows() if row.get("launch") == index}
    for order, point in points.items():
        deaths = ended.get(point.point_id, [])
        if len(deaths) < MOST_JOBS_ENDED or point.point_id in have or (index, point.point_id) in again.pairs:
            continue
        launches = " and ".join(str(launch) for launch in sorted({launch for launch, _ in deaths}))
        last = deaths[-1][1]
        why = f"not tried again: it ended {len(deaths)} jobs, in launch {launches} ({last['reason']})"
        _append(directory, index, order, point, status=last["status"], reason=why)


def _append(directory: Path, index: int, order: int, point: Point, **values: Any) -> None:
    log = PointLog(directory)
    try:
        log.append(row_of(point, {"run_id": directory.name, "launch": index, "order": order, **values}))
    finally:
        log.close()
