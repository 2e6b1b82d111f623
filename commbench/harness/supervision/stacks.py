"""What a job that hangs is doing: stacks and states of its ranks, seen from outside, and which rank stopped first.

Python stacks come from the rank itself: faulthandler writes them in C when a signal arrives, whatever lock the rank
holds. A rank that is stopped is continued for that. The native stack and the kernel's view need nothing of the rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commbench.harness.ranks.rank import STACK_SIGNAL, log_path
from commbench.harness.supervision.heartbeat import STAGES, Pulse

STACKS_WITHIN_S = 1.5  # for a rank to write its stacks
NATIVE_WITHIN_S = 5.0
_TOLD_BYTES = 4000  # of each stack, to another host
_STACK = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*?(?=^(?:Current thread|Thread) 0x|\Z)", re.DOTALL | re.M)
# of a main thread: of a module that -m runs, or of a script
_OUTERMOST = re.compile(r"^  File .* in (?:_run_module_as_main|<module>)\n(?!  File)", re.M)
_FRAME = re.compile(r'^  File "([^"]*)", line (\d+) in (.*)$', re.M)
_LIBRARIES = r"(libc\.|libpthread|libpython|_shm|libffi|nccl|rccl|libmpi|libucp|libuct|libcuda\.|libfabric)"
# Where a rank that waits for others stands: our barriers and gates, and what carries a collective.
_WAITING = (
    "measure/team.py",
    "measure/team_hosts.py",
    "measure/gate.py",
    "measure/host.py",
    "measure/loop.py",
    "backends/torch_dist.py",
    "backends/shm.py",
    "backends/mpi.py",
    "torch/distributed/distributed_c10d.py",
)


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank of a job that does not go on. state: of its process, in the kernel's letters (T: stopped, "": gone).
    python: its stacks as faulthandler writes them, "" where none came. native: the same of gdb or py-spy, "" where
    neither is there. kernel: what the kernel tells of where it waits. host: the other host that it runs on, "" for this
    one."""

    pulse: Pulse
    state: str
    python: str = ""
    native: str = ""
    kernel: str = ""
    host: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For a host that judges all ranks: of long stacks the end, where the main thread stands."""
        told = {"python": self.python[-_TOLD_BYTES:], "native": self.native[:_TOLD_BYTES], "kernel": self.kernel}
        return {"pulse": asdict(self.pulse), "state": self.state, **told}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], host: str) -> RankState:
        """Raises KeyError, TypeError or ValueError where the record is none."""
        texts = {name: str(record[name]) for name in ("state", "python", "native", "kernel")}
        pulse = Pulse(**record["pulse"])
        whole = (pulse.rank, pulse.pid, pulse.steps, pulse.stage, pulse.order or 0, pulse.iteration or 0)
        if not all(isinstance(number, int) for number in whole) or not 0 <= pulse.stage < len(STAGES):
            raise ValueError(f"{pulse} is no pulse")
        return cls(pulse, host=host, **texts)

    @property
    def innermost(self) -> tuple[str, int, str] | None:
        """File, line and function of the innermost Python frame of the main thread."""
        stacks = _STACK.findall(self.python)
        for stack in reversed(stacks):  # the main thread is the last one
            frame = _FRAME.search(stack)
            if frame is not None:
                return frame[1], int(frame[2]), frame[3]
        return None

    @property
    def waits(self) -> bool:
        """Whether it stands where ranks wait for each other."""
        frame = self.innermost
        return frame is not None and frame[0].endswith(_WAITING)


def process_state(pid: int, born: int) -> str:
    """The kernel's letter for what a process does; "" when it has ended or the number is another process's by now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if sys.platform == "linux" or not _exists(pid) else "?"
    return "" if fields[0] in "ZX" or (born and int(fields[19]) != born) else fields[0]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def collect(directory: Path, launch: int, pulses: Sequence[Pulse]) -> list[RankState]:
    """States and stacks of all ranks of this host."""
    logs = {p.rank: log_path(directory, launch, p.rank) for p in pulses}
    sizes = {rank: path.stat().st_size if path.exists() else 0 for rank, path in logs.items()}
    states = {p.rank: process_state(p.pid, p.born) for p in pulses}
    kernels = {p.rank: _kernel(p.pid) for p in pulses}
    for pulse in pulses:
        if states[pulse.rank]:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(pulse.pid, STACK_SIGNAL)
                if states[pulse.rank] == "T":
                    os.kill(pulse.pid, signal.SIGCONT)
    texts: dict[int, str] = {}
    going_on = {p.rank: p for p in pulses if states[p.rank] == "T"}
    deadline = time.monotonic() + STACKS_WITHIN_S
    while time.monotonic() < deadline and len(texts) < sum(map(bool, states.values())):
        time.sleep(0.01 if going_on else 0.05)
        for rank, path in logs.items():
            text = _since(path, sizes[rank])
            # the main thread comes last
            if states[rank] and rank not in texts and _OUTERMOST.search(text):
                texts[rank] = _since(path, sizes[rank])
                _stop_again(going_on.pop(rank, None))
    for pulse in going_on.values():
        _stop_again(pulse)
    for rank, path in logs.items():
        texts.setdefault(rank, _since(path, sizes[rank]) if states[rank] else "")
    with ThreadPoolExecutor(max_workers=4) as pool:
        native = list(pool.map(lambda p: native_stack(p.pid) if states[p.rank] else "", pulses))
    return [
        RankState(p, states[p.rank], texts[p.rank].strip(), stack, kernels[p.rank])
        for p, stack in zip(pulses, native, strict=True)
    ]


def _stop_again(pulse: Pulse | None) -> None:
    """A rank that was continued to write its stacks goes no further: what hangs must not end well after all."""
    if pulse is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pulse.pid, signal.SIGSTOP)


def _since(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(offset)
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _kernel(pid: int) -> str:
    """The kernel's own view: where it waits, in which system call, its stack where that may be read."""
    parts = []
    for name in ("wchan", "syscall", "stack"):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text().strip()
        except OSError:
            continue
        if text and text != "0":
            parts.append(f"{name}: {text}" if "\n" not in text else f"{name}:\n{text}")
    return "\n".join(parts)


def native_stack(pid: int) -> str:
    """The threads' native stacks, by py-spy or gdb; where neither is installed or allowed, a line that says so."""
    tools: Mapping[str, list[str]] = {
        "py-spy": ["dump", "--native", "--nonblocking", "--pid", str(pid)],
        # nothing that lies beside a library is loaded or run; reading torch's own symbols takes over ten seconds
        "gdb": ["-nx", "-batch", "-iex", "set auto-load off", "-iex", "set debuginfod enabled off",
                "-iex", "set auto-solib-add off", "-p", str(pid), "-ex", f"sharedlibrary {_LIBRARIES}",
                "-ex", "thread apply all backtrace 24"],
    }  # fmt: skip
    for name, arguments in tools.items():
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run(
                [path, *arguments], capture_output=True, text=True, timeout=NATIVE_WITHIN_S, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no native stack: {name} did not answer: {error}"
        lines = [line for line in done.stdout.splitlines() if line.startswith(("#", "Thread", "    ", "Process"))]
        if lines:
            return f"{name}:\n" + "\n".join(lines)
        said = done.stderr.strip().splitlines()
        return f"no native stack: {name} says {said[-1] if said else f'exit {done.returncode}'}"
    return "no native stack: neither py-spy nor gdb is installed"


def first_stopped(states: Sequence[RankState]) -> tuple[int | None, str]:
    """Which rank stopped first, and what tells; None where no rank stands out.

    In this order: a rank that is gone, one that is stopped, one that has finished fewer steps or iterations than all
    others, one that does not stand where ranks wait for each other, and among three or more one whose stack is unlike
    all others'.
    """
    if not states:
        return None, "no rank has come up"
    for letters, text in (("", "it is gone"), ("T", "it is stopped (SIGSTOP)"), ("t", "a debugger holds it")):
        odd = [s.pulse.rank for s in states if s.state == letters]
        if odd and len(odd) < len(states):
            return odd[0], text
    progress = [(s.pulse.steps, -1 if s.pulse.iteration is None else s.pulse.iteration) for s in states]
    behind = [i for i, p in enumerate(progress) if p == min(progress)]
    if len(behind) == 1 and len(states) > 1:
        return states[behind[0]].pulse.rank, "the others are past where it stands"
    busy = [s for s in states if s.innermost is not None and not s.waits]
    if len(busy) == 1 and all(s.innermost is not None for s in states):
        frame = busy[0].innermost
        assert frame is not None
        return busy[0].pulse.rank, f"it is in {frame[2]} ({Path(frame[0]).name}:{frame[1]}) while the others wait"
    places = [s.innermost for s in states]
    odd_ones = [s for s in states if places.count(s.innermost) == 1]
    if len(states) > 2 and len(odd_ones) == 1 and odd_ones[0].innermost is not None:
        frame = odd_ones[0].innermost
        return odd_ones[0].pulse.rank, f"it alone is in {frame[2]} ({Path(frame[0]).name}:{frame[1]})"
    return None, "no rank stands out: all wait in the same call"


def write_report(path: Path, headline: str, states: Sequence[RankState]) -> None:
    """Everything that was seen, for people."""
    parts = [headline, ""]
    for s in states:
        where = f" of {s.host}" if s.host else ""
        process = f"pid {s.pulse.pid}{where}, process state {s.state or 'gone'}"
        parts += [f"==== rank {s.pulse.rank}, {process}: {s.pulse.where()}"]
        parts += ["", "Python stacks:", s.python or "none came", ""]
        if s.native:
            parts += ["Native stacks:", s.native, ""]
        if s.kernel:
            parts += ["Kernel:", s.kernel, ""]
    path.write_text("\n".join(parts))
