"""The environment fingerprint: what it tells, what it keeps to itself, and what makes two of them differ."""

from __future__ import annotations

import copy
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commbench.harness.environment import fingerprint as module
from commbench.harness.environment.fingerprint import (
    REDACTED,
    differences,
    fingerprint,
    format_cpu_list,
    git_state,
    parse_cpu_list,
    parse_nvidia_csv,
    parse_rocm_csv,
    redact,
    relevant_env,
)

NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *topo*) printf '\\tGPU0\\tGPU1\\nGPU0\\tX\\tNV18\\n' ;;
  *vbios*) [ -n "$OLD_DRIVER" ] && { echo 'Field "vbios_version" is not a valid field to query.' >&2; exit 2; }
    echo 'index, name, driver_version, clocks.current.sm [MHz], clocks.max.sm [MHz], power.limit [W]'
    echo '0, NVIDIA H200, 570.1, 345, 1980, 700.00'
    echo '1, NVIDIA H200, 570.1, 1980, [N/A], 700.00' ;;
  *) echo 'index, name, uuid, driver_version'; echo '0, Tesla K80, GPU-1, 470.2' ;;
esac
"""


@pytest.fixture(scope="module")
def taken() -> dict[str, Any]:
    return fingerprint("cpu")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts executables in front of the PATH: tools(name, script)."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def put(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return put


def test_it_describes_this_machine_and_survives_json(taken: dict[str, Any]) -> None:
    assert json.loads(json.dumps(taken)) == taken
    assert taken["host"]["name"] == socket.gethostname()
    assert taken["cpu"]["model"]
    assert taken["cpu"]["logical_cpus"] >= len(parse_cpu_list(taken["cpu"]["affinity"])) >= 1
    assert taken["memory"]["total_bytes"] > taken["memory"]["available_bytes"] > 0
    assert taken["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert taken["load"]["load_1m"] >= 0
    assert taken["clock"]["resolution_s"] > 0


def test_it_names_the_versions_of_torch_and_commbench_without_importing_torch() -> None:
    code = (
        "import sys; from commbench.harness.environment.fingerprint import fingerprint;"
        "v = fingerprint('cpu')['versions'];"
        "print('torch' in sys.modules, v['torch'], v['commbench'])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    import torch

    import commbench

    assert said.split() == ["False", torch.__version__, commbench.__version__]


def test_ranks_add_what_only_torch_knows() -> None:
    import torch

    facts = json.loads(json.dumps(module.rank_facts()))
    assert facts["torch"] == torch.__version__
    assert facts["num_threads"] == torch.get_num_threads()
    assert len(facts["devices"]) == torch.cuda.device_count()


def test_it_takes_less_than_a_tenth_of_a_second_without_gpus(tools: Any) -> None:
    tools("nvidia-smi", "#!/bin/sh\nexit 9\n")
    fingerprint("cpu")  # warm disk
    # CPU time, the tools' included: unlike the wall clock it does not count what else the machine does.
    times_s = []
    for _ in range(5):
        start = os.times()
        fingerprint("cpu")
        times_s.append(sum(os.times()[:4]) - sum(start[:4]))
    assert min(times_s) < 0.1


# ---- secrets


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_API_KEY", "abc"),
        ("SGLANG_HF_TOKEN", "short"),
        ("COMMBENCH_DB_PASSWORD", "hunter2"),
        ("CUDA_CREDENTIALS_FILE", "/home/me/.c"),
        ("NCCL_SECRET", "1"),
        ("VLLM_OPTIONS", "host=a,password=hunter2"),
        ("VLLM_OPTIONS", '{"api_key": "abc"}'),
        ("TORCH_NOTE", "hf_aBcD3fGh1jKlMn0pQrStUvWxYz01234567"),
        ("TORCH_NOTE", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"),
        ("TORCH_NOTE", "x/AKIA2E0A8F3B244C9986/y"),
        ("TORCH_NOTE", "kJhGfDsAqWeRtYuIoPzXcVbNmLpOiUyTrEwQ"),
    ],
)
def test_a_value_that_looks_like_a_secret_is_redacted(name: str, value: str) -> None:
    assert redact(name, value) == REDACTED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_ALGO", "Ring,Tree"),
        ("NCCL_NET_PLUGIN", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so"),
        ("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("TORCH_CUDA_ARCH_LIST", "7.0;7.5;8.0;8.6;9.0+PTX"),
        ("NCCL_TOPO_FILE", "/usr/local/lib/python3.11/site-packages/topo/ndv5-topo.xml"),
        ("VLLM_MAX_NUM_BATCHED_TOKENS", "8192"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512"),
        ("VLLM_ATTENTION_BACKEND", "FLASHINFER"),
        ("COMMBENCH_NOTE", "aaaaaaaaaaaaaaaaaaaaaaaa1"),
    ],
)
def test_an_ordinary_setting_is_kept_as_it_is(name: str, value: str) -> None:
    assert redact(name, value) == value


def test_of_a_url_only_the_user_part_goes() -> None:
    url = "https://me:hunter2@mirror.example/simple"
    assert redact("COMMBENCH_TORCH_INDEX", url) == f"https://{REDACTED}@mirror.example/simple"


def test_only_variables_that_matter_are_told_sorted_by_name() -> None:
    env = {"VLLM_X": "1", "HOME": "/root", "NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x", "OMP_NUM_THREADS": "1"}
    assert list(relevant_env(env).items()) == [("NCCL_DEBUG", "INFO"), ("OMP_NUM_THREADS", "1"), ("VLLM_X", "1")]
    assert fingerprint("cpu", env=env)["env"] == relevant_env(env)


# ---- GPUs, by stand-ins for the vendors' tools


def test_gpus_are_read_with_driver_clocks_and_topology(tools: Any) -> None:
    tools("nvidia-smi", NVIDIA_SMI)
    found = fingerprint("cuda")["accelerators"]
    assert (found["kind"], found["driver"], found["notes"]) == ("cuda", "570.1", [])
    assert [d["name"] for d in found["devices"]] == ["NVIDIA H200"] * 2
    assert found["devices"][0]["clocks.max.sm_MHz"] == "1980"
    assert found["devices"][1]["clocks.max.sm_MHz"] is None
    assert "NV18" in found["topology"]


def test_a_driver_that_refuses_a_field_is_asked_for_fewer(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tools("nvidia-smi", NVIDIA_SMI)
    monkeypatch.setenv("OLD_DRIVER", "1")
    found = fingerprint("cpu")["accelerators"]
    assert found["devices"] == [{"index": "0", "name": "Tesla K80", "uuid": "GPU-1", "driver_version": "470.2"}]
    assert "not a valid field" in found["notes"][0]


def test_a_tool_that_fails_or_hangs_leaves_a_note_and_no_devices(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tools("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    tools("rocm-smi", "#!/bin/sh\nexec sleep 30\n")
    monkeypatch.setattr(module, "_TOOL_TIMEOUT_S", 0.2)
    found = fingerprint("cpu")["accelerators"]
    assert found["devices"] == []
    assert found["kind"] is None
    assert any("NVIDIA-SMI has failed" in note for note in found["notes"])
    assert any("rocm-smi" in note and "timed out" in note for note in found["notes"])


def test_amd_gpus_are_read_from_a_table_with_noise_around_it() -> None:
    text = "WARNING: low power\n\ndevice,Card series,sclk clock speed:\ncard0,MI300X,(132Mhz)\ncard1,MI300X,N/A\n\n"
    assert parse_rocm_csv(text) == [
        {"device": "card0", "Card series": "MI300X", "sclk clock speed:": "(132Mhz)"},
        {"device": "card1", "Card series": "MI300X", "sclk clock speed:": None},
    ]


def test_a_gpu_name_with_a_comma_in_quotes_stays_one_field() -> None:
    assert parse_nvidia_csv('index, name\n0, "A, B"\n') == [{"index": "0", "name": "A, B"}]


# ---- the checkout


def test_a_checkout_tells_its_commit_and_whether_its_sources_were_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        settings = ["-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *settings, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    (tmp_path / "commbench").mkdir()
    (tmp_path / "commbench" / "a.py").write_text("1\n")
    (tmp_path / "pyproject.toml").write_text("")
    assert git_state(tmp_path) == {"git_sha": None, "git_dirty": None}
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    clean = {"git_sha": git("rev-parse", "HEAD"), "git_dirty": False}
    assert git_state(tmp_path) == clean
    (tmp_path / "notes.txt").write_text("no source")
    assert git_state(tmp_path) == clean
    (tmp_path / "commbench" / "b.py").write_text("new, and unknown to git\n")
    assert git_state(tmp_path) == clean | {"git_dirty": True}


def test_an_installed_commbench_inside_another_projects_checkout_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert git_state(tmp_path / ".venv" / "lib" / "site-packages") == {"git_sha": None, "git_dirty": None}


# ---- comparing


def changed(taken: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    section, _, key = path.partition(".")
    other = copy.deepcopy(taken)
    other[section][key] = value
    return other


def test_a_fingerprint_does_not_differ_from_itself(taken: dict[str, Any]) -> None:
    assert differences(taken, json.loads(json.dumps(taken))) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [("load.load_1m", 99.0), ("memory.available_bytes", 1), ("memory.shm_free_bytes", 1), ("host.product", "another")],
)
def test_what_does_not_change_times_is_not_compared(taken: dict[str, Any], path: str, value: object) -> None:
    assert differences(taken, changed(taken, path, value)) == []


def test_each_difference_names_the_field_and_both_values(taken: dict[str, Any]) -> None:
    assert differences(changed(taken, "cpu.governor", "powersave"), changed(taken, "cpu.governor", "performance")) == [
        "cpu.governor: powersave → performance"
    ]
    other = changed(taken, "versions.torch", "2.6.0")
    assert differences(taken, other) == [f"versions.torch: {taken['versions']['torch']} → 2.6.0"]


def test_an_environment_variable_that_only_one_has_is_a_difference(taken: dict[str, Any]) -> None:
    plain, ring = changed(taken, "env.X", "1"), changed(taken, "env.X", "1")
    ring["env"]["NCCL_ALGO"] = "Ring"
    assert differences(plain, ring) == ["env.NCCL_ALGO: not set → Ring"]
    assert differences(ring, plain) == ["env.NCCL_ALGO: Ring → not set"]


def test_memory_may_differ_by_what_the_kernel_keeps_for_itself(taken: dict[str, Any]) -> None:
    total = taken["memory"]["total_bytes"]
    assert differences(taken, changed(taken, "memory.total_bytes", int(total * 0.995))) == []
    assert len(differences(taken, changed(taken, "memory.total_bytes", total // 2))) == 1


def test_a_gpu_setting_is_a_difference_and_its_current_clock_is_not(taken: dict[str, Any]) -> None:
    def with_gpu(clock: str, limit: str, count: int = 1) -> dict[str, Any]:
        device = {"name": "H200", "clocks.current.sm_MHz": clock, "power.limit_W": limit}
        return changed(taken, "accelerators.devices", [device] * count)

    assert differences(with_gpu("345", "700"), with_gpu("1980", "700")) == []
    assert differences(with_gpu("345", "700"), with_gpu("345", "500")) == [
        "accelerators.devices[0].power.limit_W: 700 → 500"
    ]
    assert differences(with_gpu("345", "700"), with_gpu("345", "700", count=2)) == [
        "accelerators.devices: 1 devices → 2 devices"
    ]


def test_a_field_that_an_older_commbench_did_not_write_is_not_a_difference(taken: dict[str, Any]) -> None:
    older = copy.deepcopy(taken)
    del older["cpu"]["microcode"], older["clock"]
    assert differences(older, taken) == []
    assert differences(taken | {"rank": {"nccl": "2.27"}}, taken) == []
    both = taken | {"rank": {"nccl": "2.27"}}, taken | {"rank": {"nccl": "2.28"}}
    assert differences(*both) == ["rank.nccl: 2.27 → 2.28"]


@pytest.mark.parametrize(("text", "cpus"), [("", []), ("0", [0]), ("0-2,5", [0, 1, 2, 5]), ("3,8-9", [3, 8, 9])])
def test_cpu_lists_are_read_and_written_as_the_kernel_writes_them(text: str, cpus: list[int]) -> None:
    assert parse_cpu_list(text) == cpus
    assert format_cpu_list(cpus) == text
