"""One rank of an engine: set up once, then do what the driver asks, one command after another."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commbench.coordinator import weights
from commbench.coordinator.group import GroupCoordinator
from commbench.coordinator.setup import backends_of
from commbench.coordinator.world import local_platform, world_group
from commbench.errors import BackendUnavailable, CollectiveError, CommbenchError, UsageError
from commbench.harness.engine.channel import Gone, Link, enter
from commbench.harness.environment.fingerprint import rank_facts
from commbench.harness.order import shuffled
from commbench.harness.ranks import worker
from commbench.harness.ranks.rank import die_with_parent, log_path
from commbench.harness.supervision.heartbeat import BETWEEN, CALIBRATING, FINISHING, STAGES
from commbench.harness.views.profiling import RankProfile
from commbench.harness.views.tracing import Context, RankTrace
from commbench.measure import canary
from commbench.measure.observer import Observer
from commbench.measure.places import Place
from commbench.measure.session import Meter
from commbench.measure.settings import Settings
from commbench.measure.team import PageTeam
from commbench.policy import Policy, load_policy
from commbench.store.run import row_of
from commbench.types import NO_DTYPE, Point

TIMEOUT = timedelta(seconds=60)  # that a rank waits for its peers in a collective

Message = dict[str, Any]
Reply = tuple[Message, Sequence[torch.Tensor]]


class Inbox:
    """The driver's messages, read by a thread of their own: so this rank also ends when the driver dies while it waits
    for other ranks. The thread sleeps in the kernel; it takes nothing from what is being measured."""

    def __init__(self, link: Link, folder: Path) -> None:
        self._link = link
        self._folder = folder
        self._messages: queue.SimpleQueue[tuple[Message, list[bytes]]] = queue.SimpleQueue()
        self.stopped = -1  # the last call that the driver wants to end early
        threading.Thread(target=self._read, name="commbench-inbox", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                message, buffers = self._link.receive()
            except Gone:
                # nobody is left to tell, and peers may hold this rank in a collective
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(1)
            if message["command"] == "stop":
                self.stopped = message["call"]
            else:
                self._messages.put((message, buffers))

    def next(self) -> tuple[Message, list[bytes]]:
        return self._messages.get()


class FirstIteration(Observer):
    """Notes when the first iteration of a measurement starts, on the clock that this host's processes share."""

    began_ns = 0

    def phase(self, name: str) -> None:
        if name == "warm-up" and not self.began_ns:
            self.began_ns = time.monotonic_ns()


class EngineRank:
    """What a rank holds between commands. Every rank makes one with the same set-up and gets the same commands.

    Methods named ``do_…`` are the commands: they take the message and this rank's arrays, and give the reply. One that
    raises a CommbenchError leaves the rank as it was.
    """

    def __init__(self, link: Link, inbox: Inbox, setup: Mapping[str, Any]) -> None:
        self._link, self._inbox = link, inbox
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._settings = Settings.from_dict(setup["settings"])
        torch.set_num_threads(1)
        self._device = torch.device(self._settings.device)
        if self._settings.device != "cpu":
            self._device = torch.device(self._settings.device, int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self._device)
        self._group = world_group(self._device, TIMEOUT)
        self._policy_name = setup["policy"]
        self._policies: dict[str, Policy] = {}
        self._places: dict[tuple[str, bool, bool], Place] = {}
        self._queue = False
        self._world = self._coordinator([*self._settings.backends, *self._wanted([self._policy_name])])
        objects = worker.Objects(self._group.cpu_group)
        self._cores = len({core for cores in objects.all_gather(worker._own_cores()) for core in cores})
        self._team = PageTeam.form(self.rank, self.size, objects, oversubscribed=self.size > self._cores)
        self._cache_bytes = worker.last_level_cache_bytes()
        self._meter = self._new_meter(self._settings)
        self._known_answers = self._meter.host.known_answers()
        self._start_skew = self._meter.host.start_skew_s()
        self._canaries = canary.take(self._team)
        self._profile: RankProfile | None = None
        self._weights: dict[str, torch.Tensor] = {}

    # ---- what is set up -----------------------------------------------------------------------------------

    def _policy(self, name: str) -> Policy:
        """A policy by name, or from a file, which may have changed since."""
        if name not in self._policies or "/" in name or name.endswith(".toml"):
            self._policies[name] = load_policy(name)
        return self._policies[name]

    def _wanted(self, policies: Sequence[str]) -> list[str]:
        return [b for name in policies for b in backends_of(self._policy(name), self._settings.device)]

    def _coordinator(self, backends: Sequence[str]) -> GroupCoordinator:
        hints = worker._hints([_queue_point(self.size)] if self._queue else [], "world")
        return GroupCoordinator(
            self._group, self._policy(self._policy_name), local_platform(self._device), backends=backends, hints=hints
        )

    def _need(self, backends: Sequence[str], queue: bool = False) -> None:
        """Have these backends set up (and the world's message queue). Collective: all ranks need the same."""
        missing = [b for b in backends if b not in self._world.usable]
        if not missing and queue <= self._queue:
            return
        self._queue |= queue
        have = list(self._world.usable)
        self._drop_groups()
        self._world = self._coordinator([*have, *missing])

    def _drop_groups(self) -> None:
        for place in self._places.values():
            for made in (place.halves, place.coordinator):
                if made is not None and made is not self._world:
                    made.destroy()
        self._places.clear()
        self._world.destroy()

    def _place(self, points: Sequence[Point]) -> dict[str, Place]:
        """Where this rank works in points, by their groups; groups stay for later calls. Collective."""
        found = {}
        for name in sorted({p.group for p in points}):
            own = [p for p in points if p.group == name]
            queue = any(p.collective == "queue_broadcast" for p in own)
            halves = any(p.collective == "send_tensor_dict_split" for p in own)
            key = (name, queue and name != "world", halves)
            if key not in self._places:
                self._places[key] = worker._places(self._world, own, self._settings, TIMEOUT)[name]
            found[name] = self._places[key]
        return found

    def _group_named(self, name: str) -> GroupCoordinator:
        point = Point("barrier", "", NO_DTYPE, 0, self.size, group=name)
        return self._place([point])[name].coordinator

    def _new_meter(self, settings: Settings, **more: Any) -> Meter:
        return Meter(self._world, self._team, settings, cache_bytes=self._cache_bytes, **more)

    def facts(self) -> Message:
        """What a launch's record says of its ranks."""
        skew_p50_s, skew_p99_s, missed = self._start_skew
        host = self._meter.host
        return {
            "rank_facts": rank_facts(),
            "usable": self._world.usable,
            "splits": {name: p.bind(self._world.platform).splits() for name, p in self._policies.items()},
            "timer": {
                "resolution_s": host.timer.resolution_s,
                "overhead_s": host.timer.overhead_s,
                "spread_s": host.timer.spread_s,
            },
            "start": {
                "sync": host.sync, "skew_p50_s": skew_p50_s, "skew_p99_s": skew_p99_s, "missed_windows": missed,
            },
            "known_answers": self._known_answers,
            "clocks": self._meter.clocks.to_dict(),
            "oversubscribed": self._team.oversubscribed,
            "cores": self._cores,
            "last_level_cache_bytes": self._cache_bytes,
        }  # fmt: skip

    # ---- commands -----------------------------------------------------------------------------------------

    def do_measure(self, message: Message, arrays: Sequence[torch.Tensor]) -> Reply:
        """Measure points as a launch of a sweep does; every row is sent when it is finished."""
        settings = Settings.from_dict(message["settings"])
        points = [Point.from_dict(record) for record in message["points"]]
        policies = sorted({p.policy for p in points})
        queue = any(p.collective == "queue_broadcast" and p.group.partition(":")[0] == "world" for p in points)
        self._need([*settings.backends, *self._wanted(policies)], queue)
        directory = message["directory"]
        recorder = None
        if self.rank == 0 and directory is not None:
            recorder = worker.Recorder(Path(directory), 0)
        started, first = self._canaries, FirstIteration()
        parent = Context.read(message.get("traceparent"))
        trace = None
        if parent is not None:
            trace = RankTrace(Path(directory), 0, self.rank, parent, time.time_ns())
            trace.stage(STAGES[CALIBRATING])
        model: dict[str, Any] = {"weight_numels": settings.weight_numels, "bucket_bytes": settings.bucket_bytes}
        meter = self._new_meter(
            settings,
            keep=None if recorder is None else recorder.keep,
            policies={name: self._policy(name) for name in policies},
            places={name: replace(place, **model) for name, place in self._place(points).items()},
            observers=[first] if trace is None else [first, trace],
        )
        if trace is not None:
            trace.stage(STAGES[BETWEEN])
        for row in meter.measure(shuffled(points, settings.seed, 0)):
            if self.rank == 0:
                if recorder is not None:
                    recorder.append(row["point"], row["values"])
                record = row_of(row["point"], {"run_id": message["run_id"], "launch": 0, **row["values"]})
                self._link.send({"call": message["call"], "event": "point", "row": record})
            if self._team.from_first(int(self._inbox.stopped == message["call"]))[0]:
                break
        if trace is not None:
            trace.stage(STAGES[FINISHING])
        if directory is not None:
            self._canaries = canary.take(self._team)
        if trace is not None:
            trace.close()
        reply = {"facts": self.facts(), "canaries": {"start": started, "end": self._canaries}}
        return {**reply, "began_ns": first.began_ns}, ()

    def do_collective(self, message: Message, arrays: Sequence[torch.Tensor]) -> Reply:
        """One collective on real data."""
        policy = message["policy"] or self._policy_name
        backends = self._wanted([policy])
        if message["backend"]:
            backends.append(message["backend"])
        self._need(backends)
        group = self._group_named(message["group"])
        tensor = arrays[0].to(self._device) if arrays else torch.empty(0)
        with group.under(self._policy(policy)), group.forcing(message["backend"] or None):
            before = group.call_counts()
            result = COLLECTIVE_CALLS[message["collective"]](group, tensor, message)
            counts = group.call_counts()
        taken = [name for name, n in counts.items() if n != before.get(name, 0)]
        return {"backend": "+".join(sorted(taken))}, () if result is None else (result.cpu(),)

    def do_init_weights_update_group(self, message: Message, arrays: Sequence[torch.Tensor]) -> Reply:
        weights.init_weights_update_group(
            message["master_address"],
            message["master_port"],
            message["rank_offset"] + self.rank,
            message["world_size"],
            message["group_name"],
            message["backend"],
            device=self._device,
            timeout=timedelta(seconds=message["timeout_s"]),
        )
        return {}, ()

    def do_update_weights_from_distributed(self, message: Message, arrays: Sequence[torch.Tensor]) -> Reply:
        started = time.perf_counter()
        received = weights.update_weights_from_distributed(
            message["names"], message["dtypes"], message["shapes"], message["group_name"], message["bucket_bytes"]
        )
        seconds = time.perf_counter() - started
        self._weights.update(received)
        return {"seconds": seconds, "bytes": sum(t.numel() * t.element_size() for _, t in received)}, ()

    def do_destroy_weights_update_group(self, message: Message, arrays: Sequence[torch.Tensor]) -> Reply:
        weights.destroy_weights_update_group(message["group_name"])
        return {}, ()

    def do_weight(self, message: Message, arrays: Sequence[torch.Tensor]) -> Reply:
        name = message["name"]
        if name not in self._weights:
            known = ", ".join(sorted(self._weights)) or "none was received"
            raise CollectiveError(f"no weight {name!r}; there are: {known}")
        return {}, (self._weights[name].cpu(),)

    def do_start_profile(self, message: Message, arrays: Sequence[torch.Tensor]) -> Reply:
        profile = RankProfile(Path(message["folder"]), 0, self.rank, message["options"])
        profile.start()
        self._profile = profile
        return {}, ()

    def do_stop_profile(self, message: Message, arrays: Sequence[torch.Tensor]) -> Reply:
        profile, self._profile = self._profile, None
        return {"files": [] if profile is None else profile.stop()}, ()

    # ---- the loop -----------------------------------------------------------------------------------------

    def answer(self, message: Message, buffers: list[bytes]) -> None:
        """Do one command and send its reply, or its error."""
        call = message["call"]
        try:
            arrays = [_tensor(spec, data) for spec, data in zip(message.get("arrays", ()), buffers, strict=True)]
            reply, results = getattr(self, f"do_{message['command']}")(message, arrays)
        except CommbenchError as error:
            self._link.send({"call": call, "error": _told(error)})
        except (RuntimeError, ValueError, TypeError, OSError, MemoryError, worker.RecordLost) as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self._link.send({"call": call, "error": {"type": "CommbenchError", "message": text}})
        else:
            if self._profile is not None and message["command"] in ("collective", "measure"):
                self._profile.step()
            flat = [t.detach().contiguous() for t in results]
            self._link.send(
                {"call": call, "reply": reply, "arrays": [_spec(t) for t in flat]}, [_bytes(t) for t in flat]
            )

    def close(self) -> None:
        self._drop_groups()
        self._team.close()
        dist.destroy_process_group()


# ---- collectives on real data --------------------------------------------------------------------------------


def _reduce_scatter(group: GroupCoordinator, x: torch.Tensor, m: Message) -> torch.Tensor:
    rows = _rows_each(group, x, "reduce_scatter")
    return group.reduce_scatter_tensor(x.new_empty(rows, *x.shape[1:]), x, m["op"])


def _all_to_all(group: GroupCoordinator, x: torch.Tensor, m: Message) -> torch.Tensor:
    _rows_each(group, x, "all_to_all")
    return group.all_to_all(x, torch.empty_like(x))


def _scatter(group: GroupCoordinator, x: torch.Tensor, m: Message) -> torch.Tensor:
    rows = _rows_each(group, x, "scatter")
    mine = x if group.rank_in_group == m["src"] else None
    return group.scatter(mine, x.new_empty(rows, *x.shape[1:]), m["src"])


def _reduce(group: GroupCoordinator, x: torch.Tensor, m: Message) -> torch.Tensor | None:
    result = group.reduce(x, m["dst"], m["op"])
    return result if group.rank_in_group == m["dst"] else None


def _send_recv(group: GroupCoordinator, x: torch.Tensor, m: Message) -> torch.Tensor:
    n, rank = group.world_size, group.rank_in_group
    return group.send_recv(x, torch.empty_like(x), (rank + 1) % n, (rank - 1) % n)


def _all_gatherv(group: GroupCoordinator, x: torch.Tensor, m: Message) -> Any:
    return group.all_gatherv(x, [m["sizes"][r] for r in group.ranks])


def _barrier(group: GroupCoordinator, x: torch.Tensor, m: Message) -> None:
    group.barrier()


def _rows_each(group: GroupCoordinator, x: torch.Tensor, what: str) -> int:
    """Rows of each rank's part. Raises CollectiveError where they do not divide evenly."""
    rows = x.shape[0] if x.dim() else 1
    if not x.dim() or rows % group.world_size:
        raise CollectiveError(
            f"{what}: the first dimension of shape {tuple(x.shape)} is no multiple of {group.world_size} ranks"
        )
    return rows // group.world_size


COLLECTIVE_CALLS: Mapping[str, Callable[[GroupCoordinator, torch.Tensor, Message], torch.Tensor | None]] = {
    "all_reduce": lambda group, x, m: group.all_reduce(x, m["op"]),
    "reduce": _reduce,
    "all_gather": lambda group, x, m: group.all_gather(x, m["dim"]),
    "all_gatherv": _all_gatherv,
    "reduce_scatter": _reduce_scatter,
    "broadcast": lambda group, x, m: group.broadcast(x, m["src"]),
    "all_to_all": _all_to_all,
    "gather": lambda group, x, m: group.gather(x, m["dst"], m["dim"]),
    "scatter": _scatter,
    "send_recv": _send_recv,
    "barrier": _barrier,
}


# ---- messages ------------------------------------------------------------------------------------------------


def _queue_point(size: int) -> Point:
    return Point("queue_broadcast", "", "uint8", 1, size)


def _tensor(spec: Message, data: bytes) -> torch.Tensor:
    dtype = getattr(torch, spec["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"torch {torch.__version__} has no dtype {spec['dtype']!r}")
    if not data:
        return torch.empty(spec["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(spec["shape"])


def _spec(tensor: torch.Tensor) -> Message:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _told(error: CommbenchError) -> Message:
    """An error as the driver can raise it again."""
    told: Message = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, BackendUnavailable):
        told |= {"backend": error.backend, "reason": error.reason, "remedy": error.remedy}
    return told


def serve(folder: Path) -> None:
    """Meet the driver, set up, and answer until it says to end. What ends this rank in between is told first: peers end
    with it, and only the moment says whose error was the cause."""
    rank = int(os.environ["RANK"])
    link = enter(folder)
    link.send({"hello": rank, "pid": os.getpid()})
    try:
        _answer_all(folder, rank, link)
    except Exception as error:
        name = "" if isinstance(error, CommbenchError) else f"{type(error).__name__}: "
        text = name + (str(error).strip().partition("\n")[0] or "no word of why")
        with contextlib.suppress(Gone):
            link.send({"failed": text, "at_ns": time.monotonic_ns()})
        raise


def _answer_all(folder: Path, rank: int, link: Link) -> None:
    inbox = Inbox(link, folder)
    setup, _ = inbox.next()
    engine = EngineRank(link, inbox, setup)
    link.send({"call": setup["call"], "reply": engine.facts() if rank == 0 else {}, "arrays": []})
    while True:
        message, buffers = inbox.next()
        if message["command"] == "end":
            break
        engine.answer(message, buffers)
    engine.close()


def main() -> None:
    die_with_parent()
    folder, launch = Path(sys.argv[1]), int(sys.argv[2])
    log = os.open(log_path(folder, launch, int(os.environ["RANK"])), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        serve(folder)
    except BaseException:  # noqa: BLE001 - whatever ends a rank belongs in its log
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # peers may be waiting in a collective, and torch's own teardown would wait for them


if __name__ == "__main__":
    main()
