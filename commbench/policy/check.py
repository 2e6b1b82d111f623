"""What is suspect about a policy: dead zones, shadowed routes, caps that exclude their own size, gates that never
hold, picks that go back and forth with the size, and the engine's own faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from commbench.policy.compare import LARGEST, SMALLEST
from commbench.policy.evaluate import Bound, Policy
from commbench.policy.explain import size_words
from commbench.policy.gates import as_word
from commbench.policy.gpus import Gpu, find_gpu
from commbench.policy.intervals import Interval, sized, winners
from commbench.policy.model import Route
from commbench.types import CallSignature, Platform

# One machine for each kind of table row that engines have.
MACHINES = ("a100", "l40s", "h100", "b200", "gb300", "rtx5090", "mi300x")
WORLD_SIZES = (2, 4, 8)
DTYPES_CHECKED = ("bfloat16", "float32")
_KINDS = ("dead zone", "shadowed", "cap excludes its size", "never holds", "not monotone", "fault")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know. kind: of ``_KINDS``. where: the machines and calls it was seen on, in words."""

    kind: str
    what: str
    where: tuple[str, ...]
    serious: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """One machine with one configuration of the policy. setting: what was set beyond the defaults, in words."""

    place: str
    platform: Platform
    setting: str

    def __str__(self) -> str:
        return f"{self.place}{f', {self.setting}' if self.setting else ''}"


def scenes(policy: Policy, machines: Sequence[str] = MACHINES, world_sizes: Sequence[int] = WORLD_SIZES) -> list[Scene]:
    """The machines to look at: each GPU and size, with the defaults, with everything on, and with each word that a
    parameter may have. Configurations that change nothing that the machine can see are left out."""
    found: list[Scene] = []
    for name in machines:
        gpu = find_gpu(name)
        for n in world_sizes:
            found += _scenes_of(policy, gpu, n)
    return found


def _scenes_of(policy: Policy, gpu: Gpu, world_size: int) -> Iterator[Scene]:
    plain = Platform(
        device=gpu.device,
        capability=gpu.capability,
        world_size=world_size,
        one_host=True,
        nvlink=gpu.nvlink,
        multicast=gpu.multicast,
    )
    place = f"{world_size} x {gpu.name}"
    yield Scene(place, plain, "")
    everything = frozenset(policy.data.switches)
    if everything:
        yield Scene(place, replace(plain, requested=everything), "everything enabled")
    for name, word in options(policy, gpu.device):
        yield Scene(place, replace(plain, settings={name: word}), option_words(policy, name, word))


def options(policy: Policy, device: str) -> Iterator[tuple[str, str]]:
    """(parameter, word) for every word that a parameter may have beside its default, where a route for that device
    asks for it."""
    for parameter in policy.data.constants.values():
        words = ("true", "false") if parameter.kind == "flag" else parameter.choices
        for word in words:
            if word != as_word(parameter.value) and _visible(policy, parameter.name, device):
                yield parameter.name, word


def option_words(policy: Policy, parameter: str, word: str) -> str:
    """``VARIABLE=word`` as the engine's user would set it, else ``parameter = word``."""
    for variable in policy.data.variables.values():
        if variable.parameter == parameter:
            kind = policy.data.constants[parameter].kind
            return f"{variable.name}={({'true': '1', 'false': '0'}[word]) if kind == 'flag' else word}"
    return f"{parameter} = {word}"


def _visible(policy: Policy, parameter: str, device: str) -> bool:
    """Whether some route for that device asks for the parameter."""
    for route in policy.data.routes.values():
        devices = [c.arguments.get("devices", ()) for c in route.needs if c.gate.name == "device_in"]
        if all(device in d for d in devices) and any(
            parameter in (str(v) for v in c.arguments.values())
            or parameter in _table_keys(policy, c.arguments.values())
            for c in (*route.needs, *route.accepts)
        ):
            return True
    return False


def _table_keys(policy: Policy, arguments: Iterable[object]) -> set[str]:
    return {key for a in arguments if str(a) in policy.data.tables for key in policy.data.tables[str(a)].by}


def check(policy: Policy, where: Sequence[Scene]) -> list[Finding]:
    """What is suspect about the policy on those machines, the serious first."""
    notes: list[_Note] = []
    standing: dict[str, set[str]] = {}
    for scene in where:
        for route in policy.data.order("all_reduce", scene.platform.device):
            reason = policy.bind(scene.platform, "all_reduce", "bfloat16").standing(route.name)
            standing.setdefault(route.name, set()).add(reason or "")
        notes += _look(policy, scene)
    findings = [*_gather(notes), *_never(policy, standing, where), *_faults(policy)]
    return sorted(findings, key=lambda f: (not f.serious, _KINDS.index(f.kind), -len(f.where)))


@dataclass(frozen=True, slots=True)
class _Note:
    """Something seen in one place. subject and details: notes of one kind and subject become one finding that lists
    the details."""

    kind: str
    subject: str
    detail: str
    place: str


def _gather(notes: Iterable[_Note]) -> list[Finding]:
    details: dict[tuple[str, str], dict[str, None]] = {}
    places: dict[tuple[str, str], dict[str, None]] = {}
    for note in notes:
        details.setdefault((note.kind, note.subject), {})[note.detail] = None
        places.setdefault((note.kind, note.subject), {})[note.place] = None
    return [
        Finding(kind, subject.format(", ".join(d for d in details[kind, subject] if d)), tuple(where))
        for (kind, subject), where in places.items()
    ]


def _look(policy: Policy, scene: Scene) -> Iterator[_Note]:
    for dtype in DTYPES_CHECKED:
        for mode in ("eager", "graph"):
            call = CallSignature("all_reduce", "sum", dtype, 0, 0, "contiguous", mode)
            bound = policy.bind(scene.platform, "all_reduce", dtype)
            intervals = winners(bound, call, SMALLEST, LARGEST)
            place = f"{scene}: {dtype}"
            yield from _dead_zones(intervals, place)
            yield from _not_monotone(intervals, place)
            yield from _caps(bound, mode, intervals, place)
            yield from _shadowed(bound, call, intervals, place)


def _fast(interval: Interval) -> bool:
    return interval.verdict.route is not None and interval.verdict.route.fast


def _dead_zones(intervals: Sequence[Interval], place: str) -> Iterator[_Note]:
    """Sizes where every fast route declines, with a fast one on both sides."""
    fast = [i for i, interval in enumerate(intervals) if _fast(interval)]
    if not fast:
        return
    for i in range(fast[0], fast[-1]):
        zone = intervals[i]
        if not _fast(zone) and zone.verdict.route is not None:
            sides = f"{_label(intervals[i - 1])} below and {_label(intervals[i + 1])} above"
            what = f"{size_words(zone.first)} to {size_words(zone.last)} takes {_label(zone)}, with {sides}"
            yield _Note("dead zone", what, "", place)


def _not_monotone(intervals: Sequence[Interval], place: str) -> Iterator[_Note]:
    """A backend that is taken, left and taken again as the size grows."""
    labels = [_label(i) for i in intervals]
    for label in dict.fromkeys(labels):
        if labels.count(label) > 1:
            steps = ", ".join(f"{_label(i)} up to {size_words(i.last)}" for i in intervals[:-1])
            yield _Note("not monotone", f"{label} wins, loses and wins again: {steps}, then {labels[-1]}", "", place)


def _caps(bound: Bound, mode: str, intervals: Sequence[Interval], place: str) -> Iterator[_Note]:
    """A strict cap at a power of two: tensors of exactly that size, a common one, are turned away."""
    at = {i.first: (before, i) for before, i in pairwise(intervals)}
    for threshold in bound.thresholds(mode):
        limit = threshold.size_bytes
        if threshold.strictness == "<" and limit in at and limit & (limit - 1) == 0:
            before, after = at[limit]
            if before.verdict.route is not None and before.verdict.route.name == threshold.route:
                subject = f"{threshold.route} turns away a tensor of exactly its cap, which goes to another: {{}}"
                yield _Note("cap excludes its size", subject, f"{size_words(limit)} to {_label(after)}", place)


def _shadowed(bound: Bound, call: CallSignature, intervals: Sequence[Interval], place: str) -> Iterator[_Note]:
    """A route that came up and would take sizes, and is never reached because those ahead take them all."""
    for route in bound.order:
        if not route.fast or bound.standing(route.name) is not None:
            continue
        if any(i.verdict.route is route for i in intervals):
            hidden = _hidden_part(bound, route, call, intervals)
            if hidden:
                yield _Note("shadowed", hidden, "", place)
            continue
        sizes = [s for i in intervals for s in (i.first, i.last)]
        ahead = [i for i in intervals if bound.refusal(route.name, sized(call, i.first)) is None]
        if any(bound.refusal(route.name, sized(call, s)) is None for s in sizes):
            by = " and ".join(dict.fromkeys(_label(i) for i in ahead))
            yield _Note("shadowed", f"{{}} came up and never taken: every size goes to {by} first", route.name, place)


def _hidden_part(bound: Bound, route: Route, call: CallSignature, intervals: Sequence[Interval]) -> str:
    """The sizes from a route's own minimum up that another one takes first, in words; "" if none."""
    starts = [t.size_bytes for t in bound.thresholds(call.mode) if t.route == route.name and t.strictness == ">="]
    own = min((size for size in starts if size >= SMALLEST and size % SMALLEST == 0), default=0)
    first = next(i for i in intervals if i.verdict.route is route)
    if not own or own >= first.first or bound.refusal(route.name, sized(call, own)) is not None:
        return ""
    before = next(i for i in intervals if i.first <= own <= i.last)
    below = size_words(first.first)
    return f"{route.name} would start at {size_words(own)}; {_label(before)} ahead takes the sizes below {below}"


def _label(interval: Interval) -> str:
    route = interval.verdict.route
    if route is None:
        return interval.verdict.picked
    return route.name if route.word == "inplace" else route.word


def _never(policy: Policy, standing: dict[str, set[str]], where: Sequence[Scene]) -> list[Finding]:
    """Routes for these devices that came up on no machine, whatever was enabled."""
    devices = {s.platform.device for s in where}
    findings: list[Finding] = []
    for name, reasons in standing.items():
        needed = [set(c.arguments["devices"]) for c in policy.data.routes[name].needs if c.gate.name == "device_in"]
        if "" in reasons or any(not devices & n for n in needed):
            continue
        wrong_device = {f"{d} is not" for d in devices}
        real = sorted(r for r in reasons if not r.startswith(("not enabled", *wrong_device)))
        findings.append(Finding("never holds", f"{name}: {'; '.join(real[:3]) or 'never enabled'}", ()))
    return findings


def _faults(policy: Policy) -> list[Finding]:
    """The engine's own faults. One that gives wrong results silently is serious."""
    findings: list[Finding] = []
    for fault in policy.data.faults:
        conditions = [str(c) for c in (*fault.needs, *fault.when)]
        raises = f" [{fault.raises}]" if fault.raises and fault.raises not in fault.effect else ""
        fixed = f"; fixed in {fault.fixed_in}" if fault.fixed_in else ""
        where = (f"when {'; '.join(conditions)}",) if conditions else ()
        findings.append(Finding("fault", f"{fault.effect}{raises}{fixed}", where, serious=fault.wrong_result))
    return findings
