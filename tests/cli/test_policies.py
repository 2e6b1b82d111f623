"""``commbench policies`` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from commbench.policy import list_policies

Run = Callable[..., tuple[int, str, str]]


def test_alone_it_lists_every_policy_with_its_order(commbench: Run) -> None:
    code, out, _ = commbench("policies")
    assert code == 0
    assert all(f"{name} " in out for name in list_policies())
    assert "nccl_symm → ca_v1 → qr → pymscclpp → symm_mem → pynccl → torch_dist" in out
    assert commbench("policies", "list")[1] == out


@pytest.mark.parametrize("name", list_policies())
def test_show_prints_a_policy_in_full(commbench: Run, name: str) -> None:
    code, out, _ = commbench("policies", "show", name)
    assert code == 0
    assert out.startswith(name)
    assert "accepts if" in out
    data = json.loads(commbench("policies", "show", name, "--json")[1])
    assert data["name"] == name
    assert set(data["order"]["all_reduce"]["gpu"]) <= set(data["routes"])


def test_show_says_which_files_a_policy_extends(commbench: Run) -> None:
    assert "extends sglang-0.5.4 → sglang-0.5.3" in commbench("policies", "show", "sglang-0.5.6")[1]


def test_diff_prints_the_cells_whose_backend_changed_and_with_which_option(commbench: Run) -> None:
    code, out, _ = commbench("policies", "diff", "sglang-0.5.2rc2", "sglang-0.5.3", "--gpu", "mi300x", "--tp", "8")
    assert code == 0
    assert "as described\n  no cell differs" in out
    assert "with ROCM_QUICK_REDUCE_QUANTIZATION=INT4" in out
    row = next(line for line in out.splitlines() if line.startswith("  bfloat16  2 MiB"))
    assert row.split() == ["bfloat16", "2", "MiB", "16", "MiB", "−", "16", "B", "qr", "ca", "every"]


def test_diff_of_an_engine_with_another_leaves_out_what_one_of_them_lacks(commbench: Run) -> None:
    flags = ("--gpu", "h100", "--enable", "ca,symm_mem,flashinfer", "--env", "VLLM_BATCH_INVARIANT=1", "--json")
    code, out, _ = commbench("policies", "diff", "sglang-0.5.3", "vllm-0.33", *flags)
    assert code == 0
    assert {"left", "right", "dtype", "mode", "first_bytes", "last_bytes", "with"} == set(json.loads(out)[0])


def test_check_warns_and_ends_well(commbench: Run) -> None:
    code, out, _ = commbench("policies", "check", "sglang-0.5.3", "--gpu", "h100", "--tp", "8")
    assert code == 0
    assert "caps that exclude their own size" in out


def test_check_of_an_engine_with_silently_wrong_results_is_a_finding(commbench: Run) -> None:
    code, out, _ = commbench("policies", "check", "sglang-0.5.6", "--gpu", "h100", "--tp", "8")
    assert code == 1
    assert "WRONG RESULT: this engine gives wrong data without an error" in out
    code, out, _ = commbench("policies", "check", "sglang-0.5.6", "--gpu", "h100", "--tp", "8", "--json")
    assert (code, json.loads(out)[0]["serious"]) == (1, True)


@pytest.mark.parametrize("names", [("sglang-0.5.3",), ("sglang-0.5.3", "vllm-0.33")])
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot_draws_one_policy_or_two(commbench: Run, tmp_path: Path, names: tuple[str, ...], suffix: str) -> None:
    out = tmp_path / f"map{suffix}"
    assert commbench("policies", "plot", *names, "--gpu", "h100", "--out", str(out))[0] == 0
    assert out.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "sglang-9"), "unknown policy 'sglang-9'"),
        (("show", "./"), "policy '.' is a folder; name a .toml file in it"),
        (("diff", "sglang-0.5.3", "sglang-9"), "unknown policy 'sglang-9'"),
        (("check", "sglang-0.5.3", "--gpu", "voodoo2"), "unknown gpu 'voodoo2'"),
        (("plot", "sglang-0.5.3", "vllm-0.33", "commbench", "--out", "x.png"), "a plot shows one policy or two, not 3"),
        (("plot", "sglang-0.5.3", "--out", "x.docx"), "x.docx is not a picture"),
        (("plot", "sglang-0.5.3", "--out", "/nowhere/x.png"), "cannot write /nowhere/x.png"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(commbench: Run, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = commbench("policies", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
