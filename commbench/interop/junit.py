"""A judgement as JUnit XML: a test case per family, ``failure`` if it is slower, ``skipped`` if inconclusive.

Valid under the schemas of Jenkins (its xUnit plugin's junit-10) and of Ant (JUnit.xsd).
"""

from __future__ import annotations

import datetime
import math
import re
from xml.etree import ElementTree

from commbench.analysis.gate import Judgement, Status

# What XML 1.0 cannot hold, not even escaped.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(judgement: Judgement, *, host: str, when: datetime.datetime, names: tuple[str, str]) -> str:
    """The XML text. names: baseline and candidate. ``when`` is written as UTC without a zone, as the schema wants it.

    A judgement without any family gets one skipped case, so that no reader takes an empty suite for a good one.
    """
    verdicts = judgement.verdicts
    counts = {status: len(judgement.with_status(status)) for status in Status}
    empty = not verdicts
    suite = ElementTree.Element(
        "testsuite",
        {
            "id": "0",
            "package": "commbench",
            "name": "commbench gate",
            "tests": str(max(1, len(verdicts))),
            "failures": str(counts[Status.REGRESSION]),
            "errors": "0",
            "skipped": str(counts[Status.INCONCLUSIVE] + empty),
            "time": "0",
            "timestamp": when.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S"),
            "hostname": _clean(host) or "unknown",
        },
    )
    properties = ElementTree.SubElement(suite, "properties")
    facts = {
        "baseline": names[0],
        "candidate": names[1],
        "method": judgement.method,
        "margin": f"{judgement.rule.margin:g}",
        "status": judgement.status.value,
        "forced": "; ".join(judgement.forced),
    }
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    if empty:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "commbench.gate", "name": "gate", "time": "0"})
        ElementTree.SubElement(case, "skipped", {"message": _clean(judgement.reason)})
    for verdict in verdicts:
        seconds = verdict.cand_s if math.isfinite(verdict.cand_s) else 0.0
        collective = verdict.family.split(" · ")[0]
        case = ElementTree.SubElement(
            suite,
            "testcase",
            {"classname": f"commbench.gate.{collective}", "name": _clean(verdict.family), "time": f"{seconds:.9f}"},
        )
        if verdict.status == Status.REGRESSION:
            failure = ElementTree.SubElement(case, "failure", {"message": _clean(verdict.reason), "type": "regression"})
            failure.text = _clean("\n".join(_lines(verdict.slow_points)) or verdict.reason)
        elif verdict.status == Status.INCONCLUSIVE:
            ElementTree.SubElement(case, "skipped", {"message": _clean(verdict.reason)})
    for name in ("system-out", "system-err"):  # Ant's schema wants them, and says where
        ElementTree.SubElement(suite, name)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _lines(points: tuple[object, ...]) -> list[str]:
    from commbench.analysis.compare import percent
    from commbench.analysis.gate import SlowPoint

    return [
        f"{p.label}: {percent(p.ratio)} ({percent(p.low)} to {percent(p.high)})"
        for p in points
        if isinstance(p, SlowPoint)
    ]


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)
