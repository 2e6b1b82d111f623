"""What docs/security.md promises: who can reach our sockets and files, what is never evaluated or recorded."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import commbench
from commbench.errors import SpecError

SOURCE = Path(commbench.__file__).parent
# Ranks of one job hand each other Python objects through their process group, whose network they trust.
AMONG_RANKS = {"coordinator/objects.py"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_METHODS = {"read_pickle", "load_pickle"}


def offences(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [
                alias.name.partition(".")[0]
                for alias in node.names
                if alias.name.partition(".")[0] in FORBIDDEN_MODULES
            ]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FORBIDDEN_MODULES:
            names = [str(node.module)]
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in FORBIDDEN_CALLS:
                names = [called.id]
            elif isinstance(called, ast.Attribute):
                owner = called.value.id if isinstance(called.value, ast.Name) else ""
                risky = called.attr in FORBIDDEN_METHODS or (owner, called.attr) in {("torch", "load"), ("np", "load")}
                names = [f"{owner}.{called.attr}"] if risky else []
                names += ["shell=True" for k in node.keywords if k.arg == "shell" and getattr(k.value, "value", True)]
        found += [f"{path.relative_to(SOURCE)}:{node.lineno} {name}" for name in names]  # type: ignore[attr-defined]
    return found


def test_nothing_that_is_read_from_files_or_logs_is_unpickled_or_evaluated() -> None:
    files = [p for p in SOURCE.rglob("*.py") if str(p.relative_to(SOURCE)) not in AMONG_RANKS]
    assert len(files) > 100
    assert [offence for path in files for offence in offences(path)] == []


def test_the_search_for_evaluated_input_finds_it(tmp_path: Path) -> None:
    bad = SOURCE / "coordinator" / "objects.py"
    assert any("pickle" in offence for offence in offences(bad))


# ---- files and sockets --------------------------------------------------------------------------------------


def test_shared_memory_has_random_names_and_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from commbench.native.segment import DIR_VARIABLE, create_file

    monkeypatch.setenv(DIR_VARIABLE, str(tmp_path))
    made = [create_file(4096) for _ in range(2)]
    try:
        names = {path.name for _, path in made}
        assert len(names) == 2
        for fd, path in made:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert len(path.name) >= len("commbench-") + 32, "128 random bits"
            assert os.fstat(fd).st_ino == path.stat().st_ino
    finally:
        for fd, path in made:
            os.close(fd)
            path.unlink()


def test_no_descriptor_or_segment_follows_a_link_that_somebody_laid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commbench.native import segment

    (tmp_path / f"commbench-{'0' * 32}").symlink_to("/etc/passwd")
    monkeypatch.setattr(segment.secrets, "token_hex", lambda count: "0" * 2 * count)
    with pytest.raises(OSError):
        segment.make_file(tmp_path)


@pytest.mark.slow
def test_every_socket_of_a_sweep_on_one_host_listens_on_loopback(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--collectives", "all_reduce", "--sizes", "8:4KiB:x2", "--max-time-per-point", "1s", "--out", str(out)]
    environment = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    job = subprocess.Popen(
        [sys.executable, "-m", "commbench", "sweep", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    seen: set[str] = set()
    busiest = 0
    while job.poll() is None:
        with contextlib.suppress(psutil.Error):
            family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
            sockets = [c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
            seen |= set(sockets)
            busiest = max(busiest, len(sockets))
        time.sleep(0.1)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 0, said
    assert busiest >= 3, "the rendezvous and both ranks were seen"
    assert seen == {"127.0.0.1"}


# ---- secrets ------------------------------------------------------------------------------------------------


def test_no_secret_of_the_environment_or_the_command_line_reaches_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commbench.harness.run import new_manifest, prepare
    from commbench.sweep import make_spec

    secret = "hunter2hunter2"
    for name in ("COMMBENCH_API_TOKEN", "NCCL_PASSWORD", "SGLANG_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("COMMBENCH_INDEX", f"https://user:{secret}@mirror.example/simple")
    spec = make_spec({"device": "cpu", "sizes": "8"}, {})
    argv = ["commbench", "sweep", f"--otlp-endpoint=https://me:{secret}@collector.example", f"password={secret}"]
    text = json.dumps(new_manifest(spec, *prepare(spec), tmp_path, argv), default=str)
    assert secret not in text
    assert "collector.example" in text, "what is no secret stays"


def test_a_secret_among_mpiruns_options_is_refused_before_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from commbench.harness import run
    from commbench.sweep import make_spec

    monkeypatch.setattr(run, "find_mpirun", lambda: None)
    spec = make_spec({"device": "cpu", "launcher": "mpirun", "mpirun_options": "-x HF_TOKEN=abc"}, {})
    with pytest.raises(SpecError, match=r"looks like a secret.*name it only, such as -x NAME"):
        run.prepare(spec)
    run.prepare(make_spec({"device": "cpu", "launcher": "mpirun", "mpirun_options": "-x HF_TOKEN --hostfile h"}, {}))


def test_what_a_page_shows_is_escaped() -> None:
    """The page's own test writes hostile names into every field; here only that nobody turned escaping off."""
    for path in (SOURCE / "report").rglob("*.j2"):
        text = path.read_text()
        assert "autoescape false" not in text
        assert "|safe" not in text.replace(" ", "")
    assert "autoescape=True" in (SOURCE / "report" / "html.py").read_text()
