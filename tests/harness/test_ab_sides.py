"""Sides of an A/B with a Python of their own: what of it is used, and what is refused in one line.

The Pythons are wrappers of this one that see other packages; no rank is started.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import commbench
from commbench.errors import SpecError, UsageError
from commbench.harness.ab_sides import BASE, CAND, AbSide, check_side, check_spec, make_side, side_fingerprint
from commbench.harness.launchers.commands import environment_of, launch_command
from commbench.measure.settings import Settings
from commbench.store.schema import SCHEMA_VERSION
from commbench.sweep import SweepSpec
from commbench.types import Point

ROOT = Path(commbench.__file__).resolve().parents[1]
POINT = Point("all_reduce", "sum", "float32", 64, 2, backend="shm", placement="in")


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def python_of(tmp_path: Path) -> Callable[..., str]:
    """A Python whose packages are these files only, beside the standard library."""

    def make(files: dict[str, str], name: str = "python") -> str:
        for path, text in files.items():
            full = tmp_path / "packages" / path
            full.parent.mkdir(parents=True, exist_ok=True)
            full.write_text(text)
            for folder in full.relative_to(tmp_path / "packages").parents:
                if folder.name:
                    (tmp_path / "packages" / folder / "__init__.py").touch()
        paths = f"{tmp_path / 'packages'}${{PYTHONPATH:+:$PYTHONPATH}}"
        return script(tmp_path / name, f'#!/bin/sh\nPYTHONPATH="{paths}" exec {sys.executable} -S "$@"\n')

    return make


def older(**changes: Any) -> dict[str, str]:
    """A commbench as it was once: other places for its modules, fewer settings and backends; and a torch."""
    facts = {"schema": SCHEMA_VERSION, "settings": ["seed", "sync", "device", "backends", "patience_s"],
             "fields": list(POINT.to_dict()), "backends": ["torch_dist", "shm"], **changes}  # fmt: skip
    record = "from dataclasses import make_dataclass\n"
    return {
        "commbench/__init__.py": '__version__ = "0.0.9"\n',
        "commbench/measure/settings.py": f"{record}Settings = make_dataclass('Settings', {facts['settings']})\n",
        "commbench/registry.py": f"BACKENDS = dict.fromkeys({facts['backends']})\n",
        "commbench/store/schema.py": f"SCHEMA_VERSION = {facts['schema']}\n",
        "commbench/types.py": f"{record}COLLECTIVES = {{'all_reduce': 1}}\n"
                              f"Point = make_dataclass('Point', {facts['fields']})\n",
        "commbench/harness/rank.py": "",
        "commbench/harness/worker.py": "",
        "commbench/harness/fingerprint.py": "def fingerprint(device):\n    return {'device': device, 'host': {}}\n",
        "torch/distributed/run.py": "",
    }  # fmt: skip


def test_a_side_whose_python_has_a_commbench_of_its_own_runs_that_one(python_of: Callable[..., str]) -> None:
    python = python_of(older())
    side = make_side(BASE, python, ["A=1"], None)
    assert side.known is not None
    assert (side.known.version, side.program.own_commbench) == ("0.0.9", True)
    assert launch_command(Path("run"), 0, 2, side.program)[-3:] == ["commbench.harness.rank", "run", "0"]
    assert not side.program.watched, "this one had no heartbeat yet"
    assert side_fingerprint(side, "cpu") == {"device": "cpu", "host": {}}


def test_neither_the_working_directory_nor_this_commbench_stands_in_for_a_sides_own(
    python_of: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "commbench").mkdir(parents=True)
    (tmp_path / "here" / "commbench" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    side = make_side(BASE, python_of(older()), [], None)
    assert side.known is not None
    assert side.known.version == "0.0.9"
    environment = environment_of(side.program)
    assert environment["PYTHONSAFEPATH"] == "1"
    assert str(ROOT) not in environment.get("PYTHONPATH", "")


def test_a_python_without_commbench_runs_this_one(python_of: Callable[..., str]) -> None:
    stand_ins = {"torch/distributed/run.py": "", "sitecustomize.py": ""}
    python = python_of(stand_ins)
    with pytest.raises(UsageError) as refused:  # as far as its packages allow
        make_side(CAND, python, [], None)
    assert str(refused.value).startswith(f"--cand-python {python} does not work: ")
    assert "commbench" not in str(refused.value).rpartition("does not work: ")[2], "it was found, unlike what it needs"


def test_a_python_without_torch_is_refused(python_of: Callable[..., str]) -> None:
    files = {path: text for path, text in older().items() if not path.startswith("torch")}
    with pytest.raises(UsageError, match=r"--base-python .* does not work: .*No module named 'torch'"):
        make_side(BASE, python_of(files), [], None)


def test_a_commbench_whose_ranks_cannot_be_started_is_refused(python_of: Callable[..., str]) -> None:
    files = {path: text for path, text in older().items() if path != "commbench/harness/rank.py"}
    with pytest.raises(UsageError, match=r"its commbench 0.0.9 has no ranks that this one knows how to start; measure"):
        make_side(BASE, python_of(files), [], None)


def test_another_package_of_that_name_is_refused(python_of: Callable[..., str]) -> None:
    python = python_of({"commbench/__init__.py": ""})
    with pytest.raises(UsageError, match=r"does not work: ModuleNotFoundError: No module named 'commbench.measure'"):
        make_side(BASE, python, [], None)


@pytest.mark.parametrize(
    ("said", "expected"),
    [(json.dumps({"python": [3, 9]}), "is Python 3.9; commbench needs 3.11 or newer"), ("hello", "printed something")],
)
def test_a_python_that_is_too_old_or_no_python_is_refused(tmp_path: Path, said: str, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        make_side(BASE, script(tmp_path / "python", f"#!/bin/sh\necho '{said}'\n"), [], None)


def asked(side: AbSide, point: Point = POINT, bind: str = "", **settings: Any) -> None:
    spec = SweepSpec(bind=bind, tp=settings.setdefault("tp", 2), pp=settings.get("pp", 1))
    check_side(side, spec, [point], Settings(**settings))


def test_a_side_that_would_measure_something_else_is_refused(python_of: Callable[..., str]) -> None:
    side = make_side(BASE, python_of(older()), [], None)
    asked(side, sync="barrier")  # it knows this one
    asked(side, patience_s=99.0)  # and waits in its own way
    asked(side, tp=2)  # all ranks are one group there
    for strange, expected in (
        ({"graph_timing": "chained"}, "does not know graph_timing"),
        ({"loop": "native"}, "does not know loop"),
        ({"tp": 2, "pp": 2}, "does not know tp, pp"),
        ({"bind": "core"}, "does not know bind"),
        ({"point": Point("all_reduce", "sum", "float32", 64, 2, backend="fake")}, "does not know backend fake"),
        ({"point": Point("all_gather", "", "float32", 64, 2)}, "does not know collective all_gather"),
    ):
        with pytest.raises(UsageError, match=expected):
            asked(side, **strange)  # type: ignore[arg-type]
    asked(AbSide(CAND), graph_timing="chained", loop="native")  # this commbench knows all that it can be asked


def test_a_side_of_another_schema_is_refused(python_of: Callable[..., str]) -> None:
    side = make_side(BASE, python_of(older(schema=SCHEMA_VERSION + 1)), [], None)
    with pytest.raises(UsageError, match=rf"writes runs of schema {SCHEMA_VERSION + 1}, this one of schema"):
        asked(side)


def test_a_side_whose_points_have_other_fields_is_refused(python_of: Callable[..., str]) -> None:
    names = [name for name in POINT.to_dict() if name != "layout"]
    side = make_side(BASE, python_of(older(fields=names)), [], None)
    with pytest.raises(UsageError, match="does not know the point's layout"):
        asked(side)


def test_what_only_a_sweep_can_do_is_refused_with_its_place() -> None:
    with pytest.raises(SpecError, match=r"s.toml: nnodes: an A/B measures on one host"):
        check_spec(SweepSpec(tp=4, nnodes=2), "s.toml")
    with pytest.raises(SpecError, match=r"s.toml: launcher: an A/B starts the launches of both sides itself"):
        check_spec(SweepSpec(launcher="external"), "s.toml")
    check_spec(SweepSpec(), "s.toml")
