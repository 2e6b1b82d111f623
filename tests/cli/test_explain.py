"""``commbench explain`` as a user meets it."""

from __future__ import annotations

import csv
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]


def test_it_prints_the_order_with_a_tick_or_a_reason_and_the_distance_to_the_threshold(commbench: Run) -> None:
    code, out, err = commbench("explain", "--policy", "sglang-0.5.3", "--gpu", "h100", "--tp", "8", "--size", "8MiB")
    assert (code, err) == (0, "")
    assert "enabled   ca_v1, pynccl (the engine's defaults)" in out
    assert "✗ ca_v1       8 MiB is not < 8 MiB" in out
    assert "✗ symm_mem    not enabled (--enable-torch-symm-mem)" in out
    assert "✓ torch_dist" in out
    assert "picked    inplace (backend torch_dist)" in out
    assert "8 MiB is not < 8 MiB: 8 elements fewer (16 B) would take ca" in out


def test_without_a_policy_it_explains_commbenchs_own(commbench: Run) -> None:
    code, out, _ = commbench("explain", "--gpu", "cpu", "--tp", "4", "--size", "64KiB", "--dtype", "float32")
    assert code == 0
    assert "picked    shm: shared memory" in out


def test_json_holds_what_the_text_says(commbench: Run) -> None:
    arguments = ("--policy", "sglang-0.5.3", "--gpu", "h100", "--enable", "ca,symm_mem", "--size", "8MiB", "--json")
    data = json.loads(commbench("explain", *arguments)[1])
    assert data["picked"] == "symm_mem"
    assert data["enabled"] == ["ca_v1", "pynccl", "symm_mem"]
    assert data["nearest_below"] == {"size_bytes": 8388592, "elements": -8, "picked": "ca", "backend": "ca"}
    assert {x["route"]: x["answer"] for x in data["order"]}["ca_v1"] == "declined"


def test_a_range_prints_winner_intervals(commbench: Run) -> None:
    code, out, _ = commbench("explain", "--policy", "sglang-0.5.3", "--gpu", "h100", "--range", "8:256MiB")
    assert code == 0
    assert "16 B to 8 MiB − 16 B  ca" in out
    assert "8 MiB to      256 MiB  inplace" in out
    data = json.loads(commbench("explain", "--policy", "sglang-0.5.3", "--range", "8:256MiB", "--json")[1])
    assert [(i["first_bytes"], i["picked"]) for i in data] == [(16, "ca"), (8 << 20, "inplace")]


def test_wrong_results_of_an_engine_are_said_loudly(commbench: Run) -> None:
    arguments = ("--policy", "sglang-0.5.6", "--enable", "ca,symm_mem", "--dtype", "float16", "--size", "80MiB")
    assert "WRONG RESULT: THE INPUT IS LEFT UNREDUCED" in commbench("explain", *arguments)[1]


def test_a_machine_that_the_engine_would_not_speed_up_is_answered_as_the_engine_would(commbench: Run) -> None:
    code, out, _ = commbench("explain", "--policy", "sglang-0.5.3", "--tp", "3", "--enable", "ca", "--size", "4KiB")
    assert code == 0
    assert "ca_v1       world size 3 is not one of 2, 4, 6, 8" in out


def test_one_rank_needs_no_backend_and_that_is_said(commbench: Run) -> None:
    assert "no backend is asked, the input comes back" in commbench("explain", "--tp", "1")[1]


def test_a_route_whose_kernel_dispatch_raises_is_marked(commbench: Run) -> None:
    out = commbench("explain", "--policy", "vllm-0.33", "--size", "1MiB", "--layout", "dense_t")[1]
    assert "! symm_mem    raises RuntimeError" in out
    assert "picked    nothing: the engine raises RuntimeError" in out


def test_a_collective_without_thresholds_takes_one_backend_for_every_size(commbench: Run) -> None:
    out = commbench("explain", "--collective", "all_gather", "--gpu", "cpu", "--tp", "2")[1]
    assert "call      all_gather of bfloat16" in out
    assert "next      no size takes anything else" in out


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        (("--gpu", "mi300x", "--tp", "4"), "4 x mi300x (gfx942) on one node, XGMI"),
        (("--arch", "sm103"), "8 x sm103 on one node, NVLink with multicast"),
        (("--gpu", "H100", "--topology", "pcie"), "8 x h100 (sm90) on one node, PCIe only"),
        (("--gpu", "b200", "--tp", "16", "--nnodes", "2"), "16 x b200 (sm100) over 2 nodes, NVLink with multicast"),
    ],
)
def test_the_machine_is_said_in_words(commbench: Run, flags: tuple[str, ...], place: str) -> None:
    assert f"group     {place}\n" in commbench("explain", *flags)[1]


def test_variables_and_parameters_that_were_given_are_shown(commbench: Run) -> None:
    flags = ("--policy", "vllm-0.33", "--env", "VLLM_BATCH_INVARIANT=1", "--set", "ca_cap=1MiB", "--size", "2MiB")
    out = commbench("explain", *flags)[1]
    assert "set       VLLM_BATCH_INVARIANT=1, ca_cap=1MiB" in out
    assert "picked    ca: custom all-reduce" in out  # no cap where the order of reduction is fixed


def test_a_batch_is_answered_into_a_file(commbench: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "calls.csv", tmp_path / "answers.csv"
    source.write_text("arch,cc_major,world_size,dtype,size_bytes\ncuda,9,8,bfloat16,1024\ncuda,9,3,bfloat16,1024\n")
    code, out, _ = commbench("explain", "--batch", str(source), "--policy", "sglang-0.5.3", "--out", str(target))
    assert code == 0
    assert "2 rows answered by sglang-0.5.3" in out
    with target.open() as stream:
        assert [row["picked"] for row in csv.DictReader(stream)] == ["ca", "inplace"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpu", "voodoo2"), "unknown gpu 'voodoo2'; available: "),
        (("--arch", "sixty"), "architecture 'sixty' is not like sm90"),
        (("--gpu", "h100", "--arch", "sm90"), "both say what the GPU is"),
        (("--policy", "sglang-9"), "unknown policy 'sglang-9'; available: "),
        (("--policy", "gone.toml"), "policy file 'gone.toml' does not exist"),
        (("--enable", "warp"), "unknown switch 'warp'; available: "),
        (("--env", "COLOUR=red"), "reads no environment variable 'COLOUR'"),
        (("--env", "COLOUR"), "--env 'COLOUR' is not NAME=VALUE"),
        (
            ("--policy", "sglang-0.5.3", "--env", "SGLANG_MSCCLPP_MAX_BYTES=x"),
            "SGLANG_MSCCLPP_MAX_BYTES='x' is not a size",
        ),
        (("--set", "colour=red"), "unknown parameter 'colour'"),
        (("--size", "many"), "size 'many' is not a number of bytes"),
        (("--size", "7"), "--size 7 is not a whole number of bfloat16 elements"),
        (("--range", "8"), "--range '8' is not FROM:TO"),
        (("--range", "2MiB:1MiB"), "ends before it starts"),
        (("--mode", "lazy"), "'lazy' is not one of"),
        (("--batch", "calls.csv"), "--batch needs --out"),
        (("--batch", "gone.csv", "--out", "x.csv"), "cannot open gone.csv"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(commbench: Run, flags: tuple[str, ...], said: str) -> None:
    code, out, err = commbench("explain", *flags)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_it_needs_neither_torch_nor_pandas() -> None:
    program = (
        "import sys\nfrom commbench.cli.explain import command\n"
        "command.main(['--policy', 'vllm-0.33', '--range', '8:1MiB'], standalone_mode=False)\n"
        "heavy = {'torch', 'pandas', 'numpy', 'matplotlib', 'pydantic', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.perf
def test_it_answers_within_three_tenths_of_a_second_of_cpu_time() -> None:
    best = 9.0
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "commbench", "explain"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert best < 0.3
