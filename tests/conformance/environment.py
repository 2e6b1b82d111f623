"""An environment that has a release of an engine beside this one's torch and numpy, made once per test session."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

import pytest

SGLANG = "sglang==0.5.3"
REPOSITORY = Path(__file__).resolve().parents[2]


@functools.cache
def _make(release: str) -> tuple[str, str]:
    """(path of the environment's Python, "") or ("", why it cannot be made)."""
    home = Path(tempfile.mkdtemp(prefix="commbench-conformance-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--retries", "0", "--timeout", "20"]
    done = subprocess.run([*install, "--target", site, release], capture_output=True, text=True, check=False)
    if done.returncode:
        return "", f"{release} cannot be installed from the registry: {done.stderr.strip().splitlines()[-1]}"
    (Path(site) / "torch-from-here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(python), ""


def python_with(release: str) -> str:
    """The Python of an environment with that release's wheel, without its dependencies. Skips the test, saying why,
    where the registry cannot be reached."""
    python, problem = _make(release)
    if problem:
        pytest.skip(problem)
    return python


def clean_environment() -> dict[str, str]:
    """This process's variables without those that engines read, and with the checkout importable."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "ROCM_", "PYTHONPATH"))}
    return {**clean, "PYTHONPATH": str(REPOSITORY)}
