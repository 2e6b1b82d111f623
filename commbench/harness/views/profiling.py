"""Profiles: torch's profiler on every rank, one Chrome trace for each.

Torch is imported only where a profile begins. While none is asked for, nothing of this runs.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commbench.errors import CommbenchError, SpecError, UsageError
from commbench.measure.observer import BlockSeen, Observer
from commbench.types import Point

PROFILE_VARIABLE = "COMMBENCH_PROFILE"  # activities, comma-separated: how a sweep tells its ranks
PROFILES_DIR = "profiles"
ACTIVITIES = ("cpu", "cuda")  # of a sweep: those of torch.profiler.ProfilerActivity that its devices have
# options whose values are objects of torch: how they are written down, to travel to the ranks
_DESCRIBED = {
    "schedule": "a dict such as {'wait': 1, 'warmup': 1, 'active': 3}; a step is one call of the engine",
    "experimental_config": "a dict of its fields",
    "execution_trace_observer": "True, and each rank writes its execution trace beside its profile",
    "on_trace_ready": "a function that a module holds",
    "custom_trace_id_callback": "a function that a module holds",
}


def parse_activities(text: str) -> tuple[str, ...]:
    """Activities from ``cpu,cuda``. Raises SpecError naming one that does not exist."""
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    if not names:
        raise SpecError(f"--profile: {text!r} names no activity; write --profile=cpu, or --profile alone")
    for name in names:
        if name not in ACTIVITIES:
            raise SpecError(f"--profile: unknown activity {name!r}; available: {', '.join(ACTIVITIES)}")
    return names


def trace_path(folder: Path, launch: int, rank: int, part: int = 0) -> Path:
    """Where a rank's trace goes; a schedule that repeats makes several parts."""
    return folder / (f"launch-{launch}.rank-{rank}" + (f".{part}" if part else "") + ".trace.json")


# ---- options on their way to the ranks -----------------------------------------------------------------------


def written(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of torch.profiler.profile as JSON can hold them. Raises UsageError naming one that cannot travel."""
    return {name: _written(name, value) for name, value in options.items()}


def _written(name: str, value: Any) -> Any:
    if name == "activities" and value is not None:
        given = [value] if isinstance(value, str) else list(value)
        return [activity if isinstance(activity, str) else activity.name.lower() for activity in given]
    if callable(value) and name in ("on_trace_ready", "custom_trace_id_callback"):
        module, qualified = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        if not module or module == "__main__" or "<" in qualified or not qualified:
            raise UsageError(
                f"start_profile: {name}={value!r} cannot be sent to the ranks; it takes {_DESCRIBED[name]}"
            )
        return f"{module}:{qualified}"
    try:
        json.dumps(value)
    except TypeError:
        how = f"; it takes {_DESCRIBED[name]}" if name in _DESCRIBED else ""
        raise UsageError(f"start_profile: {name}={value!r} cannot be sent to the ranks{how}") from None
    return value


def _read(options: Mapping[str, Any], execution_trace: Path) -> dict[str, Any]:
    """The options as torch takes them, on a rank. Raises UsageError for one that this torch does not have."""
    import torch
    from torch import profiler

    known = [name for name in inspect.signature(profiler.profile.__init__).parameters if name != "self"]
    read: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise UsageError(
                f"start_profile: the profiler of torch {torch.__version__} has no option {name!r}; it has: "
                f"{', '.join(known)}"
            )
        if value is None:
            continue
        if name == "activities":
            read[name] = [_activity(text) for text in value]
        elif name == "schedule":
            read[name] = _made(name, value, profiler.schedule)
        elif name == "experimental_config":
            read[name] = _made(name, value, torch._C._profiler._ExperimentalConfig)
        elif name == "execution_trace_observer":
            if value is not False:
                read[name] = profiler.ExecutionTraceObserver().register_callback(str(execution_trace))
        elif name in ("on_trace_ready", "custom_trace_id_callback"):
            read[name] = _function(name, value)
        else:
            read[name] = value
    return read


def _activity(text: str) -> Any:
    from torch import profiler

    supported: set[Any] = profiler.supported_activities()  # type: ignore[no-untyped-call]
    found = getattr(profiler.ProfilerActivity, str(text).upper(), None)
    if found not in supported:
        here = sorted(activity.name.lower() for activity in supported)
        raise UsageError(f"start_profile: activity {text!r} is not available here; available: {', '.join(here)}")
    return found


def _made(name: str, value: Any, make: Callable[..., Any]) -> Any:
    try:
        return make(**value)
    except (TypeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else "its values do not fit each other"
        raise UsageError(f"start_profile: {name}={value!r}: {reason}; it takes {_DESCRIBED[name]}") from error


def _function(name: str, text: Any) -> Any:
    module, colon, qualified = str(text).partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"start_profile: {name}={text!r} is not there on the ranks: {error}") from error
    if not colon or not callable(found):
        raise UsageError(f"start_profile: {name}={text!r} is no function")
    return found


# ---- on a rank ----------------------------------------------------------------------------------------------


class RankProfile:
    """One profile on this rank, from ``start`` to ``stop``, both on one thread. files: the traces written so far."""

    def __init__(self, folder: Path, launch: int, rank: int, options: Mapping[str, Any]) -> None:
        from torch import profiler

        folder.mkdir(parents=True, exist_ok=True)
        self._where = folder, launch, rank
        read = _read(options, folder / f"launch-{launch}.rank-{rank}.execution.json")
        self._scheduled = "schedule" in read
        self._then = read.pop("on_trace_ready", None)
        self.files: list[Path] = []
        self._problem: Exception | None = None
        try:
            self._profile = profiler.profile(**read, on_trace_ready=self._ready)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise UsageError(f"start_profile: {str(error).splitlines()[0]}") from error

    def _ready(self, profile: Any) -> None:
        """Must not raise: torch's profiler would be left half stopped, and no other could start."""
        path = trace_path(*self._where, len(self.files))
        try:
            profile.export_chrome_trace(str(path))
            self.files.append(path)
            if self._then is not None:
                self._then(profile)
        except Exception as error:  # noqa: BLE001 - a disk's, or whatever the user's function raises
            self._problem = self._problem or error

    def _tell(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise CommbenchError(
                f"a trace could not be written or handed to on_trace_ready: {type(problem).__name__}: {problem}"
            ) from problem

    def start(self) -> None:
        self._profile.start()

    def step(self) -> None:
        """A call of the engine is over; moves a schedule on. Raises CommbenchError where a trace could not be written,
        and where on_trace_ready raised."""
        if self._scheduled:
            self._profile.step()
            self._tell()

    def collect(self, on: bool) -> None:
        """Stop and go on collecting, within the profile."""
        self._profile.toggle_collection_dynamic(on, self._profile.activities)

    def stop(self) -> None:
        """Raises CommbenchError as ``step``."""
        self._profile.stop()
        self._tell()


class Profiler(Observer):
    """Profiles a launch of a sweep: each point's checks, and its first block of samples, under the point's name.

    Every iteration of a whole sweep would make traces that no viewer opens. Warm-up and later blocks are left out.
    """

    def __init__(self, profile: RankProfile) -> None:
        self._profile = profile
        self._point = ""
        self._first = False
        self._collecting = True
        self._span: Any = None
        profile.start()
        self._collect(False)

    def visit(self, order: int, point: Point, number: int) -> None:
        self._point, self._first = point.label(), number == 0

    def phase(self, name: str) -> None:
        self._end()
        if name == "check" or (name == "sample" and self._first):
            from torch.profiler import record_function

            self._collect(True)
            self._span = record_function(f"{self._point}: {name}")
            self._span.__enter__()

    def block(self, seen: BlockSeen) -> None:
        if seen.kept:
            self._end()

    def left(self, status: str, reason: str) -> None:
        self._end()

    def _end(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None
        self._collect(False)

    def _collect(self, on: bool) -> None:
        if on != self._collecting:
            self._collecting = on
            self._profile.collect(on)

    def close(self) -> None:
        """Write the trace."""
        self._end()
        self._collect(True)  # a profile that is not collecting does not stop
        self._profile.stop()
