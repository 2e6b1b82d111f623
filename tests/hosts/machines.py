"""Hosts on one machine: network, UTS, IPC, mount and time namespaces, joined by veth pairs on a bridge.

Each has a name, an address, a /dev/shm, a temporary folder and, where asked for, a monotonic clock of its own. Needs
root and the tools of util-linux and iproute2; ``why_not`` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.harness.faults import quick_stacks

NETWORK = "10.87.0"
_HOLD = "mount -t tmpfs -o size=1g tmpfs /dev/shm && hostname {name} && ip link set lo up && echo $$ && exec sleep 900"


def why_not() -> str:
    """Why such hosts cannot be made here, "" if they can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    try:
        with hosts(1, clocks=[1000.0]) as (only,):
            only.run(["true"], timeout=20).check_returncode()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"namespaces cannot be made: {str(said).strip().splitlines()[-1] if str(said).strip() else error!r}"
    return ""


@dataclass(slots=True)
class Host:
    """One host. ``pid`` holds its namespaces; ``cable`` is its end at the bridge; ``temporary`` is where its programs
    put what is temporary."""

    number: int
    name: str
    pid: int
    hub: int
    temporary: Path
    variables: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number + 1}"

    def inside(self, command: Sequence[str]) -> list[str]:
        spaces = ["--net", "--uts", "--ipc", "--mount", "--time"]
        return ["nsenter", "--target", str(self.pid), *spaces, f"--wd={Path.cwd()}", "--", *command]

    def run(self, command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.inside(command), capture_output=True, text=True, timeout=timeout)

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """A program on this host; ended with it."""
        job = subprocess.Popen(
            self.inside(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.variables, "TMPDIR": str(self.temporary)},
        )
        self.started.append(job)
        return job

    def cable(self, state: str) -> None:
        """Pull (``down``) or plug (``up``) the network cable at the switch."""
        _run(["nsenter", "--target", str(self.hub), "--net", "ip", "link", "set", f"v{self.number}", state])

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on this host, but for what holds it."""
        space = Path(f"/proc/{self.pid}/ns/uts").readlink()
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if process.pid != self.pid and Path(f"/proc/{process.pid}/ns/uts").readlink() == space:
                    found.append(process)
        return found

    def segments(self) -> list[str]:
        """What lies in this host's shared memory."""
        return self.run(["ls", "-A", "/dev/shm"], timeout=20).stdout.split()


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def _hold(command: Sequence[str]) -> tuple[subprocess.Popen[str], int]:
    """Start what keeps namespaces alive; (its process, the process inside)."""
    holder = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    assert holder.stdout is not None
    line = holder.stdout.readline().strip()
    if not line.isdigit():
        _, said = holder.communicate(timeout=20)
        raise OSError(said.strip() or f"{command[0]} said {line!r}")
    return holder, int(line)


@contextlib.contextmanager
def hosts(count: int, clocks: Sequence[float] = ()) -> Iterator[list[Host]]:
    """So many hosts on one switch. clocks: seconds by which each host's monotonic clock is ahead of the machine's.

    At the end everything that still runs on them is killed. Raises OSError or subprocess.SubprocessError where they
    cannot be made.
    """
    with contextlib.ExitStack() as stack:
        hub, hub_pid = _hold(["unshare", "--net", "--kill-child", "--fork", "sh", "-c", "echo $$ && exec sleep 900"])
        stack.callback(_end, hub)
        inside = ["nsenter", "--target", str(hub_pid), "--net", "ip", "link"]
        _run([*inside, "add", "br0", "type", "bridge"])
        _run([*inside, "set", "br0", "up"])
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        variables = quick_stacks(folder)
        made = []
        for number in range(count):
            name = f"host{chr(ord('a') + number)}"
            ahead = ["--time", "--monotonic", str(int(clocks[number]))] if number < len(clocks) else []
            script = _HOLD.format(name=name)
            spaces = ["--net", "--uts", "--ipc", "--mount", *ahead, "--kill-child", "--fork"]
            holder, pid = _hold(["unshare", *spaces, "sh", "-c", script])
            stack.callback(_end, holder)
            host = Host(number, name, pid, hub_pid, folder / name, variables)
            host.temporary.mkdir()
            stack.callback(_clear, host)
            _run([*inside, "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid)])
            _run([*inside, "set", f"v{number}", "master", "br0", "up"])
            for arguments in (["addr", "add", f"{host.address}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
                host.run(["ip", *arguments], timeout=20).check_returncode()
            made.append(host)
        yield made


def _clear(host: Host) -> None:
    for process in host.processes():
        with contextlib.suppress(psutil.Error):
            process.kill()
    for job in host.started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate(timeout=20)


def _end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate(timeout=20)


def wait_for(condition: object, within_s: float, what: str) -> None:
    """Until ``condition()`` holds. Raises AssertionError."""
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} within {within_s:g} s"
        time.sleep(0.1)
