"""An exported module, applied to the real SGLang 0.5.3: its decisions are then those of our policy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from commbench.interop.export import CUSTOM, SYMMETRIC, Group, Picks, sizes_to_ask
from commbench.interop.export_sglang import export
from commbench.policy import load_policy
from commbench.types import DTYPES
from tests.conformance.environment import SGLANG, clean_environment, python_with

DRIVER = Path(__file__).with_name("sglang_export_driver.py")
GROUPS = [Group((major, 0), n) for major in (9, 10) for n in (2, 4, 6, 8)]
WORDS = {CUSTOM: "ca", SYMMETRIC: "symm_mem"}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MINE = """
format = 1
extends = "commbench"
name = "mine"
[tables.ca_max_bytes]
rows = [{ device = "cuda", value = "768KiB" }]
[tables.symm_mem_max_bytes]
rows = [
  { capability = "9.x", world_size = [2, 4], value = "24MiB" },
  { capability = "9.x", world_size = 8, value = "4MiB" },
  { capability = "10.x", world_size = [4, 6, 8], value = "96MiB" },
]
"""


def ask(module: Path, questions: list[tuple[int, int, str, int]]) -> list[str]:
    """The picks of the real SGLang after the module was applied, for (capability major, ranks, dtype, size)."""
    file = module.with_suffix(".json")
    file.write_text(json.dumps(questions))
    command = [python_with(SGLANG), str(DRIVER), str(module), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    picks: list[str] = json.loads(done.stdout)
    return picks


@pytest.mark.parametrize("name", ["commbench", "mine"])
def test_sglang_0_5_3_with_the_exported_thresholds_decides_as_our_policy_does(tmp_path: Path, name: str) -> None:
    if name == "mine":
        (tmp_path / "mine.toml").write_text(MINE)
        name = str(tmp_path / "mine.toml")
    policy = load_policy(name)
    module = tmp_path / "exported.py"
    module.write_text(export(policy, "sglang-0.5.3", GROUPS))
    questions, wanted = [], []
    for group in GROUPS:
        picks = Picks(policy, group)
        for dtype in ("bfloat16", "float16", "float32"):
            for size in sizes_to_ask(picks.limits(dtype, "eager"), DTYPES[dtype].itemsize):
                questions.append((group.capability[0], group.world_size, dtype, size))
                wanted.append(WORDS.get(picks.kind(dtype, size, "eager"), "inplace"))
    assert {"ca", "symm_mem", "inplace"} == set(wanted)  # else the comparison would say little
    picked = ask(module, questions)
    assert [(q, w, p) for q, w, p in zip(questions, wanted, picked, strict=True) if w != p] == []


def test_without_the_export_sglang_0_5_3_decides_otherwise(tmp_path: Path) -> None:
    module = tmp_path / "nothing.py"
    module.write_text("def apply():\n    pass\n")
    # its bound is strict: exactly 8 MiB goes to symmetric memory, which our policy gives to custom all-reduce
    assert ask(module, [(9, 8, "bfloat16", 8 << 20)]) == ["symm_mem"]
    assert Picks(load_policy("commbench"), Group((9, 0), 8)).kind("bfloat16", 8 << 20, "eager") == CUSTOM
