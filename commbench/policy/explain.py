"""One decision in words: the order with each route's answer, the pick, and how far the next threshold is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commbench.policy.evaluate import Bound, Policy, Verdict, switched_on
from commbench.policy.intervals import Interval, Nearest, aligned, misaligned, nearest, sized, winners
from commbench.policy.model import Fault, Route
from commbench.types import CallSignature, Platform
from commbench.units import format_size

TAKEN, DECLINED, NOT_ASKED, ABSENT, RAISES = "taken", "declined", "not asked", "absent", "raises"


@dataclass(frozen=True, slots=True)
class Line:
    """What one route of the order says. answer: taken, declined, raises (the engine's fault strikes there), not asked
    (a route ahead ended it; reason then says what it would have answered), or absent (it is for another device)."""

    route: Route
    answer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision, everything around it, and the words for it."""

    policy: Policy
    platform: Platform
    place: str
    call: CallSignature
    verdict: Verdict
    lines: tuple[Line, ...]
    below: Nearest | None
    above: Nearest | None
    to_align: Nearest | None
    out_of_line: tuple[Nearest, ...]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        p, call, verdict = self.platform, self.call, self.verdict
        return {
            "policy": self.policy.name,
            "platform": {
                "device": p.device,
                "capability": ".".join(map(str, p.capability)),
                "world_size": p.world_size,
                "nnodes": p.nnodes,
                "nvlink": p.nvlink,
                "multicast": p.multicast,
                "group": p.group,
            },
            "enabled": sorted(switched_on(self.policy.data, p)),
            "enabled_by": "default" if p.requested is None else "request",
            "call": {
                "collective": call.collective,
                "op": call.op,
                "dtype": call.dtype,
                "size_bytes": call.size_bytes,
                "numel": call.numel,
                "layout": call.layout,
                "mode": call.mode,
                "shape": list(call.shape),
            },
            "picked": verdict.picked,
            "backend": verdict.route.backend if verdict.route else None,
            "reason": verdict.reason,
            "order": [
                {"route": x.route.name, "backend": x.route.backend, "answer": x.answer, "reason": x.reason}
                for x in self.lines
            ],
            "faults": [_fault_dict(f) for f in verdict.faults],
            "nearest_below": _nearest_dict(self.below),
            "nearest_above": _nearest_dict(self.above),
            "nearest_multiple_of_16": _nearest_dict(self.to_align),
            "misaligned": [_nearest_dict(n) for n in self.out_of_line],
        }

    def text(self) -> list[str]:
        """The lines that ``commbench explain`` prints."""
        out = [*header(self.policy, self.platform, self.place), f"call      {describe_call(self.call)}", ""]
        width = max((len(x.route.name) for x in self.lines if x.answer != ABSENT), default=0)
        marks = {TAKEN: "✓", DECLINED: "✗", NOT_ASKED: "·", RAISES: "!"}
        for x in self.lines:
            if x.answer != ABSENT:
                out.append(f"  {marks[x.answer]} {x.route.name:<{width}}  {x.reason}")
        absent = [x.route.name for x in self.lines if x.answer == ABSENT]
        if absent:
            out.append(f"    not for {self.platform.device}: {', '.join(absent)}")
        out += ["", f"picked    {picked_words(self.verdict)}"]
        if self.platform.world_size == 1:
            out.append("note      with one rank there is nothing to reduce: no backend is asked, the input comes back")
        out += self._distance()
        out += fault_lines(self.verdict.faults)
        return out

    def _distance(self) -> list[str]:
        if self.verdict.route is None:
            return []
        lines = [f"next      {step_words(near, self)}" for near in self._near_first()]
        if not lines:
            lines = ["next      no size takes anything else"]
        if self.to_align is not None:
            more = f"{abs(self.to_align.elements)} element{'s' if abs(self.to_align.elements) > 1 else ''}"
            direction = "more" if self.to_align.elements > 0 else "fewer"
            lines.append(
                f"aligned   {more} {direction} make a multiple of 16 bytes, which takes {_word(self.to_align.verdict)}"
            )
        for near in self._out_of_line():
            step = 16 if len(self.out_of_line) > 1 or near.size_bytes % 4 == 0 else 4
            lines.append(f"aligned   sizes that are no multiple of {step} bytes take {_word(near.verdict)}")
        return lines

    def _out_of_line(self) -> list[Nearest]:
        """Each other route that a size takes for its alignment alone, once."""
        return list({_word(n.verdict): n for n in reversed(self.out_of_line)}.values())

    def _near_first(self) -> list[Nearest]:
        found = [n for n in (self.below, self.above) if n is not None]
        return sorted(found, key=lambda n: abs(n.elements))


def explain(policy: Policy, platform: Platform, place: str, call: CallSignature) -> Explanation:
    """Everything there is to say about one call. place: the hardware in words.

    Raises PolicyError for an environment variable or a switch that the policy cannot read.
    """
    bound = policy.bind(platform, call.collective, call.dtype)
    verdict = bound.verdict(call)
    return Explanation(
        policy,
        platform,
        place,
        call,
        verdict,
        tuple(_lines(bound, call, verdict)),
        nearest(bound, call, below=True),
        nearest(bound, call, below=False),
        aligned(bound, call),
        tuple(misaligned(bound, call)),
    )


def _lines(bound: Bound, call: CallSignature, verdict: Verdict) -> list[Line]:
    declined = {route.name: reason for route, reason in verdict.declined}
    lines: list[Line] = []
    for route in bound.order:
        if _for_another_device(bound, route):
            lines.append(Line(route, ABSENT, f"not for {bound.platform.device}"))
        elif verdict.route is route:
            lines.append(Line(route, TAKEN, verdict.reason))
        elif route.name in declined:
            lines.append(Line(route, DECLINED, declined[route.name]))
        elif verdict.route is None and verdict.faults and verdict.faults[0].route == route.name:
            lines.append(Line(route, RAISES, f"raises {verdict.raises}"))
        else:
            reason = bound.refusal(route.name, call)
            said = "not asked; it would take the call too" if reason is None else f"not asked; {reason}"
            lines.append(Line(route, NOT_ASKED, said))
    return lines


def _for_another_device(bound: Bound, route: Route) -> bool:
    device = bound.platform.device
    return any(c.gate.name == "device_in" and device not in c.arguments.get("devices", ()) for c in route.needs)


def header(policy: Policy, platform: Platform, place: str) -> list[str]:
    """Policy, group and switches, one line each."""
    on = sorted(switched_on(policy.data, platform))
    whose = "the policy's" if policy.data.engine in ("", "commbench") else "the engine's"
    source = f"{whose} defaults" if platform.requested is None else "as asked for"
    title = f" ({policy.data.title})" if policy.data.title else ""
    lines = [f"policy    {policy.name}{title}", f"group     {place}"]
    if policy.data.switches:
        lines.append(f"enabled   {', '.join(on) if on else 'nothing'} ({source})")
    changed = [f"{name}={platform.env[name]}" for name in policy.data.variables if name in platform.env]
    changed += [f"{name}={text}" for name, text in platform.settings.items()]
    if changed:
        lines.append(f"set       {', '.join(changed)}")
    return lines


def describe_call(call: CallSignature) -> str:
    """The call in one line."""
    shape = f", shape {'x'.join(map(str, call.shape))}" if call.shape else ""
    op = f" {call.op}" if call.op else ""
    layout = "transposed" if call.layout == "dense_t" else call.layout
    size = f"{format_size(call.size_bytes)} ({call.numel} elements{shape})"
    return f"{call.collective}{op} of {call.dtype}, {size}, {layout}, {_MODES[call.mode]}"


_MODES = {
    "eager": "eager",
    "graph": "inside graph capture",
    "pcg": "in a piecewise graph",
    "compile": "under torch.compile",
}


def size_words(size_bytes: int) -> str:
    """``8 MiB``, ``8 MiB − 16 B``: a size beside a round one is told by it."""
    plain = format_size(size_bytes)
    if not plain.endswith(" B") or size_bytes < 1024:
        return plain
    for unit in (1 << 20, 1 << 10):
        near = (size_bytes + unit // 2) // unit * unit
        rest = size_bytes - near
        if near and 0 < abs(rest) <= 64:
            return f"{format_size(near)} {'−' if rest < 0 else '+'} {abs(rest)} B"
    return plain


def _word(verdict: Verdict) -> str:
    if verdict.route is None:
        return f"nothing: it raises {verdict.raises}"
    route = verdict.route
    return route.word if route.word in (route.name, route.backend) else f"{route.word} ({route.title or route.name})"


def picked_words(verdict: Verdict) -> str:
    """The pick with what is behind its word."""
    if verdict.route is None:
        return f"nothing: the engine raises {verdict.raises}"
    route = verdict.route
    behind = f" (backend {route.backend})" if route.backend != route.word else ""
    return f"{route.word}{behind}: {route.title}" if route.title else f"{route.word}{behind}"


def step_words(near: Nearest, said: Explanation) -> str:
    """``8 MiB is not < 8 MiB: 8 elements fewer (16 B) would take ca``."""
    count = abs(near.elements)
    direction = "more" if near.elements > 0 else "fewer"
    distance = abs(near.size_bytes - said.call.size_bytes)
    elements = f"{count} element{'s' if count > 1 else ''} {direction}"
    step = f"{elements} ({size_words(distance)}) would take {_word(near.verdict)}"
    reason = _reason_between(near, said)
    return f"{reason}: {step}" if reason else step


def _reason_between(near: Nearest, said: Explanation) -> str:
    """Why the one of the two that is not taken here, or not there, declines: the threshold that lies between."""
    there, here = near.verdict.route, said.verdict.route
    declined_here = {route.name: reason for route, reason in said.verdict.declined}
    declined_there = {route.name: reason for route, reason in near.verdict.declined}
    if there is not None and there.name in declined_here:
        return declined_here[there.name]
    if here is not None and here.name in declined_there:
        return declined_there[here.name]
    return ""


def fault_lines(faults: tuple[Fault, ...]) -> list[str]:
    """The engine's own faults that strike, loudly where a result is wrong."""
    lines: list[str] = []
    for fault in faults:
        mark = "WRONG RESULT" if fault.wrong_result else "fault"
        fixed = f" (fixed in {fault.fixed_in})" if fault.fixed_in else ""
        lines += ["", f"{mark}: {fault.effect}{fixed}"]
    return lines


def range_text(
    policy: Policy, platform: Platform, place: str, call: CallSignature, low: int, high: int, hidden: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """Winner intervals over sizes: (lines to print, the same as data)."""
    bound = policy.bind(platform, call.collective, call.dtype)
    start = -(-max(low, 1) // 16) * 16
    intervals = winners(bound, call, start, max(high, start), hidden)
    op = f" {call.op}" if call.op else ""
    lines = [
        *header(policy, platform, place),
        f"calls     {call.collective}{op} of {call.dtype}, {call.layout}, {_MODES[call.mode]}; in steps of 16 bytes",
        "",
    ]
    spans = [(size_words(i.first), size_words(i.last)) for i in intervals]
    left, right = (max(len(s[k]) for s in spans) for k in (0, 1))
    for span, interval in zip(spans, intervals, strict=True):
        lines.append(f"  {span[0]:>{left}} to {span[1]:>{right}}  {_word(interval.verdict)}")
    lines += _other_sizes(bound, call, intervals, hidden)
    faults = {f.name: f for i in intervals for f in i.verdict.faults}
    lines += fault_lines(tuple(faults.values()))
    return lines, [_interval_dict(i) for i in intervals]


def _other_sizes(bound: Bound, call: CallSignature, intervals: list[Interval], hidden: int) -> list[str]:
    """A note where sizes that are no multiple of 16 bytes take something else."""
    differing = {_word(near.verdict) for i in intervals for near in misaligned(bound, sized(call, i.first, hidden))}
    if not differing:
        return []
    return ["", f"sizes that are no multiple of 16 bytes may take {' or '.join(sorted(differing))} instead"]


def _interval_dict(interval: Interval) -> dict[str, Any]:
    verdict = interval.verdict
    return {
        "first_bytes": interval.first,
        "last_bytes": interval.last,
        "picked": verdict.picked,
        "backend": verdict.route.backend if verdict.route else None,
        "reason": verdict.reason,
    }


def _nearest_dict(near: Nearest | None) -> dict[str, Any] | None:
    if near is None:
        return None
    return {
        "size_bytes": near.size_bytes,
        "elements": near.elements,
        "picked": near.verdict.picked,
        "backend": near.verdict.route.backend if near.verdict.route else None,
    }


def _fault_dict(fault: Fault) -> Mapping[str, Any]:
    return {
        "name": fault.name,
        "stage": fault.stage,
        "effect": fault.effect,
        "raises": fault.raises,
        "wrong_result": fault.wrong_result,
        "fixed_in": fault.fixed_in,
    }
