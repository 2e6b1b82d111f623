"""ARCHITECTURE.md's example of a backend: the text of the document is what runs here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from commbench.errors import BackendUnavailable
from tests.ranks import run_ranks, world

DOCUMENT = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"


def example() -> tuple[str, str]:
    """(the backend's file, the registry's line) as the document shows them."""
    section = DOCUMENT.read_text().partition("## Add a backend")[2].partition("\n## ")[0]
    file, line = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return file, line


def use_it(rank: int, size: int, folder: str) -> dict[str, Any]:
    import commbench.backends
    from commbench.coordinator.group import GroupCoordinator
    from commbench.policy import load_policy
    from commbench.registry import BACKENDS
    from commbench.types import Platform

    file, line = example()
    commbench.backends.__path__.append(folder)
    if rank == 0:
        (Path(folder) / "mine.py").write_text(file)
    process_group = world()
    torch.distributed.barrier()
    exec(line, {"BACKENDS": BACKENDS})
    group = GroupCoordinator(process_group, load_policy("commbench"), Platform(device="cpu"), backends=["mine"])
    seen: dict[str, Any] = {"usable": group.usable["mine"], "provider": group.provider("mine")}
    with group.forcing("mine"):
        seen["sum"] = group.all_reduce(torch.full((4,), float(rank + 1))).tolist()
        for what, call in (
            ("large", lambda: group.all_reduce(torch.ones(2000))),
            ("op", lambda: group.all_reduce(torch.ones(4), op="max")),
            ("other", lambda: group.broadcast(torch.ones(4), src=0)),
        ):
            with pytest.raises(BackendUnavailable) as refused:
                call()
            seen[what] = str(refused.value)
    seen["calls"] = group.call_counts()["mine"]
    group.destroy()
    sys.modules.pop("commbench.backends.mine")
    return seen


def test_the_worked_example_of_a_backend_runs_on_two_ranks(tmp_path: Path) -> None:
    for seen in run_ranks(use_it, 2, str(tmp_path)):
        assert seen["usable"] is None
        assert "all_gather_object" in seen["provider"]
        assert seen["sum"] == [3.0] * 4
        assert "8000 bytes exceed its 4096" in seen["large"]
        assert "it has op sum, not max" in seen["op"]
        assert "has no broadcast" in seen["other"]
        assert seen["calls"] == 1
