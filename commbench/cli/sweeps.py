"""``commbench sweeps``: the sweeps that come with commbench."""

from __future__ import annotations

import tomllib

import click

from commbench.sweep import shipped_sweeps


@click.command()
def command() -> None:
    """List the sweeps that come with commbench."""
    shipped = shipped_sweeps()
    width = max((len(name) for name in shipped), default=0)
    for name, path in shipped.items():
        description = str(tomllib.loads(path.read_text()).get("description", "")).strip()
        click.echo(f"{name:<{width}}  {description.splitlines()[0] if description else ''}")
    click.echo("\nRun one with: commbench sweep NAME. Copy and change one: " + str(next(iter(shipped.values())).parent))
