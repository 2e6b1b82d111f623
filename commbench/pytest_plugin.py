"""A pytest plugin: measure a collective inside a test, in real ranks, with the harness's own protocol.

``measure_collective`` is a function-scoped fixture; with pytest-benchmark, ``collective_benchmark`` also puts the
numbers into that plugin's table and JSON. Nothing of commbench is imported until a test asks for one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class CollectiveMeasurement:
    """What one measurement gave. latency_s: median over all launches; low_s and high_s: its 95 % interval.

    launch_medians_s: one per launch. status and reason: as in a run (``ok``, ``wrong``, ``unsteady``, …). backend: the
    one that ran. directory: the run, with raw samples, for ``commbench report`` or ``compare``.
    """

    latency_s: float
    low_s: float
    high_s: float
    launch_medians_s: tuple[float, ...]
    status: str
    reason: str
    backend: str
    label: str
    busbw_gb_per_s: float
    directory: Path

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def latencies_s(self) -> list[float]:
        """Every valid iteration's latency, launch by launch, in the order it was taken."""
        from commbench.analysis.iterations import iteration_latencies
        from commbench.store.run import open_run

        run = open_run(self.directory)
        frame = iteration_latencies(run.samples(), run.points())
        return [float(v) for v in frame.sort_values(["launch", "iteration"])["latency_s"]]


Measure = Callable[..., CollectiveMeasurement]


@pytest.fixture
def measure_collective(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """A function that measures one collective in fresh ranks and gives a CollectiveMeasurement.

    ``measure_collective("all_reduce", size="64KiB", dtype="float32", tp=2)``; further keywords are those of a sweep's
    settings (``backends``, ``policy``, ``launches``, ``max_time_per_point``, ``op``, ``device``, …). Raises SpecError
    for what cannot be measured, LaunchError when the ranks cannot start.
    """

    def measure(
        collective: str, *, size: str | int = "64KiB", dtype: str = "float32", tp: int = 2, **settings: Any
    ) -> CollectiveMeasurement:
        from commbench.harness.run import execute, prepare
        from commbench.sweep import make_spec

        given = {
            "name": "pytest",
            "collectives": [collective],
            "sizes": size,
            "dtypes": [dtype],
            "tp": tp,
            "max_time_per_point": "0.2s",
            **{("ops" if key == "op" else key): [v] if key == "op" else v for key, v in settings.items()},
        }
        spec = make_spec(given, {key: f"measure_collective: {key}" for key in given})
        expansion, how = prepare(spec)
        if len(expansion.points) != 1:
            labels = ", ".join(p.label() for p in expansion.points[:4])
            raise ValueError(f"measure_collective measures one point, and this names {len(expansion.points)}: {labels}")
        directory = tmp_path_factory.mktemp("commbench") / "run"
        run = execute(spec, expansion, how, directory, lambda event: None, ["pytest"])
        return _measurement(run.points(), expansion.points[0].label(), directory)

    return measure


def _measurement(points: pd.DataFrame, label: str, directory: Path) -> CollectiveMeasurement:
    import pandas as pd

    from commbench.analysis.launches import merge_launches

    merged = merge_launches(points).iloc[0]
    medians = points["latency_median_s"].dropna()

    def number(name: str) -> float:
        value = merged[name]
        return math.nan if pd.isna(value) else float(value)

    return CollectiveMeasurement(
        latency_s=number("latency_median_s"),
        low_s=number("latency_ci_low_s"),
        high_s=number("latency_ci_high_s"),
        launch_medians_s=tuple(float(v) for v in medians),
        status=str(merged["status"]),
        reason=str(merged["reason"]),
        backend=str(merged["backend_picked"]),
        label=label,
        busbw_gb_per_s=number("busbw_gb_per_s"),
        directory=directory,
    )


class _Replay:
    """A clock that makes each round last as long as the next measured latency."""

    def __init__(self, durations_s: Sequence[float]) -> None:
        self._durations = itertools.cycle(durations_s)
        self._now = 0.0
        self._started = False

    def __call__(self) -> float:
        if self._started:
            self._now += next(self._durations)
        self._started = not self._started
        return self._now


@pytest.fixture
def collective_benchmark(request: pytest.FixtureRequest, measure_collective: Measure) -> Measure:
    """``measure_collective`` whose iterations become the rounds of pytest-benchmark's table and JSON.

    Needs pytest-benchmark. One measurement per test, as with its own ``benchmark`` fixture. With
    ``--benchmark-disable`` the collective is measured all the same, and reported nowhere.
    """
    try:
        benchmark: Any = request.getfixturevalue("benchmark")
    except pytest.FixtureLookupError:
        pytest.skip("collective_benchmark needs pytest-benchmark: pip install pytest-benchmark")

    def measure(collective: str, **settings: Any) -> CollectiveMeasurement:
        found = measure_collective(collective, **settings)
        durations = found.latencies_s()
        if not found.ok or not durations:
            raise AssertionError(f"{found.label}: {found.status}: {found.reason}")
        # The fixture reads its clock twice a round, before and after a call that does nothing.
        clock, benchmark._timer = benchmark._timer, _Replay(durations)
        try:
            benchmark.pedantic(lambda: None, rounds=len(durations), iterations=1)
        finally:
            benchmark._timer = clock
        benchmark.extra_info.update(
            backend=found.backend, launches=len(found.launch_medians_s), busbw_gb_per_s=found.busbw_gb_per_s
        )
        return found

    return measure
