"""What is drawn is read back from the SVG and from the axes; how it looks is for eyes."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.text
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from commbench.report import plots as plots_module
from commbench.report.plots import Plot, draw
from commbench.report.summary import summarise
from commbench.store.run import open_run
from commbench.types import COLLECTIVES, Point
from commbench.units import format_time
from tests.report.figures import kept_figures, texts
from tests.runs import grid

Build = Callable[..., Path]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure of the report as matplotlib holds it, laid out but not written."""
    return kept_figures(monkeypatch, plots_module, written=False)


def plot(*paths: Path) -> dict[str, Plot]:
    made = draw([summarise(open_run(path)) for path in paths], paths[0] / "plots")
    return {p.name: p for p in made}


def legend(figure: Figure) -> list[str]:
    return [t.get_text() for found in figure.legends for t in found.get_texts()]


def test_a_run_gives_its_four_kinds_of_plots_as_png_and_svg(build_run: Build) -> None:
    path = build_run(grid(("all_reduce", "all_gather"), ("float32", "bfloat16")))
    made = plot(path)
    assert list(made) == ["latency", "busbw", "distribution", "picks"]
    for one in made.values():
        assert one.png.read_bytes().startswith(b"\x89PNG")
        assert ET.parse(one.svg).getroot().tag.endswith("svg")
        assert "http://www.w3.org/2000/svg" in one.svg.read_text()


def test_the_latency_line_goes_through_the_medians_and_its_band_through_the_interval(
    build_run: Build, figures: list[Figure]
) -> None:
    path = build_run(grid(sizes=[8, 64, 512]))
    plot(path)
    points = summarise(open_run(path)).points
    axes = figures[0].axes[0]
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [8.0, 64.0, 512.0]
    assert line.get_ydata().tolist() == points["latency_median_s"].tolist()
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.max() == points["latency_ci_high_s"].max()
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "median latency" in axes.get_ylabel()


def test_a_point_that_is_no_success_is_a_cross_and_not_on_a_line(build_run: Build, figures: list[Figure]) -> None:
    points = grid(sizes=[8, 64, 512])
    plot(build_run(points, problems={points[1].point_id: ("wrong", "3 elements differ")}))
    axes = figures[0].axes[0]
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [line.get_xdata().tolist() for line in crosses] == [[64.0]]
    assert all(64.0 not in line.get_xdata() for line in axes.lines if line not in crosses)
    assert "no success: wrong (see list)" in legend(figures[0])


def test_an_unsteady_point_wears_a_ring(build_run: Build, figures: list[Figure]) -> None:
    points = grid(sizes=[8, 64, 512])
    plot(build_run(points, problems={points[1].point_id: ("unsteady", "drifts")}))
    rings = [line for line in figures[0].axes[0].lines if line.get_markerfacecolor() == "none"]
    assert [line.get_xdata().tolist() for line in rings] == [[64.0]]
    assert "unsteady: no steady state found" in legend(figures[0])


def test_every_plot_of_an_oversubscribed_run_says_so(build_run: Build, figures: list[Figure]) -> None:
    plot(build_run(grid(("all_reduce", "barrier"), sizes=[64, 1024], world_size=8), cores=2))
    assert len(figures) == 4
    for figure in figures:
        assert "⚠ 8 ranks on 2 cores: oversubscribed" in texts(figure)


def test_every_plot_names_the_run_its_host_and_its_size(build_run: Build, figures: list[Figure]) -> None:
    plot(build_run(grid(), "my-run", launches=3))
    for figure in figures:
        assert "my-run: testhost, 2 ranks on cpu, 3 launches" in texts(figure)


def test_axes_have_units(build_run: Build, figures: list[Figure]) -> None:
    plot(build_run(grid(sizes=[8 << i for i in range(18)])))
    latency, busbw = figures[0].axes[0], figures[1].axes[0]
    assert "1 KiB" in [t.get_text() for t in latency.get_xticklabels()]
    assert "10 µs" in [t.get_text() for t in latency.get_yticklabels()]
    assert "GB/s" in busbw.get_ylabel()


def test_no_labels_overlap_whatever_the_number_of_panels(build_run: Build, figures: list[Figure]) -> None:
    many = grid(("all_reduce", "broadcast", "barrier"), ("float32", "bfloat16"),
                [8 << i for i in range(0, 22, 3)], ("auto", "shm_oneshot", "a_backend_with_a_long_name"))  # fmt: skip
    plot(build_run(many, "many"))
    plot(build_run(grid(sizes=[64]), "single"))
    plot(build_run(grid(("barrier",)), "barrier"))
    for figure in figures:
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()
        shown = [t for t in figure.findobj(matplotlib.text.Text) if t.get_text().strip() and t.get_visible()]
        for axes in figure.axes:  # tick labels outside the limits are not drawn
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                hidden = {t.label1 for t in axis.get_major_ticks() if not low <= t.get_loc() <= high}
                shown = [t for t in shown if t not in hidden]
        boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in shown]
        boxes = [(text, box) for text, box in boxes if box.width > 0]
        for i, (a, first) in enumerate(boxes):
            assert figure.bbox.containsx(first.x0), a
            assert figure.bbox.containsx(first.x1), a
            for b, second in boxes[i + 1 :]:
                assert not _overlap(first, second), f"{a!r} meets {b!r}"


def _overlap(a: Any, b: Any) -> bool:
    """Whether two boxes share more than a hair."""
    return bool(min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 2)


def test_automatic_and_forced_calls_look_different(build_run: Build, figures: list[Figure]) -> None:
    plot(build_run(grid(backends=("auto", "shm"), sizes=[8, 64])))
    forced, auto = figures[0].axes[0].lines
    assert (forced.get_linestyle(), forced.get_markerfacecolor()) == ("--", "white")
    assert (auto.get_linestyle(), auto.get_markerfacecolor()) == ("-", auto.get_color())
    assert forced.get_color() == auto.get_color()


def test_two_runs_share_axes_and_differ_in_dashes_and_colour(build_run: Build, figures: list[Figure]) -> None:
    made = plot(build_run(grid(sizes=[8, 64]), "before"), build_run(grid(sizes=[8, 64]), "after", seed=9))
    before, after = figures[0].axes[0].lines
    assert (before.get_linestyle(), after.get_linestyle()) == ("-", "--")
    assert before.get_color() != after.get_color()
    assert legend(figures[0]) == ["shm (auto) · before", "shm (auto) · after"]
    assert made["latency"].png.parent.parent.name == "before"


def test_an_absurd_interval_does_not_blow_up_the_axis(build_run: Build, figures: list[Figure]) -> None:
    plot(build_run(grid(sizes=[8, 64, 512]), changes={"latency_ci_low_s": 1e-12, "latency_ci_high_s": 1e6}))
    low, high = figures[0].axes[0].get_ylim()
    assert 1e-8 < low < high < 1e-3


def test_a_barrier_is_drawn_without_a_size_axis(build_run: Build, figures: list[Figure]) -> None:
    made = plot(build_run(grid(("barrier",), backends=("auto", "shm"))))
    assert list(made) == ["latency", "distribution"]
    axes = figures[0].axes[0]
    assert axes.get_xlabel() == "no message"
    assert sum(len(line.get_ydata()) for line in axes.lines) == 2


def test_one_point_is_enough(build_run: Build) -> None:
    assert list(plot(build_run(grid(sizes=[1024])))) == ["latency", "busbw", "distribution", "picks"]


def test_few_samples_are_shown_one_by_one(build_run: Build, figures: list[Figure]) -> None:
    plot(build_run(grid(sizes=[1024]), samples=3))
    dots = [line for line in figures[2].axes[0].lines if len(line.get_ydata()) == 3]
    assert len(dots) == 1


def test_the_median_that_the_spread_names_is_that_of_the_table(build_run: Build, figures: list[Figure]) -> None:
    path = build_run(grid(sizes=[1024]), samples=4)  # an even number has two in the middle
    plot(path)
    (median,) = summarise(open_run(path)).points["latency_median_s"]
    (tick,) = figures[2].axes[0].get_xticklabels()
    assert tick.get_text() == f"1 KiB\n{format_time(median)}"


def test_an_interval_whose_neighbours_have_none_is_a_bar(build_run: Build, figures: list[Figure]) -> None:
    path = build_run(grid(sizes=[8, 64]))
    rows = [json.loads(line) for line in (path / "points.jsonl").read_text().splitlines()]
    (few, many) = sorted(rows, key=lambda row: int(row["size_bytes"]))
    few |= {"latency_ci_low_s": None, "latency_ci_high_s": None}
    (path / "points.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (few, many)))
    plot(path)
    (bar,) = [c for c in figures[0].axes[0].collections if isinstance(c, LineCollection)]
    ((_, low), (_, high)) = bar.get_segments()[0]
    assert (low, high) == (many["latency_ci_low_s"], many["latency_ci_high_s"])


def test_samples_that_are_all_equal_are_drawn(build_run: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots_module, "_latencies", _constant)
    assert "distribution" in plot(build_run(grid(sizes=[64])))


def _constant(context: Any, points: Any) -> Any:
    import pandas as pd

    return pd.DataFrame({"run": 0, "point_id": points["point_id"].iloc[0], "latency_s": np.full(50, 1e-6)})


def test_many_panels_are_spread_over_several_figures_without_loss(build_run: Build, figures: list[Figure]) -> None:
    ten = list(COLLECTIVES)[:10]  # nine with dtypes, and the barrier
    made = plot(build_run(grid(ten, ("float32", "bfloat16"), [64, 1024])))
    assert [name for name in made if name.startswith("latency")] == ["latency-1", "latency-2"]
    titles = [axes.get_title(loc="left") for figure in figures[:2] for axes in figure.axes]
    assert len(titles) == len(set(titles)) == 19


def test_a_run_without_a_success_still_shows_where_it_tried(build_run: Build, figures: list[Figure]) -> None:
    points = grid(sizes=[8, 64])
    made = plot(build_run(points, problems={p.point_id: ("timeout", "no answer") for p in points}))
    assert list(made) == ["latency", "picks"]
    assert any(line.get_marker() == "x" for line in figures[0].axes[0].lines)


def test_a_run_without_points_has_no_plots(build_run: Build) -> None:
    points = grid()
    path = build_run(points, unmeasured={p.point_id for p in points})
    assert plot(path) == {}
    assert not (path / "plots").exists()


def test_a_run_whose_samples_are_gone_has_all_other_plots(build_run: Build) -> None:
    path = build_run(grid())
    for file in (path / "samples").iterdir():
        file.unlink()
    assert list(plot(path)) == ["latency", "busbw", "picks"]


# -- the map of picks --------------------------------------------------------------------------------


def cells(axes: Any) -> dict[str, int]:
    """Cells per colour."""
    found: dict[str, int] = {}
    for collection in axes.collections:
        colour = matplotlib.colors.to_hex(collection.get_facecolor()[0])
        found[colour] = found.get(colour, 0) + len(collection.get_paths())
    return found


def test_the_map_colours_each_size_by_the_backend_taken(build_run: Build, figures: list[Figure]) -> None:
    plot(build_run(grid(dtypes=("float32", "bfloat16"), sizes=[8, 64, 1 << 20]), threshold=1024))
    assert cells(figures[3].axes[0]) == {"#d55e00": 4, "#0072b2": 2}
    assert legend(figures[3]) == ["shm", "torch_dist"]


def test_the_map_shows_failures_as_such_and_forced_calls_not_at_all(build_run: Build, figures: list[Figure]) -> None:
    points = grid(sizes=[8, 64], backends=("auto", "torch_dist"))
    plot(build_run(points, problems={points[0].point_id: ("failed", "boom")}))
    assert cells(figures[3].axes[0]) == {"#ffffff": 1, "#d55e00": 1}
    assert "no success (see list)" in legend(figures[3])


def test_forced_calls_alone_have_no_map(build_run: Build) -> None:
    assert "picks" not in plot(build_run(grid(backends=("shm",))))


def test_the_map_draws_the_thresholds_of_the_policy_where_they_are(
    build_run: Build, figures: list[Figure], tmp_path: Path
) -> None:
    policy = tmp_path / "mine.toml"
    policy.write_text(
        'format = 1\nname = "mine"\n[order.all_reduce]\ncpu = ["shm", "torch_dist"]\ngpu = ["torch_dist"]\n'
        '[order.other]\ncpu = ["torch_dist"]\ngpu = ["torch_dist"]\n'
        '[switches]\nshm = { what = "shm", default_on = ["cpu"] }\n'
        '[routes.shm]\nswitches = ["shm"]\naccepts = [{ gate = "size_below", limit = "4KiB" }]\n[routes.torch_dist]\n'
    )
    points = [Point("all_reduce", "sum", "float32", s, 2, policy=str(policy)) for s in (8, 1024, 65536)]
    plot(build_run(points))
    (line,) = [line for line in figures[3].axes[0].lines if line.get_linestyle() == "--"]
    assert list(line.get_xdata()) == [4096, 4096]
    assert "shm takes sizes < 4 KiB" in texts(figures[3])


def test_a_threshold_that_is_reached_itself_has_the_sign_for_it(build_run: Build, figures: list[Figure]) -> None:
    plot(build_run(grid(sizes=[1024, 1 << 20])))
    assert "shm: one-shot up to here, two-shot above (≤ 64 KiB)" in texts(figures[3])


def test_a_policy_that_is_no_longer_there_leaves_a_note(build_run: Build, figures: list[Figure]) -> None:
    plot(build_run([Point("all_reduce", "sum", "float32", 64, 2, policy="gone")]))
    assert any("thresholds not drawn: unknown policy 'gone'" in text for text in texts(figures[3]))
