"""A judgement in the forms that other tools read, held against those tools or their stated formats."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from commbench.analysis.compare import Comparison, compare
from commbench.analysis.gate import Judgement, Rule, Status, judge
from commbench.interop.annotations import to_annotations
from commbench.interop.benchmark_json import round_statistics, to_benchmark_json
from commbench.interop.junit import to_junit
from commbench.interop.markdown import to_markdown
from commbench.interop.openmetrics import to_openmetrics
from commbench.interop.outputs import write_outputs
from commbench.interop.smaller_is_better import to_smaller_is_better
from tests.nights import FINGERPRINT, points_of, side_frame

POINTS = points_of()
WHEN = datetime.datetime(2026, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)
NAMES = ("base|line", "cand`idate")


@pytest.fixture(scope="module")
def night() -> tuple[Judgement, Comparison]:
    """One red family, one inconclusive one, six green ones."""
    gone = next(p for p in POINTS if p.collective == "all_gather")
    cand = side_frame(
        [p for p in POINTS if p != gone], seed=2,
        slower=lambda p: 1.2 if p.collective == "all_reduce" and p.backend == "shm" and p.size_bytes > 4096 else 1.0,
    )  # fmt: skip
    comparison = compare(side_frame(POINTS, seed=1), cand)
    return judge(comparison, Rule()), comparison


def test_junit_has_a_case_per_family_failed_only_if_slower_and_skipped_if_inconclusive(night: Any) -> None:
    root = ElementTree.fromstring(to_junit(night[0], host="node7", when=WHEN, names=NAMES))
    suite = root.find("testsuite")
    assert suite is not None
    cases = suite.findall("testcase")
    assert len(cases) == int(suite.attrib["tests"]) == 8
    assert [c.attrib["name"] for c in cases if c.find("failure") is not None] == ["all_reduce · shm · 4–64 KiB"]
    assert len([c for c in cases if c.find("skipped") is not None]) == int(suite.attrib["skipped"]) == 1
    assert int(suite.attrib["failures"]) == 1
    assert suite.attrib["timestamp"] == "2026-03-04T05:06:07"
    failure = next(c.find("failure") for c in cases if c.find("failure") is not None)
    assert failure is not None
    assert "slower: +" in failure.attrib["message"]


def test_junit_of_nothing_is_one_skipped_case() -> None:
    empty = side_frame(POINTS, launches=0)
    root = ElementTree.fromstring(to_junit(judge(compare(empty, empty), Rule()), host="", when=WHEN, names=NAMES))
    assert len(root.findall(".//testcase")) == len(root.findall(".//skipped")) == 1


def test_junit_survives_characters_that_xml_cannot_hold(night: Any) -> None:
    judgement = night[0]
    strange = replace(judgement.verdicts[0], reason="<&\x00\x1b[31m\ud800'\"")
    text = to_junit(replace(judgement, verdicts=(strange,)), host="h", when=WHEN, names=NAMES)
    message = ElementTree.fromstring(text.encode()).find(".//failure")
    assert message is not None
    assert message.attrib["message"].startswith("<&\ufffd")


def test_markdown_names_the_verdict_every_family_and_escapes_names(night: Any) -> None:
    text = to_markdown(night[0], names=NAMES)
    assert text.startswith("## 🔴 commbench gate: regression")
    rows = [line for line in text.splitlines() if line.startswith(("| 🔴", "| 🟡", "| 🟢"))]
    assert len(rows) == 8
    assert rows[0].startswith("| 🔴 | all\\_reduce · shm · 4–64 KiB |")
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)
    assert "`cand'idate`" in text


def test_markdown_stays_below_the_limit_and_says_what_it_cut(night: Any) -> None:
    judgement = replace(night[0], verdicts=night[0].verdicts * 4000)
    text = to_markdown(judgement, names=NAMES)
    assert len(text.encode()) <= 1 << 20
    assert text.endswith("verdict.json has everything.*\n")


def test_annotations_are_one_line_each_worst_first(night: Any) -> None:
    lines = to_annotations(night[0]).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning"]
    assert lines[0].startswith("::error title=all_reduce · shm · 4–64 KiB::slower: +")


def test_annotations_escape_what_would_end_them(night: Any) -> None:
    strange = replace(night[0].verdicts[0], family="a:b,c", reason="50%\nmore")
    (line,) = to_annotations(replace(night[0], verdicts=(strange,))).splitlines()
    assert line == "::error title=a%3Ab%2Cc::50%25%0Amore"


def test_at_most_ten_annotations_and_the_last_counts_the_rest(night: Any) -> None:
    judgement = replace(night[0], verdicts=(night[0].verdicts[0],) * 25)
    lines = to_annotations(judgement).splitlines()
    assert len(lines) == 10
    assert "and 16 more families" in lines[-1]


def test_a_green_night_has_no_annotation() -> None:
    quiet = judge(compare(side_frame(POINTS, seed=1), side_frame(POINTS, seed=2)), Rule())
    assert quiet.status == Status.PASS
    assert to_annotations(quiet) == ""


def test_smaller_is_better_records_have_a_name_a_unit_and_a_value(night: Any) -> None:
    records = to_smaller_is_better(night[1])
    assert len(records) == len(POINTS) - 1
    assert len({r["name"] for r in records}) == len(records)
    assert all(set(r) >= {"name", "unit", "value"} and r["value"] > 0 for r in records)
    assert all(re.fullmatch(r"± [0-9.e+-]+", r["range"]) for r in records)
    json.dumps(records, allow_nan=False)


def test_openmetrics_are_in_base_units_and_end_with_eof(night: Any) -> None:
    lines = to_openmetrics(*night).splitlines()
    assert lines[-1] == "# EOF"
    assert "# UNIT commbench_latency_seconds seconds" in lines
    sample = re.compile(r'^[a-z_]+(\{([a-z_]+="(\\.|[^"\\])*",?)*\})? [0-9.e+-]+$')
    assert all(sample.match(line) for line in lines if not line.startswith("#"))
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("commbench_latency_seconds{")]
    assert len(values) == 2 * len(POINTS) - 1
    assert max(values) < 1e-3


@pytest.mark.parametrize("n", range(1, 13))
def test_round_statistics_are_those_of_pytest_benchmark(n: int) -> None:
    from pytest_benchmark.stats import Stats

    theirs = Stats()
    data = [((i * 7919) % 97 + 1) * 1e-6 for i in range(n)]
    for value in data:
        theirs.update(value)
    ours = round_statistics(data)
    for name, value in theirs.as_dict().items():
        assert ours[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_pytest_benchmark_compare_reads_both_sides(night: Any, tmp_path: Path) -> None:
    paths = []
    for side in ("base", "cand"):
        document = to_benchmark_json(night[1], side, manifest={"fingerprint": FINGERPRINT}, when=WHEN)
        paths.append(tmp_path / f"{side}.json")
        paths[-1].write_text(json.dumps(document, allow_nan=False))
    done = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", *map(str, paths), "--columns=min,median,rounds"],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "all_reduce float32 64 KiB [shm]" in done.stdout
    assert done.stdout.count("all_reduce float32 64 KiB [shm]") >= 2  # one row a side


def test_every_form_is_written_and_is_what_it_says(night: Any, tmp_path: Path) -> None:
    manifests = ({"fingerprint": FINGERPRINT}, {})
    paths = write_outputs(tmp_path / "out", *night, names=NAMES, manifests=manifests, when=WHEN)
    assert all(p.stat().st_size > 0 for p in paths)
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert (verdict["status"], verdict["exit_code"]) == ("regression", 1)
    assert verdict["verdicts"][0]["slow_points"][0]["ratio"] == pytest.approx(1.2, rel=0.05)
