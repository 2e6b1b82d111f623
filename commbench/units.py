"""Sizes and times as people write them. Inside the program: bytes and seconds.

GB = 1e9 bytes in rates, KiB and MiB in sizes. ``K``, ``M`` and ``G`` alone are binary, as in
nccl-tests; ``KB``, ``MB`` and ``GB`` are decimal.
"""

from __future__ import annotations

import re

from commbench.errors import SpecError

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "kib": 1 << 10,
    "m": 1 << 20,
    "mib": 1 << 20,
    "g": 1 << 30,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_MICROSECOND = ("us", "µs", "μs")  # µ as the micro sign and as the Greek letter
_TIME_UNITS = {
    "ns": 1e-9,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    **dict.fromkeys(_MICROSECOND, 1e-6),
}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Zµμ]*)\s*")
_MOST_BYTES = 1 << 62  # what sizes are counted in has 64 bits
_LONGEST_S = 366 * 86400.0


def parse_size(text: str | int) -> int:
    """Bytes from ``8``, ``1KiB``, ``10MB`` or ``1.5GiB``.

    Raises SpecError for anything else, for a negative number, for a fraction of a byte and for more than 64 bits count.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise SpecError(f"size {text} is negative")
        return _possible(text, text)
    if str(text).strip().startswith("-"):
        raise SpecError(f"size {text!r} is negative")
    match = _NUMBER.fullmatch(str(text))
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise SpecError(f"size {text!r} is not a number of bytes; write 8, 64KiB, 1MiB or 10MB")
    digits, _, decimals = match[1].partition(".")
    if len(digits) > len(str(_MOST_BYTES)) or len(decimals) > 30:
        raise SpecError(f"size {text!r:.60} has more digits than any size has")
    # in whole numbers: floats would round sizes above 2^53
    value, rest = divmod(int(digits + decimals) * _SIZE_UNITS[match[2].lower()], 10 ** len(decimals))
    if rest:
        raise SpecError(f"size {text!r} is not a whole number of bytes")
    return _possible(value, text)


def _possible(size_bytes: int, text: str | int) -> int:
    if size_bytes > _MOST_BYTES:
        raise SpecError(f"size {text!s:.60} is larger than any memory")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """The shortest exact spelling: ``1 KiB``, ``8 B``, ``1000 B``, ``1.5 MiB``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            value = size_bytes / scale
            text = f"{value:.3f}".rstrip("0").rstrip(".")
            if float(text) * scale == size_bytes:
                return f"{text} {unit}"
    return f"{size_bytes} B"


def decimal_size(size_bytes: int) -> str:
    """A size that is seldom a round number of anything, in four digits: ``16.06 GB``, decimal as rates are."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} B"


def parse_duration(text: str | float) -> float:
    """Seconds from ``2m``, ``500ms``, ``1.5s`` or a plain number of seconds, up to a year. Raises SpecError."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(max(min(text, 1e300), -1e300))  # a whole number may be more than a float holds
    else:
        match = _NUMBER.fullmatch(str(text))
        if match is None or (match[2] and match[2] not in _TIME_UNITS):
            raise SpecError(f"duration {text!r} is not a time; write 500ms, 30s or 2m")
        seconds = float(match[1]) * _TIME_UNITS[match[2] or "s"]
    if not seconds > 0:  # nor is NaN
        raise SpecError(f"duration {text!r:.60} must be more than zero")
    if seconds > _LONGEST_S:
        raise SpecError(f"duration {text!r:.60} is longer than a year")
    return seconds


def parse_percent(text: str | float) -> float:
    """A fraction from ``1%`` or ``0.01``. Raises SpecError unless 0 < value < 1."""
    raw = str(text).strip()
    try:
        value = float(raw[:-1]) / 100 if raw.endswith("%") else float(raw)
    except ValueError:
        raise SpecError(f"{text!r} is not a percentage; write 1% or 0.01") from None
    if not 0 < value < 1:
        raise SpecError(f"{text!r} must be between 0% and 100%")
    return value


def format_time(seconds: float) -> str:
    """Three significant digits with a unit: ``412 ns``, ``1.23 µs``, ``45.6 ms``."""
    if seconds != seconds:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    digits = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2
    return f"{value:.{digits}f}"
