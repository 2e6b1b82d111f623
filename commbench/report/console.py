"""The console that tables are printed on."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """rich's, but a reader that has gone (head, less) is a BrokenPipeError: rich itself would exit with 1, which says
    that something was found."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
