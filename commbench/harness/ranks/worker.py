"""One rank of a launch: set up the group, measure the points of the plan, hand results to the store."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commbench.backends.base import Group
from commbench.backends.ca import PROVIDER_VARIABLE as CA_PROVIDER_VARIABLE
from commbench.coordinator.group import GroupCoordinator
from commbench.coordinator.hints import Hints
from commbench.coordinator.layouts import parallel_layout
from commbench.coordinator.setup import backends_of
from commbench.coordinator.world import library_for_shared_gpus, local_platform, new_group, take_device, world_group
from commbench.errors import CommbenchError
from commbench.harness.environment.fingerprint import format_cpu_list, rank_facts
from commbench.harness.launch import PROGRESS
from commbench.harness.launchers.agent import bind_stores
from commbench.harness.order import shuffled
from commbench.harness.ranks.watch import Watch, watching
from commbench.harness.ranks.work import read_work, with_patience
from commbench.harness.supervision.heartbeat import (
    BETWEEN,
    CALIBRATING,
    DONE,
    FINISHING,
    JOINING,
    STORE_LOST,
    Heartbeat,
)
from commbench.measure import canary
from commbench.measure.loop import Block
from commbench.measure.places import Place
from commbench.measure.session import Meter
from commbench.measure.settings import Settings
from commbench.measure.team_hosts import form_team, is_oversubscribed, machine_of_this_process
from commbench.policy import load_policy
from commbench.store.run import Plan, PointLog, open_run, row_of
from commbench.store.samples import SampleLog
from commbench.types import Point

LEAST_PATIENCE_S = 60.0  # that ranks wait for each other, at least, before they give up by themselves


class RecordLost(Exception):
    """The run directory cannot be written any more. Ends the launch: no later point could be kept either."""


class Objects:
    """Set-up traffic over the world's process group."""

    def __init__(self, process_group: Any) -> None:
        self._process_group = process_group

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size(self._process_group)
        dist.all_gather_object(values, value, group=self._process_group)
        return values


class Recorder:
    """Rank 0's hand on the run directory: rows, raw samples, and a line to the watching command.

    Every method raises RecordLost when the directory cannot be written (any more).
    """

    def __init__(self, directory: Path, launch: int) -> None:
        self._directory, self._launch = directory, launch
        with self._writing():
            self._samples, self._log = SampleLog(directory, launch), PointLog(directory)
            self._stream = (directory / PROGRESS).open("a")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RecordLost(f"{self._directory} cannot be written: {error.strerror or error}") from error

    def tell(self, event: str, **facts: Any) -> None:
        record = {"time_s": time.time(), "launch": self._launch, "event": event, **facts}
        with self._writing():
            self._stream.write(json.dumps(record) + "\n")
            self._stream.flush()

    def keep(self, *block: Any) -> None:
        """``SampleLog.append``."""
        with self._writing():
            self._samples.append(*block)

    def append(self, point: Point, values: dict[str, Any]) -> None:
        with self._writing():
            self._log.append(row_of(point, {"run_id": self._directory.name, "launch": self._launch, **values}))

    def close(self) -> None:
        for stream in (self._samples, self._log, self._stream):
            with self._writing():
                stream.close()


def last_level_cache_bytes() -> int:
    """The largest cache that this process's first core can use, as sysfs tells; 32 MiB where it does not."""
    largest = 0
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = index.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            largest = max(largest, int(text[:-1]) << 10)
    return largest or 32 << 20


def _hints(points: Sequence[Point], kind: str) -> Hints:
    """A message queue for the groups whose queue is measured."""
    wanted = any(p.collective == "queue_broadcast" and p.group.partition(":")[0] == kind for p in points)
    return Hints(message_queue=wanted)


def _places(
    world: GroupCoordinator, points: Sequence[Point], settings: Settings, timeout: datetime.timedelta
) -> dict[str, Place]:
    """Where this rank works in the points of each group. Collective: every rank has the same points."""
    layout = parallel_layout(world.world_size, settings.tp or world.world_size, settings.ep, settings.pp)
    coordinators = {"world": world}
    halves: dict[str, GroupCoordinator] = {}

    def make(ranks: Sequence[Sequence[int]], kind: str, hints: Hints) -> GroupCoordinator:
        backend = dist.get_backend(world.device_group)
        group = new_group(ranks, kind, world.device, backend, timeout)
        platform = replace(world.platform, group=kind)
        return GroupCoordinator(
            group, world.policy, platform, backends=list(world.usable), hints=hints, owns_process_groups=True
        )

    places = {}
    for name in sorted({p.group for p in points}):
        kind = name.partition(":")[0]
        if kind not in coordinators:
            coordinators[kind] = make(layout.of(kind), kind, _hints(points, kind))
        if kind not in halves and any(p.collective == "send_tensor_dict_split" and p.group == name for p in points):
            n = len(layout.of(kind)[0]) // 2
            parts = [half for ranks in layout.of(kind) for half in (ranks[:n], ranks[n:])]
            halves[kind] = make(parts, f"{kind}_halves", Hints())
        coordinator = coordinators[kind]
        takes_part = not name.endswith(":0") or world.rank in layout.of(kind)[0]
        model = settings.weight_numels, settings.bucket_bytes
        places[name] = Place(coordinator, halves.get(kind), takes_part, *model)
    return places


def _left(directory: Path, launch: int, ordered: Sequence[tuple[int, Point]]) -> list[int]:
    """Places of the points to measure: what the watching command wrote, or else those without a row."""
    told = read_work(directory, launch)
    if told is not None:
        return told
    done = {row["point_id"] for row in open_run(directory).rows() if row["launch"] == launch}
    return [order for order, point in ordered if point.point_id not in done]


def _own_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def main(directory: Path, launch: int, heartbeat: Heartbeat | None, watch: Watch) -> None:
    def stage(stage: int) -> None:
        if heartbeat is not None:
            heartbeat.stage(stage)
        watch.stage(stage)

    stage(JOINING)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = Plan.load(directory)
    settings = with_patience(Settings.from_dict(plan.settings), os.environ)
    torch.set_num_threads(1)
    if settings.ca_provider:
        os.environ[CA_PROVIDER_VARIABLE] = settings.ca_provider
    device = take_device(settings.device, share=settings.share_device)
    timeout = datetime.timedelta(seconds=max(LEAST_PATIENCE_S, settings.patience_s))
    bind_stores()
    group: Group = world_group(device, timeout, library_for_shared_gpus() if settings.share_device else "")
    policies = {name: load_policy(name) for name in sorted({p.policy for p in plan.points})}
    # every policy finds its backends set up
    backends = [*settings.backends, *(b for p in policies.values() for b in backends_of(p, settings.device))]
    first = next(iter(policies.values()), None) or load_policy("commbench")
    coordinator = GroupCoordinator(
        group, first, local_platform(device), backends=backends, hints=_hints(plan.points, "world")
    )
    places = _places(coordinator, plan.points, settings, timeout)
    objects = Objects(group.cpu_group)
    # a launcher may pin each rank to a core of its own: what counts is what those of a machine have together
    machines = objects.all_gather((machine_of_this_process(), _own_cores()))
    cores = len({(machine, core) for machine, own in machines for core in own})
    team = form_team(
        rank,
        size,
        objects,
        one_host=group.one_host,
        oversubscribed=is_oversubscribed(machines),
        new_group=lambda: dist.new_group(list(range(size)), backend="gloo", timeout=timeout),
    )

    # rank 0 knows what has no result yet: the others may not see the run directory
    ordered = shuffled(plan.points, settings.seed, launch)
    left = set(objects.all_gather(_left(directory, launch, ordered) if rank == 0 else None)[0])
    points = [(order, p) for order, p in ordered if order in left]
    recorder = Recorder(directory, launch) if rank == 0 else None
    stage(CALIBRATING)
    team.barrier()
    meter = Meter(
        coordinator,
        team,
        settings,
        cache_bytes=last_level_cache_bytes(),
        keep=None if recorder is None else recorder.keep,
        tell=None if recorder is None else lambda label, order: recorder.tell("visit", label=label, order=order),
        policies=policies,
        places=places,
        observers=[*([] if heartbeat is None else [heartbeat]), *watch.observers],
    )
    if heartbeat is not None:
        meter.host.write_times_to(Block(heartbeat.capacity, heartbeat.room))
    skew_p50_s, skew_p99_s, missed = meter.host.start_skew_s()
    known_answers = meter.host.known_answers()
    if recorder is not None:
        recorder.tell(
            "ready",
            rank_facts=rank_facts(settings.device),
            usable=coordinator.usable,
            splits={name: policy.bind(coordinator.platform).splits() for name, policy in policies.items()},
            timer={
                "resolution_s": meter.host.timer.resolution_s,
                "overhead_s": meter.host.timer.overhead_s,
                "spread_s": meter.host.timer.spread_s,
            },
            start={
                "sync": meter.host.sync,
                "skew_p50_s": skew_p50_s,
                "skew_p99_s": skew_p99_s,
                "missed_windows": missed,
            },
            known_answers=known_answers,
            clocks=meter.clocks.to_dict(),
            oversubscribed=team.oversubscribed,
            cores=cores,
            affinity=[format_cpu_list(own) for _, own in machines],
            last_level_cache_bytes=last_level_cache_bytes(),
        )
    canaries = canary.take(team)
    if recorder is not None:
        recorder.tell("canaries", when="start", **canaries)
    stage(BETWEEN)
    for row in meter.measure(points):
        if recorder is not None:
            recorder.append(row["point"], row["values"])
            recorder.tell("point", order=row["values"]["order"], status=row["values"]["status"])
    stage(FINISHING)
    canaries = canary.take(team)
    if recorder is not None:
        recorder.tell("canaries", when="end", **canaries)
    if not group.one_host:  # the offsets as they were known by the end, with what the line through them leaves
        clocks = team.compare_clocks()
        if recorder is not None:
            recorder.tell("clocks", **clocks.to_dict())
    if recorder is not None:
        recorder.tell("done")
    team.barrier()
    for place in places.values():
        for made in (place.halves, place.coordinator):
            if made is not None:
                made.destroy()
    coordinator.destroy()
    team.close()
    dist.destroy_process_group()
    stage(DONE)


def run(directory: Path, launch: int, heartbeat: Heartbeat | None = None) -> None:
    """``main``, and on any failure a traceback in this rank's log and an exit that waits for no peer."""
    try:
        with watching(directory, launch) as watch:
            main(directory, launch, heartbeat, watch)
    except BaseException as error:  # noqa: BLE001 - whatever ends a rank belongs in its log
        if heartbeat is not None:
            name = "" if isinstance(error, CommbenchError | RecordLost) else f"{type(error).__name__}: "
            said = str(error).strip().splitlines()
            heartbeat.fail(name + (said[0] if said else ""), STORE_LOST if isinstance(error, RecordLost) else 0)
        with contextlib.suppress(OSError):  # a full disk has no room for it, and the heartbeat has it already
            traceback.print_exc()
            sys.stderr.flush()
        # peers may be waiting in a collective, and torch's own teardown would wait for them
        os._exit(1)
