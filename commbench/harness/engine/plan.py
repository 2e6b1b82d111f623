"""What an engine is asked to measure, as a sweep's spec, points and settings. Raises what a sweep raises."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from commbench.errors import SpecError, UsageError, unknown
from commbench.harness.run import prepare
from commbench.measure.settings import Settings
from commbench.policy import load_policy
from commbench.sweep import Expansion, SweepSpec, find_sweep, make_spec, read_file
from commbench.types import AUTO, COLLECTIVES, Point

# settled when ranks start: what an engine's ranks have, beside the sizes of its groups and its device
_ONE_LAUNCH: Mapping[str, Any] = {
    "launches": 1, "launcher": "torchrun", "mpirun_options": "", "nnodes": 1, "bind": "", "ca_provider": "",
    "share_device": False, "point_timeout": None, "launch_timeout": None,
}  # fmt: skip
_OF_ENGINE = ("tp", "pp", "ep", "device")
_LAUNCHED = (*_OF_ENGINE, *_ONE_LAUNCH)
# what a point says of itself
_OF_POINTS = (
    "collectives", "dtypes", "ops", "sizes", "layout", "placement", "cache", "mode", "backends", "policy", "group",
)  # fmt: skip
Planned = tuple[SweepSpec, Expansion, Settings]


def planned(engine: SweepSpec, device: str, what: Any, settings: Mapping[str, Any]) -> Planned:
    """engine: the spec that the ranks were started with, on that device. what, settings: as ``Engine.measure``.

    Every field of a sweep is taken as it is asked for, or SpecError names it: nothing is left out.
    """
    own = {"tp": engine.tp, "pp": engine.pp, "ep": engine.ep, "device": device}
    _check_launched("measure", settings, own)
    given: dict[str, Any] = {"name": "engine", "policy": engine.policy, **settings, **own}
    source = {key: f"measure: {key}" for key in given}
    if isinstance(what, Point):
        return _of_points([what], own, settings, given, source)
    if isinstance(what, list | tuple) and what:
        return _of_points(what, own, settings, given, source)
    asked: dict[str, Any]
    if isinstance(what, SweepSpec):
        asked = {key: getattr(what, key) for key in what.given}
        _check_launched("measure: the sweep", _without(asked, settings), own)
        spec = make_spec({**given, **asked, **settings, "device": device}, source)
    elif isinstance(what, str | os.PathLike) and os.fspath(what):
        path = find_sweep(os.fspath(what))
        asked = read_file(path)
        _check_launched(str(path), _without(asked, settings), own)
        from_file = {key: f"{path}: {key}" for key in _without(asked, settings)}
        spec = make_spec({**given, **asked, **settings, "device": device}, {**source, **from_file})
    elif what is None:
        spec = make_spec(given, source)
    else:
        raise UsageError(
            f"measure: {type(what).__name__} {what!r:.80} is no point, list of points, sweep, or name of a sweep"
        )
    return spec, *prepare(spec)


def policy_files(names: Iterable[str]) -> dict[str, str]:
    """Where the ranks find policies: name → name, or the whole path of a file, since a rank may be in another folder.

    Raises UnknownName or PolicyError for one that cannot be loaded.
    """
    found = {}
    for name in names:
        load_policy(name)
        is_file = name.endswith(".toml") or "/" in name
        found[name] = str(Path(name).resolve()) if is_file else name
    return found


def _without(asked: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a sweep asks for and a keyword does not override."""
    return {key: value for key, value in asked.items() if key not in settings}


def _check_launched(who: str, asked: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises SpecError for the first setting that these ranks do not have."""
    have = {**own, **_ONE_LAUNCH}
    for key in _LAUNCHED:
        if key not in asked or asked[key] == have[key] or (key == "device" and asked[key] == AUTO):
            continue
        value, mine = asked[key], have[key]
        if key in _OF_ENGINE:
            way_out = f"start Engine({key}={value!r}), or give measure(…, {key}={mine!r}) to measure on these ranks"
        else:
            way_out = f"`commbench sweep` takes it, or give measure(…, {key}={mine!r}) to measure on these ranks"
        described = ", ".join(f"{name}={setting}" for name, setting in own.items())
        raise SpecError(
            f"{who}: {key}={value!r} is settled when ranks start; this engine is one launch of torchrun with "
            f"{described}; {way_out}"
        )


def _of_points(
    points: Sequence[Any],
    own: Mapping[str, Any],
    settings: Mapping[str, Any],
    given: Mapping[str, Any],
    source: Mapping[str, str],
) -> Planned:
    for key in _OF_POINTS:
        if key in settings:
            raise SpecError(
                f"measure: {key}={settings[key]!r} does not go with points, which say that of themselves; leave it "
                "away, or leave the points away and name a sweep by its settings"
            )
    for point in points:
        _check(point, own)
    wanted = tuple(dict.fromkeys(points))
    policies = tuple(dict.fromkeys(p.policy for p in wanted))
    spec = make_spec({**given, "policy": policies}, source)
    _, how = prepare(spec)
    forced = tuple(sorted({p.backend for p in wanted if p.backend != AUTO}))
    return spec, Expansion(wanted, {}), replace(how, backends=forced)


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
