"""commbench weights: a model's time to sync, by bucket size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from commbench.cli.weights import command
from commbench.errors import Interrupted, SpecError, StoreError, UsageError
from commbench.harness.environment.comparable import compare_manifests
from commbench.store.run import open_run

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 100, "torch_dtype": "bfloat16",
}  # fmt: skip
PARAMETERS = 2 * 100 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32


def run(*words: str) -> Result:
    return CliRunner().invoke(command, list(words), standalone_mode=False)


def test_each_bucket_size_has_a_time_to_sync_a_rate_and_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "out"
    done = run(
        str(tmp_path), "--tp", "2", "--device", "cpu", "--bucket-size", "1KiB,1MiB", "--max-time-per-point", "50ms",
        "--out", str(out), "--json",
    )  # fmt: skip
    assert done.exception is None, done.exception
    document: dict[str, Any] = json.loads(done.stdout)
    assert (document["tensors"], document["size_bytes"]) == (1 + 2 * 9 + 2, 2 * PARAMETERS)
    assert [result["bucket_bytes"] for result in document["buckets"]] == [1024, 1 << 20]
    for result in document["buckets"]:
        assert result["gb_per_s"] == pytest.approx(2 * PARAMETERS / result["time_to_sync_s"] / 1e9)
    for name, size in (("bucket-1KiB", 1024), ("bucket-1MiB", 1 << 20)):
        measured = open_run(out / name)
        assert measured.manifest["weights"]["bucket_bytes"] == size
        assert measured.manifest["weights"]["parameters"] == PARAMETERS
        assert measured.rows()[0]["wrong_count"] == 0
    assert Path(document["report"]).parent == out / "report"
    assert "Launch-to-launch" not in Path(document["report"]).read_text()  # another bucket size is no further launch
    small, large = (open_run(out / name).manifest for name in ("bucket-1KiB", "bucket-1MiB"))
    assert "settings.bucket_bytes: 1024 → 1048576" in compare_manifests(small, large).refusals


@pytest.mark.slow
def test_an_interrupted_command_reports_the_bucket_sizes_that_it_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commbench.harness.engine.driver import Engine

    measure = Engine.measure_weights
    calls: list[int] = []

    def interrupted(self: Engine, *args: Any, **keywords: Any) -> Any:
        calls.append(keywords["bucket_bytes"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, *args, **keywords)

    monkeypatch.setattr(Engine, "measure_weights", interrupted)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    out = tmp_path / "out"
    words = ["--device", "cpu", "--bucket-size", "1KiB,1MiB,2MiB", "--max-time-per-point", "50ms", "--out", str(out)]
    done = run(str(tmp_path), *words, "--json")
    assert isinstance(done.exception, Interrupted)
    assert str(done.exception) == f"interrupted; 1 of 3 bucket sizes are kept in {out}"
    document: dict[str, Any] = json.loads(done.stdout)
    assert [result["bucket_bytes"] for result in document["buckets"]] == calls[:1]
    assert (out / "report" / "plots" / "weights.png").exists()


def test_bad_input_is_named_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("{")
    for words, kind, told in (
        ([str(tmp_path / "nosuch")], UsageError, "nosuch cannot be read"),
        ([str(tmp_path / "list.json")], UsageError, "holds no object"),
        ([str(tmp_path / "text.json")], UsageError, "is not JSON"),
        ([str(config), "--bucket-size", "0"], SpecError, "must name sizes from 1 byte"),
        ([str(config), "--bucket-size", ","], SpecError, "must name sizes from 1 byte"),
        ([str(config), "--bucket-size", "4q"], SpecError, "--bucket-size: size '4q' is not a number of bytes"),
        ([str(config), "--layers", "3"], UsageError, "3 layers of a model that has 2"),
        ([str(config), "--dtype", "int3"], UsageError, "dtype 'int3'"),
        ([str(config), "--max-time-per-point", "soon"], SpecError, "--max-time-per-point: duration 'soon'"),
        ([str(config), "--out", str(tmp_path)], StoreError, "not empty"),
        ([str(config), "--tp", "1"], SpecError, "1 ranks cannot hold"),
    ):
        problem = run(*words).exception
        assert isinstance(problem, kind), (words, problem)
        assert told in str(problem)
