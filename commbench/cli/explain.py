"""``commbench explain``: which backend a call takes and why, for any engine and GPU, without one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from commbench.cli._click import named
from commbench.errors import UsageError
from commbench.policy import load_policy
from commbench.policy.request import Request
from commbench.types import COLLECTIVES, DTYPES, OPS, CallSignature
from commbench.units import parse_size

MODES = ("eager", "graph", "pcg", "compile")
LAYOUTS = ("contiguous", "strided", "dense_t")


def request_options(function: click.decorators.FC) -> click.decorators.FC:
    """The options that describe a machine; shared by the commands that ask policies."""
    for option in reversed(
        (
            click.option(
                "--gpu", default="", metavar="NAME", help="h100, h200, b200, gb300, a100, l40s, mi300x, mi355x, …; cpu."
            ),
            click.option(
                "--arch", "architecture", default="", metavar="SM", help="sm90, sm103, gfx942, … in place of --gpu."
            ),
            click.option("--tp", "world_size", type=click.IntRange(1), default=8, show_default=True, help="Ranks."),
            click.option("--nnodes", type=click.IntRange(1), default=1, show_default=True, help="Nodes they span."),
            click.option(
                "--topology",
                type=click.Choice(["nvlink", "pcie"]),
                default=None,
                help="Links. [default: the GPU's usual]",
            ),
            click.option(
                "--enable", default=None, metavar="A,B", help="Backends switched on. [default: the engine's own]"
            ),
            click.option("--env", multiple=True, metavar="K=V", help="An environment variable that the engine reads."),
            click.option("--set", "settings", multiple=True, metavar="K=V", help="A parameter of the policy."),
            click.option("--group", default="tp", show_default=True, help="The group's tag: tp, ep, pp, …"),
        )
    ):
        function = option(function)
    return function


def request_of(
    gpu: str, architecture: str, world_size: int, nnodes: int, topology: str | None, enable: str | None,
    env: tuple[str, ...], settings: tuple[str, ...], group: str,
) -> Request:  # fmt: skip
    """The options as a request."""
    words = None if enable is None else tuple(w.strip() for w in enable.split(",") if w.strip())
    return Request(gpu, architecture, world_size, nnodes, topology or "", words, env, settings, group)


# a skewed v-variant is dispatched as the balanced one
_DISPATCHED = [c.name for c in COLLECTIVES.values() if c.dispatched and not c.name.endswith("_skewed")]


@click.command(short_help="Say which backend a call takes and why, without a GPU.")
@click.option(
    "--policy", "policy_name", default="commbench", show_default=True, help="A shipped policy or a .toml file."
)
@request_options
@click.option(
    "--collective",
    metavar="NAME",
    type=click.Choice(_DISPATCHED),
    default="all_reduce",
    show_default=True,
    help="all_reduce, all_gather, reduce_scatter, broadcast, …",
)
@click.option(
    "--op", metavar="NAME", type=click.Choice(OPS), default="sum", show_default=True, help="sum, prod, min, max, avg."
)
@click.option(
    "--dtype",
    metavar="NAME",
    type=click.Choice([*DTYPES]),
    default="bfloat16",
    show_default=True,
    help="float32, bfloat16, int8, float8_e4m3fn, …",
)
@click.option("--size", metavar="SIZE", default="1MiB", show_default=True, help="Of the tensor that is passed in.")
@click.option("--hidden", type=click.IntRange(1), default=None, help="Width of a row: the tensor is (rows, width).")
@click.option(
    "--mode",
    metavar="NAME",
    type=click.Choice(MODES),
    default="eager",
    show_default=True,
    help="eager; graph; pcg, a piecewise graph; compile, under torch.compile.",
)
@click.option(
    "--layout",
    metavar="NAME",
    type=click.Choice(LAYOUTS),
    default="contiguous",
    show_default=True,
    help="contiguous; strided, with gaps; dense_t, transposed.",
)
@click.option("--registered", is_flag=True, help="The tensor lives in symmetric memory.")
@click.option("--range", "size_range", default=None, metavar="A:B", help="Winners over sizes, in place of one call.")
@click.option("--batch", type=click.Path(path_type=Path), default=None, help="Answer every row of a CSV file.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Where --batch writes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def command(
    policy_name: str, collective: str, op: str, dtype: str, size: str, hidden: int | None, mode: str, layout: str,
    registered: bool, size_range: str | None, batch: Path | None, out: Path | None, as_json: bool, **machine: object,
) -> None:  # fmt: skip
    """Say which backend a call takes, why the others do not, and how far the next threshold is.

    \b
    commbench explain --policy sglang-0.5.3 --gpu h100 --tp 8 --size 8MiB
    commbench explain --policy vllm-0.33 --gpu b200 --range 8:256MiB
    commbench explain --batch calls.csv.gz --policy sglang-0.5.10 --out answers.csv

    ✓ takes the call, ✗ declines it, ! raises, · stands behind the one that took it.
    """
    policy = load_policy(policy_name)
    if batch is not None:
        from commbench.policy.batch import answer_file

        if out is None:
            raise UsageError("--batch needs --out FILE.csv")
        if size_range is not None:
            raise UsageError("--batch and --range exclude each other")
        count = answer_file(policy, batch, out)
        click.echo(f"{count} rows answered by {policy.name} → {out}")
        return
    from commbench.policy.explain import explain, range_text
    from commbench.policy.intervals import sized

    request = request_of(**machine)  # type: ignore[arg-type]
    platform = request.platform(policy)
    op = op if COLLECTIVES[collective].reduces else ""
    template = CallSignature(collective, op, dtype, 0, 0, layout, mode, registered=registered)
    if size_range is not None:
        low, colon, high = size_range.partition(":")
        if not colon:
            raise UsageError(f"--range {size_range!r} is not FROM:TO, e.g. 8:256MiB")
        first, last = (named("--range", parse_size, end) for end in (low, high))
        if last < first:
            raise UsageError(f"--range {size_range!r} ends before it starts")
        lines, data = range_text(policy, platform, request.place(), template, first, last, hidden or 0)
        click.echo(json.dumps(data, indent=2) if as_json else "\n".join(lines))
        return
    size_bytes = named("--size", parse_size, size)
    itemsize = DTYPES[dtype].itemsize
    if size_bytes % itemsize:
        raise UsageError(f"--size {size} is not a whole number of {dtype} elements ({itemsize} bytes each)")
    said = explain(policy, platform, request.place(), sized(template, size_bytes, hidden or 0))
    click.echo(json.dumps(said.to_dict(), indent=2) if as_json else "\n".join(said.text()))
