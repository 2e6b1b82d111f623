"""A live driver: ranks that stay up, so that one thing after another can be measured, tried out and profiled.

The driver imports no torch. It starts the ranks as a sweep does, and hands them commands over ``channel``.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from commbench.errors import UsageError, unknown
from commbench.harness.engine.calls import Calls, Message
from commbench.harness.engine.collectives import Collectives
from commbench.harness.engine.job import Job
from commbench.harness.engine.measurements import Measurements, close_run, create_run
from commbench.harness.engine.plan import planned, policy_files
from commbench.harness.engine.weight_updates import DEFAULT_BUCKET_BYTES, WeightUpdates, check_whole
from commbench.harness.launchers.commands import launch_command, printable
from commbench.harness.views.spans import PARENT_VARIABLE
from commbench.harness.views.tracing import launch_span
from commbench.types import DTYPES, Point

if TYPE_CHECKING:
    from commbench.sweep import SweepSpec

STARTUP_S = 120.0  # for all ranks to report ready

Heard = Callable[[Mapping[str, Any]], None]
Folder = str | os.PathLike[str]


class Engine(Collectives, WeightUpdates):
    """Ranks that stay up until ``close``, the end of the ``with`` block, collection, or the interpreter's end.

    tp, ep, pp: sizes of the groups, as of a sweep (tp × pp ranks). policy: by name or file. backends: to set up beside
    the policy's own (others are set up when a call names them). device: auto (cuda or cpu), cpu, cuda, xpu, hpu or npu.
    environment: variables for the ranks, on top of this process's (None takes one away). startup_timeout_s: seconds for
    all ranks to be ready.

    Returns when every rank is ready. Raises UsageError (SpecError, UnknownName or PolicyError) for what cannot be asked
    for, and LaunchError with the failing rank's own error when a rank does not come up. One call runs at a time;
    another thread waits its turn. A rank that dies ends the engine: the call that finds out raises PeerLost with the
    rank's name.
    """

    _job: Job | None = None

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
        started = time.time()
        from commbench.harness.environment.kernel_packages import check_versions, installed_versions, left_alone
        from commbench.harness.run import prepare
        from commbench.sweep import make_spec

        named = backends.split(",") if isinstance(backends, str) else backends
        settings = {
            "tp": tp, "ep": ep, "pp": pp, "policy": [policy], "device": device,
            "backends": ["auto", *named], "collectives": ["barrier", "all_reduce"], "sizes": "8",
        }  # fmt: skip
        self._spec = make_spec(settings, {key: f"Engine: {key}" for key in settings})
        _, self._settings = prepare(self._spec)
        policies = policy_files(self._spec.policy)
        given = _variables(environment)
        if isinstance(startup_timeout_s, bool) or not isinstance(startup_timeout_s, int | float):
            raise UsageError(f"Engine: startup_timeout_s={startup_timeout_s!r} is no time; give seconds")
        variables = {name: value for name, value in {**os.environ, **given}.items() if value is not None}
        if self._settings.device != "cpu":  # kernels of other devices only
            check_versions(installed_versions(), variables)
        for text in left_alone(variables):
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        job = self._job = Job.start(self._spec.ranks, given)
        self._calls = Calls(job)
        # also when this process ends; and it must not hold the engine
        self._finalizer = weakref.finalize(self, job.end)
        try:
            from commbench.harness.environment.fingerprint import fingerprint

            self._fingerprint = fingerprint(self._settings.device)  # takes a while, as do the ranks
            deadline = time.monotonic() + startup_timeout_s
            job.meet(deadline)
            setup = {
                "command": "setup", "settings": self._settings.to_dict(), "policy": policy, "policies": policies,
            }  # fmt: skip
            self._calls.exchange([setup] * job.ranks, starting=deadline)
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
    def pids(self) -> tuple[int, ...]:
        """Process numbers of the ranks, by rank."""
        return self._pids

    @property
    def closed(self) -> bool:
        return self._job is None or bool(self._job.ended)

    def close(self) -> None:
        """End the ranks; a profile that runs is written. May be called often, and by another thread than the one that
        waits in a call, which then raises EngineError."""
        if self._job is not None:
            self._calls.end()
            self._finalizer.detach()

    def __enter__(self) -> Self:
        self._calls.check_usable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._job is None:
            return "<commbench.Engine never started>"
        return f"<commbench.Engine {f'ended: {self._job.ended}' if self._job.ended else f'{self.ranks} ranks'}>"

    # ---- measuring ----------------------------------------------------------------------------------------

    def measure(
        self,
        what: Point | Sequence[Point] | SweepSpec | Folder | None = None,
        *,
        out: Folder | None = None,
        trace: bool = False,
        otlp_endpoint: str | None = None,
        on_event: Heard | None = None,
        **settings: Any,
    ) -> Measurements:
        """Measure as ``commbench sweep`` does.

        what: a Point, several, a SweepSpec, or a sweep's name or file; settings are those of a sweep
        (``collectives=["all_reduce"]``, ``sizes="8:1MiB:x8"``, ``max_time_per_point="0.2s"``, …) and override a file's.
        out: a run directory to make. trace, otlp_endpoint: note spans there, as ``sweep --trace``; an endpoint that
        cannot be reached is warned of. on_event hears ``{"event": "point", "row": …}`` as each point finishes.

        Every setting is taken as it stands, or SpecError names it: ranks, device and launches are the engine's, so a
        sweep that asks for others is refused unless a keyword overrides that. Raises what a sweep raises for other bad
        input, and StoreError for an ``out`` that cannot be used. Ctrl-C ends it after the present points, which are
        kept, and goes on as KeyboardInterrupt; a second one ends the engine.
        """
        return self._measure(what, settings, None, out=out, trace=trace, endpoint=otlp_endpoint, on_event=on_event)

    def measure_weights(
        self,
        numels: Sequence[int],
        dtype: str = "bfloat16",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        out: Folder | None = None,
        **settings: Any,
    ) -> Measurements:
        """Time to sync a model's weights from rank 0 to all others: make a group, broadcast the tensors in buckets, end
        the group.

        numels: elements of each tensor, all of one dtype. Further keywords and what is raised: as ``measure``. The
        latency is the time to sync, algbw the model's size over it.
        """
        if not numels or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numels):
            raise UsageError("measure_weights: numels must be the elements of each tensor, whole numbers from 1")
        check_whole("measure_weights", "bucket_bytes", bucket_bytes)
        if dtype not in DTYPES:
            raise unknown("dtype", str(dtype), DTYPES)
        size = sum(numels) * DTYPES[dtype].itemsize
        point = Point("weight_update", "", dtype, size, self.ranks, placement="out")
        return self._measure(point, settings, (tuple(numels), bucket_bytes), out=out)

    def _measure(
        self,
        what: Any,
        settings: Mapping[str, Any],
        model: tuple[tuple[int, ...], int] | None,
        *,
        out: Folder | None,
        trace: bool = False,
        endpoint: str | None = None,
        on_event: Heard | None = None,
    ) -> Measurements:
        """model: elements of its tensors and bytes of a bucket, for a weight update."""
        from commbench.harness.views.look import Look

        called_ns = time.monotonic_ns()
        self._calls.check_usable()
        spec, expansion, how = planned(self._spec, self._settings.device, what, settings)
        if model is not None:
            how = replace(how, weight_numels=model[0], bucket_bytes=model[1])
        if out is not None and not isinstance(out, str | os.PathLike):
            raise UsageError(f"measure: out={out!r} is no path of a run directory")
        directory = None if out is None else Path(out)
        look = Look.of(None, trace, endpoint, os.environ)
        if look.trace and directory is None:
            raise UsageError("measure: a trace is written into a run directory; give out=FOLDER")
        said: list[str] = []
        try:
            with self._calls.turn("measure"), contextlib.ExitStack() as stack:
                if directory is not None:
                    create_run(directory, (spec, expansion, how), self._fingerprint)
                message: Message = {
                    "command": "measure",
                    "settings": how.to_dict(),
                    "points": [p.to_dict() for p in expansion.points],
                    "policies": policy_files(sorted({p.policy for p in expansion.points})),
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
                    answer = self._calls.exchange([message] * self.ranks, hear)[0][0]
                    outcome = "complete" if len(rows) == len(expansion.points) else "interrupted"
                finally:
                    if directory is not None:
                        close_run(directory, outcome, self._launch, answer)
                if self._calls.interruption is not None:
                    raise self._calls.interruption
        finally:
            for text in said:  # in the name of measure's caller
                warnings.warn(text, RuntimeWarning, stacklevel=3)
        return Measurements(tuple(rows), directory, max(0.0, (answer["began_ns"] - called_ns) * 1e-9))

    # ---- profiles -----------------------------------------------------------------------------------------

    def start_profile(self, folder: Folder | None = None, **options: Any) -> Path:
        """Start torch's profiler on every rank; gives the folder of the traces (default: a new one in ``profiles``).

        options: those of torch.profiler.profile. What is an object there is given as plain data: ``activities`` by
        name, ``schedule`` and ``experimental_config`` as a dict of their arguments, ``execution_trace_observer`` as
        True; ``on_trace_ready`` and ``custom_trace_id_callback`` as functions that a module holds. Raises EngineError
        when a profile runs already, UsageError for an option that this torch does not have or that cannot travel.

        The ranks alone know whether a profile runs: after Ctrl-C in the middle of this it does.
        """
        from commbench.harness.run import new_run_id
        from commbench.harness.views.profiling import PROFILES_DIR, written

        plain = written(options)
        if folder is not None and not isinstance(folder, str | os.PathLike):
            raise UsageError(f"start_profile: folder={folder!r} is no path of a folder")
        target = Path(PROFILES_DIR) / new_run_id("engine") if folder is None else Path(folder)
        message = {
            "command": "start_profile", "folder": str(target.resolve()), "told": str(target), "options": plain,
        }  # fmt: skip
        self._calls.run("start_profile", [message] * self.ranks)
        return target

    def stop_profile(self) -> list[Path]:
        """Stop, and write one Chrome trace per rank; gives the files. Raises EngineError where no profile was started.

        May be called again, also after Ctrl-C in the middle of it: it gives the files of the last profile.
        """
        replies = self._calls.run("stop_profile", [{"command": "stop_profile"}] * self.ranks)
        return [Path(path) for reply, _ in replies for path in reply["files"]]


def _variables(environment: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Raises UsageError for what no environment can hold."""
    given = dict(environment or {})
    for name, value in given.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise UsageError(f"Engine: environment has a variable {name!r}, which no environment can hold")
        if value is not None and (not isinstance(value, str) or "\0" in value):
            raise UsageError(f"Engine: environment: {name}={value!r} is no text; None takes a variable away")
    return given
