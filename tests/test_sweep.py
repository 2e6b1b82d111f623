"""Sweep specifications: what they accept, how they unfold, what they say when they are wrong."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commbench.errors import SpecError, UnknownName
from commbench.sweep import SweepSpec, expand, find_sweep, make_spec, parse_sizes, read_file, shipped_sweeps
from commbench.types import COLLECTIVES, DTYPES

MEMORY = 24 << 30


def points(**settings: object) -> list[tuple[str, str, int]]:
    return [(p.collective, p.dtype, p.size_bytes) for p in expand(make_spec(settings, {}), MEMORY).points]


def sizes(text: str, **settings: object) -> list[int]:
    spec = {"collectives": "all_reduce", "dtypes": "float32", "sizes": text, **settings}
    return [size for _, _, size in points(**spec)]


def test_a_list_and_a_multiplying_and_an_adding_range_unfold() -> None:
    assert sizes("8,1KiB,10MB") == [8, 1024, 10_000_000]
    assert sizes("8:128:x4") == [8, 32, 128]
    assert sizes("1KiB:4KiB:+1KiB") == [1024, 2048, 3072, 4096]
    assert sizes("8:64") == [8, 16, 32, 64]


def test_a_range_rounds_down_to_whole_elements_and_drops_doubles() -> None:
    assert sizes("8:32:x1.414") == [8, 16, 20, 32]  # 8, 11.3, 16.0, 22.6, 32.0


def test_a_range_is_split_among_the_ranks_where_the_collective_splits() -> None:
    assert sizes("8:128:x2", collectives="all_gather", tp=4) == [16, 32, 64, 128]


@given(st.integers(1, 10**7), st.integers(0, 10**7), st.sampled_from(sorted(DTYPES)), st.integers(2, 9))
def test_whatever_the_range_every_size_is_whole_elements_on_every_rank(a: int, more: int, dtype: str, tp: int) -> None:
    spec = make_spec({"sizes": f"{a}:{a + more}:x3", "dtypes": dtype, "collectives": "all_gather", "tp": tp}, {})
    for point in expand(spec, MEMORY).points:
        assert point.size_bytes > 0
        assert point.size_bytes % (DTYPES[dtype].itemsize * tp) == 0


def test_a_barrier_has_one_point_without_size_or_dtype() -> None:
    assert points(collectives="barrier") == [("barrier", "none", 0)]


def test_combinations_that_cannot_exist_are_skipped_and_counted() -> None:
    expansion = expand(make_spec({"ops": "sum,avg", "dtypes": "float32,int8", "collectives": "all_reduce"}, {}), MEMORY)
    assert {(p.op, p.dtype) for p in expansion.points} == {("sum", "float32"), ("sum", "int8"), ("avg", "float32")}
    assert expansion.skipped == {"op avg does not exist for int8": 1}


def test_the_customary_placement_is_each_collectives_own() -> None:
    spec = make_spec({"collectives": ",".join(COLLECTIVES), "tp": 4}, {})
    for point in expand(spec, MEMORY).points:
        assert point.placement == COLLECTIVES[point.collective].placements[0]


def test_points_are_distinct() -> None:
    expansion = expand(make_spec({"collectives": ",".join(COLLECTIVES), "placement": "in,out", "tp": 4}, {}), MEMORY)
    assert len({p.point_id for p in expansion.points}) == len(expansion.points)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"collectives": "all_reduces"}, "unknown collective 'all_reduces'"),
        ({"dtypes": "float31"}, "unknown dtype 'float31'"),
        ({"ops": "xor"}, "unknown op 'xor'"),
        ({"backends": "ncll"}, "unknown backend 'ncll'"),
        ({"layout": "diagonal"}, "unknown layout 'diagonal'"),
        ({"cache": "lukewarm"}, "unknown cache 'lukewarm'"),
        ({"mode": "later"}, "unknown mode 'later'"),
        ({"group": "tp9"}, "unknown group 'tp9'"),
        ({"device": "tpu"}, "'tpu' is no device"),
        ({"sync": "hope"}, "'hope' is no way to start iterations"),
        ({"sizes": "9"}, r"size 9 is no multiple of 4 \(4 bytes\)"),
        ({"sizes": "8", "collectives": "all_gather", "tp": 4}, r"no multiple of 16 \(4 bytes × 4 ranks\)"),
        ({"sizes": "0"}, "size 0 has nothing to measure"),
        ({"sizes": "-8"}, "size '-8' is negative"),
        ({"sizes": "8:4"}, "ends below its start"),
        ({"sizes": "8:16:x1"}, "never reaches the end"),
        ({"sizes": "8:16:+0"}, "never reaches the end"),
        ({"sizes": "8:16:2"}, "neither a factor"),
        ({"sizes": "8:1GiB:x1.0000001"}, "more than 10000 steps"),
        ({"sizes": "0:16"}, "starts at 0"),
        ({"sizes": ""}, "is empty"),
        ({"sizes": "1TiB"}, "not a number of bytes"),
        ({"sizes": "100GiB"}, "this host has 24.0 GiB"),
        ({"tp": 1}, "takes at least 2"),
        ({"tp": -3}, "takes at least 2"),
        ({"tp": 100_000}, "so many ranks"),
        ({"launches": 0}, "not between 1 and 1000"),
        ({"target_ci": "0%"}, "between 0% and 100%"),
        ({"budget": "-2m"}, "duration"),
        ({"ops": "avg", "dtypes": "int8"}, "op avg does not exist for int8"),
        ({"placement": "out", "collectives": "broadcast"}, "broadcast has no out-place form"),
        ({"colectives": "all_reduce"}, "unknown key"),
        ({"seed": -1}, "seed: -1 is negative"),
        ({"mpirun_options": "-x 'A"}, "no command line: No closing quotation"),
        ({"tp": True}, "True is not a whole number"),
        ({"tp": "four"}, "'four' is not a whole number"),
        ({"name": 3}, "3 is no text"),
        ({"name": "a/b"}, "'a/b' is no name for a run's folder"),
        ({"name": " "}, "' ' is no name for a run's folder"),
        ({"device": 3}, "3 is no text"),
        ({"dtypes": [1, 2]}, r"dtypes: \[1, 2\] is no list of names"),
        ({"policy": ""}, "policy: is empty"),
        ({"sizes": 3.5}, "3.5 is no size"),
        ({"sizes": [8, True]}, "holds what is no size"),
        ({"share_device": "maybe"}, "'maybe' is neither true nor false"),
        ({"budget": [1, 2]}, r"budget: duration \[1, 2\]"),
        ({"point_timeout": "100ms"}, "point_timeout: 0.1 s is not longer than"),
    ],
)  # fmt: skip
def test_bad_input_is_named_with_its_value(settings: dict[str, object], message: str) -> None:
    base: dict[str, object] = {"collectives": "all_reduce", "dtypes": "float32"}
    with pytest.raises(SpecError, match=message):
        expand(make_spec({**base, **settings}, {}), MEMORY)


def test_a_message_names_the_flag_or_the_file_that_the_value_came_from() -> None:
    with pytest.raises(SpecError, match=r"^--dtypes: unknown dtype"):
        make_spec({"dtypes": "float31"}, {"dtypes": "--dtypes"})


def test_a_spec_knows_which_settings_were_given_and_reads_back_from_what_json_holds() -> None:
    spec = make_spec({"tp": 4, "dtypes": "int8", "budget": "2m"}, {})
    assert spec.given == ("dtypes", "tp", "budget")
    assert SweepSpec(**json.loads(json.dumps(spec.to_dict()))) == spec
    with pytest.raises(AttributeError):
        spec.tp = 2  # type: ignore[misc]


def test_a_changed_spec_is_checked_and_keeps_what_else_was_given() -> None:
    spec = make_spec({"tp": 4, "dtypes": "int8"}, {}).changed(tp=3, name="other")
    assert (spec.tp, spec.dtypes, spec.name, spec.given) == (3, ("int8",), "other", ("name", "dtypes", "tp"))
    with pytest.raises(SpecError, match="tp: 0 ranks"):
        spec.changed(tp=0)


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_sweep_file_gives_what_flags_give(tmp_path: Path) -> None:
    path = write(
        tmp_path, '[sweep]\ncollectives = ["all_reduce"]\nsizes = ["8:64:x2", 1024]\n[run]\ntp = 4\nbudget = "2m"\n'
    )
    spec = make_spec(read_file(path), {})
    assert (spec.name, spec.collectives, spec.tp, spec.budget) == ("mine", ("all_reduce",), 4, 120.0)
    assert parse_sizes(spec.sizes)[-1] == 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sweep\n", r"mine.toml is not valid TOML: .*line 1"),
        ("[sweep]\ntp = 2\n", r"unknown key sweep.tp; it belongs under \[run\]"),
        ("[run]\nspeed = 2\n", r"unknown key run.speed; allowed: tp, device"),
        ("[swep]\n", r"unknown key 'swep'"),
        ("sweep = 3\n", r"sweep must be a table"),
    ],
)
def test_a_malformed_file_is_named_with_its_key_or_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_file(write(tmp_path, text))


def test_a_file_that_is_not_text_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8"):
        read_file(path)


def test_shipped_sweeps_are_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"quick", "nightly", "thresholds", "decode"} <= set(shipped_sweeps())
    assert find_sweep("decode").is_file()
    assert find_sweep("sweeps/decode.toml").is_file()
    with pytest.raises(UnknownName, match=r"unknown sweep 'decod'; available: .*decode"):
        find_sweep("decod")
    with pytest.raises(UnknownName, match=r"no sweep file other/decod.toml"):
        find_sweep("other/decod.toml")


@pytest.mark.parametrize("name", ["quick", "nightly", "thresholds", "decode"])
def test_every_shipped_sweep_unfolds(name: str) -> None:
    spec = make_spec(read_file(find_sweep(name)), {})
    assert isinstance(spec, SweepSpec)
    assert spec.description

    def probes(policy: str, collective: str, dtype: str, ranks: int) -> list[int]:
        return [65536]

    assert expand(spec, MEMORY, probes).points


def groups_of(**settings: object) -> set[tuple[str, int]]:
    return {(p.group, p.world_size) for p in expand(make_spec(dict(settings), {}), MEMORY).points}


def test_a_group_has_the_size_that_tp_pp_and_ep_give_it() -> None:
    every = "world,tp,pp,moe_ep,moe_tp,tp:0,pp:0"
    found = groups_of(tp=4, pp=2, ep=2, group=every, collectives="all_reduce", sizes="1KiB")
    assert found == {
        ("world", 8), ("tp", 4), ("pp", 2), ("moe_ep", 2), ("moe_tp", 2), ("tp:0", 4), ("pp:0", 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group": "dp"}, "unknown group 'dp'; allowed: world, tp, pp"),
        ({"group": "pp"}, "a pp group has one rank with --tp 2 --pp 1 --ep 1"),
        ({"group": "tp:0"}, "tp:0 is all of tp"),
        ({"tp": 4, "ep": 3}, "ep: 3 does not divide tp"),
        ({"tp": 1}, "tp: 1 ranks cannot hold"),
        ({"tp": 2, "collectives": "send_tensor_dict_split"}, "takes two halves of 2 ranks or more"),
        ({"tp": 3, "collectives": "send_object"}, "takes pairs of ranks, which a group of 3"),
        ({"collectives": "send_object,all_reduce", "backends": "shm,torch_dist"}, "send_object has one way"),
    ],
)
def test_a_group_that_nothing_can_run_in_is_an_error(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        expand(make_spec({"sizes": "1KiB", **settings}, {}), MEMORY)


def test_two_stages_of_one_rank_are_a_sweep() -> None:
    assert groups_of(tp=1, pp=2, group="pp", collectives="send_tensor_dict", sizes="1KiB") == {("pp", 2)}


def test_objects_are_measured_in_bytes_whatever_the_dtypes() -> None:
    spec = make_spec({"collectives": "send_object,all_reduce", "dtypes": "bfloat16", "sizes": "1KiB"}, {})
    assert {(p.collective, p.dtype) for p in expand(spec, MEMORY).points} == {
        ("send_object", "uint8"), ("all_reduce", "bfloat16"),
    }  # fmt: skip
