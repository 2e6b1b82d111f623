from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from commbench.report.table import MOST_ROWS, print_summary, print_whole
from commbench.store.run import open_run
from commbench.types import COLLECTIVES
from tests.runs import grid

Build = Callable[..., Path]


def printed(path: Path, width: int = 80, terminal: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=terminal, color_system=None)
    print_summary(open_run(path), console)
    return stream.getvalue()


def row(text: str, size: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(size))


def test_each_point_has_a_line_with_all_its_figures(build_run: Build) -> None:
    text = printed(build_run(grid(sizes=[1024, 1 << 20]), launches=2), 120)
    assert "run-a: testhost, 2 ranks on cpu, 2 launches" in text
    assert "all_reduce float32" in text
    cells = row(text, "1 MiB")
    assert cells[2] == "auto→torch_dist"
    assert cells[4] == "ms"
    assert cells[-2:] == ["✓", "ok"]
    assert text.rstrip().endswith("2 points: all ok")


def test_forced_points_name_their_backend_once(build_run: Build) -> None:
    assert "shm_oneshot→" not in printed(build_run(grid(backends=("shm_oneshot",))))


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(build_run: Build, width: int) -> None:
    points = grid(("all_reduce", "barrier"), ("bfloat16",), [8, 1 << 20], ("auto", "symm_mem_multimem"))
    problems = {points[0].point_id: ("timeout", "rank 3 did not answer " * 9)}
    text = printed(build_run(points, problems=problems), width)
    assert max(map(len, text.splitlines())) <= width
    assert "symm_mem_mul" in text


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_cuts_no_figure_off(build_run: Build, width: int) -> None:
    folder = build_run(grid(sizes=[1024, 1 << 20], backends=("auto", "shm_oneshot")), launches=2)
    wide, narrow = (printed(folder, w) for w in (200, width))
    assert "…" not in narrow
    figures = [line.split() for line in wide.splitlines() if line.split()[-2:] == ["✓", "ok"]]
    assert len(figures) == 4
    for cells in figures:
        assert any(line.split()[-len(cells) + 3 :] == cells[3:] for line in narrow.splitlines())


def test_a_table_that_is_wider_than_the_terminal_is_printed_whole() -> None:
    table = Table(box=None)
    table.add_column("point")
    table.add_column("change", no_wrap=True, justify="right")
    table.add_row(Text("reduce_scatter bfloat16 256 KiB [torch_dist]"), Text("×3.54 (×0.000241 to ×5.21e+04)"))
    stream = io.StringIO()
    print_whole(table, Console(file=stream, width=24))
    text = stream.getvalue()
    assert "×3.54 (×0.000241 to ×5.21e+04)" in text
    assert {"reduce_scatter", "bfloat16", "[torch_dist]"} <= set(text.split())


def test_problems_are_printed_last_with_their_reasons(build_run: Build) -> None:
    points = grid(sizes=[8, 64, 512])
    problems = {
        points[1].point_id: ("wrong", "3 of 16 elements differ"),
        points[2].point_id: ("failed", "[red]boom[/x]"),
    }
    lines = printed(build_run(points, problems=problems)).splitlines()
    tail = "\n".join(lines[-6:])
    assert "wrong all_reduce float32 [auto] 64 B" in tail
    assert "3 of 16 elements differ" in tail
    assert "[red]boom[/x]" in tail  # as it is, not as markup
    assert lines[-1] == "3 points: 1 ok, 1 wrong, 1 failed"


def test_oversubscription_is_said_at_the_top(build_run: Build) -> None:
    lines = printed(build_run(grid(world_size=8), cores=2)).splitlines()
    assert lines[1] == "⚠ 8 ranks on 2 cores: oversubscribed"


def test_a_long_table_is_thinned_on_a_terminal_but_hides_no_problem(build_run: Build) -> None:
    points = grid(tuple(COLLECTIVES)[:4], ("float32", "bfloat16"), [8 << i for i in range(12)])
    bad = points[5]
    path = build_run(points, problems={bad.point_id: ("wrong", "differs")})
    text = printed(path, terminal=True)
    shown = [line for line in text.splitlines() if "→" in line and "asked" not in line]
    assert len(shown) <= MOST_ROWS + 1
    assert f"{len(shown)} of {len(points)} points shown" in text
    assert any(line.split()[-1] == "wrong" for line in shown)
    assert "8 B" in text
    assert "16 KiB" in text
    piped = printed(path)
    assert sum("→" in line and "asked" not in line for line in piped.splitlines()) == len(points)


def test_a_barrier_has_no_size_and_no_bandwidth(build_run: Build) -> None:
    text = printed(build_run(grid(("barrier",)), changes={"checked": False}))
    assert row(text, "–")[-4:] == ["–", "–", "no", "ok"]


def test_variants_and_policies_are_named_only_where_they_vary(build_run: Build) -> None:
    assert "strided" not in printed(build_run(grid(layout="strided"), "one"))
    varied = [*grid(sizes=[8]), *grid(sizes=[8], layout="strided"), *grid(sizes=[8], policy="vllm-0.33")]
    text = printed(build_run(varied, "several"), 120)
    assert "all_reduce float32 strided" in text
    assert "auto (vllm-0.33)→shm" in text


def test_points_in_noise_or_below_the_precision_asked_for_are_counted(build_run: Build) -> None:
    noise = json.dumps({"marks": ["stolen"]})
    text = printed(build_run(grid(sizes=[8]), changes={"noise": noise, "target_reached": False}))
    assert "1 point was measured in noise" in text
    assert "1 point did not reach the interval asked for" in text


def test_a_run_without_points_says_so(build_run: Build) -> None:
    points = grid(sizes=[8])
    text = printed(build_run(points, unmeasured={points[0].point_id}, outcome="interrupted"))
    assert "not measured 1 of 1 planned points" in text
    assert "no point was measured" in text
