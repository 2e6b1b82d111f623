"""What an engine makes of what it is asked to measure: every field of a sweep is taken, or refused by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from commbench.errors import PolicyError, SpecError, UnknownName
from commbench.harness.engine.plan import planned, policy_files
from commbench.harness.run import prepare
from commbench.sweep import SETTINGS, SweepSpec, make_spec, read_file
from commbench.types import Point

OWN = {"tp": 2, "pp": 1, "ep": 1, "device": "cpu"}
ENGINE = make_spec(OWN, {})
BASE: dict[str, Any] = {"collectives": ["all_reduce"], "dtypes": ["float32"], "sizes": "8KiB"}
POINT = Point("all_reduce", "sum", "float32", 1024, 2)

# every field with a value that is not its default
TAKEN: dict[str, Any] = {
    "name": "mine", "description": "what it is for", "collectives": ["broadcast"], "dtypes": ["int32"],
    "ops": ["max"], "sizes": "64", "layout": ["strided"], "placement": ["in"], "cache": ["cold"],
    "mode": ["eager", "graph"], "backends": ["torch_dist"], "policy": ["sglang-0.5.3"], "group": ["tp"],
    "target_ci": "2%", "max_time_per_point": "30ms", "budget": "10s", "seed": 7, "sync": "barrier", "loop": "native",
    "graph_timing": "chained", "skew": "1:300us",
}  # fmt: skip
SETTLED: dict[str, Any] = {
    "tp": 4, "pp": 2, "ep": 2, "device": "cuda", "launches": 3, "share_device": True, "launcher": "mpirun",
    "mpirun_options": "--bind-to none", "nnodes": 2, "bind": "core", "ca_provider": "vllm", "point_timeout": "5s",
    "launch_timeout": "1m",
}  # fmt: skip


def sweep_file(folder: Path, settings: dict[str, Any]) -> Path:
    """A sweep file that says these, with every key in its table."""
    path = folder / "mine.toml"
    from commbench.sweep import _TABLES

    lines = [f"{key} = {json.dumps(settings[key])}" for key in ("name", "description") if key in settings]
    for table, keys in _TABLES.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(settings[key])}" for key in keys if key in settings)]
    path.write_text("\n".join(lines))
    assert {key: value for key, value in read_file(path).items() if key in settings} == settings
    return path


def test_every_field_of_a_sweep_is_known_to_these_tests() -> None:
    assert set(TAKEN) | set(SETTLED) == set(SETTINGS)
    assert not set(TAKEN) & set(SETTLED)


@pytest.mark.parametrize("field", TAKEN)
@pytest.mark.parametrize("where", ["file", "spec", "keyword"])
def test_a_field_is_taken_as_it_is_asked_for(field: str, where: str, tmp_path: Path) -> None:
    asked = {**BASE, field: TAKEN[field]}
    wanted = make_spec({"name": "mine" if where == "file" else "engine", **asked, **OWN}, {})
    if where == "file":
        found = planned(ENGINE, "cpu", sweep_file(tmp_path, asked), {})
    elif where == "spec":
        found = planned(ENGINE, "cpu", make_spec(asked, {}), {})
    else:
        found = planned(ENGINE, "cpu", None, asked)
    assert found[0] == wanted
    assert found[1:] == prepare(wanted)
    assert getattr(found[0], field) != getattr(SweepSpec, field)


@pytest.mark.parametrize("field", SETTLED)
@pytest.mark.parametrize("where", ["file", "spec", "keyword"])
def test_a_field_that_is_settled_when_ranks_start_is_refused_with_its_value_and_a_way_out(
    field: str, where: str, tmp_path: Path
) -> None:
    value = SETTLED[field]
    # what a sweep needs to have this field at all
    beside: dict[str, Any] = {"nnodes": {"tp": 2}, "mpirun_options": {"launcher": "mpirun"}}.get(field, {})
    asked = {**BASE, **beside, field: value}
    told = f"{field}={value!r} is settled when ranks start; this engine is one launch of torchrun with tp=2"
    if where == "spec":
        spec = make_spec(asked, {})
        told = f"{field}={getattr(spec, field)!r} is settled"
        call = lambda **more: planned(ENGINE, "cpu", spec, more)  # noqa: E731
    elif where == "file":
        path = sweep_file(tmp_path, asked)
        told = f"{path}: {told}"
        call = lambda **more: planned(ENGINE, "cpu", path, more)  # noqa: E731
    else:
        told = f"measure: {told}"
        call = lambda **more: planned(ENGINE, "cpu", None, {**asked, **more})  # noqa: E731
    without = {key: {**OWN, "launcher": "torchrun"}[key] for key in beside}
    with pytest.raises(SpecError, match=re.escape(told)) as problem:
        call(**without)
    # the way out is a keyword that says what the ranks have, and it works
    mine = {**OWN, **{key: getattr(SweepSpec, key) for key in SETTLED if key not in OWN}}[field]
    assert f"measure(…, {field}={mine!r})" in str(problem.value)
    assert getattr(call(**without, **{field: mine})[0], field) == mine


def test_the_device_of_a_file_may_be_auto_or_the_engines(tmp_path: Path) -> None:
    for device in ("auto", "cpu"):
        spec, _, settings = planned(ENGINE, "cpu", sweep_file(tmp_path, {**BASE, "device": device}), {})
        assert (spec.device, settings.device) == ("cpu", "cpu")


def test_a_sweep_that_names_no_policy_has_the_engines(tmp_path: Path) -> None:
    engine = make_spec({**OWN, "policy": ["sglang-0.5.3"]}, {})
    for what in (sweep_file(tmp_path, BASE), make_spec(BASE, {})):
        assert planned(engine, "cpu", what, {})[0].policy == ("sglang-0.5.3",)
        assert planned(engine, "cpu", what, {"policy": ["commbench"]})[0].policy == ("commbench",)


@pytest.mark.parametrize("field", SETTINGS)
def test_beside_points_go_only_fields_that_points_do_not_say(field: str) -> None:
    asked = {**TAKEN, **SETTLED}[field]
    if field in SETTLED:
        with pytest.raises(SpecError, match=f"{field}=.* is settled"):
            planned(ENGINE, "cpu", POINT, {field: asked})
    elif field in POINT.to_dict() or field in ("collectives", "dtypes", "ops", "sizes", "backends"):
        with pytest.raises(SpecError, match=f"{field}=.* does not go with points, which say that of themselves"):
            planned(ENGINE, "cpu", [POINT], {field: asked})
    else:
        spec, expansion, _ = planned(ENGINE, "cpu", [POINT], {field: asked})
        assert getattr(spec, field) == getattr(make_spec({field: asked}, {}), field)
        assert expansion.points == (POINT,)


def test_a_value_that_cannot_be_is_told_with_the_file_and_the_key(tmp_path: Path) -> None:
    for settings, told in (
        ({"seed": "x"}, "mine.toml: seed: 'x' is not a whole number"),
        ({"pp": True}, "mine.toml: pp: True is not a whole number"),
        ({"sync": "soon"}, "mine.toml: sync: 'soon' is no way to start"),
    ):
        with pytest.raises(SpecError, match=told):
            planned(ENGINE, "cpu", sweep_file(tmp_path, {**BASE, **settings}), {})
    with pytest.raises(SpecError, match="the CPU has no graphs to capture"):
        planned(ENGINE, "cpu", None, {**BASE, "mode": ["graph"]})
    with pytest.raises(SpecError, match="the CPU has no graphs to capture"):
        planned(ENGINE, "cpu", Point("all_reduce", "sum", "float32", 1024, 2, mode="graph"), {})


def test_policies_of_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\nextends = "commbench"\n')
    monkeypatch.chdir(tmp_path)
    assert policy_files(["commbench", "mine.toml"]) == {
        "commbench": "commbench",
        "mine.toml": str(tmp_path.resolve() / "mine.toml"),
    }
    with pytest.raises(PolicyError, match=r"'other\.toml' does not exist"):
        policy_files(["other.toml"])
    with pytest.raises(UnknownName, match="unknown policy 'nosuch'"):
        policy_files(["nosuch"])
