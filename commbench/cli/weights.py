"""``commbench weights``: how long a model's weights take from a trainer to the ranks of an engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import click

from commbench.cli._click import named
from commbench.errors import CommbenchError, Interrupted, SpecError
from commbench.units import decimal_size, format_size, parse_duration, parse_size

DEFAULT_BUCKETS = "1MiB,16MiB,64MiB,256MiB"


@click.command(context_settings={"max_content_width": 100})
@click.argument("config", type=click.Path(path_type=Path))
@click.option(
    "--tp", type=int, default=2, show_default=True, help="Ranks that hold the weights; rank 0 is the trainer."
)
@click.option("--bucket-size", "buckets", default=DEFAULT_BUCKETS, show_default=True, help="Bytes that travel at once, "
              "comma-separated. A larger tensor has a bucket of its own.")  # fmt: skip
@click.option("--dtype", default="", help="In place of the config's.")
@click.option("--layers", type=int, help="The first so many layers only, where the whole model does not fit.")
@click.option("--device", default="auto", show_default=True, help="auto (cuda or cpu), cpu, cuda, xpu, hpu, npu.")
@click.option("--max-time-per-point", default="2s", show_default=True, help="Longest sampling of one bucket size.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the order of bucket sizes.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder: a run for each bucket size. "
              "[default: reports/<time>-weights-<id>]")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there.")
def command(
    config: Path,
    tp: int,
    buckets: str,
    dtype: str,
    layers: int | None,
    device: str,
    max_time_per_point: str,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> int:
    """Time to sync the weights of a model, for several sizes of buckets.

    CONFIG is a Hugging Face config.json (or the folder that holds it): it gives the tensors, no weights are read.

    \b
    commbench weights Llama-3.1-8B/config.json --tp 4
    commbench weights config.json --layers 2 --bucket-size 4MiB,64MiB
    """
    from commbench.analysis.parameters import parameters_of
    from commbench.harness.engine.driver import Engine
    from commbench.harness.run import FAILING, new_run_id
    from commbench.interop.model_config import read_config
    from commbench.report import write_report
    from commbench.store.run import check_writable, update_manifest

    sizes = named("--bucket-size", _bucket_sizes, buckets)
    named("--max-time-per-point", parse_duration, max_time_per_point)
    model = parameters_of(read_config(config), str(config), dtype=dtype, layers=layers)
    folder = out if out is not None else Path("reports") / new_run_id("weights")
    check_writable(folder)
    order = list(sizes)
    random.Random(seed).shuffle(order)
    rows: dict[int, dict[str, Any]] = {}
    ended: KeyboardInterrupt | CommbenchError | None = None
    try:
        with Engine(tp=tp, device=device) as engine:
            for size in order:
                click.echo(f"bucket size {format_size(size)} ({len(rows) + 1} of {len(order)})", err=True)
                found = engine.measure_weights(
                    [p.numel for p in model.tensors], model.dtype, bucket_bytes=size, out=folder / _name(size),
                    max_time_per_point=max_time_per_point, seed=seed,
                    sync="barrier",  # an update lasts milliseconds: a start within a microsecond will do
                )  # fmt: skip
                update_manifest(
                    folder / _name(size),
                    weights={
                        "config": str(config), "architecture": model.architecture, "tensors": len(model.tensors),
                        "parameters": model.numel, "layers": layers, "bucket_bytes": size,
                    },
                )  # fmt: skip
                (rows[size],) = found
    except (KeyboardInterrupt, CommbenchError) as error:  # what is finished is reported all the same
        ended = error
        if not rows:
            raise
    sizes = [size for size in sizes if size in rows]
    page = write_report([folder / _name(size) for size in sizes], folder / "report")
    results = [_result(size, rows[size]) for size in sizes]
    if as_json:
        about = {"architecture": model.architecture, "dtype": model.dtype, "tensors": len(model.tensors), "tp": tp}
        document = {**about, "size_bytes": model.size_bytes, "buckets": results, "report": str(page)}
        click.echo(json.dumps(document, indent=1))
    else:
        count = f"{len(model.tensors)} tensors, {model.numel:,} parameters"
        whole = f"{decimal_size(model.size_bytes)} of {model.dtype}"
        click.echo(f"{model.architecture}: {count}, {whole}, from one rank to {tp - 1}")
        click.echo(f"{'bucket':>10} {'time to sync':>14} {'95 % interval':>22} {'GB/s':>8}  status")
        for result in results:
            click.echo(_line(result))
        click.echo(f"report: {page}")
    if isinstance(ended, KeyboardInterrupt):
        raise Interrupted(f"interrupted; {len(sizes)} of {len(order)} bucket sizes are kept in {folder}") from ended
    if ended is not None:
        raise ended
    return 1 if any(row["status"] in FAILING for row in rows.values()) else 0


def _bucket_sizes(text: str) -> list[int]:
    """Raises SpecError for what is no size, and for none."""
    sizes = sorted({parse_size(part) for part in text.split(",") if part.strip()})
    if not sizes or not sizes[0]:
        raise SpecError(f"{text!r} must name sizes from 1 byte, such as {DEFAULT_BUCKETS}")
    return sizes


def _name(size: int) -> str:
    return f"bucket-{format_size(size).replace(' ', '')}"


def _result(size: int, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "bucket_bytes": size,
        "time_to_sync_s": row["latency_median_s"],
        "ci_low_s": row["latency_ci_low_s"],
        "ci_high_s": row["latency_ci_high_s"],
        "gb_per_s": row["algbw_gb_per_s"],
        "status": row["status"],
        "reason": row["reason"],
    }


def _line(result: dict[str, Any]) -> str:
    def ms(name: str) -> str:
        return "–" if result[name] is None else f"{1e3 * result[name]:.2f}"

    interval = f"{ms('ci_low_s')}–{ms('ci_high_s')} ms" if result["ci_low_s"] is not None else "–"
    rate = "–" if result["gb_per_s"] is None else f"{result['gb_per_s']:.3f}"
    line = f"{format_size(result['bucket_bytes']):>10} {ms('time_to_sync_s') + ' ms':>14} {interval:>22} {rate:>8}  "
    return f"{line}{result['status']}" + (f": {result['reason']}" if result["status"] != "ok" else "")
