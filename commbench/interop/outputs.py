"""Every form of a judgement, in one folder."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commbench.analysis.gate import Judgement, to_dict
from commbench.errors import UsageError
from commbench.interop.annotations import to_annotations
from commbench.interop.benchmark_json import to_benchmark_json
from commbench.interop.junit import to_junit
from commbench.interop.markdown import to_markdown
from commbench.interop.openmetrics import to_openmetrics
from commbench.interop.smaller_is_better import to_smaller_is_better
from commbench.store.run import write_json

if TYPE_CHECKING:
    from commbench.analysis.compare import Comparison

VERDICT, SUMMARY, JUNIT, ANNOTATIONS = "verdict.json", "summary.md", "junit.xml", "annotations.txt"
SMALLER, METRICS = "smaller-is-better.json", "metrics.txt"
BENCHMARKS = {"base": "benchmark-baseline.json", "cand": "benchmark-candidate.json"}


def write_outputs(
    directory: Path,
    judgement: Judgement,
    comparison: Comparison,
    *,
    names: tuple[str, str],
    manifests: tuple[Mapping[str, Any], Mapping[str, Any]],
    when: datetime.datetime,
) -> list[Path]:
    """Write all of them; gives their paths. Raises UsageError when the folder cannot be written."""
    host = str(((manifests[1].get("fingerprint") or {}).get("host") or {}).get("name") or "")
    texts = {
        SUMMARY: to_markdown(judgement, names=names),
        JUNIT: to_junit(judgement, host=host, when=when, names=names),
        ANNOTATIONS: to_annotations(judgement),
        METRICS: to_openmetrics(judgement, comparison),
    }
    verdict = {"baseline": names[0], "candidate": names[1], "judged_at": when.isoformat(), **to_dict(judgement)}
    documents: dict[str, Any] = {VERDICT: verdict, SMALLER: to_smaller_is_better(comparison)}
    for manifest, (side, name) in zip(manifests, BENCHMARKS.items(), strict=True):
        documents[name] = to_benchmark_json(comparison, side, manifest=manifest, when=when)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")
        for name, document in documents.items():
            json.dumps(document, allow_nan=False)  # a NaN would make a file that JSON readers refuse
            write_json(directory / name, document)
    except OSError as error:
        raise UsageError(f"--out {directory} cannot be written: {error.strerror or error}") from error
    return [directory / name for name in (*texts, *documents)]
