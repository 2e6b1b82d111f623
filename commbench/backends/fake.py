"""A backend with scripted durations and results: for known-answer tests and demonstrations.

A call exchanges data truly (over the CPU group) only when its input has changed since the last exchange, and
then waits as long as the script says, so results are right while the timed calls last exactly the scripted time.

The script is JSON in the environment variable COMMBENCH_FAKE, or given to the constructor:

``duration_s``  seconds each call lasts on every rank: a number, or a list that is walked through and repeated
``wrong``       {"rank": r, "elements": k}: rank r's results have k wrong elements
``quantised``   a level of types.QUANTISED: all-reduces round their results to steps of that level, as its backends do
``through``     a float dtype: all-reduces send their results through it
``slow``        {"rank": r, "factor": f}: rank r's calls last f times as long
``fail``        {"rank": r, "collective": c}: rank r raises in every call of that collective
``out_of_memory``  the same: rank r asks for more memory than any machine has
``die``, ``segv``, ``stop``, ``hang``  the same: rank r kills itself (SIGKILL), reads from address 0, stops itself
                (SIGSTOP), or never comes back, in C code that holds the interpreter's lock

Each of the last six may have ``"call": k``: only from the k-th call of that collective on, counted from 0.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from commbench.backends.base import Availability, Backend, Group
from commbench.backends.torch_dist import TorchDistBackend
from commbench.errors import CollectiveError, UsageError
from commbench.native import load
from commbench.types import QUANTISED

if TYPE_CHECKING:
    from commbench.native._shm import BoundCall

SCRIPT_VARIABLE = "COMMBENCH_FAKE"
_EVENTS = ("fail", "out_of_memory", "die", "segv", "stop", "hang")
_KEYS = frozenset({"duration_s", "wrong", "quantised", "through", "slow", *_EVENTS})


def read_script() -> dict[str, Any]:
    """The script from the environment; {} when unset. Raises UsageError if it cannot be understood."""
    text = os.environ.get(SCRIPT_VARIABLE, "")
    if not text:
        return {}
    try:
        script = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{SCRIPT_VARIABLE} is not JSON: {error}") from error
    if not isinstance(script, dict) or set(script) - _KEYS:
        raise UsageError(f"{SCRIPT_VARIABLE} must be an object with keys among {', '.join(sorted(_KEYS))}")
    return script


class FakeBackend(Backend):
    """See the module's text."""

    name = "fake"
    collectives = TorchDistBackend.collectives

    def __init__(self, group: Group, script: dict[str, Any] | None = None) -> None:
        super().__init__(group)
        script = read_script() if script is None else script
        durations = script.get("duration_s", 10e-6)
        self._durations_ns = [round(d * 1e9) for d in (durations if isinstance(durations, list) else [durations])]
        wrong = script.get("wrong", {})
        self._wrong_elements = wrong["elements"] if wrong.get("rank") == group.rank else 0
        self.quantised = script.get("quantised", "")
        self._through = script.get("through", "")
        slow = script.get("slow", {})
        if slow.get("rank") == group.rank:
            self._durations_ns = [round(d * slow["factor"]) for d in self._durations_ns]
        mine = {name: script[name] for name in _EVENTS if script.get(name, {}).get("rank") == group.rank}
        self._events = {e["collective"]: (name, int(e.get("call", 0))) for name, e in mine.items()}
        self._seen: dict[str, int] = {}
        self._inner = TorchDistBackend(group)
        # tensor → its version when last exchanged; by identity, since memory addresses are reused
        self._exchanged: Any = WeakIdKeyDictionary()

    def _happen(self, collective: str) -> None:
        """What the script has for this rank in a call of that collective."""
        event, first = self._events[collective]
        seen = self._seen.get(collective, 0)
        self._seen[collective] = seen + 1
        if seen < first:
            return
        match event:
            case "fail":
                raise CollectiveError(f"scripted failure in {collective} on rank {self.group.rank}")
            case "out_of_memory":
                torch.empty(1 << 60, dtype=torch.uint8)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                ctypes.string_at(0)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                libc = ctypes.PyDLL(None)
                while True:
                    libc.pause()

    @classmethod
    def availability(cls, device: str) -> Availability:
        return Availability(True, provider="scripted")

    def _play(
        self,
        collective: str,
        tensor: torch.Tensor | None,
        output: torch.Tensor | None,
        move: Callable[[], None],
    ) -> None:
        """One call: exchange if the content of ``tensor`` is new, then last the scripted time."""
        start = time.perf_counter_ns()
        if collective in self._events:
            self._happen(collective)
        # torch counts in-place changes in _version, so all ranks see the same calls as new
        if tensor is not None and self._exchanged.get(tensor) != tensor._version:
            move()
            if output is not None and self._wrong_elements and output.numel():
                output.view(-1)[: self._wrong_elements] += 1
            self._exchanged[tensor] = tensor._version
            start = time.perf_counter_ns()
        duration = self._durations_ns[self.calls % len(self._durations_ns)]
        self.calls += 1
        end = start + duration
        now = time.perf_counter_ns
        while now() < end:
            pass

    def all_reduce(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        def move() -> None:
            self._inner.all_reduce(input, output, op)
            if self.quantised:
                step = QUANTISED[self.quantised] * output.abs().max()
                if step > 0 and step.isfinite():
                    output.copy_((output / step).round() * step)
            if self._through:
                output.copy_(output.to(getattr(torch, self._through)))

        self._play("all_reduce", input, output, move)

    def all_gather(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self._play("all_gather", input, output, lambda: self._inner.all_gather(input, output))

    def reduce_scatter(self, input: torch.Tensor, output: torch.Tensor, op: str) -> None:
        self._play("reduce_scatter", input, output, lambda: self._inner.reduce_scatter(input, output, op))

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._play("broadcast", tensor, tensor, lambda: self._inner.broadcast(tensor, src))

    def all_to_all(self, input: torch.Tensor, output: torch.Tensor) -> None:
        self._play("all_to_all", input, output, lambda: self._inner.all_to_all(input, output))

    def reduce(self, input: torch.Tensor, output: torch.Tensor, dst: int, op: str) -> None:
        self._play("reduce", input, output, lambda: self._inner.reduce(input, output, dst, op))

    def gather(self, input: torch.Tensor, output: torch.Tensor | None, dst: int) -> None:
        self._play("gather", input, output, lambda: self._inner.gather(input, output, dst))

    def scatter(self, input: torch.Tensor | None, output: torch.Tensor, src: int) -> None:
        self._play("scatter", output, output, lambda: self._inner.scatter(input, output, src))

    def send_recv(self, input: torch.Tensor, output: torch.Tensor, dst: int, src: int) -> None:
        self._play("send_recv", input, output, lambda: self._inner.send_recv(input, output, dst, src))

    def native_call(
        self, collective: str, input: torch.Tensor, output: torch.Tensor | None, op: str = "sum", root: int = 0
    ) -> BoundCall | None:
        return load().BoundCall.busy_wait(self._durations_ns)  # type: ignore[no-any-return]

    def all_gatherv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int]) -> None:
        self._play("all_gatherv", input, output, lambda: self._inner.all_gatherv(input, output, sizes))

    def reduce_scatterv(self, input: torch.Tensor, output: torch.Tensor, sizes: list[int], op: str) -> None:
        self._play("reduce_scatterv", input, output, lambda: self._inner.reduce_scatterv(input, output, sizes, op))

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self._play("send", tensor, None, lambda: self._inner.send(tensor, dst))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self._inner.recv(tensor, src)  # what the sender has sent must be taken, whatever this side has seen
        self._play("recv", None, None, lambda: None)

    def barrier(self) -> None:
        # synchronised by the start gate already; a real exchange would hide the scripted time
        self._play("barrier", None, None, lambda: None)
