"""Every key of a sweep, and the two commands that launch by themselves: each is honoured, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commbench.errors import UsageError
from commbench.sweep import _TABLES, SETTINGS, SweepSpec

Run = Callable[..., tuple[int, str, str]]
USUAL: dict[str, Any] = {
    "collectives": ["all_reduce"], "dtypes": ["float32"], "sizes": "64", "backends": ["torch_dist"], "device": "cpu",
}  # fmt: skip
# for every key another value than USUAL's and the default
OTHER: dict[str, Any] = {
    "name": "another", "description": "words", "collectives": ["broadcast"], "dtypes": ["bfloat16"], "ops": ["max"],
    "sizes": "128", "layout": ["strided"], "placement": ["out"], "cache": ["cold"], "mode": ["graph"],
    "backends": ["fake"], "policy": ["sglang-0.5.3"], "group": ["tp"], "tp": 3, "pp": 2, "ep": 2, "device": "cuda",
    "launches": 7, "target_ci": 0.05, "max_time_per_point": 0.2, "budget": 60.0, "seed": 3, "sync": "barrier",
    "loop": "native", "graph_timing": "chained", "share_device": True, "launcher": "external",
    "mpirun_options": "--bind-to none", "nnodes": 2, "bind": "none", "skew": "1:10us", "ca_provider": "vllm",
    "point_timeout": 100.0, "launch_timeout": 100.0,
}  # fmt: skip


def test_every_key_of_a_sweep_is_looked_at_here() -> None:
    assert set(OTHER) == set(SETTINGS)


class Captured(UsageError):
    """Ends a command where it would launch."""


def spec_file(path: Path, **keys: Any) -> str:
    tables: dict[str, list[str]] = {"": [], "sweep": [], "run": []}
    for key, value in {**USUAL, **keys}.items():
        table = next((t for t, names in _TABLES.items() if key in names), "")
        tables[table].append(f"{key} = {json.dumps(value)}")
    path.write_text("\n".join([*tables[""], "[sweep]", *tables["sweep"], "[run]", *tables["run"]]))
    return str(path)


# ---- gate --ab ------------------------------------------------------------------------------------------------------

SAID_ONLY = {"name", "description", "launches"}  # the run's folder and, for launches, a line of their own


@pytest.fixture
def of_ab(commbench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, str]]:
    """Keys of a sweep → (what the ranks of both sides would get, what was printed)."""
    from commbench.harness import ab, ab_sides
    from commbench.harness.run import limits_of
    from tests.nights import FINGERPRINT

    found: list[Any] = []

    def run_stage(directory, sides, points, spec, settings, pairs, on_event, fingerprints):  # type: ignore[no-untyped-def]
        programs = {name: ab.started_by(side.program, spec) for name, side in sides.items()}
        found.append((points, settings, spec.ranks, programs, limits_of(spec), pairs))
        raise Captured("captured")

    monkeypatch.setattr(ab, "run_stage", run_stage)
    monkeypatch.setattr(ab_sides, "side_fingerprint", lambda side, device: dict(FINGERPRINT))

    def run(**keys: Any) -> tuple[Any, str]:
        found.clear()
        code, out, err = commbench("gate", "--ab", spec_file(tmp_path / "s.toml", **keys), "--out", str(tmp_path / "o"))
        assert (code, out) == (2, "")
        return (found[0] if found else None), err

    return run


@pytest.mark.parametrize("key", sorted(OTHER))
def test_gate_ab_drops_no_key_in_silence(of_ab: Callable[..., tuple[Any, str]], key: str) -> None:
    usual, _ = of_ab()
    given, said = of_ab(**{key: OTHER[key]}, **({"tp": 4} if key in ("ep", "nnodes") else {}))
    if key in SAID_ONLY:
        assert given == usual
        assert key != "launches" or "launches = 7 is for a sweep; --pairs says how many here" in said
    elif given is None:
        assert key.replace("_", "-") in said.replace("_", "-"), said
        assert len(said.strip().splitlines()) == 1
    else:
        assert given != usual


def test_gate_ab_binds_ranks_as_the_sweep_says(of_ab: Callable[..., tuple[Any, str]]) -> None:
    given, _ = of_ab(bind="none")
    assert {name: program.bind for name, program in given[3].items()} == {"base": "none", "cand": "none"}


def test_gate_ab_waits_as_long_as_the_sweep_says(of_ab: Callable[..., tuple[Any, str]]) -> None:
    given, _ = of_ab(point_timeout=100.0, launch_timeout=200.0)
    assert (given[4].point_s, given[4].launch_s) == (100.0, 200.0)


# ---- tune -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(OTHER))
def test_tune_drops_no_key_in_silence(
    commbench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    from commbench.harness import tuning

    found: list[SweepSpec] = []

    def adaptive(spec: SweepSpec, *others: Any, **more: Any) -> Any:
        found.append(spec)
        found.append(others[3])
        raise Captured("captured")

    monkeypatch.setattr(tuning, "adaptive", adaptive)
    value = OTHER[key]
    text = ",".join(value) if isinstance(value, list) else str(value)
    if key == "backends":
        text = "torch_dist,fake"
    flags = ["--tp", "2"] if key != "tp" else []
    code, _, err = commbench("tune", *flags, f"--{key.replace('_', '-')}", text, "--out", str(tmp_path / "p.toml"))
    assert code == 2
    if not found:
        assert key.replace("_", "-") in err, err
    elif key == "budget":
        assert found[1].budget_s == value
    elif key == "backends":
        assert found[0].backends == ("auto", "torch_dist", "fake")
    else:
        assert getattr(found[0], key) == (tuple(value) if isinstance(value, list) else value)
