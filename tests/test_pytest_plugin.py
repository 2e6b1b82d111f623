"""The pytest plugin, in a pytest of its own: collectives measured inside tests, and numbers in pytest-benchmark."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ("pytest_benchmark.plugin", "commbench.pytest_plugin")


def run_pytest(folder: Path, *args: str, plugins: tuple[str, ...] = PLUGINS) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "COMMBENCH_FAKE": '{"duration_s": 1e-3}',
    }  # fmt: skip
    loaded = [text for name in plugins for text in ("-p", name)]
    command = [sys.executable, "-m", "pytest", *loaded, "-p", "no:cacheprovider", *args, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=280)


def example() -> str:
    """The example of docs/gate.md on the scripted backend, started by barriers: busy cores then cost no windows."""
    text = (ROOT / "docs" / "gate.md").read_text()
    found = re.search(r"```python\n(# test_latency\.py\n.*?)```", text, re.DOTALL)
    assert found, "docs/gate.md has no example test_latency.py"
    assert found[1].count('backends=["auto"]') == 2
    return found[1].replace('backends=["auto"]', 'backends=["fake"], sync="barrier"')


@pytest.mark.slow
def test_the_example_of_the_docs_measures_and_appears_in_pytest_benchmark(tmp_path: Path) -> None:
    (tmp_path / "test_latency.py").write_text(example())
    done = run_pytest(tmp_path, "--benchmark-json=numbers.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    (record,) = json.loads((tmp_path / "numbers.json").read_text())["benchmarks"]
    assert record["name"] == "test_all_reduce_in_the_table"
    assert record["stats"]["median"] == pytest.approx(1e-3, rel=0.1)  # the scripted duration, not the test's own
    assert record["stats"]["rounds"] >= 6
    assert record["extra_info"]["backend"] == "fake"


def test_without_pytest_benchmark_its_fixture_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_it(collective_benchmark):\n    raise AssertionError('not reached')\n"
    )
    done = run_pytest(tmp_path, "-rs", plugins=("commbench.pytest_plugin",))
    assert "1 skipped" in done.stdout, done.stdout
    assert "pip install pytest-benchmark" in done.stdout


def test_loading_the_plugin_imports_neither_torch_nor_pandas() -> None:
    code = "import commbench.pytest_plugin, sys; print([m for m in ('torch', 'pandas', 'numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.strip() == "[]", done.stderr
