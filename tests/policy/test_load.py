"""Reading policy files: what a mistake in one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from commbench.errors import PolicyError, UnknownName
from commbench.policy import list_policies, load_policy
from tests.policy.helpers import MIB, call, h100

HEAD = 'format = 1\nextends = "sglang-0.5.3"\n'


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "mine.toml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_the_shipped_policies_are_listed_by_engine_and_version() -> None:
    assert list_policies() == (
        "commbench", "sglang-0.5.2rc2", "sglang-0.5.3", "sglang-0.5.4", "sglang-0.5.6", "sglang-0.5.10",
        "sglang-0.5.15", "sglang-0.5.23", "vllm-0.33",
    )  # fmt: skip


@pytest.mark.parametrize("name", list_policies())
def test_every_shipped_policy_reads_and_is_called_as_its_file(name: str) -> None:
    assert load_policy(name).name == name


def test_an_unknown_policy_says_what_there_is() -> None:
    with pytest.raises(UnknownName, match=r"unknown policy 'sglang-9'; available: .*sglang-0\.5\.3"):
        load_policy("sglang-9")


def test_a_users_file_extends_a_shipped_one_and_changes_only_what_it_says(write) -> None:
    path = write(HEAD + 'name = "mine"\n[tables.ca_max_bytes]\nrows = [{ device = "cuda", value = "1MiB" }]\n')
    mine, theirs = load_policy(path), load_policy("sglang-0.5.3")
    assert mine.name == "mine"
    assert mine.decide(call(size_bytes=2 * MIB), h100()).picked == "torch_dist"
    assert theirs.decide(call(size_bytes=2 * MIB), h100()).picked == "ca"
    assert mine.data.order("all_reduce", "cuda")[3].title == theirs.data.order("all_reduce", "cuda")[3].title


def test_a_file_may_extend_another_file_beside_it(write) -> None:
    write(HEAD + 'name = "base"\n', "base.toml")
    assert load_policy(write('format = 1\nextends = "./base.toml"\n')).data.lineage == ("./base.toml", "sglang-0.5.3")


def test_a_file_that_changes_is_read_again(write) -> None:
    path = write(HEAD + 'name = "one"\n')
    assert load_policy(path).name == "one"
    write(HEAD + 'name = "another"\n')
    assert load_policy(path).name == "another"


def test_inherited_faults_end_with_the_version_that_fixed_them() -> None:
    def faults(name: str) -> set[str]:
        return {f.name for f in load_policy(name).data.faults}

    assert "symm-mem-unreduced" in faults("sglang-0.5.10")
    assert "symm-mem-unreduced" not in faults("sglang-0.5.15")
    assert "mscclpp-world-size" in faults("sglang-0.5.15")
    assert "mscclpp-world-size" not in faults("sglang-0.5.23")


def test_extends_in_a_circle_is_told_with_the_circle(write) -> None:
    write('format = 1\nextends = "./b.toml"\n', "a.toml")
    write('format = 1\nextends = "./a.toml"\n', "b.toml")
    with pytest.raises(PolicyError, match=r"extends goes in a circle: a → b → a"):
        load_policy(str(Path(write("format = 1\n", "c.toml")).with_name("a.toml")))


CAPS = "[tables.symm_mem_max_bytes]\nrows = [%s]\n"
GATE = '[routes.ca_v1]\naccepts = [{ gate = "%s"%s }]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format = 1\n", r"order: there is none"),
        ('format = 2\nextends = "sglang-0.5.3"\n', r"format: 2 is not 1"),
        ("format = 1\n[order\n", r"not valid TOML"),
        (HEAD + 'colour = "red"\n', r"unknown key 'colour'"),
        (HEAD + GATE % ("size_bellow", ""), r"ca_v1\.accepts\[1\]: unknown gate 'size_bellow'; .*size_below"),
        (HEAD + GATE % ("size_below", ""), r"size_below needs 'limit'"),
        (HEAD + GATE % ("size_below", ', limit = "8 apples"'), r"size '8 apples' is not a number of bytes"),
        (HEAD + GATE % ("size_below", ", limit = 8, limits = 9"), r"size_below takes no 'limits'; it takes limit"),
        (HEAD + GATE % ("dtype_in", ', dtypes = "float32"'), r"'float32' is not a list of words"),
        (HEAD + GATE % ("one_node", ""), r"one_node looks at the group only; it belongs in needs"),
        (HEAD + '[routes.ca_v1]\nneeds = [{ gate = "not_empty" }]\n', r"looks at a call; it belongs in accepts"),
        (HEAD + GATE % ("size_below", ', limit = { table = "caps" }'), r"unknown table 'caps'"),
        (HEAD + GATE % ("unless_taken_by", ', routes = ["warp"]'), r"unknown routes? 'warp'"),
        (HEAD + '[order.all_reduce]\ngpu = ["warp"]\n', r"order\.all_reduce\.gpu: unknown route 'warp'"),
        (HEAD + '[order.all_reduce]\ngpu = ["ca_v1", "ca_v1"]\n', r"a route stands twice"),
        (HEAD + '[order.all_shuffle]\ngpu = ["ca_v1"]\n', r"order\.all_shuffle: unknown collective"),
        (HEAD + '[routes.ca_v1]\nswitches = ["warp"]\n', r"unknown switch 'warp'"),
        (HEAD + '[environment]\nX = { parameter = "warp" }\n', r"unknown parameter 'warp'"),
        (HEAD + '[parameters]\nqr_level = { value = "INT5" }\n', r"'INT5' is not one of NONE, FP"),
        (HEAD + '[parameters]\nx = { value = "many", kind = "count" }\n', r"'many' is not a count"),
        (
            HEAD + '[tables.ca_max_bytes]\nrows = [{ device = "cuda", value = 1 }, { value = 2 }]\n',
            r"tables\.ca_max_bytes: rows 1 and 2 overlap",
        ),
        (
            HEAD + CAPS % '{ capability = "9.x", value = 1 }, { capability = "9.0", value = 2 }',
            r"rows 1 and 2 overlap",
        ),
        (HEAD + CAPS % '{ capability = "nine", value = 1 }', r"'nine' is not like 9\.0"),
        (HEAD + '[[faults]]\nname = "x"\nstage = "lunch"\neffect = "y"\n', r"stage 'lunch' is not one of"),
        (HEAD + '[[faults]]\nname = "x"\nstage = "step"\neffect = "y"\n', r"a fault at stage step needs its route"),
        ('format = 1\nextends = "sglang-9"\n', r"unknown policy 'sglang-9'"),
        ("format = 1\nextends = 3\n", r"extends is 3"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_where_and_what(write, text: str, said: str) -> None:
    with pytest.raises((PolicyError, UnknownName), match=said) as raised:
        load_policy(write(text))
    assert "\n" not in str(raised.value)


def test_a_file_that_does_not_exist_is_named() -> None:
    with pytest.raises(PolicyError, match=r"policy file 'gone\.toml' does not exist"):
        load_policy("gone.toml")
