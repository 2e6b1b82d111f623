"""Whether processes are still there."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import psutil


def alive(pids: Iterable[int]) -> list[int]:
    """Those that run (a zombie does not)."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def all_gone(pids: Iterable[int], within_s: float = 15.0) -> bool:
    """Wait until none runs."""
    deadline = time.monotonic() + within_s
    while left := alive(pids):
        if time.monotonic() > deadline:
            print(f"still running: {[psutil.Process(pid).cmdline() for pid in left]}")
            return False
        time.sleep(0.05)
    return True


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def folder_of(pid: int) -> Path:
    """The engine's folder, from the command of its torchrun."""
    return Path(next(word for word in psutil.Process(pid).cmdline() if "commbench-engine-" in word))
