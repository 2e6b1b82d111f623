"""``commbench export``: a policy's thresholds in an engine's own terms."""

from __future__ import annotations

from pathlib import Path

import click

from commbench.errors import StoreError, UsageError, unknown

TARGETS = ("sglang-0.5.3", "sglang-0.5.23", "vllm-0.33")


@click.command(context_settings={"max_content_width": 100})
@click.argument("policy", metavar="POLICY")
@click.option("--for", "target", required=True, help=f"Engine and version: {', '.join(TARGETS)}.")
@click.option("--world-size", "world_sizes", type=int, multiple=True,
              help="Ranks; again for more. [default: 2, 4, 6, 8]")  # fmt: skip
@click.option("--capability", "capabilities", multiple=True,
              help="Compute capability, such as 9.0; again for more. [default: the engine's own]")  # fmt: skip
@click.option("--enable", help="The policy's switches that are on, comma-separated. [default: its own]")
@click.option("--out", type=click.Path(path_type=Path), help="File to write. [default: stdout]")
def command(
    policy: str, target: str, world_sizes: tuple[int, ...], capabilities: tuple[str, ...], enable: str | None,
    out: Path | None,
) -> int:  # fmt: skip
    """Write the thresholds of POLICY (a name or a file) as a Python module that an engine can import.

    The policy's picks on GPUs are worked back into the engine's own tables. The result is checked: our policy of
    that engine, with these tables, must pick the same at every size where either changes. What the engine cannot
    express is refused, with the first size that would come out different.

    \b
    commbench export policy.toml --for sglang-0.5.3 --out thresholds.py
    commbench export policy.toml --for vllm-0.33 --world-size 8 --capability 9.0
    """
    from commbench.interop import export_sglang, export_vllm
    from commbench.interop.export import Group
    from commbench.policy import load_policy

    if target not in TARGETS:
        raise unknown("target", target, TARGETS)
    module = export_vllm if target == export_vllm.RELEASE else export_sglang
    asked = [_capability(text) for text in capabilities] or list(module.CAPABILITIES)
    for n in world_sizes:
        if n not in module.WORLD_SIZES:
            allowed = ", ".join(map(str, module.WORLD_SIZES))
            raise UsageError(f"--world-size {n}: {target} has these backends for {allowed} ranks only")
    groups = [Group(c, n) for c in asked for n in world_sizes or module.WORLD_SIZES]
    requested = None if enable is None else frozenset(s.strip() for s in enable.split(",") if s.strip())
    loaded = load_policy(policy)
    if module is export_vllm:
        text = export_vllm.export(loaded, groups, requested)
    else:
        text = export_sglang.export(loaded, target, groups, requested)
    if out is None:
        click.echo(text, nl=False)
        return 0
    try:
        out.write_text(text)
    except OSError as error:
        raise StoreError(f"--out {out} cannot be written: {error.strerror or error}") from error
    click.echo(f"{out}: {len(groups)} groups, checked against policy {target}")
    return 0


def _capability(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    if not dot or not major.isdigit() or not minor.isdigit():
        raise UsageError(f"--capability {text!r} is not like 9.0")
    return int(major), int(minor)
