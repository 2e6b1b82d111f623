"""Which GPUs a sweep may use, told without loading a library; and runs that were profiled."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path

import pytest

from commbench.errors import SpecError
from commbench.harness import run as harness
from commbench.harness.environment.comparable import compare_manifests
from commbench.sweep import make_spec


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with eight NVIDIA GPUs."""
    folder = tmp_path / "gpus"
    for i in range(8):
        (folder / f"0000:{i:02d}:00.0").mkdir(parents=True)
    monkeypatch.setattr(harness, "NVIDIA_GPUS", folder)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def torch_for(monkeypatch: pytest.MonkeyPatch, folder: Path, cuda: str) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip = None\n")
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(folder / "torch" / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)


@pytest.mark.parametrize(("shown", "count"), [(None, 8), ("0,1", 2), ("", 0), ("-1", 0), ("GPU-aa, GPU-bb,GPU-cc", 3)])
def test_gpus_that_the_environment_hides_are_not_there(
    eight: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, count: int
) -> None:
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert harness.gpu_count() == count


@pytest.mark.parametrize(("build", "device"), [("'13.0'", "cuda"), ("None", "cpu")])
def test_auto_takes_gpus_only_where_the_installed_torch_can_use_them(
    eight: Path, monkeypatch: pytest.MonkeyPatch, build: str, device: str
) -> None:
    torch_for(monkeypatch, eight, build)
    assert harness.resolve_device(make_spec({"tp": 2}, {})) == device


def test_cuda_with_a_torch_for_the_cpu_is_refused_with_the_reason(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_for(monkeypatch, eight, "None")
    with pytest.raises(SpecError, match="this torch is built for the CPU"):
        harness.resolve_device(make_spec({"tp": 2, "device": "cuda"}, {}))


def test_a_run_that_was_profiled_is_not_compared_with_one_that_was_not() -> None:
    plain = {"schema_version": 1, "fingerprint": {"env": {}}}
    profiled = {"schema_version": 1, "fingerprint": {"env": {"COMMBENCH_PROFILE": "cpu"}}}
    assert compare_manifests(plain, profiled).refusals == ("--profile: off → on",)
    assert not compare_manifests(profiled, profiled).refusals
