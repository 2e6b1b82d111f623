"""``commbench tune`` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commbench.policy import load_policy
from commbench.types import CallSignature, Platform
from tests.scripted import one_shot_and_two_shot, rows, write_run

KIB = 1 << 10
Commbench = Callable[..., tuple[int, str, str]]


def shm_as_today(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``auto`` took shm: one-shot up to 32 KiB, two-shot above, as long as the same kernel forced."""
    forced = {(r["launch"], r["size_bytes"], r["backend_requested"]): r["latency_median_s"] for r in found}
    for row in found:
        if row["backend_requested"] == "auto":
            kernel = "shm_oneshot" if row["size_bytes"] <= 32 * KIB else "shm_twoshot"
            row["latency_median_s"] = forced[row["launch"], row["size_bytes"], kernel]
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    found = shm_as_today(rows(one_shot_and_two_shot(256 * KIB), lambda size: "shm", cv=0.01))
    return write_run(tmp_path / "run", found)


def picked(policy: str, size_bytes: int, dtype: str = "float32", ranks: int = 2) -> str:
    platform = Platform(device="cpu", world_size=ranks, one_host=True)
    call = CallSignature("all_reduce", "sum", dtype, size_bytes, size_bytes // 4)
    return load_policy(policy).decide(call, platform).picked


def test_the_policy_takes_what_was_measured_fastest_and_leaves_the_rest_alone(
    commbench: Commbench, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "policy.toml"
    code, said, _ = commbench("tune", str(run), "--out", str(out))
    assert code == 0
    assert "Take shm_oneshot up to 256 KiB, then shm_twoshot" in said
    name = str(out)
    assert picked(name, 128 * KIB) == "shm_oneshot"
    assert picked(name, 256 * KIB) == "shm_oneshot"
    assert picked(name, 256 * KIB + 4) == "shm_twoshot"
    # not measured: other sizes, dtypes and numbers of ranks stay with today's policy
    for size, dtype, ranks in (
        (512, "float32", 2),
        (8 << 20, "float32", 2),
        (4096, "float64", 2),
        (4096, "float32", 4),
    ):
        assert picked(name, size, dtype, ranks) == picked("commbench", size, dtype, ranks)


def test_a_plot_stands_beside_the_policy(commbench: Commbench, run: Path, tmp_path: Path) -> None:
    commbench("tune", str(run), "--out", str(tmp_path / "p" / "mine.toml"))
    assert (tmp_path / "p" / "mine.png").stat().st_size > 10_000
    svg = (tmp_path / "p" / "mine.svg").read_text()
    assert "Take shm_oneshot up to 256 KiB" in svg
    assert "tuned policy" in svg


def test_explain_reads_the_policy_at_once(commbench: Commbench, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy.toml"
    commbench("tune", str(run), "--out", str(out))
    code, said, err = commbench(
        "explain", "--policy", str(out), "--gpu", "cpu", "--tp", "2", "--dtype", "float32", "--size", "64KiB"
    )
    assert (code, err) == (0, "")
    assert "shm_oneshot" in said


def test_a_policy_that_nothing_beats_is_extended_without_a_change(commbench: Commbench, tmp_path: Path) -> None:
    found = shm_as_today(rows(one_shot_and_two_shot(32 * KIB), lambda size: "shm", cv=0.02))
    out = tmp_path / "policy.toml"
    code, said, _ = commbench("tune", str(write_run(tmp_path / "run", found)), "--out", str(out))
    assert code == 0
    assert "Keep today's policy" in said
    assert "[routes" not in out.read_text()
    assert picked(str(out), 4096) == "shm"


def test_one_json_document_holds_intervals_crossovers_and_regrets(
    commbench: Commbench, run: Path, tmp_path: Path
) -> None:
    _, out, _ = commbench("tune", str(run), "--out", str(tmp_path / "policy.toml"), "--json")
    (cell,) = json.loads(out)["cells"]
    assert [i["backend"] for i in cell["intervals"]] == ["shm_oneshot", "shm_twoshot"]
    assert cell["intervals"][0]["gain_low"] > 0.01
    crossover = cell["boundaries"][0]["crossover"]
    assert crossover["low_bytes"] < 256 * KIB < crossover["high_bytes"]
    assert cell["regret_tuned"]["worst"] < cell["regret_today"]["worst"]


def test_a_workload_is_answered_in_milliseconds_per_step(commbench: Commbench, run: Path, tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load = tmp_path / "load.toml"
    load.write_text('model = "config.json"\ntp = 2\ndtype = "float32"\n[decode]\ntokens = { 4 = 1 }\n')
    out = tmp_path / "policy.toml"
    code, said, _ = commbench("tune", str(run), "--out", str(out), "--workload", str(load))
    assert code == 0
    assert "tuned saves" in said
    _, text, _ = commbench("tune", str(run), "--out", str(out), "--workload", str(load), "--json")
    steps = {s["policy"]: s["milliseconds"] for s in json.loads(text)["workload"]}
    # 65 all-reduces of 4 × 4096 float32: 64 KiB, where today's policy takes two-shot
    curves = one_shot_and_two_shot(256 * KIB)
    assert steps["today"] == pytest.approx(65e3 * curves["shm_twoshot"](64 * KIB), rel=0.03)
    assert steps["tuned"] == pytest.approx(65e3 * curves["shm_oneshot"](64 * KIB), rel=0.03)


def test_two_runs_of_one_name_are_two_sets_of_launches(commbench: Commbench, tmp_path: Path) -> None:
    paths = []
    for seed in (1, 2):
        found = shm_as_today(rows(one_shot_and_two_shot(256 * KIB), lambda size: "shm", seed=seed, launches=3))
        (tmp_path / str(seed)).mkdir()
        paths.append(str(write_run(tmp_path / str(seed) / "run", found)))
    _, out, _ = commbench("tune", *paths, "--out", str(tmp_path / "policy.toml"), "--json")
    assert json.loads(out)["cells"][0]["launches"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to tune from"),
        (("RUN", "--backends", "shm"), "--backends says how to measure; it needs --tp N"),
        (("RUN", "--tp", "2"), "leave out the runs"),
        (("RUN", "--policy", "sglang-0.5.3"), "--policy sglang-0.5.3: the run holds points of commbench"),
        (("RUN", "--workload", "none.toml"), "none.toml cannot be read"),
        (("--tp", "2", "--backends", "auto,shm"), "needs two or more"),
        (("--tp", "2", "--budget", "1s"), "--budget 1s is too short"),
        (("--tp", "2", "--mode", "graph"), "mode"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    commbench: Commbench, run: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    named = [str(run) if a == "RUN" else a for a in arguments]
    code, out, err = commbench("tune", *named, "--out", str(tmp_path / "policy.toml"), "--quiet")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "policy.toml").exists()


def test_a_workload_of_sizes_that_were_not_measured_is_refused_and_writes_nothing(
    commbench: Commbench, run: Path, tmp_path: Path
) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load = tmp_path / "load.toml"
    load.write_text('model = "config.json"\ntp = 2\ndtype = "float32"\n[prefill]\ntokens = { 8192 = 1 }\n')
    out = tmp_path / "policy.toml"
    code, _, err = commbench("tune", str(run), "--out", str(out), "--workload", str(load))
    assert code == 2
    assert "outside the measured sizes" in err
    assert not out.exists()
