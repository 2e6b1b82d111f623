"""Options whose value may be left out."""

from __future__ import annotations

import click


def bare(option: str, value: str) -> type[click.Command]:
    """A command that takes ``option`` alone as ``option=value``. click itself would take the word that follows."""

    class WithBareOption(click.Command):
        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            end = args.index("--") if "--" in args else len(args)
            given = [f"{option}={value}" if arg == option else arg for arg in args[:end]]
            return super().parse_args(ctx, [*given, *args[end:]])

    return WithBareOption
