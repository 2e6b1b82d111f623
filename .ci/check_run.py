"""Check that a run directory is a complete run in which every point is ok: python .ci/check_run.py DIRECTORY

Reads the files as anybody would, without commbench, so that it also checks what is promised about them.
Exits 1 with what is wrong, a line each; 3 if it is only that points are unsteady, which can be the machine's doing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pandas as pd


def problems(run: Path) -> list[str]:
    manifest = json.loads((run / "manifest.json").read_text())
    points = json.loads((run / "plan.json").read_text())["points"]
    launches = manifest["spec"]["launches"]
    rows = [json.loads(line) for line in (run / "points.jsonl").read_text().splitlines()]
    table = pd.read_parquet(run / "points.parquet")
    samples = pd.concat([pd.read_parquet(path) for path in sorted((run / "samples").glob("*.parquet"))])
    ranks = set(range(manifest["spec"]["tp"]))

    found = []
    if manifest["outcome"] != "complete":
        found.append(f"manifest.json: outcome is {manifest['outcome']!r}, not 'complete'")
    if not manifest["fingerprint"]["versions"]["torch"]:
        found.append("manifest.json: the fingerprint does not tell torch's version")
    if not points:
        found.append("plan.json: no points")
    if len(rows) != len(points) * launches:
        found.append(f"points.jsonl: {len(rows)} lines for {len(points)} points in {launches} launches")
    if sorted(table["point_id"]) != sorted(row["point_id"] for row in rows):
        found.append("points.parquet: not the points of points.jsonl")
    for row in rows:
        name = f"{row['collective']} {row['dtype']} {row['size_bytes']} B [{row['backend_requested']}]"
        latencies = [row[f"latency_{which}_s"] for which in ("min", "median", "p99", "max")]
        if row["status"] != "ok":
            found.append(f"{name}: {row['status']}: {row['reason']}")
        elif not row["checked"] or row["wrong_count"] != 0:
            found.append(f"{name}: results were not checked, or wrong ({row['wrong_count']})")
        elif None in latencies or not 0 < latencies[0] <= latencies[1] <= latencies[2] <= latencies[3] < 60:
            found.append(f"{name}: ok, but its latencies (min, median, p99, max) are {latencies} s")
        elif row["backend_requested"] not in ("auto", row["backend_picked"]):
            found.append(f"{name}: {row['backend_picked']} was taken")
        of_point = samples[samples["point_id"] == row["point_id"]]
        if set(of_point["rank"]) != ranks or (of_point["end_ns"] < of_point["start_ns"]).any():
            found.append(f"{name}: raw samples of ranks {sorted(set(of_point['rank']))}, or an end before its start")
    page = run / "report.html"
    if not page.is_file() or "<html" not in page.read_text()[:500].lower():
        found.append("report.html: not there, or no page")
    for kind in ("png", "svg"):
        if not any((run / "plots").glob(f"*.{kind}")):
            found.append(f"plots/: no {kind} file")
    if not found:
        picked = Counter(row["backend_picked"] for row in rows)
        sys.stdout.write(f"{len(rows)} points, every one ok; picked: {dict(picked)}\n")
    return found


def main() -> int:
    found = problems(Path(sys.argv[1]))
    sys.stderr.writelines(line + "\n" for line in found)
    if not found:
        return 0
    return 3 if all(": unsteady: " in line for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
