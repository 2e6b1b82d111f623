from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from commbench.errors import StoreError, UsageError
from commbench.report import write_report
from commbench.report.html import flatten
from commbench.store.run import open_run
from tests.runs import grid

Build = Callable[..., Path]


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the drawing where only the text of the page matters."""
    monkeypatch.setattr("commbench.report.plots.draw", lambda summaries, directory: [])


class Page(HTMLParser):
    """The parts of a page that tests look at; fails on tags that are not closed."""

    VOID = frozenset({"meta", "img", "br", "input", "link"})

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.feed(path.read_text())
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [v for k, v in attrs if k in ("href", "src", "action", "data", "srcset") and v]
        self.ids += [found["id"]] if found.get("id") else []
        if tag == "img":
            self.images.append(found)
        if tag == "table":
            self.tables.append([])
        if tag == "tr" and self.tables:
            self.tables[-1].append([])
        if tag in ("td", "th") and self.tables:
            self.tables[-1][-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open or "style" in self.open:
            return
        self.text += data
        if ("td" in self.open or "th" in self.open) and self.tables and self.tables[-1]:
            self.tables[-1][-1][-1] += data


def test_the_page_loads_nothing_from_anywhere(build_run: Build) -> None:
    path = write_report([build_run(grid(("all_reduce", "barrier")))])
    page = Page(path)
    own = {"plots/" + f.name for f in (path.parent / "plots").iterdir()}
    for link in page.links:
        assert link.startswith(("data:image/", "#")) or link in own, link
    text = re.sub(r"data:image/[^\"]*", "", path.read_text())
    assert "http:" not in text.replace("http-equiv", "")
    assert "https:" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert len(page.ids) == len(set(page.ids))


def test_every_plot_is_on_the_page_with_words_in_its_place(build_run: Build) -> None:
    path = write_report([build_run(grid())])
    images = Page(path).images
    assert len(images) == len(list((path.parent / "plots").glob("*.svg"))) == 4
    assert all(str(image["alt"]).strip() for image in images)


@pytest.mark.usefixtures("no_plots")
def test_the_page_begins_with_what_where_and_how_it_went(build_run: Build) -> None:
    text = Page(write_report([build_run(grid(sizes=[8, 1 << 20]), "tuesday")])).text
    first = text[: text.index("At a glance")]
    assert "tuesday" in first
    assert "all_reduce of 8 B to 1 MiB in float32" in first
    assert "2 ranks on cpu of testhost, 1 launch, policy commbench" in first
    assert "2 points: all ok" in first


@pytest.mark.usefixtures("no_plots")
def test_the_command_that_makes_the_page_again_can_be_pasted(build_run: Build, tmp_path: Path) -> None:
    folder = build_run(grid(sizes=[64])).rename(tmp_path / "my run")
    assert f"commbench report '{folder}'" in Page(write_report([folder])).text


@pytest.mark.usefixtures("no_plots")
def test_problems_and_their_reasons_come_before_all_figures(build_run: Build) -> None:
    points = grid(sizes=[64, 128, 512], world_size=8)
    problems = {points[0].point_id: ("wrong", "3 elements differ"), points[1].point_id: ("failed", "rank 5 died")}
    unmeasured = {points[2].point_id}
    path = build_run(points, problems=problems, unmeasured=unmeasured, outcome="interrupted", cores=2)
    text = Page(write_report([path])).text
    first = text[: text.index("All points")]
    for expected in ("all_reduce float32 [auto] 64 B", "3 elements differ", "rank 5 died", "oversubscribed",
                     "interrupted", "all_reduce float32 [auto] 512 B"):  # fmt: skip
        assert expected in first


@pytest.mark.usefixtures("no_plots")
def test_what_comes_from_outside_is_escaped(build_run: Build) -> None:
    evil = "<script>alert(1)</script>\"'&"
    points = grid(sizes=[8])
    path = build_run(
        points,
        problems={points[0].point_id: ("failed", evil)},
        changes={"provider": evil, "backend_picked": evil, "decision": json.dumps({"picked": evil, "reason": evil})},
        manifest={"fingerprint": {"host": {"name": evil}, evil: evil}, "argv": ["x", evil], "spec": {"name": evil}},
    )
    page = write_report([path])
    assert page.read_text().count("<script>") == 1  # the page's own
    assert "alert(1)" in Page(page).text


@pytest.mark.usefixtures("no_plots")
def test_the_table_has_every_point_with_its_decision_on_demand(build_run: Build) -> None:
    page = Page(write_report([build_run(grid(sizes=[8, 64, 1 << 20]))]))
    table = next(t for t in page.tables if "asked" in t[0])
    rows = [row for row in table[1:] if len(row) == len(table[0])]
    column = {name: i for i, name in enumerate(table[0])}
    assert [row[column["size"]] for row in rows] == ["8 B", "64 B", "1 MiB"]
    assert [row[column["took"]] for row in rows] == ["shm", "shm", "torch_dist"]
    assert {row[column["checked"]] for row in rows} == {"✓"}
    details = [row[0] for row in table[1:] if len(row) == 1]
    assert len(details) == 3
    assert "1048576 bytes is not below its limit" in details[2]
    assert "No backend was asked before it" in details[0]


@pytest.mark.usefixtures("no_plots")
def test_columns_appear_only_where_something_varies(build_run: Build) -> None:
    def head(path: Path) -> list[str]:
        return next(t for t in Page(write_report([path])).tables if "asked" in t[0])[0]

    usual = ["collective", "dtype", "size", "asked", "took", "median", "95 % interval", "p99", "algbw GB/s",
             "busbw GB/s", "checked", "status", "why"]  # fmt: skip
    assert head(build_run(grid(), "plain")) == usual
    varied = [*grid(sizes=[8]), *grid(sizes=[8], layout="strided", cache="cold")]
    assert head(build_run(varied, "varied", launches=2)) == [
        *usual[:3], "layout", "cache", *usual[3:-1], "launches", "why",
    ]  # fmt: skip


@pytest.mark.usefixtures("no_plots")
def test_the_environment_and_the_command_are_on_the_page(build_run: Build) -> None:
    text = Page(write_report([build_run(grid())])).text
    for expected in ("cpu › model", "Test CPU", "env › OMP_NUM_THREADS", "commbench sweep --tp 2"):
        assert expected in text
    assert "governor" not in text  # null in the fingerprint


def test_nested_values_become_paths_and_sizes_readable() -> None:
    document = {"cpus": [0, 1, 2, 3], "gpus": [{"name": "A"}, {"name": "B"}], "none": None, "total_bytes": 3 << 30}
    assert list(flatten(document)) == [
        ("cpus", "0–3"), ("gpus › 0 › name", "A"), ("gpus › 1 › name", "B"),
        ("total_bytes", "3221225472 (about 3 GiB)"),
    ]  # fmt: skip


# -- where it goes, and what cannot be reported ------------------------------------------------------------


def test_several_runs_share_a_page_in_a_folder_of_its_own(build_run: Build, tmp_path: Path) -> None:
    runs = [build_run(grid(), "before"), build_run(grid(), "after", seed=9)]
    path = write_report(runs, tmp_path / "out")
    assert path == tmp_path / "out" / "report.html"
    text = Page(path).text
    assert "before" in text
    assert "after" in text
    assert "Launch-to-launch coefficient of variation" in text
    assert not any((run / "report.html").exists() for run in runs)


@pytest.mark.usefixtures("no_plots")
def test_several_runs_without_a_folder_are_refused(build_run: Build) -> None:
    with pytest.raises(UsageError, match="--out DIR"):
        write_report([build_run(grid(), "a"), build_run(grid(), "b")])


@pytest.mark.usefixtures("no_plots")
def test_a_run_named_twice_is_refused(build_run: Build, tmp_path: Path) -> None:
    path = build_run(grid())
    with pytest.raises(UsageError, match="named twice"):
        write_report([path, path / ".." / path.name], tmp_path / "out")


@pytest.mark.usefixtures("no_plots")
def test_a_folder_with_other_things_is_refused_and_an_earlier_report_replaced(build_run: Build, tmp_path: Path) -> None:
    run, out = build_run(grid()), tmp_path / "out"
    write_report([run], out)
    write_report([run], out)
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        write_report([run], out)
    with pytest.raises(UsageError, match="is a file"):
        write_report([run], out / "thesis.tex")


def test_plots_of_an_earlier_report_do_not_stay(build_run: Build) -> None:
    run = build_run(grid(sizes=[64]))
    (run / "plots").mkdir()
    (run / "plots" / "latency-7.png").write_bytes(b"old")
    write_report([run])
    assert sorted(p.name for p in (run / "plots").glob("latency*")) == ["latency.png", "latency.svg"]


def test_a_run_without_points_still_has_a_page(build_run: Build) -> None:
    points = grid()
    page = Page(write_report([build_run(points, unmeasured={p.point_id for p in points}, finished=False)]))
    assert "no point was measured" in page.text


def test_a_page_that_cannot_be_written_is_an_error_with_the_way_out(build_run: Build) -> None:
    run = build_run(grid(sizes=[64]))
    (run / "report.html").mkdir()
    with pytest.raises(StoreError, match="--out DIR"):
        write_report([run])


def test_reporting_changes_nothing_but_the_report(build_run: Build) -> None:
    run = build_run(grid(sizes=[64]))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    write_report([run])
    assert {p: p.read_bytes() for p in before} == before
    assert open_run(run).rows()
