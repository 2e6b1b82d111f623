"""The examples of README.md and docs/engine.md run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_notebooks_example_of_the_readme_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    said = run(code, tmp_path)
    assert "[array([0., 2., 4., 6.]), array([0., 2., 4., 6.])]" in said
    assert "backend_picked" in said
    for size in (8, 64, 512, 4096, 32768):
        assert re.search(rf"^\d+ +{size} ", said, re.MULTILINE), said
    traces = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert traces == ["launch-0.rank-0.trace.json", "launch-0.rank-1.trace.json"]


@pytest.mark.slow
def test_the_trainer_of_the_docs_hands_its_weights_over(tmp_path: Path) -> None:
    codes = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engine.md").read_text(), re.DOTALL)
    (code,) = [code for code in codes if "Thread" in code]
    assert code.count("29500") == 2
    said = run(code.replace("29500", str(free_port())), tmp_path)
    assert said.count("tensor([1., 1., 1.,") == 2
