"""Which devices of other vendors than NVIDIA and AMD this machine has for ranks, as torch tells.

Torch is asked in a process of its own: a vendor's package takes long to import, may hold a device, and may end the
process that imports it. The command that watches a sweep must have none of that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from commbench.harness.launchers.commands import Program, environment_of

ASKING_S = 120.0
ACCELERATORS = ("xpu", "hpu", "npu")  # backends.accelerators.VENDORS, which imports torch
_seen: dict[tuple[str, frozenset[tuple[str, str]]], Found] = {}  # kind and environment → devices that were there


@dataclass(frozen=True, slots=True)
class Found:
    """count: devices that ranks may use. reason: why there are none, "" if there are; remedy: what helps."""

    count: int = 0
    reason: str = ""
    remedy: str = ""


def look(device: str) -> Found:
    """What this process can use of a kind of device. Imports torch and the vendor's package."""
    from commbench.backends.accelerators import device_module, missing

    problem = missing(device)
    if problem is not None:
        return Found(0, *problem)
    return Found(int(device_module(device).device_count()))


def ask(device: str) -> Found:
    """``look`` in a process of its own, which may fail in any way, with the environment of a rank.

    Devices that were seen once are not asked for again: ranks of this process may hold them by then.
    """
    environment = environment_of(Program())
    key = (device, frozenset(environment.items()))
    if key in _seen:
        return _seen[key]
    command = [sys.executable, "-m", "commbench.harness.environment.devices", device]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=ASKING_S, stdin=subprocess.DEVNULL,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Found(0, f"asking torch for {device} devices took longer than {ASKING_S:g} s", "check the driver")
    answer = (done.stdout.strip().splitlines() or [""])[-1]  # vendors' packages print before
    if done.returncode != 0 or not answer.startswith("{"):
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Found(0, f"asking torch for {device} devices ended with exit status {done.returncode}: {said}",
                     "check the vendor's package and driver")  # fmt: skip
    found = Found(**json.loads(answer))
    if found.count:
        _seen[key] = found
    return found


def main(argv: Sequence[str]) -> None:
    sys.stdout.write("\n" + json.dumps(asdict(look(argv[0]))) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
