"""docs/policies.md: its worked example runs as printed, and it tells every gate; the schema is the gates'."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from commbench.policy import list_policies, load_policy
from commbench.policy.gates import GATES
from commbench.policy.load import DATA
from commbench.policy.schema import text

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_worked_example_runs_as_the_page_shows(tmp_path: Path, monkeypatch, capsys) -> None:
    from commbench.cli.explain import command

    (tmp_path / "ours.toml").write_text(block("toml"))
    monkeypatch.chdir(tmp_path)
    shown = block("console")
    prompt, _, output = shown.partition("\n")
    command.main(prompt.removeprefix("$ commbench explain ").split(), standalone_mode=False)
    assert capsys.readouterr().out == output


def test_every_gate_is_on_the_page_with_its_arguments() -> None:
    for gate in GATES.values():
        row = next((line for line in PAGE.splitlines() if line.startswith(f"| `{gate.name}` |")), "")
        assert row, gate.name
        assert all(f"`{name}`" in row for name in gate.arguments)


def test_every_shipped_policy_is_on_the_page() -> None:
    assert all(name.removeprefix("sglang-") in PAGE for name in list_policies())


def test_every_gate_says_what_it_asks_and_its_arguments_are_in_the_words() -> None:
    for gate in GATES.values():
        assert gate.doc
        assert gate.says


def test_the_stored_schema_is_that_of_the_gates() -> None:
    assert (DATA / "policy.schema.json").read_text() == text()


@pytest.mark.parametrize("name", list_policies())
def test_every_shipped_file_satisfies_the_schema(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(tomllib.loads((DATA / f"{name}.toml").read_text()), json.loads(text()))


def test_the_schema_refuses_a_gate_that_does_not_exist() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    bad = {"format": 1, "routes": {"ca": {"accepts": [{"gate": "warp"}]}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, json.loads(text()))


def test_every_policy_has_an_order_on_cpu_and_gpu_for_every_collective() -> None:
    from commbench.types import COLLECTIVES

    for name in list_policies():
        for collective in COLLECTIVES:
            for device in ("cpu", "cuda", "hip"):
                assert load_policy(name).data.order(collective, device)
