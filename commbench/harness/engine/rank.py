"""What a rank of an engine does: set up once, then what the driver asks, one command after another."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commbench.coordinator import weights
from commbench.coordinator.group import GroupCoordinator
from commbench.coordinator.setup import backends_of
from commbench.coordinator.world import local_platform, take_device, world_group
from commbench.errors import BackendUnavailable, CollectiveError, CommbenchError, EngineError, UsageError
from commbench.harness.engine.channel import Link
from commbench.harness.engine.rank_collectives import CALLS, bytes_of, spec_of, tensor_of
from commbench.harness.engine.start import Inbox
from commbench.harness.environment.fingerprint import rank_facts
from commbench.harness.order import shuffled
from commbench.harness.ranks import worker
from commbench.harness.ranks.watch import Watch, closing
from commbench.harness.supervision.heartbeat import BETWEEN, CALIBRATING, FINISHING
from commbench.harness.views.profiling import RankProfile
from commbench.harness.views.spans import Context
from commbench.harness.views.tracing import RankTrace
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
        self._device = take_device(self._settings.device)
        self._group = world_group(self._device, TIMEOUT)
        self._policy_name = setup["policy"]
        self._policies: dict[str, Policy] = {}
        self._take_policies(setup["policies"])
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
        self._profile: RankProfile | None = None  # that runs
        self._last_profile: RankProfile | None = None  # that was stopped
        self._profile_told = ""  # where the profile that runs goes, as the driver says it
        self._weights: dict[str, torch.Tensor] = {}

    # ---- what is set up -----------------------------------------------------------------------------------

    def _take_policies(self, files: Mapping[str, str]) -> None:
        """files: name → shipped name or whole path, as the driver found it. A file may have changed since."""
        for name, path in files.items():
            if name not in self._policies or "/" in path:
                self._policies[name] = load_policy(path)

    def _wanted(self, policies: Sequence[str]) -> list[str]:
        return [b for name in policies for b in backends_of(self._policies[name], self._settings.device)]

    def _coordinator(self, backends: Sequence[str]) -> GroupCoordinator:
        hints = worker._hints([_queue_point(self.size)] if self._queue else [], "world")
        return GroupCoordinator(
            self._group, self._policies[self._policy_name], local_platform(self._device), backends=backends, hints=hints
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
            "rank_facts": rank_facts(self._settings.device),
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
        self._take_policies(message["policies"])
        queue = any(p.collective == "queue_broadcast" and p.group.partition(":")[0] == "world" for p in points)
        self._need([*settings.backends, *self._wanted(policies)], queue)
        directory, started, first = message["directory"], self._canaries, FirstIteration()
        parent = Context.read(message.get("traceparent"))
        trace = None if parent is None else RankTrace(Path(directory), 0, self.rank, parent, time.time_ns())
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(closing(Watch(trace)))
            watch.stage(CALIBRATING)
            recorder = None
            if self.rank == 0 and directory is not None:
                recorder = stack.enter_context(contextlib.closing(worker.Recorder(Path(directory), 0)))
            model: dict[str, Any] = {"weight_numels": settings.weight_numels, "bucket_bytes": settings.bucket_bytes}
            meter = self._new_meter(
                settings,
                keep=None if recorder is None else recorder.keep,
                policies={name: self._policies[name] for name in policies},
                places={name: replace(place, **model) for name, place in self._place(points).items()},
                observers=[first, *watch.observers],
            )
            watch.stage(BETWEEN)
            for row in meter.measure(shuffled(points, settings.seed, 0)):
                if self.rank == 0:
                    if recorder is not None:
                        recorder.append(row["point"], row["values"])
                    record = row_of(row["point"], {"run_id": message["run_id"], "launch": 0, **row["values"]})
                    self._link.send({"call": message["call"], "event": "point", "row": record})
                if self._team.from_first(int(self._inbox.stopped == message["call"]))[0]:
                    break
            watch.stage(FINISHING)
            if directory is not None:
                self._canaries = canary.take(self._team)
        reply = {"facts": self.facts(), "canaries": {"start": started, "end": self._canaries}}
        return {**reply, "began_ns": first.began_ns}, ()

    def do_collective(self, message: Message, arrays: Sequence[torch.Tensor]) -> Reply:
        """One collective on real data."""
        self._take_policies(message["policies"])
        policy = message["policy"] or self._policy_name
        backends = self._wanted([policy])
        if message["backend"]:
            backends.append(message["backend"])
        self._need(backends)
        group = self._group_named(message["group"])
        tensor = arrays[0].to(self._device) if arrays else torch.empty(0)
        with group.under(self._policies[policy]), group.forcing(message["backend"] or None):
            before = group.call_counts()
            result = CALLS[message["collective"]](group, tensor, message)
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
        if self._profile is not None:
            raise EngineError(
                f"a profile already runs, for {self._profile_told}; stop_profile() ends it and writes its traces"
            )
        try:
            profile = RankProfile(Path(message["folder"]), 0, self.rank, message["options"])
        except OSError as error:
            raise UsageError(f"start_profile: {message['told']} cannot be made: {error.strerror}") from error
        profile.start()
        self._profile, self._last_profile, self._profile_told = profile, None, message["told"]
        return {}, ()

    def do_stop_profile(self, message: Message, arrays: Sequence[torch.Tensor]) -> Reply:
        if self._profile is not None:
            ended, self._profile = self._profile, None
            self._last_profile = ended
            ended.stop()
        if self._last_profile is None:
            raise EngineError("no profile runs; start_profile() starts one")
        return {"files": [str(path) for path in self._last_profile.files]}, ()

    # ---- the loop -----------------------------------------------------------------------------------------

    def answer(self, message: Message, buffers: list[bytes]) -> None:
        """Do one command and send its reply, or its error."""
        call = message["call"]
        try:
            arrays = [tensor_of(spec, data) for spec, data in zip(message.get("arrays", ()), buffers, strict=True)]
            reply, results = getattr(self, f"do_{message['command']}")(message, arrays)
            if self._profile is not None and message["command"] in ("collective", "measure"):
                self._profile.step()
        except CommbenchError as error:
            self._link.send({"call": call, "error": _told(error)})
        except (RuntimeError, ValueError, TypeError, OSError, MemoryError, worker.RecordLost) as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            self._link.send({"call": call, "error": {"type": "CommbenchError", "message": text}})
        else:
            flat = [t.detach().contiguous() for t in results]
            self._link.send(
                {"call": call, "reply": reply, "arrays": [spec_of(t) for t in flat]}, [bytes_of(t) for t in flat]
            )

    def close(self) -> None:
        """End what this rank holds; a profile that runs is written."""
        if self._profile is not None:
            self._profile.stop()
        self._drop_groups()
        self._team.close()
        dist.destroy_process_group()


def _queue_point(size: int) -> Point:
    return Point("queue_broadcast", "", "uint8", 1, size)


def _told(error: CommbenchError) -> Message:
    """An error as the driver can raise it again."""
    told: Message = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, BackendUnavailable):
        told |= {"backend": error.backend, "reason": error.reason, "remedy": error.remedy}
    return told
