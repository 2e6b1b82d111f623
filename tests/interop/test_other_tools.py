"""The numbers that other tools define, from raw samples: what each means, how it is printed, when it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from commbench.cli.report import command
from commbench.errors import UsageError
from commbench.interop.other_tools import as_tool, means_of_calls, means_of_loops
from commbench.store.run import open_run
from commbench.store.samples import SampleLog
from commbench.types import Point
from tests.runs import RunBuilder, grid

# Two loops of two calls on two ranks, in µs: rank → durations; 1 µs lies between the calls of a loop, 500 between loops
DURATIONS = {0: (10, 20, 30, 40), 1: (20, 30, 40, 70)}
BETWEEN, BETWEEN_LOOPS = 1_000, 500_000


@dataclass
class TwoLoops(RunBuilder):
    """Every point has the samples of DURATIONS."""

    def log_samples(self, log: SampleLog, point: Point, times: np.ndarray, random: np.random.Generator) -> None:
        for first in (0, 2):
            starts, ends = np.zeros((2, 2), np.int64), np.zeros((2, 2), np.int64)
            for rank, durations in DURATIONS.items():
                now = 10**9 + first * BETWEEN_LOOPS
                for i in range(2):
                    starts[rank, i] = now
                    ends[rank, i] = now + durations[first + i] * 1000
                    now = ends[rank, i] + BETWEEN
            log.append(point.point_id, first, starts, ends, np.ones(2, dtype=bool))


def run_with(path: Path, sync: str, points: list[Point] | None = None, **changes: Any) -> Path:
    points = points or grid(sizes=(1024,), backends=("shm",), placement="out")
    return TwoLoops(path / f"run-{sync}", points, changes={"sync": sync, **changes}).build()


def table(directory: Path, tool: str) -> list[list[str]]:
    """The cells of the lines that are no comments."""
    lines = as_tool(open_run(directory), tool).splitlines()
    return [line.split() for line in lines if line.strip() and not line.startswith("#")]


# ---- what the numbers are --------------------------------------------------------------------------------------


def test_nccl_tests_takes_whole_loops_and_the_mean_over_ranks(tmp_path: Path) -> None:
    # rank 0: (10+1+20 + 30+1+40)/4 = 25.5; rank 1: (20+1+30 + 40+1+70)/4 = 40.5
    (cells,) = table(run_with(tmp_path, "none"), "nccl-tests")
    assert cells[:5] == ["1024", "256", "float", "sum", "-1"]
    assert cells[5] == "33.00"
    # out-of-place was measured; of the in-place half nothing was
    assert cells[9:] == ["N/A"] * 4


def test_nccl_tests_bandwidths_are_of_that_time(tmp_path: Path) -> None:
    points = grid(sizes=(1 << 20,), backends=("shm",), placement="in", collectives=("all_gather",))
    (cells,) = table(run_with(tmp_path, "none", points), "nccl-tests")
    assert cells[:2] == ["1048576", str((1 << 20) // 4 // 2)]  # count: the elements of one rank's part
    assert cells[5:9] == ["N/A"] * 4
    assert cells[9:] == ["33.00", "31.78", "15.89", "0"]  # 1 MiB / 33 µs, and half of it with two ranks


def test_both_placements_stand_in_one_line_of_nccl_tests(tmp_path: Path) -> None:
    points = [p for way in ("in", "out") for p in grid(sizes=(1024,), backends=("shm",), placement=way)]
    (cells,) = table(run_with(tmp_path, "none", points), "nccl-tests")
    assert cells[5] == cells[9] == "33.00"


def test_osu_takes_calls_and_gives_mean_least_and_largest_over_ranks(tmp_path: Path) -> None:
    # rank 0: 100/4 = 25; rank 1: 160/4 = 40
    assert table(run_with(tmp_path, "barrier"), "osu") == [["1024", "32.50", "25.00", "40.00", "4"]]


@pytest.mark.parametrize("sync", ["barrier", "none"])
def test_imb_gives_least_largest_and_mean_over_ranks_with_and_without_a_barrier(tmp_path: Path, sync: str) -> None:
    lines = as_tool(open_run(run_with(tmp_path, sync)), "imb").splitlines()
    head, cells = lines[-2].split(), lines[-1].split()
    assert head == ["#bytes", "#repetitions", "t_min[usec]", "t_max[usec]", "t_avg[usec]"]
    assert cells == ["1024", "4", "25.00", "40.00", "32.50"]


def test_param_gives_percentiles_over_ranks_of_each_ranks_mean(tmp_path: Path) -> None:
    head, cells = table(run_with(tmp_path, "none"), "param")
    assert head[0] == "COMMS-RES"
    # between 25 and 40: the half, three quarters and 95 % of the way
    assert cells[:8] == ["COMMS-RES-all_reduce-float32", "1024", "256", "32.5", "36.2", "39.2", "25.0", "40.0"]
    assert cells[8:10] == ["0.032", "0.032"]  # 1024 bytes / 32.5 µs


def test_batches_are_divided_by_their_calls() -> None:
    samples = pd.DataFrame(
        {"rank": [0, 0], "block": [0, 0], "iteration": [0, 1], "start_ns": [0, 1000], "end_ns": [800, 1800]}
    )
    assert means_of_calls(samples, 4) == pytest.approx([200e-9])
    assert means_of_loops(samples, 4) == pytest.approx([1800e-9 / 8])


@pytest.mark.parametrize(
    ("collective", "size"),
    [
        ("all_gather", "512"),
        ("all_to_all", "512"),
        ("gather", "512"),
        ("reduce_scatter", "1024"),
        ("broadcast", "1024"),
    ],
)
def test_osu_counts_one_ranks_part_of_what_is_split_except_of_reduce_scatter(
    tmp_path: Path, collective: str, size: str
) -> None:
    points = grid(collectives=(collective,), sizes=(1024,), backends=("shm",))
    assert table(run_with(tmp_path, "barrier", points), "osu")[0][0] == size


def test_each_launch_has_its_own_table(tmp_path: Path) -> None:
    points = grid(sizes=(1024,), backends=("shm",), placement="out")
    run = TwoLoops(tmp_path / "run", points, launches=2, changes={"sync": "none"}).build()
    assert len(table(run, "nccl-tests")) == 2


# ---- when there is no such number ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "sync", "flag"),
    [
        ("nccl-tests", "window", "--sync none"),
        ("nccl-tests", "barrier", "--sync none"),
        ("osu", "window", "--sync barrier"),
        ("osu", "none", "--sync barrier"),
        ("imb", "window", "--sync barrier or --sync none"),
        ("param", "window", "--sync barrier or --sync none"),
    ],
)
def test_another_start_of_iterations_is_refused_with_the_flag(tmp_path: Path, tool: str, sync: str, flag: str) -> None:
    with pytest.raises(UsageError, match=f"sync {sync}.*{flag}$"):
        as_tool(open_run(run_with(tmp_path, sync)), tool)


@pytest.mark.parametrize(
    ("tool", "loop", "way"),
    [("imb", "native", "--sync none"), ("osu", "python", "--loop native"), ("osu", "native", "larger --sizes")],
)
def test_batches_between_barriers_give_no_number_and_the_way_to_one(
    tmp_path: Path, tool: str, loop: str, way: str
) -> None:
    run = run_with(tmp_path, "barrier", timing="batched", iters_per_sample=3, loop=loop)
    with pytest.raises(UsageError, match=f"batches of 3 calls.*{way}"):
        as_tool(open_run(run), tool)


def test_samples_that_do_not_tell_their_loops_are_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path, "none")
    (path,) = (run / "samples").glob("*.parquet")
    frame = pd.read_parquet(path).drop(columns="block")
    frame.to_parquet(path)
    with pytest.raises(UsageError, match=r"do not tell where loops begin.*--sync none"):
        as_tool(open_run(run), "nccl-tests")
    assert as_tool(open_run(run), "imb")


def test_missing_raw_samples_are_told(tmp_path: Path) -> None:
    run = run_with(tmp_path, "none")
    for path in (run / "samples").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="raw samples of 0 of 2 ranks"):
        as_tool(open_run(run), "nccl-tests")


def test_a_run_without_a_collective_of_the_tool_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no measured point that osu has"):
        as_tool(open_run(run_with(tmp_path, "barrier", grid(collectives=("barrier",), backends=("shm",)))), "osu")


def test_failed_points_are_no_rows(tmp_path: Path) -> None:
    points = grid(sizes=(1024, 4096), backends=("shm",), placement="out")
    problems = {points[0].point_id: ("failed", "it broke")}
    run = TwoLoops(tmp_path / "run", points, problems=problems, changes={"sync": "none"}).build()
    assert [cells[0] for cells in table(run, "nccl-tests")] == ["4096"]


# ---- the command -----------------------------------------------------------------------------------------------


def test_the_command_prints_the_table_and_writes_no_page(tmp_path: Path) -> None:
    run = run_with(tmp_path, "none")
    done = CliRunner().invoke(command, [str(run), "--as", "nccl-tests"], standalone_mode=False)
    assert done.return_value == 0
    assert "out-of-place" in done.output
    assert "33.00" in done.output
    assert not (run / "report.html").exists()


def test_the_command_refuses_a_folder_for_a_page_that_it_does_not_write(tmp_path: Path) -> None:
    arguments = [str(run_with(tmp_path, "none")), "--as", "imb", "--out", str(tmp_path / "page")]
    done = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert isinstance(done.exception, UsageError)


def test_an_unknown_tool_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--as 'ompi' is no tool; known: nccl-tests, osu, imb, param"):
        as_tool(open_run(run_with(tmp_path, "none")), "ompi")
