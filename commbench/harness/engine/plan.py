"""What an engine is asked to measure, as a sweep's spec, points and settings. Raises what a sweep raises."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from commbench.errors import SpecError, UsageError, unknown
from commbench.harness.run import prepare
from commbench.measure.settings import Settings
from commbench.sweep import Expansion, SweepSpec, find_sweep, make_spec, read_file
from commbench.types import AUTO, COLLECTIVES, Point

# settled when ranks start; what an engine's ranks have beside the sizes of its groups and its device
_ONE_LAUNCH: Mapping[str, Any] = {
    "launches": 1, "launcher": "torchrun", "mpirun_options": "", "nnodes": 1, "bind": "", "ca_provider": "",
    "share_device": False, "point_timeout": None, "launch_timeout": None,
}  # fmt: skip
_LAUNCHED = ("tp", "pp", "ep", "device", *_ONE_LAUNCH)
Planned = tuple[SweepSpec, Expansion, Settings]


def planned(engine: SweepSpec, device: str, what: Any, settings: Mapping[str, Any]) -> Planned:
    """engine: the spec that the ranks were started with, on that device. what, settings: as ``Engine.measure``."""
    own = {"tp": engine.tp, "pp": engine.pp, "ep": engine.ep, "device": device}
    for key, value in settings.items():
        if key in _LAUNCHED and not _as_launched(key, value, own):
            raise SpecError(f"measure: {key}={value!r} is settled when ranks start; {_described(own)}")
    given: dict[str, Any] = {"name": "engine", "policy": engine.policy, **settings, **own}
    source = {key: f"measure: {key}" for key in given}
    if isinstance(what, Point):
        return _of_points([what], own, given, source)
    if isinstance(what, list | tuple) and what:
        return _of_points(what, own, given, source)
    if isinstance(what, SweepSpec):
        spec = _of_spec(what, own, settings, source)
    elif isinstance(what, str | os.PathLike) and os.fspath(what):
        path = find_sweep(os.fspath(what))
        in_file = {key: value for key, value in read_file(path).items() if key not in _LAUNCHED}
        spec = make_spec({**given, **in_file, **settings}, {**source, **{key: f"{path}: {key}" for key in in_file}})
    elif what is None:
        spec = make_spec(given, source)
    else:
        raise UsageError(
            f"measure: {type(what).__name__} {what!r:.80} is no point, list of points, sweep, or name of a sweep"
        )
    return spec, *prepare(spec)


def _as_launched(key: str, value: Any, own: Mapping[str, Any]) -> bool:
    return bool(value == {**own, **_ONE_LAUNCH}[key]) or (key == "device" and value == AUTO)


def _described(own: Mapping[str, Any]) -> str:
    return f"this engine is one launch of torchrun with {', '.join(f'{k}={v}' for k, v in own.items())}"


def _of_spec(
    what: SweepSpec, own: Mapping[str, Any], settings: Mapping[str, Any], source: Mapping[str, str]
) -> SweepSpec:
    asked = {key: getattr(what, key) for key in _LAUNCHED if key in what.model_fields_set}
    for key, value in asked.items():
        if not _as_launched(key, value, own):
            raise SpecError(f"measure: the sweep asks for {key}={value!r}; {_described(own)}")
    values = {key: getattr(what, key) for key in what.model_fields_set}
    return make_spec({**values, **settings, **own}, source)


def _of_points(
    points: Sequence[Any], own: Mapping[str, Any], given: Mapping[str, Any], source: Mapping[str, str]
) -> Planned:
    for point in points:
        _check(point, own)
    wanted = tuple(dict.fromkeys(points))
    policies = tuple(dict.fromkeys(p.policy for p in wanted))
    spec = make_spec({**given, "policy": policies}, source)
    _, settings = prepare(spec)
    forced = tuple(sorted({p.backend for p in wanted if p.backend != AUTO}))
    return spec, Expansion(wanted, {}), replace(settings, backends=forced)


def _check(point: Any, own: Mapping[str, Any]) -> None:
    """A point of one's own making must be one that a sweep would make."""
    if not isinstance(point, Point):
        raise UsageError(f"measure: {type(point).__name__} {point!r:.80} in the list is no point")
    collective = COLLECTIVES.get(point.collective)
    if collective is None:
        raise unknown("collective", point.collective, COLLECTIVES)
    settings: dict[str, Any] = {
        "collectives": [point.collective], "sizes": str(point.size_bytes or 8), "layout": [point.layout],
        "placement": [point.placement], "cache": [point.cache], "mode": [point.mode], "backends": [point.backend],
        "policy": [point.policy], "group": [point.group], **own,
    }  # fmt: skip
    if collective.has_data and collective.carries == "tensors":
        settings["dtypes"] = [point.dtype]
    if collective.reduces:
        settings["ops"] = [point.op]
    expansion, _ = prepare(make_spec(settings, {key: f"{point}: {key}" for key in settings}))
    (possible,) = expansion.points
    if possible != point:
        wrong = [name for name, value in possible.to_dict().items() if getattr(point, name) != value]
        told = ", ".join(f"{name}={getattr(point, name)!r} must be {getattr(possible, name)!r}" for name in wrong)
        raise SpecError(f"measure: {point}: {told}")
