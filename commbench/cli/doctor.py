"""``commbench doctor``: what is available here, why the rest is not, and what to do."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commbench.cli import _nodes

if TYPE_CHECKING:
    from commbench.harness.environment.doctor import Note

_MARKS = {"ok": "✓", "off": "·", "note": "–", "warning": "!", "problem": "✗"}
_WIDEST, _NARROWEST = 110, 60


@click.command(short_help="Say what is available here, what is not, and what to do.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("reports"), show_default=True, help="For results.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
@click.option("--preflight", is_flag=True, help="Compare several hosts, and time the links between them, before a "
              "sweep on them: the same command on each, with the options below.")  # fmt: skip
@_nodes.where_options
def command(out: Path, as_json: bool, preflight: bool, **flags: Any) -> None:
    """Say what is available on this machine, why the rest is not, and what to do about it.

    ✓ works, · is not here, – is a setting that matters, ! will not work or will mislead, ✗ stops the main job.

    Exit code 1 where a sweep cannot run at all. Nothing is changed and no variable of yours is overridden.
    """
    place, count = _nodes.take(flags), 1 if flags["nnodes"] is None else flags["nnodes"]
    if count < 1:
        raise click.UsageError(f"--nnodes {count}: it takes at least 1 host")
    if preflight:
        click.get_current_context().exit(_preflight(place, count, as_json))
    if count > 1:
        raise click.UsageError(f"--nnodes {count}: hosts are compared with --preflight")
    from commbench.harness.environment.doctor import can_run, diagnose, look

    notes = diagnose(look(out), os.environ)
    if as_json:
        click.echo(json.dumps({"can_run": can_run(notes), "notes": [asdict(n) for n in notes]}, indent=2))
    else:
        click.echo("\n".join(_lines(notes, _terminal())))
    click.get_current_context().exit(0 if can_run(notes) else 1)


def _preflight(place: _nodes.Place, count: int, as_json: bool) -> int:
    code, findings = _nodes.preflight(place, count)
    if as_json and findings:
        click.echo(json.dumps({"can_run": code == 0, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        for finding in findings:
            click.echo("\n".join(_wrapped(f"{_MARKS[finding.severity]} ", finding.text, 2, _terminal())))
    return code


def _terminal() -> int:
    """Columns to write in: the terminal's, as far as lines stay readable."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns))


def _grouped(notes: list[Note]) -> list[tuple[list[str], Note]]:
    """Notes of which all but the subject is the same are told once: (subjects, the note), where the first stands."""
    groups: dict[tuple[str, ...], tuple[list[str], Note]] = {}
    for note in notes:
        key = (note.section, note.state, note.what, note.remedy)
        groups.setdefault(key, ([], note))[0].append(note.subject)
    return list(groups.values())


def _lines(notes: list[Note], columns: int) -> list[str]:
    lines: list[str] = []
    groups = _grouped(notes)
    width = max(len(subjects[0]) for subjects, _ in groups)
    section = ""
    for subjects, note in groups:
        if note.section != section:
            section = note.section
            lines += ["", section] if lines else [section]
        names = ", ".join(subjects)
        first = f"  {_MARKS[note.state]} {names:<{width}}  "
        if len(names) > width:
            lines += _wrapped(f"  {_MARKS[note.state]} ", names, 4, columns)
            first = " " * (width + 6)
        lines += _wrapped(first, note.what, width + 6, columns)
        if note.remedy:
            lines += _wrapped(f"    {'':<{width}}  → ", note.remedy, width + 8, columns)
    counts = {state: sum(n.state == state for n in notes) for state in ("problem", "warning")}
    if counts["problem"]:
        last = "a sweep cannot run here: see ✗"
    elif counts["warning"]:
        last = (
            f"a sweep can run here; {counts['warning']} thing{'s' if counts['warning'] > 1 else ''} to look at: see !"
        )
    else:
        last = "a sweep can run here"
    return [*lines, "", last]


def _wrapped(first: str, text: str, indent: int, columns: int) -> list[str]:
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
