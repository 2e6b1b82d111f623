"""A sweep: what to measure, from a TOML file or flags, checked and unfolded into points.

Lists multiply: every collective with every op, dtype, size, … that it has. Combinations that cannot exist are
skipped and counted; a value that ends up in no point at all is an error, since somebody asked for it.
"""

from __future__ import annotations

import math
import os
import shlex
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, Self

from commbench.errors import SpecError, UnknownName, unknown
from commbench.registry import BACKENDS, CA_PROVIDERS
from commbench.types import AUTO, CACHES, COLLECTIVES, DTYPES, LAYOUTS, NO_DTYPE, OPS, PLACEMENTS, Point, ops_of
from commbench.units import format_size, parse_duration, parse_percent, parse_size

DEFAULT_SIZES = "8:16MiB:x8"
BOUNDARIES = "boundaries"  # in place of a size: the policy's thresholds, one element to each side
MOST_STEPS = 10_000
MEASURED_MODES = ("eager", "graph")
GRAPH_TIMINGS = ("isolated", "chained")
BYTES_PER_RANK = 200 << 20  # what a rank's process takes before any buffer (torch's own memory)
BYTES = "uint8"  # the dtype of what carries objects
# kinds of groups; all groups of a kind work at once, unless it ends in :0, which is the first group alone
GROUPS = ("world", "tp", "pp", "moe_ep", "moe_tp", "tp:0", "pp:0", "moe_ep:0", "moe_tp:0")
SYNCS = ("window", "barrier", "none")
LOOPS = ("python", "native")
LAUNCHERS = ("torchrun", "mpirun", "external")
BINDINGS = ("", "core", "numa", "none")  # "": what the launcher does
DEVICES = ("auto", "cpu", "cuda", "xpu", "hpu", "npu")
# settings that take one word of several: what the word is, and those it may be ("" is not to say)
ONE_OF: dict[str, tuple[str, tuple[str, ...]]] = {
    "device": ("device", DEVICES),
    "sync": ("way to start iterations", SYNCS),
    "launcher": ("launcher", LAUNCHERS),
    "bind": ("way to bind ranks", BINDINGS),
    "ca_provider": ("provider of custom all-reduce", ("", *CA_PROVIDERS)),
    "loop": ("timed loop", LOOPS),
    "graph_timing": ("way to time graphs", GRAPH_TIMINGS),
}
# settings that are lists of names: what a name is, and those it may be (None: whoever reads it knows)
LISTS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "collectives": ("collective", tuple(COLLECTIVES)),
    "dtypes": ("dtype", tuple(DTYPES)),
    "ops": ("op", OPS),
    "layout": ("layout", LAYOUTS),
    "placement": ("placement", PLACEMENTS),
    "cache": ("cache", CACHES),
    "mode": ("mode", MEASURED_MODES),
    "backends": ("backend", (AUTO, *BACKENDS)),
    "policy": ("policy", None),
    "group": ("group", GROUPS),
}

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SizeRange:
    """start:stop:step, both ends included. step multiplies (x2, x1.414) or adds (+1KiB)."""

    start: int
    stop: int
    factor: float = 0.0
    increment: int = 0

    def sizes(self) -> Iterator[int]:
        exact = float(self.start)
        while round(exact) <= self.stop:
            yield round(exact)
            exact = exact * self.factor if self.factor else exact + self.increment


def parse_sizes(text: str) -> list[int | SizeRange | str]:
    """Sizes and ranges from ``8,1KiB,8:64MiB:x2,1KiB:16KiB:+1KiB,boundaries``. Raises SpecError."""
    parsed: list[int | SizeRange | str] = []
    for token in (t.strip() for t in str(text).split(",")):
        if not token:
            continue
        if token == BOUNDARIES:
            parsed.append(token)
            continue
        parts = token.split(":")
        if len(parts) == 1:
            size = parse_size(token)
            if size == 0:
                raise SpecError("size 0 has nothing to measure; the smallest message is one element")
            parsed.append(size)
        elif len(parts) in (2, 3):
            parsed.append(_parse_range(token, parts))
        else:
            raise SpecError(f"size {token!r} is no range; write start:stop:step, such as 8:64MiB:x2")
    return parsed


def _parse_range(token: str, parts: Sequence[str]) -> SizeRange:
    start, stop = parse_size(parts[0]), parse_size(parts[1])
    step = parts[2].strip() if len(parts) == 3 else "x2"
    if start == 0:
        raise SpecError(f"range {token!r} starts at 0; the smallest message is one element")
    if stop < start:
        raise SpecError(f"range {token!r} ends below its start; write the smaller size first")
    if step.startswith(("x", "*")):
        try:
            factor = float(step[1:])
        except ValueError:
            raise SpecError(f"range {token!r}: step {step!r} is no factor; write x2 or x1.414") from None
        if not 1 < factor < math.inf:
            raise SpecError(f"range {token!r}: step {step!r} never reaches the end; a factor must be above 1")
        if math.log(stop / start) / math.log(factor) > MOST_STEPS:
            raise SpecError(f"range {token!r} has more than {MOST_STEPS} steps; take a larger factor")
        return SizeRange(start, stop, factor=factor)
    if step.startswith("+"):
        increment = parse_size(step[1:])
        if increment == 0:
            raise SpecError(f"range {token!r}: step {step!r} never reaches the end; add at least one byte")
        if (stop - start) // increment > MOST_STEPS:
            raise SpecError(f"range {token!r} has more than {MOST_STEPS} steps; take a larger step")
        return SizeRange(start, stop, increment=increment)
    raise SpecError(f"range {token!r}: step {step!r} is neither a factor (x2) nor an increment (+1KiB)")


def parse_skew(text: str) -> tuple[int, float]:
    """(rank, seconds) from ``1:300us``. Raises SpecError."""
    rank, colon, delay = text.partition(":")
    if not colon or not rank.strip().isdigit():
        raise SpecError(f"skew {text!r} is not RANK:TIME; write 1:300us")
    return int(rank), parse_duration(delay)


class SettingError(SpecError):
    """One setting of a sweep is wrong: ``key`` names it, ``fault`` says what is wrong with it."""

    def __init__(self, key: str, fault: str) -> None:
        super().__init__(f"{key}: {fault}")
        self.key = key
        self.fault = fault


@dataclass(frozen=True, init=False)
class SweepSpec:
    """What a sweep file or the flags say. Every list multiplies with the others.

    Settings are keywords. Each is checked and brought into its field's type: lists of names from a list or from
    ``"a,b"``, sizes from ``"8:64KiB:x2"`` or a list, times from ``"2m"`` or seconds, the target from ``"1%"`` or a
    fraction. Raises SettingError.
    """

    name: str = "sweep"
    description: str = ""
    # what to measure
    collectives: Names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    dtypes: Names = ("float32", "bfloat16")
    ops: Names = ("sum",)
    sizes: str = DEFAULT_SIZES
    layout: Names = ("contiguous",)
    placement: Names = ()  # none: each collective's customary one
    cache: Names = ("hot",)
    mode: Names = ("eager",)
    backends: Names = (AUTO,)
    policy: Names = ("commbench",)
    group: Names = ("world",)
    # how
    tp: int = 2
    pp: int = 1
    ep: int = 1
    device: str = "auto"
    launches: int = 1
    target_ci: float = 0.01
    max_time_per_point: float = 0.5
    budget: float | None = None
    seed: int = 0
    sync: str = "window"
    loop: str = "python"
    graph_timing: str = "isolated"
    share_device: bool = False
    launcher: str = "torchrun"
    mpirun_options: str = ""
    nnodes: int = 1
    bind: str = ""
    skew: str = ""
    ca_provider: str = ""  # none: the first that is installed
    # how long to wait for it
    point_timeout: float | None = None
    launch_timeout: float | None = None
    # the settings that somebody named; the others hold their defaults
    given: Names = field(default=(), compare=False)

    def __init__(self, **settings: Any) -> None:
        for key in settings:
            if key not in SETTINGS:
                raise SettingError(key, f"unknown key; allowed: {', '.join(SETTINGS)}")
        for key in SETTINGS:  # in this order, whatever the user's: the first fault is always the same
            value = _checked(key, settings[key]) if key in settings else getattr(type(self), key)
            object.__setattr__(self, key, value)
        object.__setattr__(self, "given", tuple(key for key in SETTINGS if key in settings))
        self._check_together()

    def _check_together(self) -> None:
        """Raise SettingError where settings do not fit each other."""
        if self.point_timeout is not None and self.point_timeout <= self.max_time_per_point:
            raise SettingError(
                "point_timeout",
                f"{self.point_timeout:g} s is not longer than the {self.max_time_per_point:g} s that a point may take "
                "when all is well (--max-time-per-point)",
            )
        if self.ranks < 2:
            raise SettingError("tp", f"{self.ranks} ranks cannot hold a collective; it takes at least 2")
        if self.ranks % self.nnodes:
            raise SettingError("nnodes", f"{self.ranks} ranks cannot be spread evenly over {self.nnodes} hosts")
        if self.nnodes > 1 and self.launcher == "mpirun":
            raise SettingError(
                "nnodes",
                "mpirun starts the ranks of all hosts itself; name the hosts in --mpirun-options and leave --nnodes "
                "away",
            )
        if self.tp % self.ep:
            raise SettingError("ep", f"{self.ep} does not divide tp, {self.tp} ranks, among which experts are split")

    @property
    def ranks(self) -> int:
        """Processes of a launch."""
        return self.tp * self.pp

    @property
    def ranks_per_node(self) -> int:
        """Processes of a launch on each host."""
        return self.ranks // self.nnodes

    def group_size(self, group: str) -> int:
        """Ranks in one group of a kind (``tp``, or ``tp:0`` for the first alone)."""
        sizes = {"world": self.ranks, "tp": self.tp, "pp": self.pp, "moe_ep": self.ep, "moe_tp": self.tp // self.ep}
        return sizes[group.partition(":")[0]]

    def to_dict(self) -> dict[str, Any]:
        """Every setting in what JSON holds. ``SweepSpec(**spec.to_dict())`` is the same spec."""
        values = {key: getattr(self, key) for key in SETTINGS}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def changed(self, **settings: Any) -> Self:
        """The same spec with other settings, which are checked."""
        return type(self)(**{**{key: getattr(self, key) for key in self.given}, **settings})


SETTINGS = tuple(f.name for f in fields(SweepSpec) if f.name != "given")
_WHOLE = ("tp", "pp", "ep", "launches", "seed", "nnodes")
_DURATIONS = ("max_time_per_point", "budget", "point_timeout", "launch_timeout")


def _checked(key: str, value: Any) -> Any:
    """One setting in its field's type. Raises SettingError."""
    try:
        if key in LISTS:
            return _names(key, value)
        if key in _WHOLE:
            return _whole(key, value)
        if key in _DURATIONS:
            return None if value is None and key != "max_time_per_point" else parse_duration(value)
        if key == "target_ci":
            return parse_percent(value)
        if key == "sizes":
            return _sizes_text(value)
        if key == "share_device":
            if not isinstance(value, bool):
                raise SpecError(f"{value!r} is neither true nor false")
            return value
        return _word(key, value)
    except SpecError as error:
        raise SettingError(key, str(error)) from None


def _names(key: str, value: Any) -> Names:
    what, allowed = LISTS[key]
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise SpecError(f"{value!r} is no list of names")
    for name in value:
        if allowed is not None and name not in allowed:
            raise SpecError(f"unknown {what} {name!r}; allowed: {', '.join(allowed)}")
    if not value and key != "placement":
        raise SpecError("is empty; name at least one")
    return tuple(dict.fromkeys(value))


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SpecError(f"{value!r} is not a whole number")
    if key == "seed" and value < 0:
        raise SpecError(f"{value} is negative; seeds start at 0")
    if key in ("tp", "pp", "ep") and value < 1:
        raise SpecError(f"{value} ranks cannot hold a collective; it takes at least 2")
    if key == "nnodes" and value < 1:
        raise SpecError(f"{value} hosts cannot run anything; it takes at least 1")
    if key == "launches" and not 1 <= value <= 1000:
        raise SpecError(f"{value} is not between 1 and 1000")
    return value


def _sizes_text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, list | tuple):
        if any(isinstance(v, bool) or not isinstance(v, str | int) for v in value):
            raise SpecError(f"{value!r} holds what is no size; write 8, '1KiB' or '8:64MiB:x2'")
        value = ",".join(str(v) for v in value)
    if not isinstance(value, str):
        raise SpecError(f"{value!r} is no size; write 8, '1KiB' or '8:64MiB:x2'")
    if not parse_sizes(value):
        raise SpecError("is empty; name at least one size")
    return value


def _word(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(f"{value!r} is no text")
    if key in ONE_OF:
        what, allowed = ONE_OF[key]
        if value not in allowed:
            raise SpecError(f"{value!r} is no {what}; allowed: {', '.join(filter(None, allowed))}")
    if key == "skew" and value:
        parse_skew(value)
    if key == "mpirun_options":
        try:
            shlex.split(value)
        except ValueError as error:
            raise SpecError(f"{value!r} is no command line: {error}") from None
    if key == "name" and (not value.strip() or not value.isprintable() or os.sep in value):
        raise SpecError(f"{value!r} is no name for a run's folder; take letters, digits and hyphens")
    return value


_TABLES = {
    "sweep": (
        "collectives", "dtypes", "ops", "sizes", "layout", "placement", "cache", "mode", "backends", "policy", "group",
    ),
    "run": (
        "tp", "device", "launches", "target_ci", "max_time_per_point", "budget", "seed", "sync", "loop", "skew",
        "launcher", "mpirun_options", "nnodes", "bind",
        "pp", "ep", "graph_timing", "share_device", "point_timeout", "launch_timeout",
        "ca_provider",
    ),
}  # fmt: skip


def shipped_sweeps() -> dict[str, Path]:
    """The sweeps that come with commbench: name → file, from the package or from a checkout's ``sweeps/``."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_sweeps", here.parent / "sweeps"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return {}


def find_sweep(name: str) -> Path:
    """A sweep file by path, or a shipped one by its name. Raises UnknownName, or SpecError if it is a folder."""
    path = Path(name)
    if path.is_dir():
        raise SpecError(f"{name} is a folder; name a sweep file in it")
    if path.is_file():
        return path
    shipped = shipped_sweeps()
    if name in shipped:
        return shipped[name]
    if path.suffix or os.sep in name:
        # `sweeps/quick.toml` is how the docs write it; it works from any folder
        if path.parent.name == "sweeps" and path.stem in shipped:
            return shipped[path.stem]
        raise UnknownName(f"no sweep file {name}; shipped sweeps: {', '.join(shipped)}")
    raise unknown("sweep", name, shipped)


def read_file(path: Path) -> dict[str, Any]:
    """The flat settings of a sweep file. Raises SpecError naming file, key or line."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path} is not valid TOML: {error}") from error
    flat: dict[str, Any] = {"name": path.stem}
    for key, value in document.items():
        if key in ("name", "description"):
            flat[key] = value
        elif key in _TABLES:
            if not isinstance(value, dict):
                raise SpecError(f"{path}: {key} must be a table: [{key}]")
            for name, setting in value.items():
                if name not in _TABLES[key]:
                    home = next((t for t, names in _TABLES.items() if name in names), "")
                    hint = f"it belongs under [{home}]" if home else f"allowed: {', '.join(_TABLES[key])}"
                    raise SpecError(f"{path}: unknown key {key}.{name}; {hint}")
                flat[name] = setting
        else:
            raise SpecError(f"{path}: unknown key {key!r}; allowed: name, description, [sweep], [run]")
    return flat


def make_spec(settings: Mapping[str, Any], source: Mapping[str, str]) -> SweepSpec:
    """A checked spec. ``source`` says where each setting comes from, for messages. Raises SpecError."""
    try:
        return SweepSpec(**settings)
    except SettingError as error:
        raise SpecError(f"{source.get(error.key, error.key)}: {error.fault}") from None


@dataclass(frozen=True, slots=True)
class Expansion:
    """The points of a sweep in canonical order, and the combinations that cannot exist: reason → how many."""

    points: tuple[Point, ...]
    skipped: Mapping[str, int]


# (policy, collective, dtype, world size) → sizes at and around the policy's thresholds
Probes = Callable[[str, str, str, int], list[int]]


def expand(spec: SweepSpec, memory_bytes: int, probes: Probes | None = None) -> Expansion:
    """Unfold a spec into points.

    memory_bytes: what this host has; larger requests are refused before anything starts. probes: for the size
    ``boundaries``. Raises SpecError for an explicit size that does not fit, a value that no point uses, or no point.
    """
    _check_memory(spec, memory_bytes)
    tokens = parse_sizes(spec.sizes)
    skipped: Counter[str] = Counter()
    used: set[tuple[str, str]] = set()
    points: dict[Point, None] = {}
    for collective_name, backend, policy, group, mode, cache in product(
        spec.collectives, spec.backends, spec.policy, spec.group, spec.mode, spec.cache
    ):
        collective = COLLECTIVES[collective_name]
        ranks = spec.group_size(group)
        reason = _no_place(spec, collective_name, group, backend, mode, cache)
        if reason:
            skipped[reason] += 1
            if ranks > 1 and ranks % collective.multiple:
                used.add(("collectives", collective_name))  # another number of ranks has it: no mistake of the user's
            continue
        used |= {("group", group), ("backends", backend)}
        common: dict[str, Any] = {
            "world_size": ranks,
            "group": group,
            "backend": backend,
            "policy": policy,
            "mode": mode,
        }
        if not collective.has_data:
            points[Point(collective_name, "", NO_DTYPE, 0, cache="hot", placement="in", **common)] = None
            used |= {("collectives", collective_name)}
            continue
        for dtype, layout, placement, op in product(
            spec.dtypes if collective.carries == "tensors" else (BYTES,),
            spec.layout,
            spec.placement or (collective.placements[0],),
            spec.ops if collective.reduces else ("",),
        ):
            reason = _impossible(collective_name, dtype, op, layout, placement)
            if reason:
                skipped[reason] += 1
                continue
            used |= {
                ("collectives", collective_name), ("dtypes", dtype), ("layout", layout), ("placement", placement),
                ("ops", op), ("cache", cache),
            }  # fmt: skip
            for size in _sizes_for(tokens, collective_name, dtype, ranks, policy, probes):
                point = Point(
                    collective_name, op, dtype, size, layout=layout, cache=cache, placement=placement, **common
                )
                points[point] = None
    if not points:
        raise SpecError("nothing to measure: " + ("; ".join(skipped) or "the sizes name none"))
    for key in ("collectives", "dtypes", "ops", "layout", "placement", "cache", "group", "backends"):
        for value in getattr(spec, key):
            if (key, value) not in used and _asked_for(spec, key):
                why = next((r for r in skipped if value in r), "nothing in this sweep can have it")
                raise SpecError(f"{key}: {value!r} would not be measured: {why}")
    return Expansion(tuple(points), dict(skipped))


def _asked_for(spec: SweepSpec, key: str) -> bool:
    """Whether the user named this list; what the defaults hold may go unused (a barrier has no dtype)."""
    return key in spec.given


def _no_place(spec: SweepSpec, collective: str, group: str, backend: str, mode: str, cache: str) -> str:
    """Why a collective cannot run in a group, or ""."""
    info, ranks = COLLECTIVES[collective], spec.group_size(group)
    if ranks < 2:
        return f"a {group} group has one rank with --tp {spec.tp} --pp {spec.pp} --ep {spec.ep}"
    if group.endswith(":0") and spec.ranks == ranks:
        return f"{group} is all of {group.removesuffix(':0')}: there is one such group only"
    if ranks % info.multiple:
        what = "pairs of ranks" if info.multiple == 2 else "two halves of 2 ranks or more"
        return f"{collective} takes {what}, which a group of {ranks} does not have"
    if mode == "graph" and not (info.dispatched and info.has_data):
        return f"{collective} waits on the host, so no graph holds it"
    if not info.dispatched and backend != AUTO:
        return f"{collective} has one way, so {backend} cannot be forced"
    if not info.dispatched and cache != "hot":
        return f"{collective} makes its tensors anew, so they are not {cache}"
    return ""


def _impossible(collective: str, dtype: str, op: str, layout: str, placement: str) -> str:
    """Why a combination cannot exist, or ""."""
    info = COLLECTIVES[collective]
    if op and op not in ops_of(dtype):
        return f"op {op} does not exist for {dtype}"
    if placement not in info.placements:
        return f"{collective} has no {placement}-place form"
    if not info.dispatched and layout != "contiguous":
        return f"{collective} makes its tensors anew, so they are not {layout}"
    if layout == "strided" and placement == "in" and collective in ("all_gather", "reduce_scatter"):
        return f"in-place {collective} works on parts of one contiguous tensor, not on strided ones"
    return ""


def _sizes_for(
    tokens: Sequence[int | SizeRange | str],
    collective: str,
    dtype: str,
    ranks: int,
    policy: str,
    probes: Probes | None,
) -> list[int]:
    """Sizes in bytes for one collective and dtype: explicit ones must fit, ranges are rounded down to fit."""
    itemsize = DTYPES[dtype].itemsize
    unit = itemsize * (ranks if COLLECTIVES[collective].splits else 1)
    sizes: dict[int, None] = {}
    for token in tokens:
        if isinstance(token, int):
            if token % unit:
                per = f"{itemsize} bytes" + (f" × {ranks} ranks" if unit != itemsize else "")
                raise SpecError(
                    f"size {token} is no multiple of {unit} ({per}), which {collective} of {dtype} needs; "
                    f"take {max(unit, token // unit * unit)}, or a range, which is rounded down"
                )
            sizes[token] = None
        elif isinstance(token, SizeRange):
            for size in token.sizes():
                # the first step of a range may be below one element per rank: the smallest that exists stands in
                sizes[max(unit, size // unit * unit)] = None
        elif probes is not None:
            for size in probes(policy, collective, dtype, ranks):
                sizes[max(unit, size // unit * unit)] = None
    return sorted(sizes)


def _check_memory(spec: SweepSpec, memory_bytes: int) -> None:
    largest = max(
        (t if isinstance(t, int) else t.stop for t in parse_sizes(spec.sizes) if not isinstance(t, str)), default=0
    )
    ranks, pipeline = spec.ranks * BYTES_PER_RANK, f" --pp {spec.pp}" if spec.pp > 1 else ""
    if ranks > memory_bytes:
        raise SpecError(
            f"--tp {spec.tp}{pipeline}: so many ranks need about {format_size(ranks >> 20 << 20)} of memory for "
            f"their processes alone, this host has {format_size(memory_bytes >> 20 << 20)}"
        )
    # input and output on every rank, and one more copy while results are compared
    needed = ranks + spec.ranks * 3 * largest
    if needed > memory_bytes:
        raise SpecError(
            f"size {largest} ({format_size(largest)}) with {spec.ranks} ranks needs about {needed / 2**30:.1f} GiB of "
            "memory, "
            f"this host has {memory_bytes / 2**30:.1f} GiB"
        )
