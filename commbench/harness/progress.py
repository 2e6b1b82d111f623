"""Showing a sweep while it runs: a live line on a terminal, plain lines elsewhere. Everything goes to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from commbench.harness.launch import Event

LINE_EVERY_S = 5.0  # plain lines come at most so often


@contextmanager
def watcher(total: int, *, quiet: bool, estimate_s: float) -> Iterator[Callable[[Event], None]]:
    """A function that takes a launch's events, showing them until the context ends."""
    if quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with _live(total) as on_event:
            yield _never_failing(on_event)
    else:
        yield _never_failing(_plain(total, estimate_s))


def _never_failing(show: Callable[[Event], None]) -> Callable[[Event], None]:
    """Showing ends with its reader (a closed terminal or pipe); measuring does not."""
    showing = True

    def on_event(event: Event) -> None:
        nonlocal showing
        if showing:
            try:
                show(event)
            except OSError:
                showing = False

    return on_event


def _plain(total: int, estimate_s: float) -> Callable[[Event], None]:
    started = last = time.monotonic()
    finished = 0
    label = ""
    print(f"measuring {total} points, about {estimate_s:.0f} s", file=sys.stderr, flush=True)

    def on_event(event: Event) -> None:
        nonlocal finished, last, label
        if event["event"] == "visit":
            label = event["label"]
        elif event["event"] == "point":
            finished += 1
        elif event["event"] == "trouble":
            print(f"launch {event['launch']}: {event['text']}: {label}", file=sys.stderr, flush=True)
        now = time.monotonic()
        if event["event"] == "point" and (now - last >= LINE_EVERY_S or finished == total):
            last = now
            left = (now - started) / finished * (total - finished)
            print(
                f"[{finished}/{total}] {now - started:.0f} s, about {left:.0f} s left: {label}",
                file=sys.stderr,
                flush=True,
            )

    return on_event


@contextmanager
def _live(total: int) -> Iterator[Callable[[Event], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    # four redraws a second: the ranks need the cores
    with Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=Console(stderr=True),
        refresh_per_second=4,
        transient=True,
    ) as progress:
        task: Any = progress.add_task("starting ranks", total=total)

        def on_event(event: Event) -> None:
            match event["event"]:
                case "visit":
                    progress.update(task, description=event["label"])
                case "point":
                    progress.advance(task)
                case "trouble":
                    progress.update(task, description=f"launch {event['launch']}: {event['text']}")
                case "ready":
                    progress.update(task, description="calibrating")

        yield on_event
