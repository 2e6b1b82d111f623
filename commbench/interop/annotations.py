"""A judgement as annotations of a GitHub Actions run: one line each, worst first."""

from __future__ import annotations

from commbench.analysis.gate import Judgement, Status

MOST = 10  # of one kind that a step shows
_LEVEL = {Status.REGRESSION: "error", Status.INCONCLUSIVE: "warning"}


def to_annotations(judgement: Judgement, most: int = MOST) -> str:
    """``::error title=…::…`` for families that are slower, ``::warning …`` for inconclusive ones; "" when all is green.

    At most ``most`` lines; the last one counts what it leaves out. A night that is inconclusive as a whole is one line.
    """
    shown = [v for v in judgement.verdicts if v.status in _LEVEL]
    reasons = {v.reason for v in shown}
    if judgement.status == Status.INCONCLUSIVE and (not shown or (len(shown) > 1 and len(reasons) == 1)):
        return _line("warning", "commbench gate: inconclusive", judgement.reason)
    left = len(shown) - most
    lines = [_line(_LEVEL[v.status], v.family, v.reason) for v in shown[: most - 1 if left > 0 else most]]
    if left > 0:
        lines.append(_line("warning", "commbench gate", f"and {left + 1} more families that are not green"))
    return "".join(lines)


def _line(level: str, title: str, message: str) -> str:
    return f"::{level} title={_property(title)}::{_data(message)}\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
