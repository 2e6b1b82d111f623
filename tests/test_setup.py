"""run_bench.sh: what it installs, when, from where, and what it says when it cannot.

pip, torch, commbench and pytest are stand-ins that write down how they were called, so that these tests need no network
and take seconds; the interpreter and the environments it makes are real.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
BASH = shutil.which("bash") or "bash"
pytestmark = pytest.mark.skipif(os.name != "posix", reason="run_bench.sh is for POSIX systems")

# Found in front of the real packages, by PYTHONPATH.
PIP = """
import os, pathlib, re, sys, time
calls = pathlib.Path(os.environ["CALLS"])
if sys.argv[1] == "install":
    with calls.open("a") as file:
        print(*sys.argv[2:], file=file)
    if re.search(os.environ.get("PIP_HANGS_AT", "^$"), " ".join(sys.argv)):
        calls.with_suffix(".hangs").touch()
        time.sleep(60)
    if re.search(os.environ.get("PIP_FAILS_AT", "^$"), " ".join(sys.argv)):
        if "--log" in sys.argv:
            pathlib.Path(sys.argv[sys.argv.index("--log") + 1]).write_text(os.environ.get("PIP_SAYS", ""))
        sys.exit("ERROR: " + os.environ.get("PIP_SAYS", "no"))
"""
PACKAGES = {
    "pip/__main__.py": PIP,
    "pip/__init__.py": "",
    "commbench/__main__.py": "import os, sys; print('commbench', *sys.argv[1:], 'in', os.getcwd())",
    "commbench/__init__.py": "",
    "commbench/native/__init__.py": "import os\nwhy_unavailable = lambda: os.environ.get('NATIVE_MISSING', '')",
    "pytest/__main__.py": "import os, sys; print('pytest', *sys.argv[1:], 'in', os.getcwd()); sys.exit(5)",
    "pytest/__init__.py": "",
}
# The interpreter of these tests, but environments come without pip: the stand-in serves, and it saves seconds.
PYTHON = f"""
if [ "$1 $2" = "-m venv" ]; then shift 2; set -- -m venv --without-pip "$@"; fi
exec "{sys.executable}" "$@"
"""
TORCH = "__version__ = {!r}\n"


class Checkout:
    """A copy of the files that run_bench.sh looks at, and a PATH without GPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root / "a checkout"
        self.bin, self.packages, self.calls_file = root / "bin", root / "packages", root / "calls"
        (self.root / "commbench" / "native" / "src").mkdir(parents=True)
        (self.root / "commbench" / "native" / "src" / "a.cpp").write_text("int a;")
        for name in ("run_bench.sh", "pyproject.toml", "constraints-dev.txt"):
            shutil.copy(REPOSITORY / name, self.root / name)
        for name, text in PACKAGES.items():
            self.put(self.packages / name, text)
        self.put(self.packages / "torch/__init__.py", TORCH.format("2.13.0"))
        self.bin.mkdir()
        self.script("nvidia-smi", "exit 9")
        self.script("rocm-smi", "exit 9")
        self.script("python3", PYTHON)
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(root),
            "CALLS": str(self.calls_file),
            "PYTHONPATH": str(self.packages),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COMMBENCH_TORCH_INDEX": "",
            # Should the real pip run by mistake, it must fail, and not download torch.
            "PIP_NO_INDEX": "1",
            "PIP_CONFIG_FILE": os.devnull,
        }

    @staticmethod
    def put(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def script(self, name: str, text: str) -> None:
        self.put(self.bin / name, f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

    def run(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [BASH, str(self.root / "run_bench.sh"), *words]
        return subprocess.run(command, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[str]:
        """What pip was asked to install since the last call of this."""
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text().splitlines()
        self.calls_file.unlink()
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def index() -> Iterator[tuple[str, list[str]]]:
    """A package index on this host: its address, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def use_index(checkout: Checkout, address: str) -> None:
    """PyTorch's own address in this copy of the script becomes ``address``; no variable overrides it."""
    script = checkout.root / "run_bench.sh"
    text = script.read_text()
    assert "PYTORCH_INDEX=https://download.pytorch.org/whl\n" in text
    script.write_text(text.replace("PYTORCH_INDEX=https://download.pytorch.org/whl\n", f"PYTORCH_INDEX={address}\n"))
    del checkout.env["COMMBENCH_TORCH_INDEX"]


def activate(checkout: Checkout, torch: str | None, variable: str = "VIRTUAL_ENV") -> Path:
    """An activated environment of the user's, with that torch or none, and not found through PYTHONPATH."""
    prefix = checkout.root.parent / "users environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True, timeout=60)
    shutil.rmtree(checkout.packages / "torch")
    if torch:
        site = next(prefix.glob("lib/python3*/site-packages"))
        checkout.put(site / "torch" / "__init__.py", TORCH.format(torch))
    checkout.env[variable] = str(prefix)
    return prefix


# ---- the ordinary course


def test_the_first_run_makes_an_environment_installs_and_measures(checkout: Checkout) -> None:
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"commbench sweep sweeps/quick.toml in {checkout.root}\n"
    torch, requirements, package = checkout.calls()
    assert torch.endswith(" torch==2.13.0")
    assert requirements.startswith("-r ")
    assert package == f"--no-deps -e {checkout.root}"
    assert (checkout.root / ".venv" / "bin" / "python").exists()


def test_a_second_run_installs_nothing(checkout: Checkout) -> None:
    checkout.run()
    checkout.calls()
    again = checkout.run(cwd=checkout.root)
    assert again.returncode == 0
    assert again.stderr == ""
    assert checkout.calls() == []


def test_from_another_folder_it_says_where_the_paths_it_names_start(checkout: Checkout, tmp_path: Path) -> None:
    assert f"paths below start at {checkout.root}" in checkout.run(cwd=tmp_path).stderr


def test_other_arguments_go_to_commbench_in_the_users_folder(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.run("sweep", "--tp", "4", "--sizes", "8, 16", cwd=tmp_path)
    assert done.stdout == f"commbench sweep --tp 4 --sizes 8, 16 in {tmp_path}\n"


def test_set_up_says_nothing_on_stdout_so_that_json_stays_json(checkout: Checkout) -> None:
    done = checkout.run("sweep", "--json")
    assert done.stdout.startswith("commbench sweep --json")
    assert "set-up complete" in done.stderr


def test_the_tests_run_with_the_development_tools_and_their_exit_status(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.run("test", "-k", "x", cwd=tmp_path)
    assert done.returncode == 5
    assert done.stdout == f"pytest -k x in {checkout.root}\n"
    assert any(call.endswith(f"-c {checkout.root}/constraints-dev.txt") for call in checkout.calls())


def test_after_the_tests_a_measurement_needs_no_second_set_up_but_the_reverse_does(checkout: Checkout) -> None:
    checkout.run("sweep")
    checkout.calls()
    checkout.run("test")
    assert len(checkout.calls()) == 3
    checkout.run("sweep")
    checkout.run("test")
    assert checkout.calls() == []


@pytest.mark.parametrize(
    "changed",
    [
        "pyproject.toml",
        "commbench/native/src/a.cpp",
        "commbench/native/src/new.hpp",
        "commbench/new/__init__.py",  # an editable installation would look for commbench/new.py
    ],
)
def test_a_change_of_what_is_built_sets_up_again(checkout: Checkout, changed: str) -> None:
    checkout.run("sweep")
    checkout.calls()
    (checkout.root / changed).parent.mkdir(exist_ok=True)
    with (checkout.root / changed).open("a") as file:
        file.write("\n")
    checkout.run("sweep")
    assert len(checkout.calls()) == 3


def test_pip_is_never_given_torch_and_another_package_to_resolve_together(checkout: Checkout) -> None:
    checkout.env["PIP_FAILS_AT"] = "-r "
    assert checkout.run("test").returncode == 2
    listed = (checkout.root / ".venv" / "commbench-requirements.txt").read_text().splitlines()
    assert any(line.startswith("numpy") for line in listed)
    assert any(line.startswith("pytest") for line in listed)
    assert not any(line.startswith("torch") for line in listed)


# ---- where torch comes from


def test_without_a_gpu_torch_comes_from_pytorchs_index_of_cpu_builds(
    checkout: Checkout, index: tuple[str, list[str]]
) -> None:
    address, asked = index
    use_index(checkout, address)
    checkout.run("sweep")
    assert asked == ["/cpu/torch/"]
    assert f"--index-url {address}/cpu torch==2.13.0" in checkout.calls()[0]


def test_an_index_that_does_not_answer_in_time_is_passed_over(checkout: Checkout) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        use_index(checkout, f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        done = checkout.run("sweep")
        assert done.returncode == 0
        assert time.monotonic() - start < 20
    assert "--index-url" not in checkout.calls()[0]


def test_the_index_and_the_torch_can_be_chosen(checkout: Checkout) -> None:
    checkout.env |= {"COMMBENCH_TORCH_INDEX": "https://mirror.invalid/whl", "COMMBENCH_TORCH": "torch==2.8.0"}
    checkout.run("sweep")
    assert checkout.calls()[0].endswith("--index-url https://mirror.invalid/whl torch==2.8.0")


def test_with_an_nvidia_gpu_torch_is_what_pip_gives(checkout: Checkout, index: tuple[str, list[str]]) -> None:
    address, asked = index
    use_index(checkout, address)
    checkout.script("nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"')
    checkout.run("sweep")
    assert asked == []
    assert "--index-url" not in checkout.calls()[0]


def test_with_an_amd_gpu_torch_comes_from_the_index_of_its_rocm_release(
    checkout: Checkout, index: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, _ = index
    use_index(checkout, address)
    checkout.script("rocm-smi", 'echo "GPU[0]   : Card series: MI300X"')
    checkout.put(tmp_path / "rocm/.info/version", "6.4.1-83\n")
    checkout.env["ROCM_PATH"] = str(tmp_path / "rocm")
    checkout.run("sweep")
    assert f"--index-url {address}/rocm6.4 " in checkout.calls()[0]


def test_where_the_pinned_torch_has_no_build_the_oldest_supported_or_newer_is_taken(checkout: Checkout) -> None:
    checkout.env |= {
        "PIP_FAILS_AT": "torch==2.13.0",
        "PIP_SAYS": "No matching distribution found for torch==2.13.0",
    }
    done = checkout.run("sweep")
    assert done.returncode == 0, done.stderr
    assert [call.split()[-1] for call in checkout.calls()[:2]] == ["torch==2.13.0", "torch>=2.6"]


def test_a_chosen_torch_that_does_not_exist_is_not_replaced_by_another(checkout: Checkout) -> None:
    checkout.env |= {
        "COMMBENCH_TORCH": "torch==9.9",
        "PIP_FAILS_AT": "torch==",
        "PIP_SAYS": "No matching distribution found for torch==9.9",
    }
    done = checkout.run("sweep")
    assert done.returncode == 2
    assert "no torch build for this Python" in done.stderr
    assert len(checkout.calls()) == 1


def test_a_network_that_fails_is_not_taken_for_a_missing_build(checkout: Checkout) -> None:
    checkout.env |= {
        "PIP_FAILS_AT": "torch==",
        "PIP_SAYS": "WARNING: Retrying (Retry(total=4))\nERROR: No matching distribution found for torch==2.13.0",
    }
    done = checkout.run("sweep")
    assert done.returncode == 2
    assert len(checkout.calls()) == 1


# ---- an activated environment


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
@pytest.mark.parametrize("torch", ["2.6.0a0+ecf3bae40a.nv25.01", "2.14.1+cu130"])
def test_a_torch_in_an_activated_environment_is_used_as_it_is(checkout: Checkout, torch: str, variable: str) -> None:
    prefix = activate(checkout, torch, variable)
    done = checkout.run("sweep")
    assert done.returncode == 0, done.stderr
    assert torch in done.stderr
    requirements, package = checkout.calls()
    assert requirements.startswith(f"-r {prefix}/")
    assert package.startswith("--no-deps -e ")
    assert not (checkout.root / ".venv").exists()
    assert checkout.run("sweep").stderr == ""
    assert checkout.calls() == []


def test_an_activated_environment_without_torch_is_left_alone(checkout: Checkout) -> None:
    prefix = activate(checkout, None)
    checkout.put(checkout.packages / "torch" / "__init__.py", TORCH.format("2.13.0"))
    checkout.env["PYTHONPATH"] = ""
    checkout.env["COMMBENCH_PYTHON"] = str(checkout.bin / "with-packages")
    checkout.script("with-packages", f'export PYTHONPATH="{checkout.packages}"\n{PYTHON}')
    before = sorted(path for path in prefix.rglob("*"))
    checkout.run("sweep")
    assert (checkout.root / ".venv").exists()
    assert sorted(path for path in prefix.rglob("*")) == before


def test_an_activated_torch_that_is_too_old_gets_one_clear_line(checkout: Checkout) -> None:
    activate(checkout, "2.5.1")
    done = checkout.run("sweep")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "has torch 2.5.1" in line
    assert "needs 2.6 or newer" in line
    assert "deactivate" in line
    assert checkout.calls() == []


# ---- what can be wrong


def old_python(checkout: Checkout, name: str) -> None:
    checkout.script(name, 'case "$1" in -V) echo Python 3.9.2 ;; *) exit 1 ;; esac')


def test_an_old_python_gets_one_clear_line(checkout: Checkout) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        old_python(checkout, name)
    done = checkout.run()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "needs Python 3.11 or newer, and found Python 3.9.2" in line
    assert "COMMBENCH_PYTHON" in line
    assert not (checkout.root / ".venv").exists()


def test_a_newer_python_beside_an_old_python3_is_found(checkout: Checkout) -> None:
    for name in ("python3", "python3.13"):
        old_python(checkout, name)
    checkout.script("python3.12", PYTHON)
    assert checkout.run("sweep").returncode == 0


def test_a_chosen_python_that_does_not_run_is_named(checkout: Checkout) -> None:
    checkout.env["COMMBENCH_PYTHON"] = "/nowhere/python"
    done = checkout.run()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "COMMBENCH_PYTHON=/nowhere/python" in line


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_missing_venv_module_gets_one_clear_line(checkout: Checkout, module: str) -> None:
    checkout.put(checkout.packages / module / "__init__.py", "raise ImportError")
    done = checkout.run()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "python3 has no venv module" in line
    assert "apt install python3-venv" in line


def test_a_native_module_that_could_not_be_built_is_told_with_the_way_to_get_it(checkout: Checkout) -> None:
    checkout.env["NATIVE_MISSING"] = "the native module was not built"
    done = checkout.run()
    assert done.returncode == 0
    assert "the native module was not built, so the shared-memory backends are missing" in done.stderr
    assert "C++17 compiler" in done.stderr


def test_after_a_failed_installation_the_next_run_goes_on_from_what_is_there(checkout: Checkout) -> None:
    checkout.env["PIP_FAILS_AT"] = "--no-deps"
    done = checkout.run()
    assert done.returncode == 2
    assert "could not install commbench" in done.stderr.splitlines()[-1]
    kept = checkout.root / ".venv" / "kept"
    kept.touch()
    del checkout.env["PIP_FAILS_AT"]
    checkout.calls()
    assert checkout.run().returncode == 0
    assert kept.exists()
    assert len(checkout.calls()) == 3


@pytest.mark.parametrize("wait_for", ["torch==", "-r ", "--no-deps"])
def test_an_interrupted_set_up_exits_130_and_the_next_run_starts_from_an_empty_environment(
    checkout: Checkout, wait_for: str
) -> None:
    checkout.env["PIP_HANGS_AT"] = wait_for
    command = [BASH, str(checkout.root / "run_bench.sh")]
    running = subprocess.Popen(command, env=checkout.env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 30
    while not checkout.calls_file.with_suffix(".hangs").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)  # as Ctrl-C does
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "run this again to finish the set-up" in said
    leftover = checkout.root / ".venv" / "half a package"
    leftover.touch()
    del checkout.env["PIP_HANGS_AT"]
    assert checkout.run().returncode == 0
    assert not leftover.exists()


def test_an_environment_whose_python_is_gone_is_made_anew(checkout: Checkout) -> None:
    checkout.run()
    (checkout.root / ".venv" / "bin" / "python").unlink()
    (checkout.root / ".venv" / "bin" / "python").symlink_to("/nowhere/python")
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert "making" in done.stderr


def test_two_set_ups_at_once_wait_for_each_other_and_only_one_installs(checkout: Checkout) -> None:
    command = [BASH, str(checkout.root / "run_bench.sh"), "sweep"]
    running = [
        subprocess.Popen(command, env=checkout.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)
    ]
    for process in running:
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert len(checkout.calls()) == 3


def test_a_shell_linter_finds_nothing() -> None:
    linter = shutil.which("shellcheck")
    if linter is None:
        pytest.skip("shellcheck is not installed")
    scripts = [str(REPOSITORY / "run_bench.sh"), str(REPOSITORY / ".ci" / "run")]
    done = subprocess.run([linter, *scripts], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
