"""Our policy sglang-0.5.3 against the decisions of the real SGLang 0.5.3, asked live on meta tensors."""

from __future__ import annotations

import csv
import io
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from commbench.policy import load_policy
from commbench.policy.batch import answer
from tests.conformance.environment import SGLANG, clean_environment, python_with

DRIVER = Path(__file__).with_name("sglang_driver.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def python_with_sglang() -> list[str]:
    """The start of a command line: Python in an environment that has SGLang's wheel and, of the rest, only this one's
    torch and numpy. Skips where the package registry cannot be reached."""
    return [python_with(SGLANG), str(DRIVER)]


def live(python_with_sglang: list[str], arch: str) -> list[dict[str, str]]:
    command = [*python_with_sglang, arch, "5", "120", "25"]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(csv.DictReader(io.StringIO(done.stdout)))


@pytest.mark.parametrize(
    ("arch", "taken"), [("cuda", {"ca", "symm_mem", "pymscclpp", "inplace"}), ("hip", {"ca", "qr", "inplace"})]
)
def test_our_policy_picks_what_sglang_0_5_3_picks(python_with_sglang: list[str], arch: str, taken: set[str]) -> None:
    rows = live(python_with_sglang, arch)
    picks = Counter(row["picked"] for row in rows)
    assert taken <= picks.keys()  # else the comparison would say little
    columns = [c for c in rows[0] if c != "picked"]
    asked = [{c: row[c] for c in columns} for row in rows]
    ours = answer(load_policy("sglang-0.5.3"), asked, columns, "live")
    assert [(r, v.picked) for r, v in zip(rows, ours, strict=True) if r["picked"] != v.picked] == []
