"""What the user asked to see of a launch beside its numbers, on one rank: spans, a profile. Usually neither."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from commbench.errors import CommbenchError
from commbench.harness.supervision.heartbeat import FINISHING, STAGES
from commbench.harness.views.look import EVERYTHING
from commbench.harness.views.profiling import PROFILE_VARIABLE, PROFILES_DIR, Profiler, RankProfile
from commbench.harness.views.tracing import RankTrace, rank_trace
from commbench.measure.observer import Observer


class Watch:
    """Of one rank. ``observers`` go to the meter."""

    def __init__(self, trace: RankTrace | None = None, profiler: Profiler | None = None) -> None:
        self._trace, self._profiler = trace, profiler
        self.observers: tuple[Observer, ...] = tuple(o for o in (trace, profiler) if o is not None)

    def stage(self, stage: int) -> None:
        """One of heartbeat.STAGES begins."""
        if self._trace is not None:
            self._trace.stage(STAGES[stage])
        if stage == FINISHING:
            self._end_profile()

    def _end_profile(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            try:
                profiler.close()
            except CommbenchError as error:  # what was measured counts all the same
                print(error, file=sys.stderr)  # noqa: T201 - its log

    def close(self, error: str = "") -> None:
        self._end_profile()
        if self._trace is not None:
            self._trace.close(error)


@contextlib.contextmanager
def closing(watch: Watch) -> Iterator[Watch]:
    """Close it at the end, with the first line of what went wrong."""
    try:
        yield watch
    except BaseException as error:
        watch.close(str(error).strip().partition("\n")[0] or type(error).__name__)
        raise
    watch.close()


@contextlib.contextmanager
def watching(directory: Path, launch: int, environment: Mapping[str, str] = os.environ) -> Iterator[Watch]:
    """Around a rank's work in a launch. A rank that cannot write to the run directory (of another host) has no trace
    and no profile, and says so in its log."""
    rank = int(environment["RANK"])
    trace, profiler = None, None
    what = "traced"
    try:
        trace = rank_trace(directory, launch, rank, environment)
        what = "profiled"
        if activities := environment.get(PROFILE_VARIABLE):
            options = {} if activities == EVERYTHING else {"activities": activities.split(",")}
            profiler = Profiler(RankProfile(directory / PROFILES_DIR, launch, rank, options))
    except OSError as error:
        print(f"rank {rank} is not {what}: {error}", file=sys.stderr)  # noqa: T201 - its log
    with closing(Watch(trace, profiler)) as watch:
        yield watch
