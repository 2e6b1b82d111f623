"""What a live engine does: measure as a sweep does, and collectives on real data."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from commbench import Engine, Point
from commbench.errors import CollectiveError, EngineError, PolicyError, SpecError, StoreError, UnknownName, UsageError
from commbench.harness.run import execute, prepare
from commbench.store import schema
from commbench.sweep import make_spec
from tests.engine.conftest import FAKE

FAST = {"max_time_per_point": "30ms"}


def test_importing_commbench_and_naming_the_engine_imports_no_torch_and_no_pandas() -> None:
    code = "import commbench, sys; commbench.Engine; print([m for m in ('torch', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


# ---- measuring -----------------------------------------------------------------------------------------------


def test_measure_gives_the_records_that_a_sweep_of_the_same_settings_writes(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMMBENCH_FAKE", FAKE)  # scripted: busy cores then change no status
    asked: dict[str, Any] = {
        "collectives": ["all_reduce", "broadcast"], "dtypes": ["float32"], "sizes": "8,4KiB", "device": "cpu",
        "max_time_per_point": "30ms", "seed": 5, "backends": ["fake"], "sync": "barrier",
    }  # fmt: skip
    spec = make_spec(asked, {})
    run = execute(spec, *prepare(spec), tmp_path / "sweep", lambda event: None)
    found = engine.measure(spec, out=tmp_path / "engine")
    swept, live = run.rows(), found.run.rows()
    assert [row.keys() for row in live] == [row.keys() for row in swept]
    same = ("point_id", "order", "status", "backend_picked", "decision", "sync", "policy", "checked", "wrong_count")
    key = lambda row: row["order"]  # noqa: E731
    for a, b in zip(sorted(swept, key=key), sorted(live, key=key), strict=True):
        assert {name: a[name] for name in same} == {name: b[name] for name in same}
    assert list(found) == live
    assert set(run.manifest) == set(found.run.manifest)
    (launch,), (live_launch,) = run.manifest["launches"], found.run.manifest["launches"]
    assert {"usable", "timer", "start", "clocks", "canaries", "cores"} <= live_launch.keys() & launch.keys()
    assert found.run.manifest["outcome"] == "complete"
    assert list(found.points().columns) == list(schema.POINT_COLUMNS)
    assert set(found.run.samples()["point_id"]) == {row["point_id"] for row in live}


def test_a_point_and_a_list_of_points_are_measured_with_the_backend_that_they_name(engine: Engine) -> None:
    one = Point("all_reduce", "sum", "float32", 1024, 2, backend="torch_dist")
    two = Point("all_gather", "", "bfloat16", 4096, 2, placement="out")
    (row,) = engine.measure(one, **FAST)
    assert (row["wrong_count"], row["backend_picked"]) == (0, "torch_dist")
    rows = engine.measure([one, two], **FAST)
    assert {row["point_id"] for row in rows} == {one.point_id, two.point_id}
    assert 0 < rows.began_s < 10
    assert repr(rows) == "<commbench.Measurements 2 rows, not stored>"
    with pytest.raises(EngineError, match="not stored"):
        _ = rows.run


def test_a_shipped_sweep_is_measured_on_the_ranks_that_are_there(engine: Engine) -> None:
    with pytest.raises(SpecError, match=r"decode\.toml: launches=3 is settled when ranks start; .* launches=1\)"):
        engine.measure("decode")
    found = engine.measure("decode", launches=1, collectives=["all_reduce"], sizes="8KiB", max_time_per_point="20ms")
    assert {row["world_size"] for row in found} == {2}


@pytest.mark.parametrize(
    ("what", "settings", "told"),
    [
        (None, {"tp": 3}, "tp=3 is settled when ranks start"),
        (None, {"launches": 2}, "launches=2 is settled"),
        (None, {"launcher": "mpirun"}, "launcher='mpirun' is settled"),
        (None, {"nnodes": 2}, "nnodes=2 is settled"),
        (None, {"bind": "core"}, "bind='core' is settled"),
        (None, {"point_timeout": "5s"}, "point_timeout='5s' is settled"),
        (None, {"sizes": "8q"}, "measure: sizes"),
        (None, {"colectives": ["all_reduce"]}, "measure: colectives: unknown key"),
        (make_spec({"tp": 4}, {}), {}, "the sweep: tp=4 is settled when ranks start; this engine is one launch"),
        (Point("all_reduce", "sum", "float32", 1024, 4), {}, "world_size=4 must be 2"),
        (Point("all_reduce", "sum", "float32", 1023, 2), {}, "1023 is no multiple of 4"),
        (Point("broadcast", "sum", "float32", 1024, 2), {}, "op='sum' must be ''"),
        ([Point("all_reduce", "sum", "float99", 1024, 2)], {}, "float99"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_named(engine: Engine, what: Any, settings: dict[str, Any], told: str) -> None:
    with pytest.raises((SpecError, UnknownName), match=told):
        engine.measure(what, **settings)


def test_names_and_kinds_that_do_not_exist_are_named(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="unknown collective 'all_shrink'"):
        engine.measure(Point("all_shrink", "", "float32", 8, 2))
    with pytest.raises(UnknownName, match="nosuch"):
        engine.measure("nosuch")
    with pytest.raises(UsageError, match="out=3 is no path"):
        engine.measure(collectives=["barrier"], out=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="int 3 is no point"):
        engine.measure(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="str 'all_reduce' in the list is no point"):
        engine.measure(["all_reduce"])  # type: ignore[list-item]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(StoreError, match="not empty"):
        engine.measure(collectives=["barrier"], out=tmp_path / "full")


def test_ranks_hold_no_file_of_a_measurement_that_is_over(engine: Engine, tmp_path: Path) -> None:
    engine.measure(collectives=["barrier"], out=tmp_path / "run", trace=True, **FAST)
    for pid in engine.pids:
        assert [f.path for f in psutil.Process(pid).open_files() if f.path.startswith(str(tmp_path))] == []


def test_a_callback_hears_each_point_and_may_not_call_the_engine(engine: Engine) -> None:
    heard: list[str] = []

    def hear(event: Mapping[str, Any]) -> None:
        heard.append(event["row"]["collective"])
        with pytest.raises(EngineError, match="barrier was called from inside measure"):
            engine.barrier()

    engine.measure(collectives=["barrier"], on_event=hear, **FAST)
    assert heard == ["barrier"]


def test_an_interrupted_measurement_keeps_finished_points_and_the_engine_goes_on(
    engine: Engine, tmp_path: Path
) -> None:
    def interrupt(event: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.measure(
            collectives=["all_reduce"], dtypes=["float32"], sizes="8:64KiB:x2", out=tmp_path / "run",
            on_event=interrupt, **FAST,
        )  # fmt: skip
    from commbench.store.run import open_run

    run = open_run(tmp_path / "run")
    assert run.manifest["outcome"] == "interrupted"
    assert 1 <= len(run.rows()) < 14
    assert len(run.points()) == len(run.rows())
    assert float(engine.all_reduce(np.ones(1))[0][0]) == 2


def test_threads_take_turns(engine: Engine) -> None:
    results: dict[int, list[np.ndarray]] = {}

    def work(i: int) -> None:
        results[i] = engine.all_reduce(np.full(1000, float(i)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(results[i][1][999]) for i in range(8)] == [2.0 * i for i in range(8)]


# ---- collectives on real data ---------------------------------------------------------------------------------

A = np.arange(8, dtype=np.float32)
B = 10 * np.arange(8, dtype=np.float32)


def equal(results: list[Any], *answers: Any) -> bool:
    def same(result: Any, answer: Any) -> bool:
        if result is None or answer is None:
            return result is answer
        alike = type(result) is type(answer) and result.dtype == answer.dtype and result.shape == answer.shape
        return alike and bool((result == answer).all())

    return all(same(r, a) for r, a in zip(results, answers, strict=True))


def test_collectives_give_each_ranks_result(engine: Engine) -> None:
    each = [A, B]
    both = np.concatenate(each)
    assert equal(engine.all_reduce(each), A + B, A + B)
    assert equal(engine.all_reduce(A), 2 * A, 2 * A)  # one array for all ranks
    assert equal(engine.all_reduce(each, op="max"), np.maximum(A, B), np.maximum(A, B))
    assert equal(engine.reduce(each, dst=1), None, A + B)
    assert equal(engine.all_gather(each), both, both)
    rows = [A.reshape(2, 4), B.reshape(2, 4)]
    assert equal(engine.all_gather(rows, dim=1), np.concatenate(rows, 1), np.concatenate(rows, 1))
    assert equal(engine.all_gatherv([A[:3], B]), np.concatenate([A[:3], B]), np.concatenate([A[:3], B]))
    assert equal(engine.reduce_scatter(each), (A + B)[:4], (A + B)[4:])
    assert equal(engine.broadcast(each, src=1), B, B)
    assert equal(engine.all_to_all(each), np.concatenate([A[:4], B[:4]]), np.concatenate([A[4:], B[4:]]))
    assert equal(engine.gather(each, dst=0), both, None)
    assert equal(engine.scatter(each, src=1), B[:4], B[4:])
    assert equal(engine.send_recv(each), B, A)
    engine.barrier()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "uint8"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_torch_tensors_of_any_dtype_and_shape_come_back_as_such(
    engine: Engine, dtype: str, shape: tuple[int, ...]
) -> None:
    given = torch.ones(shape, dtype=getattr(torch, dtype))
    assert equal(engine.all_reduce(given), given + given, given + given)
    assert given.numel() == 0 or float(given.reshape(-1)[0]) == 1  # and the given one is left alone


def test_arrays_may_be_large_strided_and_of_foreign_byte_order(engine: Engine) -> None:
    large = np.ones(5_000_000, dtype=np.float32)
    assert float(engine.all_reduce(large)[1][-1]) == 2
    assert equal(engine.all_gather(A[::2]), np.tile(A[::2], 2), np.tile(A[::2], 2))
    assert equal(engine.broadcast(A.astype(">f4")), A, A)
    assert equal(engine.broadcast(torch.arange(6).reshape(2, 3).T), *[torch.arange(6).reshape(2, 3).T] * 2)


def test_a_backend_can_be_forced_and_one_that_is_not_set_up_yet_is(engine: Engine) -> None:
    assert equal(engine.all_reduce(A, backend="shm_oneshot"), 2 * A, 2 * A)
    assert equal(engine.all_reduce(A, backend="torch_dist", group="tp"), 2 * A, 2 * A)
    with pytest.raises(UnknownName, match=r"unknown backend 'warp'; available: .*shm"):
        engine.all_reduce(A, backend="warp")


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ("text", "all_reduce: str 'text' is no numpy array or torch tensor"),
        (None, "all_reduce: NoneType None is no numpy array"),
        (3.5, "all_reduce: float 3.5 is no numpy array or torch tensor; a list is one array per rank"),
        ([1.0, 2.0], "all_reduce: item 0: float 1.0 is no numpy array"),
        ({"a": A}, "all_reduce: dict .* is no numpy array"),
        (np.array([{}]), "all_reduce: an array of dtype object cannot be sent"),
        (np.array(["a"]), "all_reduce: an array of dtype <U1 cannot be sent"),
        (torch.ones(2).to_sparse(), "all_reduce: a tensor of float32 with layout torch.sparse_coo cannot be sent"),
    ],
)
def test_a_payload_that_is_no_array_is_named(engine: Engine, payload: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        engine.all_reduce(payload)


def test_a_keyword_that_a_collective_does_not_have_is_named(engine: Engine) -> None:
    told = "all_gather: there is no keyword 'bakend'; it takes dim, group, backend, policy"
    with pytest.raises(UsageError, match=told):
        engine.all_gather(np.ones(4), bakend="shm")


def test_a_policy_of_a_file_is_found_also_when_the_driver_has_gone_to_another_folder(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\nextends = "commbench"\n')
    monkeypatch.chdir(tmp_path)
    assert equal(engine.all_reduce(A, policy="mine.toml"), 2 * A, 2 * A)
    point = Point("all_reduce", "sum", "float32", 1024, 2, policy="mine.toml")
    (row,) = engine.measure(point, **FAST)
    assert (row["policy"], row["wrong_count"]) == ("mine.toml", 0)
    with pytest.raises(PolicyError, match=r"'nosuch\.toml' does not exist"):
        engine.all_reduce(A, policy="nosuch.toml")
    with pytest.raises(UsageError, match=r"policy=.* is no name of a policy"):
        engine.all_reduce(A, policy=tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"master_port": "29500"}, "master_port='29500' is no port"),
        ({"master_port": 0}, "master_port=0 is no port"),
        ({"master_address": ""}, "master_address='' is no host name"),
        ({"rank_offset": 0}, "rank_offset=0 must be a whole number, at least 1"),
        ({"world_size": 2}, "world_size=2 does not hold 2 ranks from 1 on; it takes at least 3"),
        ({"timeout_s": "soon"}, "timeout_s='soon' is no time"),
        ({"timeout_s": -1}, "timeout_s=-1 is no time"),
        ({"backend": "mpi"}, "backend 'mpi' is neither gloo nor nccl"),
        ({"backend": "nccl"}, "take backend='gloo'"),
    ],
)
def test_what_no_weight_update_group_can_have_is_named(engine: Engine, keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        engine.init_weights_update_group(**{"master_address": "127.0.0.1", "master_port": 29500, **keywords})


def test_weights_that_cannot_be_are_named(engine: Engine) -> None:
    for names, dtypes, shapes, more, told in (
        (["a"], ["float32"], [["x"]], {}, r"shape \['x'\] is no sequence of whole numbers"),
        (["a"], ["float32"], [[-1]], {}, r"shape \(-1,\) has a negative size"),
        (["a"], ["float32"], [[8]], {"bucket_bytes": 0}, "bucket_bytes=0 must be"),
        (["a", "b"], ["float32"], [[8]], {}, "2 names, 1 dtypes and 1 shapes were given"),
        (["a"], ["int33"], [[8]], {}, "'int33' is no torch dtype"),
    ):
        with pytest.raises(UsageError, match=told):
            engine.update_weights_from_distributed(names, dtypes, shapes, **more)


def test_arrays_that_do_not_fit_are_named_and_the_engine_goes_on(engine: Engine) -> None:
    with pytest.raises(CollectiveError, match="3 arrays were given, one is needed for each of 2 ranks"):
        engine.all_reduce([A, A, A])
    with pytest.raises(CollectiveError, match=r"rank 1 has float32 \(4,\), rank 0 float32 \(8,\)"):
        engine.all_reduce([A, A[:4]])
    with pytest.raises(CollectiveError, match=r"reduce_scatter: .*shape \(3,\) is no multiple of 2 ranks"):
        engine.reduce_scatter(A[:3])
    with pytest.raises(CollectiveError, match="src=7"):
        engine.broadcast(A, src=7)
    with pytest.raises(UnknownName, match="unknown op 'xor'"):
        engine.all_reduce(A, op="xor")
    with pytest.raises(UnknownName, match="unknown group 'dp'"):
        engine.all_reduce(A, group="dp")
    with pytest.raises(UsageError, match="src='0' is no whole number"):
        engine.broadcast(A, src="0")  # type: ignore[arg-type]
    assert equal(engine.all_reduce(A), 2 * A, 2 * A)


# ---- weights --------------------------------------------------------------------------------------------------


def test_weights_go_from_a_trainer_to_every_rank(engine: Engine) -> None:
    from commbench.coordinator import weights
    from tests.ranks import free_port

    given = {"a.weight": torch.randn(300, 7).bfloat16(), "b.bias": torch.randn(11), "c.empty": torch.empty(0)}
    port = free_port()
    problems: list[BaseException] = []

    def trainer() -> None:
        try:
            group = weights.init_weights_update_group("127.0.0.1", port, 0, 3, "policy")
            group.send(given, bucket_bytes=1024)
            weights.destroy_weights_update_group("policy")
        except BaseException as error:  # noqa: BLE001 - told to the test
            problems.append(error)

    thread = threading.Thread(target=trainer)
    thread.start()
    engine.init_weights_update_group("127.0.0.1", port, group_name="policy", timeout_s=30)
    received = engine.update_weights_from_distributed(
        list(given), [t.dtype for t in given.values()], [t.shape for t in given.values()], "policy", bucket_bytes=1024
    )
    thread.join()
    assert not problems
    size = sum(t.numel() * t.element_size() for t in given.values())
    assert [(r.rank, r.size_bytes) for r in received] == [(0, size), (1, size)]
    assert all(r.seconds > 0 for r in received)
    for name, tensor in given.items():
        assert equal(engine.weight(name), tensor, tensor)
    with pytest.raises(CollectiveError, match=r"no weight 'd'; there are: a.weight, b.bias, c.empty"):
        engine.weight("d")
    engine.destroy_weights_update_group("policy")
    with pytest.raises(CollectiveError, match="no weight-update group 'policy'"):
        engine.destroy_weights_update_group("policy")


def test_the_time_to_sync_a_models_weights_is_measured_in_buckets_of_any_size(engine: Engine) -> None:
    numels = [5000, 17, 3000, 1]
    for bucket in (64, 1 << 20):
        (row,) = engine.measure_weights(numels, "float32", bucket_bytes=bucket, sync="barrier", **FAST)
        assert (row["collective"], row["size_bytes"], row["wrong_count"]) == ("weight_update", 4 * 8018, 0)
        assert row["algbw_gb_per_s"] == pytest.approx(row["size_bytes"] / row["latency_median_s"] / 1e9)
    for wrong, told in (
        ({"numels": []}, "numels must be the elements"),
        ({"numels": [0]}, "numels must be the elements"),
        ({"numels": [8], "bucket_bytes": 0}, "bucket_bytes=0 must be"),
        ({"numels": [8], "dtype": "int3"}, "unknown dtype 'int3'"),
    ):
        with pytest.raises(UsageError, match=told):
            engine.measure_weights(**wrong)
