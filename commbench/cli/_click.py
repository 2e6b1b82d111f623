"""What click lacks: options whose value may be left out, options in groups, and commands that are told by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from commbench.errors import SpecError

Parsed = TypeVar("Parsed")
Kind = type[click.Command]


def bare(option: str, value: str, base: Kind = click.Command) -> Kind:
    """A command that takes ``option`` alone as ``option=value``. click itself would take the word that follows."""

    class WithBareOption(base):  # type: ignore[valid-type,misc]
        def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
            end = args.index("--") if "--" in args else len(args)
            given = [f"{option}={value}" if arg == option else arg for arg in args[:end]]
            parsed: list[str] = super().parse_args(ctx, [*given, *args[end:]])
            return parsed

    return WithBareOption


def grouped(groups: Mapping[str, tuple[str, ...]], base: Kind = click.Command) -> Kind:
    """A command whose ``--help`` shows its options under headings. groups: heading → options (``--tp``); options that
    stand in none come last, under ``Options``."""

    class WithGroups(base):  # type: ignore[valid-type,misc]
        def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
            left = {}
            for parameter in self.get_params(ctx):
                record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
                if record is not None:
                    left[parameter.opts[0]] = record
            for heading, names in groups.items():
                with formatter.section(heading):
                    formatter.write_dl([left.pop(name) for name in names])
            if left:
                with formatter.section("Options"):
                    formatter.write_dl(list(left.values()))

    return WithGroups


class Commands(click.Group):
    """A group that names its commands where one is asked for that it does not have."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}; commands: {', '.join(known)}")
        return super().resolve_command(ctx, args)


def named(option: str, parse: Callable[[str], Parsed], text: str) -> Parsed:
    """An option's value, parsed. Raises SpecError that names the option."""
    try:
        return parse(text)
    except SpecError as error:
        raise SpecError(f"{option}: {error}") from None
