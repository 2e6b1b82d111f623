"""``commbench compare`` on runs with scripted latencies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nights import FINGERPRINT, SPEC, points_of, write_run

POINTS = points_of(collectives=("all_reduce",))
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    base = write_run(tmp_path / "before", POINTS, launches=4, seed=1)
    cand = write_run(
        tmp_path / "after", POINTS[:-1], launches=4, seed=2, slower=lambda p: 1.5 if p.size_bytes == 512 else 1.0
    )
    return base, cand


def test_the_slowest_point_comes_first_with_its_interval(commbench: Run, runs: tuple[Path, Path]) -> None:
    code, out, _ = commbench("compare", *map(str, runs), "--json")
    assert code == 0
    document = json.loads(out)
    compared = [p for p in document["points"] if p["state"] == "both"]
    assert {p["label"] for p in compared[:2]} == {
        "all_reduce float32 512 B [shm]",
        "all_reduce float32 512 B [torch_dist]",
    }
    assert all(p["ratio_low"] < p["ratio"] < p["ratio_high"] for p in compared)
    assert document["points"][0]["state"] == "missing"
    assert document["counts"] == {"compared": 9, "missing": 1, "new": 0, "not_measured": 0, "picks_changed": 0}


def test_no_percentage_is_printed_without_its_interval(commbench: Run, runs: tuple[Path, Path]) -> None:
    import re

    _, out, _ = commbench("compare", *map(str, runs), "--all")
    for line in out.splitlines():
        if re.search(r"[+-]\d+\.\d %", line) and "95" not in line:
            assert re.search(r"\(.* to .*\)", line), line
    assert "missing in the candidate: all_reduce float32 64 KiB [shm]" in out


def test_plots_and_json_are_written(commbench: Run, runs: tuple[Path, Path], tmp_path: Path) -> None:
    code, _, _ = commbench("compare", *map(str, runs), "--out", str(tmp_path / "out"))
    assert code == 0
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"comparison.json", "families.png", "families.svg", "points.png", "points.svg"}


def test_two_backends_of_one_run_are_lined_up(commbench: Run, runs: tuple[Path, Path]) -> None:
    code, out, _ = commbench("compare", str(runs[0]), "--by", "backend", "--json")
    assert code == 0
    points = json.loads(out)["points"]
    assert len(points) == 5
    # baseline is shm, the first of the two by name
    assert all(p["ratio"] > 2 for p in points)


def test_more_than_two_values_must_be_chosen_from(commbench: Run, tmp_path: Path) -> None:
    three = points_of(collectives=("all_reduce",), backends=("a", "b", "c"))
    run = write_run(tmp_path / "three", three, launches=2)
    code, _, err = commbench("compare", str(run), "--by", "backend")
    assert (code, "--values A,B; there are a, b, c" in err) == (2, True)
    code, _, err = commbench("compare", str(run), "--by", "backend", "--values", "a,z")
    assert (code, "no backend 'z'; it has a, b, c" in err) == (2, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"fingerprint": {**FINGERPRINT, "cpu": {**FINGERPRINT["cpu"], "model": "Other"}}},
            "cpu.model: Test CPU → Other",
        ),
        ({"fingerprint": {**FINGERPRINT, "host": {**FINGERPRINT["host"], "name": "node8"}}}, "--same-hardware"),
        ({"spec": {**SPEC, "tp": 4}}, "spec.tp: 2 → 4"),
        ({"spec": {**SPEC, "sync": "barrier"}}, "spec.sync: window → barrier"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused_with_the_difference(
    commbench: Run, runs: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    other = write_run(tmp_path / "other", POINTS, launches=4, **change)
    code, out, err = commbench("compare", str(runs[0]), str(other))
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1
    code, out, _ = commbench("compare", str(runs[0]), str(other), "--force", "--json")
    assert code == 0
    assert json.loads(out)["forced"]


def test_a_change_of_versions_is_a_note_and_no_refusal(commbench: Run, runs: tuple[Path, Path], tmp_path: Path) -> None:
    newer = {**FINGERPRINT, "versions": {**FINGERPRINT["versions"], "torch": "2.7.0"}}
    other = write_run(tmp_path / "other", POINTS, launches=4, fingerprint=newer)
    code, out, _ = commbench("compare", str(runs[0]), str(other))
    assert code == 0
    assert "versions.torch: 2.6.0 → 2.7.0" in " ".join(out.split())


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1e-6])
def test_a_latency_that_cannot_be_true_is_refused(
    commbench: Run, runs: tuple[Path, Path], tmp_path: Path, value: float
) -> None:
    bad = write_run(
        tmp_path / "bad", POINTS, launches=2,
        rows=lambda p, k, v: v | {"latency_median_s": value} if p == POINTS[3] and k == 1 else v,
    )  # fmt: skip
    code, _, err = commbench("compare", str(runs[0]), str(bad))
    assert code == 2
    assert "without a positive latency" in err
    assert "all_reduce float32 8192 bytes in launch 1" in err


def test_rows_in_another_unit_are_refused(commbench: Run, runs: tuple[Path, Path], tmp_path: Path) -> None:
    path = write_run(tmp_path / "us", POINTS, launches=2)
    (path / "points.parquet").unlink()
    lines = path / "points.jsonl"
    lines.write_text(lines.read_text().replace("latency_median_s", "latency_median_us"))
    code, _, err = commbench("compare", str(runs[0]), str(path))
    assert code == 2
    assert "lack latency_median_s and has latency_median_us" in err


def test_what_is_no_run_is_refused(commbench: Run, runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert commbench("compare", str(runs[0]), str(tmp_path))[0] == 2
    assert commbench("compare", str(runs[0]), str(tmp_path / "nowhere"))[0] == 2
    assert commbench("compare", str(runs[0]))[0] == 2


# ---- workloads ------------------------------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path: Path) -> Path:
    """A model of 2 layers and a hidden size of 1024: 5 all-reduces of 4 KiB per token in float32."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 1024,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "load.toml"
    path.write_text('model = "config.json"\ntp = 2\ndtype = "float32"\n[decode]\ntokens = { 1 = 1 }\n')
    return path


def one_backend(slower: float) -> dict[str, Any]:
    return {"launches": 4, "slower": lambda p: slower if p.size_bytes == 4096 else 1.0}


def test_a_workload_turns_ratios_into_milliseconds_per_step_with_an_interval(
    commbench: Run, tmp_path: Path, load: Path
) -> None:
    points = points_of(collectives=("all_reduce",), backends=("shm",))
    base = write_run(tmp_path / "before", points, seed=1, **one_backend(1.0))
    cand = write_run(tmp_path / "after", points, seed=2, **one_backend(1.5))
    code, out, _ = commbench("compare", str(base), str(cand), "--workload", str(load), "--json")
    assert code == 0
    (step,) = json.loads(out)["workload"]["steps"]
    assert step["phase"] == "decode"
    assert step["base_ms"] == pytest.approx(5 * 1e3 * (2e-6 + 4096e-10), rel=0.05)
    assert step["ratio_low"] < 1.5 < step["ratio_high"]
    assert step["ratio"] == pytest.approx(step["cand_ms"] / step["base_ms"], rel=1e-9)
    _, out, _ = commbench("compare", str(base), str(cand), "--workload", str(load))
    assert "time per step in collectives" in out
    assert "decode" in out
    assert "from 4 and 4 launches" in out


def test_two_backends_of_one_run_are_weighed_by_a_workload(commbench: Run, runs: tuple[Path, Path], load: Path) -> None:
    values = ("--by", "backend", "--values", "torch_dist,shm")
    code, out, _ = commbench("compare", str(runs[0]), *values, "--workload", str(load), "--json")
    assert code == 0
    (step,) = json.loads(out)["workload"]["steps"]
    assert step["ratio_high"] < 1


def test_a_workload_that_two_points_could_answer_is_refused_in_one_line(
    commbench: Run, runs: tuple[Path, Path], load: Path
) -> None:
    code, out, err = commbench("compare", *map(str, runs), "--workload", str(load))
    assert (code, out) == (2, "")
    assert "more than one backend_requested (shm, torch_dist)" in err
    assert "--by" in err


def test_a_workload_that_sends_a_size_never_measured_is_refused_in_one_line(
    commbench: Run, tmp_path: Path, load: Path
) -> None:
    points = points_of(collectives=("all_reduce",), backends=("shm",), sizes=(64, 512))
    base = write_run(tmp_path / "before", points, launches=2, seed=1)
    cand = write_run(tmp_path / "after", points, launches=2, seed=2)
    code, _, err = commbench("compare", str(base), str(cand), "--workload", str(load))
    assert code == 2
    assert "measured is 64 B to 512 B" in err
    assert len(err.strip().splitlines()) == 1


def test_one_launch_on_a_side_gives_milliseconds_and_says_that_there_is_no_interval(
    commbench: Run, tmp_path: Path, load: Path
) -> None:
    points = points_of(collectives=("all_reduce",), backends=("shm",))
    base = write_run(tmp_path / "before", points, launches=1, seed=1)
    cand = write_run(tmp_path / "after", points, launches=1, seed=2)
    code, out, _ = commbench("compare", str(base), str(cand), "--workload", str(load))
    assert code == 0
    assert "no interval" in out
    assert "two launches on each side would give an interval" in out


def test_an_out_folder_that_cannot_be_made_is_named_in_one_line(
    commbench: Run, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = commbench("compare", *map(str, runs), "--out", str(tmp_path / "file" / "out"))
    assert code == 2
    assert err.splitlines()[-1].startswith(f"error: {tmp_path / 'file'}")
    assert "Traceback" not in err
