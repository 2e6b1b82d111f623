"""Workloads: what a model sends, and milliseconds per step under each policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commbench.analysis.tune import tune
from commbench.analysis.workload import (
    Calls,
    calls_of,
    interpolated,
    measured,
    model_of,
    step_seconds,
    steps_under,
    workload_of,
)
from commbench.errors import UsageError
from commbench.interop.workload_file import read_workload
from commbench.types import Point
from tests.scripted import frame, one_shot_and_two_shot, rows

# The numbers that the published configurations of these models give.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "torch_dtype": "bfloat16",
    "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61, "hidden_size": 7168, "torch_dtype": "bfloat16",
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
}  # fmt: skip
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "hidden_size": 2048, "torch_dtype": "bfloat16",
    "num_experts_per_tok": 8, "decoder_sparse_step": 2, "mlp_only_layers": [1],
}  # fmt: skip


def test_a_dense_model_reduces_twice_a_layer_and_once_for_the_embedding() -> None:
    calls = calls_of(model_of(LLAMA_8B), 64, dtype="bfloat16")
    assert calls == (Calls("all_reduce", 64 * 4096 * 2, 65),)


def test_experts_that_exchange_tokens_send_them_there_and_back() -> None:
    calls = calls_of(model_of(MIXTRAL), 8, dtype="bfloat16", ep=8, exchange="all_to_all")
    assert calls == (Calls("all_reduce", 8 * 4096 * 2, 33), Calls("all_to_all", 8 * 4096 * 2 * 2, 64))


def test_experts_that_reduce_send_what_a_dense_model_sends() -> None:
    dense = calls_of(model_of(LLAMA_8B), 8, dtype="bfloat16")
    assert calls_of(model_of(MIXTRAL), 8, dtype="bfloat16", ep=8) == dense


@pytest.mark.parametrize(("config", "layers"), [(MIXTRAL, 32), (DEEPSEEK_V3, 58), (QWEN_MOE, 23), (LLAMA_8B, 0)])
def test_layers_of_experts_are_those_of_the_configuration(config: dict[str, Any], layers: int) -> None:
    # Qwen: every second layer (the 2nd, 4th, …), but not layer 1, the 2nd
    assert model_of(config).moe_layers == layers


def test_an_architecture_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"'NewForCausalLM' is not known; known: .*LlamaForCausalLM"):
        model_of({"architectures": ["NewForCausalLM"]})


def test_a_configuration_without_a_hidden_size_is_refused() -> None:
    with pytest.raises(UsageError, match="hidden_size is missing"):
        model_of({k: v for k, v in LLAMA_8B.items() if k != "hidden_size"})


def test_shares_are_relative_and_time_is_their_mean() -> None:
    load = workload_of(model_of(LLAMA_8B), {"decode": {1: 3, 2: 1}}, name="w", tp=2)
    per_call = {1 * 8192: 1e-6, 2 * 8192: 5e-6}
    seconds = step_seconds(load, lambda collective, dtype, size: per_call[size])
    assert seconds == {"decode": pytest.approx(65 * (0.75 * 1e-6 + 0.25 * 5e-6))}


def test_a_latency_between_two_sizes_lies_on_a_line_in_log_log() -> None:
    assert interpolated([1024, 4096], [1e-6, 4e-6], 2048, "x") == pytest.approx(2e-6)
    assert interpolated([1024, 4096], [1e-6, 4e-6], 4096, "x") == 4e-6
    with pytest.raises(UsageError, match="measured is 1 KiB to 4 KiB"):
        interpolated([1024, 4096], [1e-6, 4e-6], 8192, "x")


def tuned(today: int = 4096, truth: float = 65536.0) -> Any:
    like = Point("all_reduce", "sum", "bfloat16", 1024, 2)
    curves = one_shot_and_two_shot(truth)
    picks = lambda size: "shm_oneshot" if size <= today else "shm_twoshot"  # noqa: E731
    return tune(frame(rows(curves, picks, like=like, cv=0.005)))


def test_a_workload_is_answered_in_milliseconds_per_step_under_each_policy() -> None:
    load = workload_of(model_of(LLAMA_8B), {"decode": {2: 1}, "prefill": {256: 1}}, name="w", tp=2)
    found = {(s.phase, s.policy): s.milliseconds for s in steps_under(tuned(), load)}
    curves = one_shot_and_two_shot(65536.0)
    assert found["decode", "today"] == pytest.approx(65e3 * curves["shm_twoshot"](2 * 8192), rel=0.02)
    assert found["decode", "tuned"] == pytest.approx(65e3 * curves["shm_oneshot"](2 * 8192), rel=0.02)
    assert found["decode", "tuned"] == pytest.approx(found["decode", "fastest"], rel=0.02)
    assert found["prefill", "today"] == pytest.approx(found["prefill", "tuned"])


def test_a_workload_that_sends_what_was_not_measured_is_refused() -> None:
    tuning, dense = tuned(), model_of(LLAMA_8B)
    large = workload_of(dense, {"prefill": {8192: 1}}, name="w", tp=2)
    wide = workload_of(dense, {"decode": {1: 1}}, name="w", tp=4)
    experts = workload_of(model_of(MIXTRAL), {"decode": {1: 1}}, name="w", tp=2, ep=2, exchange="all_to_all")
    for load, message in (
        (large, "outside the measured sizes"),
        (wide, "on 4 ranks, which was not measured"),
        (experts, "sends all_to_all"),
    ):
        with pytest.raises(UsageError, match=message):
            steps_under(tuning, load)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"tp": 1}, "tp = 1 sends nothing"),
        ({"tp": 2, "ep": 2}, "has no experts"),
        ({"tp": 2, "dtype": "float7"}, "dtype 'float7'"),
        ({"tp": 2, "exchange": "carrier pigeon"}, "exchange 'carrier pigeon'"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        workload_of(model_of(LLAMA_8B), {"decode": {1: 1}}, name="w", **how)


@pytest.mark.parametrize("tokens", [{}, {0: 1.0}, {1: -1.0, 2: 3.0}])
def test_a_distribution_needs_tokens_and_weights(tokens: dict[int, float]) -> None:
    with pytest.raises(UsageError):
        workload_of(model_of(LLAMA_8B), {"decode": tokens}, name="w", tp=2)


def side(sizes: list[int], world_size: int = 2) -> Any:
    found = rows({"shm": lambda s: s * 1e-9}, lambda size: "shm", sizes=sizes, launches=1, cv=0.0)
    points = frame([r for r in found if r["backend_requested"] == "auto"])
    return measured(points, world_size, "candidate")


def test_a_side_of_a_comparison_gives_the_latencies_of_its_points() -> None:
    latency = side([1024, 4096])
    assert latency("all_reduce", "float32", 2048) == pytest.approx(2048e-9)


def test_a_side_that_lacks_what_the_workload_sends_is_named() -> None:
    with pytest.raises(UsageError, match="candidate has none"):
        side([1024])("all_reduce", "bfloat16", 1024)
    with pytest.raises(UsageError, match="measured is 1 KiB to 4 KiB"):
        side([1024, 4096])("all_reduce", "float32", 8192)


def test_a_side_with_two_latencies_for_one_size_is_refused() -> None:
    found = rows({"shm": lambda s: s * 1e-9}, lambda size: "shm", sizes=[1024], launches=1)
    with pytest.raises(UsageError, match="several points of all_reduce float32 at 1 KiB"):
        measured(frame(found), 2, "candidate")


# ---- the file -----------------------------------------------------------------------------------------------------


def write(tmp_path: Path, text: str, config: Any = LLAMA_8B) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "load.toml"
    path.write_text(text)
    return path


def test_a_workload_file_names_a_model_its_ranks_and_its_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, 'model = "config.json"\ntp = 2\n[decode]\ntokens = { 1 = 1, 8 = 1 }\n')
    load = read_workload(path)
    assert (load.tp, load.dtype, [s.tokens for s in load.steps]) == (2, "bfloat16", [1, 8])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = 'config.json'\ntp = 2\nspeed = 3\n", "unknown key 'speed'"),
        ("tp = 2\n", "model is missing"),
        ("model = 'other.json'\ntp = 2\n", "other.json cannot be read"),
        ("model = 'load.toml'\ntp = 2\n", "is not JSON"),
        ("model = 'config.json'\ntp = 'two'\n", "tp is 'two'"),
        ("model = 'config.json'\n", "tp is None"),
        ("model = 'config.json'\ntp = 2\n", "no step is described"),
        ("model = 'config.json'\ntp = 2\n[decode]\n", "has no tokens"),
        ("model = 'config.json'\ntp = 2\n[decode]\ntokens = { many = 1 }\n", "many = 1"),
        ("model = ", "is not valid TOML"),
    ],
)
def test_a_bad_workload_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        read_workload(write(tmp_path, text))
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_workload_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_workload(tmp_path / "none.toml")
