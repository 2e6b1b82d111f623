"""``commbench export`` as a user meets it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

Commbench = Callable[..., tuple[int, str, str]]


def test_a_module_is_printed_and_nothing_else(commbench: Commbench) -> None:
    code, out, err = commbench(
        "export", "commbench", "--for", "sglang-0.5.3", "--world-size", "8", "--capability", "9.0"
    )
    assert (code, err) == (0, "")
    ast.parse(out)
    assert "CUSTOM_ALL_REDUCE_MAX_SIZE = 8 * MiB + 16" in out


def test_a_module_is_written_to_a_file(commbench: Commbench, tmp_path: Path) -> None:
    path = tmp_path / "thresholds.py"
    code, out, _ = commbench(
        "export", "sglang-0.5.3", "--for", "sglang-0.5.23", "--world-size", "2", "--out", str(path)
    )
    assert code == 0
    assert "checked against policy sglang-0.5.23" in out
    ast.parse(path.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("commbench", "--for", "sglang-9"), "unknown target 'sglang-9'"),
        (("nothing", "--for", "vllm-0.33"), "unknown policy 'nothing'"),
        (("commbench", "--for", "vllm-0.33"), "never takes custom all-reduce for 8 MiB or more"),
        (("commbench", "--for", "sglang-0.5.3", "--world-size", "3"), "--world-size 3"),
        (("commbench", "--for", "sglang-0.5.3", "--capability", "nine"), "'nine' is not like 9.0"),
        (("commbench", "--for", "sglang-0.5.3", "--enable", "warp"), "no switch 'warp'"),
        (("commbench",), "--for"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(commbench: Commbench, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = commbench("export", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
