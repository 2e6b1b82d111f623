"""A live driver: ranks that stay up, so that one thing after another can be measured, tried out and profiled.

The driver imports no torch. It starts the ranks as a sweep does, and hands them commands over ``channel``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from commbench import errors
from commbench.errors import BackendUnavailable, CommbenchError, EngineError, PeerLost, UsageError, unknown
from commbench.harness.engine.arrays import Packed, one_per_rank
from commbench.harness.engine.channel import Gone
from commbench.harness.engine.job import GRACE_S, POLL_S, Job
from commbench.harness.launchers.commands import launch_command, printable
from commbench.harness.views.tracing import PARENT_VARIABLE, launch_span
from commbench.store import schema
from commbench.types import DTYPES, OPS, Point

if TYPE_CHECKING:
    import pandas as pd

    from commbench.measure.settings import Settings
    from commbench.store.run import Run
    from commbench.sweep import Expansion, SweepSpec

STARTUP_S = 120.0  # for all ranks to report ready
DEFAULT_BUCKET_BYTES = 64 << 20  # of a weight update, as coordinator.weights has it
_GROUPS = ("world", "tp", "pp", "moe_ep", "moe_tp")
_HOW = ("group", "backend", "policy")  # what every collective on real data can be told

Arrays = Any  # a numpy array or torch tensor, or a list of one per rank
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Received:
    """What one rank got in a weight update: bytes, and the seconds it took on that rank."""

    rank: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """What ``Engine.measure`` gives: the same records that a sweep writes, in the order in which points finished.

    directory: the run, where one was asked for; it holds the raw samples too. began_s: from the call to the first
    iteration, of the first point's warm-up.
    """

    rows: tuple[dict[str, Any], ...]
    directory: Path | None = None
    began_s: float = 0.0

    def __repr__(self) -> str:
        where = "not stored" if self.directory is None else f"in {self.directory}"
        return f"<commbench.Measurements {len(self)} rows, {where}>"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def points(self) -> pd.DataFrame:
        """One row per point, with exactly the columns of a run's ``points.parquet``."""
        import pandas as pd

        frame = pd.DataFrame.from_records(list(self.rows), columns=list(schema.POINT_COLUMNS))
        return frame.astype(schema.POINT_COLUMNS)

    @property
    def run(self) -> Run:
        """The run on disk. Raises EngineError where none was asked for."""
        from commbench.store.run import open_run

        if self.directory is None:
            raise EngineError("these measurements were not stored; give measure(…, out=FOLDER)")
        return open_run(self.directory)


class Engine:
    """Ranks that stay up until ``close``, the end of the ``with`` block, collection, or the interpreter's end.

    tp, ep, pp: sizes of the groups, as of a sweep (tp × pp ranks). policy: by name or file. backends: to set up beside
    the policy's own (others are set up when a call names them). device: auto, cpu or cuda. environment: variables
    for the ranks, on top of this process's (None takes one away).

    Returns when every rank is ready. Raises SpecError, UnknownName or PolicyError for what cannot be asked for, and
    LaunchError with the failing rank's own error when a rank does not come up. One call runs at a time; another thread
    waits its turn. A rank that dies ends the engine: the call that finds out raises PeerLost with the rank's name.
    """

    def __init__(
        self,
        tp: int = 2,
        ep: int = 1,
        pp: int = 1,
        *,
        policy: str = "commbench",
        backends: Iterable[str] = (),
        device: str = "auto",
        environment: Mapping[str, str | None] | None = None,
        startup_timeout_s: float = STARTUP_S,
    ) -> None:
        self._job: Job | None = None
        started = time.time()
        from commbench.harness.environment.kernel_packages import check_versions, installed_versions, left_alone
        from commbench.harness.run import prepare
        from commbench.sweep import make_spec

        settings = {
            "tp": tp, "ep": ep, "pp": pp, "policy": [policy], "device": device,
            "backends": ["auto", *backends], "collectives": ["barrier", "all_reduce"], "sizes": "8",
        }  # fmt: skip
        self._spec = make_spec(settings, {key: f"Engine: {key}" for key in settings})
        _, self._settings = prepare(self._spec)
        self._lock = threading.RLock()
        self._busy = ""
        self._calls = itertools.count(1)
        self._profiling: Path | None = None
        self._interruption: BaseException | None = None
        given = dict(environment or {})
        variables = {name: value for name, value in {**os.environ, **given}.items() if value is not None}
        if self._settings.device != "cpu":  # kernels of other devices only
            check_versions(installed_versions(), variables)
        for text in left_alone(variables):
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        job = self._job = Job.start(self._spec.ranks, given)
        # also when this process ends; and it must not hold the engine
        self._finalizer = weakref.finalize(self, job.end)
        try:
            from commbench.harness.environment.fingerprint import fingerprint

            self._fingerprint = fingerprint(self._settings.device)  # takes a while, as do the ranks
            deadline = time.monotonic() + startup_timeout_s
            job.meet(deadline)
            setup = {"command": "setup", "settings": self._settings.to_dict(), "policy": policy}
            self._exchange([setup] * job.ranks, starting=deadline)
        except BaseException as error:
            job.end(f"it could not start: {error}")
            raise
        self._pids = tuple(job.pids[rank] for rank in range(job.ranks))
        self._launch = {
            "launch": 0,
            "command": printable(launch_command(job.folder, 0, job.ranks, job.program)),
            "launcher": job.program.launcher,
            "engine": True,
            "started_s": started,
            "startup_s": time.time() - started,
            "deaths": [],
        }

    # ---- life ---------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return self._spec.ranks

    @property
    def pids(self) -> tuple[int, ...]:
        """Process numbers of the ranks, by rank."""
        return self._pids

    @property
    def closed(self) -> bool:
        return self._job is None or bool(self._job.ended)

    def close(self) -> None:
        """End the ranks. May be called twice, and by another thread than the one that waits in a call."""
        if self._job is None:
            return
        mine = self._lock.acquire(timeout=GRACE_S)
        try:
            self._finalizer.detach()
            self._job.end()
        finally:
            if mine:
                self._lock.release()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"ended: {self._job.ended}" if self._job is not None and self._job.ended else f"{self.ranks} ranks"
        return f"<commbench.Engine {state}>"

    # ---- measuring ----------------------------------------------------------------------------------------

    def measure(
        self,
        what: Point | Sequence[Point] | SweepSpec | str | os.PathLike[str] | None = None,
        *,
        out: str | os.PathLike[str] | None = None,
        trace: bool = False,
        otlp_endpoint: str | None = None,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
        **settings: Any,
    ) -> Measurements:
        """Measure as ``commbench sweep`` does.

        what: a Point, several, a SweepSpec, or a sweep's name or file; settings are those of a sweep
        (``collectives=["all_reduce"]``, ``sizes="8:1MiB:x8"``, ``max_time_per_point="0.2s"``, …) and override a file's.
        out: a run directory to make. trace, otlp_endpoint: note spans there, as ``sweep --trace``; an endpoint that
        cannot be reached is warned of. on_event hears ``{"event": "point", "row": …}`` as each point finishes.

        The ranks and the device are the engine's. Raises SpecError where the settings ask for others, as a sweep does
        for other bad input, and StoreError for an ``out`` that cannot be used. Ctrl-C ends it after the present
        points, which are kept, and goes on as KeyboardInterrupt; a second one ends the engine.
        """
        return self._measure(what, settings, None, out=out, trace=trace, endpoint=otlp_endpoint, on_event=on_event)

    def _measure(
        self,
        what: Any,
        settings: Mapping[str, Any],
        model: tuple[tuple[int, ...], int] | None,
        *,
        out: str | os.PathLike[str] | None,
        trace: bool = False,
        endpoint: str | None = None,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Measurements:
        """model: elements of its tensors and bytes of a bucket, for a weight update."""
        from commbench.harness.engine.plan import planned
        from commbench.harness.views.look import Look

        called_ns = time.monotonic_ns()
        self._check_usable()
        spec, expansion, how = planned(self._spec, self._settings.device, what, settings)
        if model is not None:
            how = replace(how, weight_numels=model[0], bucket_bytes=model[1])
        directory = None if out is None else Path(out)
        look = Look.of(None, trace, endpoint, os.environ)
        if look.trace and directory is None:
            raise UsageError("measure: a trace is written into a run directory; give out=FOLDER")
        said: list[str] = []
        try:
            with self._turn("measure"), contextlib.ExitStack() as stack:
                if directory is not None:
                    self._create_run(directory, spec, expansion, how)
                message: Message = {
                    "command": "measure",
                    "settings": how.to_dict(),
                    "points": [p.to_dict() for p in expansion.points],
                    "run_id": "engine" if directory is None else directory.name,
                    "directory": None if directory is None else str(directory.resolve()),
                }
                if directory is not None:
                    stack.enter_context(look.at(directory, said.append))
                    stack.enter_context(launch_span(0, self.ranks))
                    message["traceparent"] = os.environ.get(PARENT_VARIABLE, "") if look.trace else ""
                rows: list[dict[str, Any]] = []

                def hear(event: Mapping[str, Any]) -> None:
                    rows.append(event["row"])
                    if on_event is not None:
                        on_event(event)

                outcome = "failed"
                answer: Message = {"facts": {}, "canaries": {}, "began_ns": called_ns}
                try:
                    answer = self._exchange([message] * self.ranks, hear)[0][0]
                    outcome = "complete" if len(rows) == len(expansion.points) else "interrupted"
                finally:
                    if directory is not None:
                        self._close_run(directory, outcome, answer)
                if self._interruption is not None:
                    raise self._interruption
        finally:
            for text in said:  # in the name of measure's caller
                warnings.warn(text, RuntimeWarning, stacklevel=3)
        return Measurements(tuple(rows), directory, max(0.0, (answer["began_ns"] - called_ns) * 1e-9))

    def _create_run(self, directory: Path, spec: SweepSpec, expansion: Expansion, how: Settings) -> None:
        from commbench.harness.run import new_manifest
        from commbench.store.run import Plan, check_writable, create

        check_writable(directory)
        manifest = new_manifest(spec, expansion, how, directory, sys.argv or ["python"], self._fingerprint)
        create(directory, manifest, Plan(expansion.points, how.to_dict()))

    def _close_run(self, directory: Path, outcome: str, answer: Message) -> None:
        from commbench.harness.run import close_run
        from commbench.store.run import open_run, update_manifest
        from commbench.store.samples import to_parquet

        to_parquet(directory, 0)
        facts = dict(answer["facts"])
        fingerprint = {**open_run(directory).manifest["fingerprint"], "rank": facts.pop("rank_facts", {})}
        record = {**self._launch, **facts, "canaries": answer["canaries"], "ended_s": time.time()}
        update_manifest(directory, launches=[record], fingerprint=fingerprint)
        close_run(directory, outcome)

    def measure_weights(
        self,
        numels: Sequence[int],
        dtype: str = "bfloat16",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        out: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> Measurements:
        """Time to sync a model's weights from rank 0 to all others: make a group, broadcast the tensors in buckets, end
        the group.

        numels: elements of each tensor, all of one dtype. Further keywords and what is raised: as ``measure``. The
        latency is the time to sync, algbw the model's size over it.
        """
        if not numels or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numels):
            raise UsageError("measure_weights: numels must be the elements of each tensor, whole numbers from 1")
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise UsageError(f"measure_weights: bucket_bytes={bucket_bytes!r} must be a whole number, at least 1")
        if dtype not in DTYPES:
            raise unknown("dtype", str(dtype), DTYPES)
        size = sum(numels) * DTYPES[dtype].itemsize
        point = Point("weight_update", "", dtype, size, self.ranks, placement="out")
        return self._measure(point, settings, (tuple(numels), bucket_bytes), out=out)

    # ---- collectives on real data -----------------------------------------------------------------------

    def all_reduce(self, array: Arrays, op: str = "sum", **how: Any) -> list[Any]:
        """The reduction over ranks, on every rank.

        This and the methods below take one array for all ranks or a list of one per rank (numpy arrays or torch
        tensors, the same shapes and dtypes), and give a list with each rank's result, as what was given.
        Further keywords: ``group`` (world, tp, pp, moe_ep or moe_tp; all groups of the kind work at once), ``backend``
        (a name to force) and ``policy``. Raises UsageError for what is no array, CollectiveError (and
        BackendUnavailable) where the collective cannot take it.
        """
        return self._collective("all_reduce", array, how, op=op)

    def reduce(self, array: Arrays, dst: int = 0, op: str = "sum", **how: Any) -> list[Any]:
        """The reduction, on rank dst of the group; None elsewhere."""
        return self._collective("reduce", array, how, dst=dst, op=op)

    def all_gather(self, array: Arrays, dim: int = 0, **how: Any) -> list[Any]:
        """All ranks' arrays along a dimension, on every rank."""
        return self._collective("all_gather", array, how, dim=dim)

    def all_gatherv(self, arrays: Sequence[Any], **how: Any) -> list[Any]:
        """As all_gather along the first dimension, of which each rank may have another number of rows."""
        return self._collective("all_gatherv", arrays, how)

    def reduce_scatter(self, array: Arrays, op: str = "sum", **how: Any) -> list[Any]:
        """Each rank's part (along the first dimension) of the reduction."""
        return self._collective("reduce_scatter", array, how, op=op)

    def broadcast(self, array: Arrays, src: int = 0, **how: Any) -> list[Any]:
        """Rank src's array, on every rank."""
        return self._collective("broadcast", array, how, src=src)

    def all_to_all(self, array: Arrays, **how: Any) -> list[Any]:
        """Part i (along the first dimension) of every rank's array, one after the other, on rank i."""
        return self._collective("all_to_all", array, how)

    def gather(self, array: Arrays, dst: int = 0, dim: int = 0, **how: Any) -> list[Any]:
        """All ranks' arrays along a dimension, on rank dst of the group; None elsewhere."""
        return self._collective("gather", array, how, dst=dst, dim=dim)

    def scatter(self, array: Arrays, src: int = 0, **how: Any) -> list[Any]:
        """Part i (along the first dimension) of rank src's array, on rank i."""
        return self._collective("scatter", array, how, src=src)

    def send_recv(self, array: Arrays, **how: Any) -> list[Any]:
        """Around the ring: the array of the rank before."""
        return self._collective("send_recv", array, how)

    def barrier(self, **how: Any) -> None:
        """All ranks meet."""
        self._collective("barrier", None, how)

    def _collective(
        self,
        name: str,
        array: Any,
        how: Mapping[str, Any],
        **details: Any,
    ) -> list[Any]:
        """how: keywords that every collective has. details: those that this one has beside."""
        from commbench.policy import load_policy
        from commbench.registry import BACKENDS

        for key in how:
            if key not in _HOW:
                raise UsageError(f"{name}: there is no keyword {key!r}; it takes {', '.join([*details, *_HOW])}")
        group, backend, policy = how.get("group", "world"), how.get("backend"), how.get("policy")
        if group not in _GROUPS:
            raise unknown("group", str(group), _GROUPS)
        if backend is not None and backend not in BACKENDS:
            raise unknown("backend", str(backend), BACKENDS)
        if policy is not None:
            load_policy(policy)
        if details.get("op", "sum") not in OPS:
            raise unknown("op", str(details["op"]), OPS)
        for key in ("src", "dst", "dim"):
            if key in details and (isinstance(details[key], bool) or not isinstance(details[key], int)):
                raise UsageError(f"{name}: {key}={details[key]!r} is no whole number")
        message = {
            "command": "collective", "collective": name, "group": group, "backend": backend, "policy": policy,
            **details,
        }  # fmt: skip
        if array is None and name == "barrier":
            self._run("barrier", [message] * self.ranks)
            return []
        arrays = one_per_rank(name, array, self.ranks, same_rows=name != "all_gatherv")
        if name == "all_gatherv":
            message["sizes"] = [a.spec["shape"][0] if a.spec["shape"] else 0 for a in arrays]
        replies = self._run(
            name,
            [{**message, "arrays": [a.spec]} for a in arrays],
            buffers=[[a.data] for a in arrays],
        )
        return [
            like.rebuilt(reply["arrays"][0], data[0]) if data else None
            for like, (reply, data) in zip(arrays, replies, strict=True)
        ]

    # ---- weights ------------------------------------------------------------------------------------------

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int = 1,
        world_size: int | None = None,
        group_name: str = "weight_update_group",
        backend: str = "gloo",
        timeout_s: float = 300.0,
    ) -> None:
        """The ranks join a weight-update group: rank r as rank_offset + r, of world_size (default: all and a trainer).

        The trainer is rank 0, elsewhere (``commbench.coordinator.weights.init_weights_update_group``), and must join
        meanwhile. Raises CollectiveError when it is not found, UsageError for a group that exists and
        a port that is none.
        """
        if isinstance(master_port, bool) or not isinstance(master_port, int) or not 0 < master_port < 1 << 16:
            raise UsageError(f"init_weights_update_group: master_port={master_port!r} is no port (1 to 65535)")
        message = {
            "command": "init_weights_update_group", "master_address": master_address, "master_port": master_port,
            "rank_offset": rank_offset, "world_size": self.ranks + rank_offset if world_size is None else world_size,
            "group_name": group_name, "backend": backend, "timeout_s": timeout_s,
        }  # fmt: skip
        self._run("init_weights_update_group", [message] * self.ranks)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> list[Received]:
        """Every rank receives these tensors from the trainer, which must send meanwhile; ``weight`` gives them.

        Raises UsageError where the lists do not fit, CollectiveError where the trainer sends something else, PeerLost
        when it is gone: as this may leave ranks waiting, PeerLost ends the engine.
        """
        message = {
            "command": "update_weights_from_distributed", "names": list(names),
            "dtypes": [str(d).removeprefix("torch.") for d in dtypes], "shapes": [list(s) for s in shapes],
            "group_name": group_name, "bucket_bytes": bucket_bytes,
        }  # fmt: skip
        replies = self._run("update_weights_from_distributed", [message] * self.ranks)
        return [Received(rank, r["bytes"], r["seconds"]) for rank, (r, _) in enumerate(replies)]

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """The ranks leave the group. Raises CollectiveError when there is none."""
        message = {"command": "destroy_weights_update_group", "group_name": group_name}
        self._run("destroy_weights_update_group", [message] * self.ranks)

    def weight(self, name: str) -> list[Any]:
        """A weight as each rank last received it, as torch tensors. Raises CollectiveError naming those there are."""
        import torch

        replies = self._run("weight", [{"command": "weight", "name": name}] * self.ranks)
        like = Packed({}, b"", torch.empty(0))  # results come as tensors: numpy has no bfloat16
        return [like.rebuilt(reply["arrays"][0], data[0]) for reply, data in replies]

    # ---- profiles -----------------------------------------------------------------------------------------

    def start_profile(self, folder: str | os.PathLike[str] | None = None, **options: Any) -> Path:
        """Start torch's profiler on every rank; gives the folder of the traces (default: a new one in ``profiles``).

        options: those of torch.profiler.profile. What is an object there is given as plain data: ``activities`` by
        name, ``schedule`` and ``experimental_config`` as a dict of their arguments, ``execution_trace_observer`` as
        True; ``on_trace_ready`` and ``custom_trace_id_callback`` as functions that a module holds. Raises EngineError
        when a profile runs already, UsageError for an option that this torch does not have or that cannot travel.
        """
        from commbench.harness.run import new_run_id
        from commbench.harness.views.profiling import PROFILES_DIR, written

        plain = written(options)
        with self._turn("start_profile"):
            if self._profiling is not None:
                raise EngineError(
                    f"a profile already runs, for {self._profiling}; stop_profile() ends it and writes its traces"
                )
            target = Path(PROFILES_DIR) / new_run_id("engine") if folder is None else Path(folder)
            try:
                target.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"start_profile: {target} cannot be made: {error.strerror}") from error
            message = {"command": "start_profile", "folder": str(target.resolve()), "options": plain}
            self._exchange([message] * self.ranks)
            self._profiling = target
        return target

    def stop_profile(self) -> list[Path]:
        """Stop, and write one Chrome trace per rank; gives the files. Raises EngineError when no profile runs."""
        with self._turn("stop_profile"):
            if self._profiling is None:
                raise EngineError("no profile runs; start_profile() starts one")
            self._profiling = None
            replies = self._exchange([{"command": "stop_profile"}] * self.ranks)
        return [Path(path) for reply, _ in replies for path in reply["files"]]

    # ---- talking to the ranks -----------------------------------------------------------------------------

    def _check_usable(self) -> None:
        job = self._job
        if job is None:
            raise EngineError("this engine never started")
        if os.getpid() != job.owner:
            raise EngineError(f"this engine belongs to process {job.owner}; a forked process needs one of its own")
        if job.ended:
            raise EngineError(f"this engine has ended: {job.ended}; start another")

    @contextlib.contextmanager
    def _turn(self, what: str) -> Iterator[None]:
        """One call at a time. A call from inside another (a callback of measure) would wait for itself."""
        self._check_usable()
        with self._lock:
            self._check_usable()
            if self._busy:
                raise EngineError(f"{what} was called from inside {self._busy}, which must return first")
            self._busy = what
            try:
                yield
            finally:
                self._busy = ""

    def _run(
        self, what: str, messages: Sequence[Message], buffers: Sequence[Sequence[Any]] | None = None
    ) -> list[tuple[Message, list[bytes]]]:
        with self._turn(what):
            return self._exchange(messages, buffers=buffers)

    def _exchange(
        self,
        messages: Sequence[Message],
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
        *,
        buffers: Sequence[Sequence[Any]] | None = None,
        starting: float | None = None,
    ) -> list[tuple[Message, list[bytes]]]:
        """Send each rank its message and wait for all replies.

        starting: a deadline, while the engine comes up. With ``on_event`` the call can be stopped: what on_event
        raises, or Ctrl-C, asks the ranks to stop, and is kept in ``_interruption``; a second Ctrl-C ends the engine.
        """
        job = self._job
        assert job is not None  # only a started engine gets here
        call = next(self._calls)
        self._interruption = None
        with self._whole_messages():
            for rank, message in enumerate(messages):
                try:
                    job.links[rank].send({**message, "call": call}, buffers[rank] if buffers else ())
                except Gone:
                    self._lost(rank, starting is not None)
        replies: dict[int, tuple[Message, list[bytes]]] = {}
        problems: dict[int, Message] = {}
        while len(replies) + len(problems) < job.ranks:
            try:
                for rank, message, data in self._ready(starting):
                    if message["call"] != call:
                        continue  # of a call that was interrupted
                    if "event" in message:
                        if on_event is not None and self._interruption is None:
                            on_event(message)
                    elif "error" in message:
                        problems[rank] = message["error"]
                        if message["error"]["type"] == "PeerLost":
                            self._lost(rank, False, message["error"]["message"])
                    else:
                        replies[rank] = ({**message["reply"], "arrays": message["arrays"]}, data)
                if starting is not None and time.monotonic() > starting:
                    late = ", ".join(str(r) for r in range(job.ranks) if r not in replies)
                    raise job.failed_start(f"ranks {late} did not become ready in time")
            except (KeyboardInterrupt, Exception) as error:  # whatever on_event raises
                if on_event is None or job.ended:
                    raise
                if self._interruption is not None:  # the run directory is closed now, so nobody may write to it
                    job.end("it was interrupted twice")
                    raise
                self._interruption = error
                with contextlib.suppress(Gone):  # then the next message tells
                    job.links[0].send({"command": "stop", "call": call})
        if problems:
            self._raise(problems)
        return [replies[rank] for rank in range(job.ranks)]

    def _ready(self, starting: float | None) -> Iterator[tuple[int, Message, list[bytes]]]:
        """Messages that have arrived, one of each rank at most, after waiting a moment for the first."""
        job = self._job
        assert job is not None
        ready = wait([link.fileno() for link in job.links.values()], POLL_S)
        for rank, link in job.links.items():
            if link.fileno() in ready:
                with self._whole_messages():
                    try:
                        message, data = link.receive()
                    except Gone:
                        self._lost(rank, starting is not None)
                if not job.note(rank, message):
                    yield rank, message, data

    @contextlib.contextmanager
    def _whole_messages(self) -> Iterator[None]:
        """A message that was cut in two (by Ctrl-C) leaves a connection that nobody can read any more."""
        try:
            yield
        except KeyboardInterrupt:
            if self._job is not None:
                self._job.end("a call was interrupted in the middle of a message")
            raise

    def _lost(self, rank: int, starting: bool, told: str = "") -> NoReturn:
        """A rank is gone, or told that a peer is: find out which was the first, and why."""
        job = self._job
        assert job is not None
        if job.ended:
            raise EngineError(f"this engine has ended: {job.ended}; start another")
        why = job.cause()
        if not why.startswith("rank "):
            why = f"rank {rank}: {told}" if told else f"rank {rank} is gone ({why})"
        named = why.split()[1].rstrip(":,")
        first = int(named) if named.isdigit() else rank
        problem = job.failed_start(why) if starting else PeerLost(f"the engine ended: {why}", first)
        job.end(why)
        raise problem

    def _raise(self, problems: Mapping[int, Message]) -> NoReturn:
        """What the ranks raised, as the driver's. Ranks that answered differently are not in step any more."""
        assert self._job is not None
        rank = min(problems)
        told = problems[rank]
        everywhere = len(problems) == self._job.ranks
        message = told["message"] if everywhere else f"rank {rank}: {told['message']}"
        if not everywhere:
            self._job.end(f"only some ranks failed: {message}")
        if told["type"] == "BackendUnavailable":
            raise BackendUnavailable(told["backend"], told["reason"], told["remedy"])
        kind = getattr(errors, told["type"], None)
        if not (isinstance(kind, type) and issubclass(kind, CommbenchError)):
            kind = CommbenchError
        raise kind(message)
