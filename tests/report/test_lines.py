from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from commbench.report.lines import Line, chosen_sizes, combine, lines, panels, run_names
from commbench.report.summary import Summary, summarise
from commbench.store.run import open_run
from commbench.types import Point
from tests.runs import grid

Build = Callable[..., Path]


def summaries(*paths: Path) -> list[Summary]:
    return [summarise(open_run(path)) for path in paths]


def drawn(*found: Summary) -> list[tuple[Line, list[int]]]:
    """The lines of the first panel with their sizes."""
    panel = panels(combine(found))[0]
    return [(line, list(points["size_bytes"])) for line, points in lines(panel.points, run_names(found), False)]


def test_a_panel_holds_one_collective_and_dtype(build_run: Build) -> None:
    (found,) = summaries(build_run(grid(("all_reduce", "barrier"), ("float32", "bfloat16"), [8, 64])))
    assert [p.title for p in panels(combine([found]))] == ["all_reduce · float32", "all_reduce · bfloat16", "barrier"]


def test_what_else_varies_makes_panels_of_its_own_and_is_named_only_then(build_run: Build) -> None:
    points = [Point("all_reduce", op, "float32", 64, 2, layout="strided") for op in ("sum", "max")]
    (found,) = summaries(build_run(points))
    assert [p.title for p in panels(combine([found]))] == ["all_reduce · float32 · max", "all_reduce · float32 · sum"]


def test_runs_of_different_ranks_are_not_put_on_one_line(build_run: Build) -> None:
    found = summaries(build_run(grid(), "two"), build_run(grid(world_size=4), "four"))
    assert [p.title for p in panels(combine(found))] == [
        "all_reduce · float32 · 2 ranks",
        "all_reduce · float32 · 4 ranks",
    ]


def test_a_line_ends_where_another_backend_was_taken(build_run: Build) -> None:
    (found,) = summaries(build_run(grid(sizes=[8, 64, 1 << 17, 1 << 18]), threshold=1024))
    assert [(line.label, sizes) for line, sizes in drawn(found)] == [
        ("shm (auto)", [8, 64]),
        ("torch_dist (auto)", [1 << 17, 1 << 18]),
    ]


def test_a_line_is_broken_at_a_point_that_is_no_success(build_run: Build) -> None:
    points = grid(sizes=[8, 64, 512, 1024])
    for status in ("wrong", "failed", "timeout", "refused", "skipped"):
        path = build_run(points, status, problems={points[2].point_id: (status, "why")})
        assert [sizes for _, sizes in drawn(*summaries(path))] == [[8, 64], [1024]]


def test_an_unsteady_point_stays_on_its_line(build_run: Build) -> None:
    points = grid(sizes=[8, 64, 512])
    path = build_run(points, problems={points[1].point_id: ("unsteady", "why")})
    assert [sizes for _, sizes in drawn(*summaries(path))] == [[8, 64, 512]]


def test_forced_and_automatic_calls_of_one_backend_are_told_apart(build_run: Build) -> None:
    (found,) = summaries(build_run(grid(sizes=[8], backends=("auto", "shm"))))
    assert {(line.backend, line.forced, line.label) for line, _ in drawn(found)} == {
        ("shm", False, "shm (auto)"),
        ("shm", True, "shm (forced)"),
    }


def test_a_backend_taken_in_place_of_another_is_not_called_forced(build_run: Build) -> None:
    path = build_run(grid(sizes=[8], backends=("shm",)), changes={"backend_picked": "torch_dist"})
    ((line, _),) = drawn(*summaries(path))
    assert (line.backend, line.forced, line.label) == ("torch_dist", False, "torch_dist (asked for shm)")


def test_several_runs_are_told_apart_by_name(build_run: Build) -> None:
    found = summaries(build_run(grid(sizes=[8]), "before"), build_run(grid(sizes=[8]), "after"))
    assert [line.label for line, _ in drawn(*found)] == ["shm (auto) · before", "shm (auto) · after"]


def test_runs_of_one_name_are_told_apart_by_folder(build_run: Build, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    found = summaries(build_run(grid(), "same"), build_run(grid(), "x/same"))
    assert run_names(found) == [f"same ({tmp_path / 'same'})", f"same ({tmp_path / 'x' / 'same'})"]


def test_chosen_sizes_are_spread_and_keep_both_ends() -> None:
    assert chosen_sizes([1, 2, 4, 8, 16, 32, 64], 3) == [1, 8, 64]
    assert chosen_sizes([4, 4, 2], 3) == [2, 4]
    assert chosen_sizes([], 3) == []
