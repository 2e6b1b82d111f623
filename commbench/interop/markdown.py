"""A judgement as Markdown, for the summary of a CI step (which takes at most 1 MiB)."""

from __future__ import annotations

import math

from commbench.analysis.compare import percent
from commbench.analysis.gate import Judgement, Status, Verdict

LIMIT_BYTES = 1 << 20
_MARK = {Status.PASS: "🟢", Status.REGRESSION: "🔴", Status.INCONCLUSIVE: "🟡"}
_CUT = "\n*Cut: a step summary holds 1 MiB. verdict.json has everything.*\n"


def to_markdown(judgement: Judgement, *, names: tuple[str, str], limit_bytes: int = LIMIT_BYTES) -> str:
    """Verdict, a table of families (worst first), slower points, canaries and notes, in at most ``limit_bytes``."""
    rule = judgement.rule
    lines = [
        f"## {_MARK[judgement.status]} commbench gate: {judgement.status.value}",
        "",
        f"{_text(judgement.reason)}. Candidate {_code(names[1])} against {_code(names[0])} "
        f"({judgement.method}, margin {rule.margin:.1%}).",
        "",
    ]
    if judgement.forced:
        lines += [f"**Forced in spite of:** {_text('; '.join(judgement.forced))}", ""]
    if judgement.verdicts:
        lines += ["| | family | change (95 %) | candidate | why |", "|---|---|---|---|---|"]
        lines += [_row(v) for v in judgement.verdicts]
        lines.append("")
    slow = [p for v in judgement.verdicts for p in v.slow_points]
    if slow:
        lines += ["<details><summary>Slower points</summary>", "", "| point | change (95 %) |", "|---|---|"]
        lines += [f"| {_text(p.label)} | {_change(p.ratio, p.low, p.high)} |" for p in slow]
        lines += ["", "</details>", ""]
    if judgement.canaries:
        canaries = (f"{c.name} {_change(c.ratio, c.low, c.high)}" for c in judgement.canaries)
        lines += ["Canaries: " + ", ".join(canaries), ""]
    lines += [f"- {_text(note)}" for note in judgement.notes]
    return _within("\n".join(lines).rstrip() + "\n", limit_bytes)


def _within(text: str, limit_bytes: int) -> str:
    if len(text.encode()) <= limit_bytes:
        return text
    room = limit_bytes - len(_CUT.encode())
    kept = text.encode()[:room].decode(errors="ignore")
    return kept[: kept.rfind("\n") + 1] + _CUT


def _row(verdict: Verdict) -> str:
    from commbench.units import format_time

    time = format_time(verdict.cand_s) if math.isfinite(verdict.cand_s) else "–"
    change = _change(verdict.ratio, verdict.low, verdict.high)
    return f"| {_MARK[verdict.status]} | {_text(verdict.family)} | {change} | {time} | {_text(verdict.reason)} |"


def _change(ratio: float, low: float, high: float) -> str:
    if not (math.isfinite(ratio) and math.isfinite(low) and math.isfinite(high)):
        return "–"
    return f"{percent(ratio)} ({percent(low)} to {percent(high)})"


def _text(text: str) -> str:
    """Plain text inside a table cell: nothing in it is markup."""
    for character in "\\`*_[]<>|":
        text = text.replace(character, "\\" + character)
    return " ".join(text.split())


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`"
