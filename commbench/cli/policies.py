"""``commbench policies``: list, show, compare, check and draw dispatch policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from commbench.cli._click import Commands
from commbench.cli.explain import request_of, request_options
from commbench.policy import Policy, list_policies, load_policy


@click.group(cls=Commands, invoke_without_command=True, short_help="List, show, compare and check dispatch policies.")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Dispatch policies: which backend an engine asks first, and when a backend accepts.

    Without a command: the list. A policy is one TOML file; docs/policies.md documents it field by field.
    """
    if ctx.invoked_subcommand is None:
        for line in _listing():
            click.echo(line)


def _listing() -> list[str]:
    policies = [load_policy(name) for name in list_policies()]
    width = max(len(p.name) for p in policies)
    lines = []
    for policy in policies:
        order = policy.data.order("all_reduce", "cuda")
        shown = " → ".join(r.name for r in order if r.name not in ("hpu", "xpu", "npu"))
        lines.append(f"{policy.name:<{width}}  {shown}")
    return [*lines, "", "commbench policies show NAME prints one; a path ending in .toml works wherever a name does."]


@command.command("list", short_help="The shipped policies, and the order in which each asks.")
def list_command() -> None:
    """The shipped policies, with the order in which each asks for an all-reduce on a GPU."""
    for line in _listing():
        click.echo(line)


@command.command(short_help="One policy in full.")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def show(name: str, as_json: bool) -> None:
    """One policy in full: order, conditions, tables, parameters, variables and the engine's faults."""
    from commbench.policy.show import show_data, show_text

    policy = load_policy(name)
    if as_json:
        click.echo(json.dumps(show_data(policy), indent=2))
        return
    for line in show_text(policy):
        click.echo(line)


@command.command(short_help="Sizes at which two policies differ on one machine.")
@click.argument("left")
@click.argument("right")
@request_options
@click.option("--hidden", type=click.IntRange(1), default=None, help="Width of a row: tensors are (rows, width).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def diff(left: str, right: str, hidden: int | None, as_json: bool, **machine: Any) -> None:
    """The (dtype, sizes, mode) cells whose backend differs between two policies on one machine.

    Looks at the machine as described, then with each value of each option that both engines have and that was not
    set with --env or --set.

    \b
    commbench policies diff sglang-0.5.2rc2 sglang-0.5.3 --gpu mi300x --tp 8
    """
    from commbench.policy.compare import differences_by_option
    from commbench.policy.show import diff_data, diff_text

    request = request_of(**machine)
    first, second = load_policy(left), load_policy(right)
    platforms = (request.platform(first, lenient=True), request.platform(second, lenient=True))
    cells = differences_by_option((first, platforms[0]), (second, platforms[1]), hidden or 0)
    if as_json:
        click.echo(json.dumps(diff_data(cells), indent=2))
        return
    for line in diff_text((first, second), platforms, request.place(), cells):
        click.echo(line)


@command.command(short_help="What is suspect about a policy, and the engine's own faults.")
@click.argument("name")
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="Look at these GPUs only (may be given again).")
@click.option("--tp", "world_sizes", type=click.IntRange(1), multiple=True, help="Look at these world sizes only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def check(name: str, gpus: tuple[str, ...], world_sizes: tuple[int, ...], as_json: bool) -> None:
    """What is suspect about a policy: dead zones, shadowed backends, caps, dead gates, and the engine's own faults.

    Ends with exit code 1 where the engine gives wrong results without an error.
    """
    from commbench.policy.check import MACHINES, WORLD_SIZES, scenes
    from commbench.policy.check import check as look
    from commbench.policy.show import check_data, check_text

    policy: Policy = load_policy(name)
    where = scenes(policy, gpus or MACHINES, world_sizes or WORLD_SIZES)
    findings = look(policy, where)
    if as_json:
        click.echo(json.dumps(check_data(findings), indent=2))
        click.get_current_context().exit(1 if any(f.serious for f in findings) else 0)
    for line in check_text(policy, where, findings):
        click.echo(line)
    if any(f.serious for f in findings):
        click.get_current_context().exit(1)


@command.command(short_help="Draw the map of picks over size and dtype.")
@click.argument("names", nargs=-1, required=True)
@request_options
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A .png or .svg file.")
def plot(names: tuple[str, ...], out: Path, **machine: Any) -> None:
    """Draw the map of picks over size and dtype for one policy, or two side by side."""
    from commbench.report.policy_map import draw_policies

    request = request_of(**machine)
    policies = [load_policy(name) for name in names]
    draw_policies([(p, request.platform(p, lenient=True)) for p in policies], request.place(), out)
    click.echo(f"drawn: {out}")
