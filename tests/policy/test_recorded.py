"""The policies against decisions recorded from the engines' own code. Needs ../shared/data/dispatch beside the
project; skipped where it is absent."""

from __future__ import annotations

import csv
import gzip
import time
from functools import lru_cache
from pathlib import Path

import pytest

from commbench.policy import Verdict, load_policy
from commbench.policy.batch import ANSWERS, answer, answer_file

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "dispatch"
FILES = sorted(RECORDED.glob("*.csv.gz")) if RECORDED.is_dir() else []
POLICY_OF = {"vllm-0.33.0": "vllm-0.33"}

needs_recordings = pytest.mark.skipif(not FILES, reason="no recorded decisions in ../shared/data/dispatch")


def policy_of(path: Path) -> str:
    release = path.name.rsplit("-", 1)[0]
    return POLICY_OF.get(release, release)


def rows_of(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as stream:
        return list(csv.DictReader(stream))


@lru_cache(maxsize=1)  # the tests of one file follow each other
def recorded_and_ours(path: Path) -> list[tuple[dict[str, str], Verdict]]:
    """Each recorded row, and what the policy says to it without having seen its answers."""
    rows = rows_of(path)
    columns = [c for c in rows[0] if c not in ANSWERS]
    asked = [{c: row[c] for c in columns} for row in rows]
    return list(zip(rows, answer(load_policy(policy_of(path)), asked, columns, path.name), strict=True))


of_each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: p.name.removesuffix(".csv.gz"), scope="module")


@needs_recordings
@of_each_file
def test_every_recorded_decision_agrees(path: Path) -> None:
    differing = [(row, ours.picked) for row, ours in recorded_and_ours(path) if row["picked"] != ours.picked]
    assert differing == []  # a row that cannot agree would be a quirk: named in docs/policies.md, at most 0.5 %


@needs_recordings
@of_each_file
def test_the_faults_of_a_step_are_told_for_exactly_the_rows_where_the_engine_failed(path: Path) -> None:
    for row, verdict in recorded_and_ours(path):
        recorded = row["kernel"].split()[1] if row["kernel"].startswith("raise ") else ""
        told = next((f.raises for f in verdict.faults if f.stage == "step" and f.raises), "")
        assert told == recorded, row


@needs_recordings
@of_each_file
def test_an_unreduced_input_is_told_for_exactly_the_rows_where_symm_mem_ran_in_place(path: Path) -> None:
    for row, verdict in recorded_and_ours(path):
        dropped = row["picked"] == "inplace" and row["kernel"].startswith("torch_symm:")
        assert any(f.wrong_result for f in verdict.faults) == dropped, row


@needs_recordings
@pytest.mark.perf
def test_a_batch_answers_ten_thousand_rows_a_second(tmp_path: Path) -> None:
    path = RECORDED / "sglang-0.5.3-cuda.csv.gz"
    best = 0.0
    for _ in range(3):
        policy = load_policy("sglang-0.5.3")
        start = time.process_time()  # the machine may be busy with other things
        count = answer_file(policy, path, tmp_path / "out.csv")
        best = max(best, count / (time.process_time() - start))
    assert best >= 10_000
