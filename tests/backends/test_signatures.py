"""What backends declare of C libraries is what the kept signatures say; and a real NCCL, as far as it goes here."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from commbench.backends import ca, pynccl, qr
from commbench.errors import BackendUnavailable
from commbench.registry import BACKENDS, CA_PROVIDERS, HARDWARE_PROVEN
from commbench.types import QUANTISED
from tests.backends.record_signatures import SOURCES, c_functions, find_wheel, load, python_functions, read_wheel
from tests.backends.simulation import is_c_type

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("provider", "declared"),
    [("nccl", {**pynccl.FUNCTIONS, **pynccl.OPTIONAL}), ("cudart", ca.RUNTIME_FUNCTIONS)],
    ids=["nccl", "cudart"],
)
def test_every_declared_c_function_has_the_types_of_its_header(provider: str, declared: dict[str, Any]) -> None:
    recorded = load(provider)["functions"]
    assert set(declared) == set(recorded)
    for name, (result, arguments) in declared.items():
        prototype = [p["type"] for p in recorded[name]["parameters"]]
        assert is_c_type(result, recorded[name]["returns"]), name
        assert len(arguments) == len(prototype), name
        for ours, theirs in zip(arguments, prototype, strict=True):
            assert is_c_type(ours, theirs), f"{name}: {theirs} is declared as {ours}"


def test_the_numbers_of_dtypes_and_ops_are_those_of_nccls_header() -> None:
    constants = load("nccl")["constants"]
    names = {"float16": "Float16", "bfloat16": "Bfloat16", "float32": "Float32", "float64": "Float64", "int8": "Int8",
             "uint8": "Uint8", "int32": "Int32", "int64": "Int64", "float8_e4m3fn": "Float8e4m3",
             "float8_e5m2": "Float8e5m2"}  # fmt: skip
    assert {getattr(torch, ours): constants[f"nccl{theirs}"] for ours, theirs in names.items()} == pynccl.DTYPE_CODES
    assert {op: constants[f"nccl{op.capitalize()}"] for op in pynccl.OP_CODES} == pynccl.OP_CODES
    assert (constants["ncclSuccess"], constants["ncclInProgress"]) == (pynccl.SUCCESS, pynccl.IN_PROGRESS)
    assert constants["NCCL_UNIQUE_ID_BYTES"] == pynccl.UNIQUE_ID_BYTES
    assert pynccl.Config().magic == constants["NCCL_API_MAGIC"]


def test_a_prototype_or_definition_that_changes_is_read_as_changed() -> None:
    header = "extern ncclResult_t  ncclSend(const void* sendbuff, size_t count, /* new */ int flags, ncclComm_t comm);"
    parameters = c_functions(header, ["ncclSend"])["ncclSend"]["parameters"]
    assert [p["type"] for p in parameters] == ["void*", "size_t", "int", "ncclComm_t"]
    file = "if torch.version.hip is not None:\n def f(a: int): ...\nelse:\n def f(a: int, b: str = ''): ...\n"
    found = python_functions(file, ["f"])
    assert [p["name"] for p in found["f@hip"]["parameters"]] == ["a"]
    assert [(p["name"], p["optional"]) for p in found["f"]["parameters"]] == [("a", False), ("b", True)]


def test_what_has_run_on_hardware_is_a_subset_of_what_is_registered_and_providers_are_listed_once() -> None:
    assert set(BACKENDS) > HARDWARE_PROVEN
    assert tuple(ca.PROVIDERS) == CA_PROVIDERS
    for name in ("pynccl", "nccl_symm", "symm_mem", "ca", "qr", "pymscclpp", "flashinfer", "hpu", "xpu", "npu"):
        assert name in BACKENDS
        assert name not in HARDWARE_PROVEN


def test_the_quick_all_reduce_levels_of_a_provider_are_checked_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    coarse = {level.lower() for levels in qr.LEVELS.values() for level in levels if level != qr.EXACT_LEVEL}
    assert coarse == set(QUANTISED)
    monkeypatch.setenv(qr.LEVEL_VARIABLE, "INT8")
    assert qr.choose_level("sgl_kernel") == "INT8"
    with pytest.raises(BackendUnavailable, match="aiter has no such level; choose one of FP, FP8, INT6, INT4"):
        qr.choose_level("aiter")


def test_an_unknown_or_missing_provider_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ca.PROVIDER_VARIABLE, "nonsense")
    with pytest.raises(BackendUnavailable, match="no provider; choose one of sgl_kernel, vllm, flashinfer"):
        ca.choose_provider()
    monkeypatch.setenv(ca.PROVIDER_VARIABLE, "vllm")
    with pytest.raises(BackendUnavailable, match="vllm is not installed; pip install vllm"):
        ca.choose_provider()
    monkeypatch.setattr(ca.devices, "kind", lambda _: "hip")
    with pytest.raises(BackendUnavailable, match="vllm has none of these kernels on hip; choose one of sgl_kernel"):
        ca.choose_provider()
    monkeypatch.delenv(ca.PROVIDER_VARIABLE)
    with pytest.raises(BackendUnavailable, match="build sgl-kernel from its sources for ROCm"):
        ca.choose_provider()


@pytest.mark.parametrize("name", [n for n in BACKENDS if n not in HARDWARE_PROVEN])
def test_a_gpu_backend_says_on_a_cpu_group_what_it_is_for_and_what_to_do(name: str) -> None:
    from commbench.registry import load_backend

    answer = load_backend(name).availability("cpu")
    assert not answer.ok
    assert "the group is on cpu" in answer.reason
    assert answer.remedy


# ---- a real NCCL -------------------------------------------------------------------------------------------------

ASK = """
import sys
from commbench.backends import pynccl
from commbench.errors import BackendUnavailable
library = pynccl.load()
print(pynccl.version(library))
first, second = pynccl.unique_id(library), pynccl.unique_id(library)
print(len(first), first != second)
try:
    pynccl.Communicator(library, 1, 0, first, 20)
    print("initialised")
except BackendUnavailable as error:
    print(error)
"""


def ask_nccl(library: str) -> list[str]:
    """In a process of its own: NCCL starts threads."""
    environment = {**os.environ, pynccl.LIBRARY_VARIABLE: library, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, cwd=REPOSITORY, env=environment,
                          timeout=60, check=True)  # fmt: skip
    return done.stdout.splitlines()


def check_answers(lines: list[str], version: int | None) -> None:
    assert int(lines[0]) >= 21800
    assert version in (None, int(lines[0]))
    assert lines[1] == "128 True"
    assert lines[2].startswith("pynccl is unavailable: ncclCommInitRankConfig failed: ")
    assert "NCCL needs a GPU of its own for each rank" in lines[2]


def test_a_real_nccl_gives_version_and_ids_and_says_honestly_that_it_cannot_start_without_a_gpu() -> None:
    for library in pynccl.candidates():
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        check_answers(ask_nccl(library), None)
        return
    pytest.skip("no NCCL library is here; the slow test takes it from its wheel")


def wheel(provider: str, folder: Path) -> Path:
    if not os.environ.get("COMMBENCH_WHEELS"):
        pytest.skip("the providers' wheels are 1.4 GB together; COMMBENCH_WHEELS=1 downloads them")
    try:
        return find_wheel(SOURCES[provider], folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{SOURCES[provider].requirement} cannot be had: {error.stderr.strip().splitlines()[-1]}")


@pytest.mark.slow
def test_the_published_nccl_gives_version_and_ids_and_fails_honestly(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel("nccl", tmp_path)) as archive:
        library = archive.extract("nvidia/nccl/lib/libnccl.so.2", tmp_path)
    check_answers(ask_nccl(library), 23203)


@pytest.mark.slow
@pytest.mark.parametrize("provider", list(SOURCES))
def test_the_kept_signatures_are_those_of_the_published_wheel(provider: str, tmp_path: Path) -> None:
    assert read_wheel(SOURCES[provider], wheel(provider, tmp_path)) == load(provider)
