"""The nightly job of the docs, run as it stands, against a local history.

Measuring is replaced by runs with scripted latencies (a stand-in for ``commbench sweep`` on the PATH of the script);
judging and keeping are the real program. The last test measures for real.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "nightly" / "nightly.sh"

STAND_IN = """#!{python}
import json, os, runpy, sys
from pathlib import Path
if sys.argv[1] == "sweep":
    from tests.nights import DAY_S, START_S, points_of, write_run
    night = json.loads(os.environ["NIGHT_SCRIPT"])
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    launches = int(sys.argv[sys.argv.index("--launches") + 1])
    write_run(out, points_of(sizes=(64, 65536)), launches=launches, seed=night["day"],
              started_s=START_S + night["day"] * DAY_S, canary_factor=night.get("canary", 1.0),
              slower=lambda p: night.get("factor", 1.0) if p.backend == "shm" else 1.0)
else:
    runpy.run_module("commbench", run_name="__main__")
"""


Night = Callable[..., subprocess.CompletedProcess[str]]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def night(tmp_path: Path) -> Night:
    """Run the script for one night."""
    stand_in = tmp_path / "commbench"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)

    def run(day: int, **script: float) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "COMMBENCH": str(stand_in), "HISTORY": str(tmp_path / "history"),
            "NIGHT": str(tmp_path / f"night{day}"), "NIGHT_SCRIPT": json.dumps({"day": day, **script}),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        }  # fmt: skip
        return subprocess.run(
            ["bash", str(SCRIPT)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200
        )

    return run


def test_the_job_goes_green_red_and_inconclusive_as_it_should(
    night: Callable[..., subprocess.CompletedProcess[str]],
    commbench: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
) -> None:
    from tests.nights import DAY_S, START_S, points_of, write_run

    first = night(0)
    assert first.returncode == 3, first.stdout + first.stderr  # nothing to judge by; the night is kept
    for day in range(1, 8):
        run = write_run(tmp_path / f"n{day}", points_of(sizes=(64, 65536)), launches=2, seed=day,
                        started_s=START_S + day * DAY_S)  # fmt: skip
        assert commbench("history", "add", str(run), "--history", str(tmp_path / "history"))[0] == 0
    usual, slow, noisy = night(8), night(9, factor=1.2), night(10, factor=1.2, canary=1.4)
    assert [usual.returncode, slow.returncode, noisy.returncode] == [0, 1, 3], usual.stdout + slow.stdout
    assert "::error title=all_" in slow.stdout
    assert "the machine changed" in noisy.stdout
    kept = {p.stem for p in (tmp_path / "history").glob("*.parquet")}
    assert kept == {"night0", *(f"n{d}" for d in range(1, 8)), "night8"}
    summary = (tmp_path / "summary.md").read_text()
    assert [summary.count(f"commbench gate: {s}") for s in ("pass", "regression", "inconclusive")] == [1, 1, 2]
    assert (tmp_path / "night9" / "gate" / "junit.xml").exists()


def test_bad_input_ends_the_night_with_its_own_exit_code(tmp_path: Path) -> None:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "COMMBENCH": f"{sys.executable} -m commbench", "SPEC": "nosuchsweep",
        "HISTORY": str(tmp_path / "h"), "NIGHT": str(tmp_path / "n"),
    }  # fmt: skip
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown sweep 'nosuchsweep'" in done.stderr


@contextmanager
def _load(night: Path) -> Iterator[None]:
    """While the ranks of a night measure, eight processes for each core do so too; starting ranks is left in peace."""
    hog = "a = bytearray(64 << 20)\nwhile True: b = bytes(a)"
    many = range(8 * (os.cpu_count() or 1))
    hogs = [subprocess.Popen([sys.executable, "-c", hog], start_new_session=True) for _ in many]
    over = threading.Event()

    def measuring() -> bool:
        progress = night / "progress.jsonl"
        lines = progress.read_text().splitlines() if progress.exists() else []
        return bool(lines) and json.loads(lines[-1])["event"] != "done"

    def follow() -> None:
        while not over.wait(0.05):
            for process in hogs:
                process.send_signal(signal.SIGCONT if measuring() else signal.SIGSTOP)

    follower = threading.Thread(target=follow)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()
        for process in hogs:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not os.environ.get("COMMBENCH_REHEARSAL"), reason="needs a quiet machine; set COMMBENCH_REHEARSAL=1"
)
def test_real_nights_go_green_red_and_inconclusive_as_they_should(tmp_path: Path) -> None:
    """Eight nights, a usual one, a slow one and one on a busy machine: real launches of the fake backend, whose calls
    last what the script says."""
    spec = tmp_path / "tiny.toml"
    spec.write_text('[sweep]\ncollectives = ["all_reduce"]\ndtypes = ["float32"]\nsizes = "1KiB,64KiB"\n'
                    'backends = ["fake"]\n[run]\nmax_time_per_point = "0.1s"\n')  # fmt: skip

    def run(name: str, launches: int, duration_s: float) -> int:
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "COMMBENCH": f"{sys.executable} -m commbench", "SPEC": str(spec),
            "HISTORY": str(tmp_path / "history"), "NIGHT": str(tmp_path / name), "LAUNCHES": str(launches),
            "COMMBENCH_FAKE": json.dumps({"duration_s": duration_s}),
        }  # fmt: skip
        return subprocess.run(["bash", str(SCRIPT)], env=environment, cwd=tmp_path, timeout=400).returncode

    assert [run(f"n{k}", 1, 1e-4) for k in range(8)] == [3] * 8  # nothing to judge by yet
    assert run("usual", 8, 1e-4) == 0
    assert run("slow", 8, 1.3e-4) == 1
    with _load(tmp_path / "noisy"):
        assert run("noisy", 8, 1e-4) == 3
    assert "<failure" in (tmp_path / "slow" / "gate" / "junit.xml").read_text()
