"""``commbench doctor``: each judgement from facts made up, and the command on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from commbench.backends.base import Availability
from commbench.harness.environment.devices import Found
from commbench.harness.environment.doctor import Directory, Machine, Note, can_run, diagnose

Run = Callable[..., tuple[int, str, str]]

CPU = {"model": "a CPU", "sockets": 1, "cores": 8, "logical_cpus": 16, "numa_nodes": {"0": "0-15"}, "quota_cpus": None}
WELL = Machine(
    facts={
        "cpu": CPU,
        "accelerators": {"devices": [], "notes": []},
        "versions": {"python": "3.11", "torch": "2.9", "numpy": "2", "pandas": "2.2"},
    },
    torch={"torch": "2.9.0+cpu"},
    gloo=True,
    backends={"torch_dist": Availability(True, provider="torch 2.9 gloo")},
    directories=(Directory("/dev/shm", "", 8 << 30),),
)


def notes(machine: Machine = WELL, env: Mapping[str, str] | None = None) -> list[Note]:
    return diagnose(machine, env or {})


def about(found: list[Note], subject: str) -> Note:
    return next(n for n in found if n.subject == subject)


def with_facts(**facts: Any) -> Machine:
    return replace(WELL, facts={**WELL.facts, **facts})


def test_a_machine_that_is_well_can_run_and_nothing_is_warned_of() -> None:
    assert can_run(notes())
    assert not [n for n in notes() if n.state in ("warning", "problem")]


@pytest.mark.parametrize(
    ("machine", "subject"),
    [
        (replace(WELL, torch=None, torch_error="No module named 'torch'"), "torch"),
        (replace(WELL, torch={"torch": "2.5.1"}), "torch"),
        (replace(WELL, gloo=False), "gloo"),
        (replace(WELL, folder_error="no permission to write in /"), "reports"),
    ],
)
def test_what_stops_the_main_job_is_a_problem_with_a_way_out(machine: Machine, subject: str) -> None:
    found = notes(machine)
    assert not can_run(found)
    assert about(found, subject).state == "problem"
    assert about(found, subject).remedy


def test_a_backend_that_is_not_there_says_why_and_what_to_install() -> None:
    machine = replace(WELL, backends={"shm": Availability(False, "the native module was not built", "install g++")})
    note = about(notes(machine), "shm")
    assert (note.state, note.what, note.remedy) == ("off", "the native module was not built", "install g++")


def test_backends_with_one_reason_and_one_remedy_are_told_once_and_each_by_itself_in_json(commbench: Run) -> None:
    _, out, _ = commbench("doctor")
    reason = "it is for an NVIDIA GPU, the group is on cpu"
    assert out.count(reason) == 1
    before = out[: out.index(reason)]
    names = before[before.rindex("· ") :]
    assert all(name in names for name in ("nccl_symm", "symm_mem", "pymscclpp", "flashinfer"))
    assert "qr" not in names  # it is for another GPU
    _, text, _ = commbench("doctor", "--json")
    apart = [n["subject"] for n in json.loads(text)["notes"] if n["what"] == reason]
    assert len(apart) == len(set(apart)) >= 4


@pytest.mark.parametrize(("columns", "most"), [("80", 80), ("120", 110), ("20", 60)])
def test_lines_fit_the_terminal(commbench: Run, monkeypatch: pytest.MonkeyPatch, columns: str, most: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    _, out, _ = commbench("doctor")
    assert max(map(len, out.splitlines())) <= most


def test_devices_of_other_vendors_are_told_and_what_is_wrong_with_those_whose_package_is_here() -> None:
    found = notes(replace(WELL, accelerators={"xpu": Found(4), "npu": Found(0, "torch.npu finds no device", "check")}))
    assert (about(found, "xpu").state, about(found, "xpu").what) == ("ok", "4 devices")
    assert (about(found, "npu").state, about(found, "npu").remedy) == ("warning", "check")
    assert not [n for n in found if n.subject == "GPU"]


@pytest.mark.parametrize(
    ("found", "state"), [(None, "off"), ("0.3.8", "warning"), ("0.3.14", "ok"), ("0.3.20", "ok"), ("0.4.0", "ok")]
)
def test_sgl_kernel_is_held_against_the_version_that_sglang_0_5_3_asks_for(found: str | None, state: str) -> None:
    note = about(notes(replace(WELL, packages={"sgl-kernel": found} if found else {})), "sgl-kernel")
    assert note.state == state
    assert "0.3.14" in note.what
    if state != "ok":
        assert 'pip install "sgl-kernel==0.3.14"' in note.remedy


@pytest.mark.parametrize(("found", "state"), [("0.4.0rc2", "warning"), ("0.4.0rc3", "ok"), ("0.4.0", "ok")])
def test_a_release_candidate_is_older_than_its_release(found: str, state: str) -> None:
    assert about(notes(replace(WELL, packages={"flashinfer-python": found})), "flashinfer-python").state == state


def test_one_variable_skips_the_version_check() -> None:
    found = notes(replace(WELL, packages={"sgl-kernel": "0.1"}), {"COMMBENCH_SKIP_VERSION_CHECK": "1"})
    assert not [n for n in found if n.subject == "sgl-kernel"]
    assert about(found, "engines").what == "not checked, since COMMBENCH_SKIP_VERSION_CHECK=1"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (Directory("/dev/shm", "it does not exist"), "it does not exist"),
        (Directory("/dev/shm", "", 32 << 20), "only 32.0 MiB free"),
    ],
)
def test_shared_memory_that_is_missing_or_small_is_warned_of(place: Directory, said: str) -> None:
    note = about(notes(replace(WELL, directories=(place,))), "/dev/shm")
    assert (note.state, note.what) == ("warning", said)
    assert "COMMBENCH_SHM_DIR" in note.remedy


def test_segments_of_killed_runs_are_told_with_what_removes_them() -> None:
    found = notes(replace(WELL, directories=(Directory("/dev/shm", "", 8 << 30, leftovers=2),)))
    assert any("2 segments" in n.what and "next sweep removes them" in n.remedy for n in found)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_warned_of(name: str) -> None:
    found = notes(env={name: "max_split_size_mb:64,expandable_segments:True"})
    assert any(n.subject == name and n.state == "warning" and "IPC" in n.what for n in found)
    assert not any(n.state == "warning" for n in notes(env={name: "expandable_segments:False"}))


def test_a_mask_of_one_gpu_is_warned_of_and_a_mask_of_two_is_not() -> None:
    one = about(notes(env={"CUDA_VISIBLE_DEVICES": "3"}), "CUDA_VISIBLE_DEVICES")
    assert one.state == "warning"
    assert "overlapping devices" in one.what
    assert not any(n.state == "warning" for n in notes(env={"CUDA_VISIBLE_DEVICES": "3,4"}))


def test_a_mask_by_names_is_warned_of() -> None:
    found = notes(env={"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"})
    assert any(n.state == "warning" and "numbers only" in n.what for n in found)


def test_a_variable_that_an_engine_reads_is_told_with_what_it_changes() -> None:
    note = about(notes(env={"ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"}), "ROCM_QUICK_REDUCE_QUANTIZATION")
    assert note.state == "note"
    assert "INT4: turns quick all-reduce on" in note.what
    assert "sglang-0.5.23" in note.what


def test_a_variable_that_an_engine_could_not_read_is_warned_of() -> None:
    note = about(notes(env={"SGLANG_MSCCLPP_MAX_BYTES": "lots"}), "SGLANG_MSCCLPP_MAX_BYTES")
    assert note.state == "warning"
    assert "is not a size" in note.what


def test_a_secret_is_not_printed() -> None:
    found = notes(env={"NCCL_DEBUG": "password=hunter2"})
    assert not any("hunter2" in n.what for n in found)


def test_gpus_without_access_to_each_other_are_named() -> None:
    note = about(notes(replace(WELL, peers=((0, 1), (2, 3)))), "peer access")
    assert (note.state, "0–1, 2–3" in note.what) == ("warning", True)


def test_device_files_that_may_not_be_opened_and_low_limits_are_warned_of() -> None:
    found = notes(replace(WELL, closed_devices=("/dev/nvidia0",), open_files=256))
    assert about(found, "/dev/nvidia0").state == "warning"
    assert about(found, "open files").remedy == "ulimit -n 1024"


def test_a_container_with_fewer_cpus_than_the_machine_says_so() -> None:
    found = notes(with_facts(cpu={**CPU, "quota_cpus": 2.0}))
    assert about(found, "quota").what == "this container may use 2 CPUs"
    assert "up to --tp 2 " in about(found, "ranks").what


def test_the_command_looks_at_this_machine_and_says_that_a_sweep_can_run(commbench: Run) -> None:
    code, out, _ = commbench("doctor")
    assert code == 0
    assert "✓ commbench sweep" in out
    assert "✓ torch_dist" in out
    assert "commbench overrides nothing that you set" in out
    code, out, _ = commbench("doctor", "--json")
    assert (code, json.loads(out)["can_run"]) == (0, True)


def test_a_folder_for_results_that_cannot_be_made_is_a_finding(commbench: Run) -> None:
    code, out, _ = commbench("doctor", "--out", "/dev/null/reports")
    assert code == 1
    assert "a sweep cannot run here: see ✗" in out
