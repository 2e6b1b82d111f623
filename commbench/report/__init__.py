"""Tables, plots and the HTML report of runs. No torch; matplotlib only in ``plots``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from commbench.errors import StoreError, UsageError
from commbench.store.schema import PLOTS_DIR, REPORT_HTML

# matplotlib logs about its caches where a home folder cannot be written: no news for who asked for a report
if (_matplotlib := logging.getLogger("matplotlib")).level == logging.NOTSET:
    _matplotlib.setLevel(logging.ERROR)


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write plots and the page for one run or several; gives the path of the page.

    They go into the run directory, or into ``out``, which several runs need. Works for runs that are still
    going on, were interrupted, or have no point that is ok. Plots of an earlier report are replaced.

    Raises StoreError for a path that is no run, and UsageError for an ``out`` that cannot be used.
    """
    from commbench.report.html import render
    from commbench.report.plots import draw
    from commbench.report.summary import summarise
    from commbench.store.run import open_run

    if not runs:
        raise UsageError("no run was named; name a run directory such as reports/<run_id>")
    if out is None and len(runs) > 1:
        raise UsageError(f"a report of {len(runs)} runs belongs to none of them; say where with --out DIR")
    seen: dict[Path, Path] = {}
    for path in runs:
        if (whole := path.resolve()) in seen:
            raise UsageError(f"run {path} was named twice")
        seen[whole] = path
    summaries = [summarise(open_run(path)) for path in runs]
    directory = runs[0] if out is None else out
    if out is not None:
        _check_out(out)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for old in (directory / PLOTS_DIR).glob("*.*"):
            if old.suffix in (".png", ".svg"):
                old.unlink()
        page = directory / REPORT_HTML
        render(summaries, draw(summaries, directory / PLOTS_DIR), page)
    except OSError as error:
        where = error.filename or directory
        raise StoreError(f"the report cannot be written: {where}: {error.strerror or error}; use --out DIR") from error
    return page


def _check_out(out: Path) -> None:
    """A folder that is new, empty, or holds nothing but an earlier report."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; name a new or empty folder")
    if out.is_dir():
        strange = sorted(p.name for p in out.iterdir() if p.name not in (PLOTS_DIR, REPORT_HTML))
        if strange:
            raise UsageError(
                f"--out {out} holds {strange[0]!r}; name a new or empty folder, or that of an earlier report"
            )
