"""What a measurement of an engine gives, and the run directory that it leaves where one is asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commbench.errors import EngineError
from commbench.store import schema

if TYPE_CHECKING:
    import pandas as pd

    from commbench.harness.engine.plan import Planned
    from commbench.store.run import Run


@dataclass(frozen=True, slots=True)
class Measurements:
    """What ``Engine.measure`` gives: the same records that a sweep writes, in the order in which points finished.

    directory: the run, where one was asked for; it holds the raw samples too. began_s: from the call to the first
    iteration, of the first point's warm-up.
    """

    rows: tuple[dict[str, Any], ...]
    directory: Path | None = None
    began_s: float = 0.0

    def __repr__(self) -> str:
        where = "not stored" if self.directory is None else f"in {self.directory}"
        return f"<commbench.Measurements {len(self)} rows, {where}>"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]

    def points(self) -> pd.DataFrame:
        """One row per point, with exactly the columns of a run's ``points.parquet``."""
        import pandas as pd

        frame = pd.DataFrame.from_records(list(self.rows), columns=list(schema.POINT_COLUMNS))
        return frame.astype(schema.POINT_COLUMNS)

    @property
    def run(self) -> Run:
        """The run on disk. Raises EngineError where none was asked for."""
        from commbench.store.run import open_run

        if self.directory is None:
            raise EngineError("these measurements were not stored; give measure(…, out=FOLDER)")
        return open_run(self.directory)


def create_run(directory: Path, planned: Planned, fingerprint: Mapping[str, Any]) -> None:
    """Make the run directory of a measurement. Raises StoreError where it cannot be used."""
    from commbench.harness.run import new_manifest
    from commbench.store.run import Plan, check_writable, create

    spec, expansion, settings = planned
    check_writable(directory)
    manifest = new_manifest(spec, expansion, settings, directory, sys.argv or ["python"], fingerprint)
    create(directory, manifest, Plan(expansion.points, settings.to_dict()))


def close_run(directory: Path, outcome: str, launch: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Write what such a run leaves. launch: how the ranks were started. answer: rank 0's, with facts and canaries."""
    from commbench.harness.run import close_run as close
    from commbench.store.run import open_run, update_manifest
    from commbench.store.samples import to_parquet

    to_parquet(directory, 0)
    facts = dict(answer["facts"])
    fingerprint = {**open_run(directory).manifest["fingerprint"], "rank": facts.pop("rank_facts", {})}
    record = {**launch, **facts, "canaries": answer["canaries"], "ended_s": time.time()}
    update_manifest(directory, launches=[record], fingerprint=fingerprint)
    close(directory, outcome)
