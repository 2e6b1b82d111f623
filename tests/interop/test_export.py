"""Exports: what is written is parsed back and decides as the policy does; what cannot be expressed is refused."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commbench.interop import export_sglang, export_vllm
from commbench.interop.export import ExportError, Group, exclusive, size_code, sizes_to_ask
from commbench.policy import Policy, load_policy
from commbench.types import CallSignature

MIB, KIB = 1 << 20, 1 << 10
ON = frozenset({"ca_v1", "symm_mem", "pynccl"})
HOPPER = [Group((9, 0), n) for n in (2, 4, 6, 8)]
ALL = [*HOPPER, *(Group((10, 0), n) for n in (2, 4, 6, 8))]


def constants(text: str) -> dict[str, Any]:
    """The module's data, evaluated; its function is left alone."""
    tree = ast.parse(text)
    tree.body = [n for n in tree.body if isinstance(n, ast.Assign)]
    scope: dict[str, Any] = {}
    exec(compile(tree, "exported", "exec"), scope)
    return {name: value for name, value in scope.items() if not name.startswith("__")}


def policy(tmp_path: Path, text: str) -> Policy:
    path = tmp_path / "mine.toml"
    path.write_text('format = 1\nextends = "commbench"\nname = "mine"\n' + text)
    return load_policy(str(path))


def caps(custom: str, symmetric: str, world_sizes: Sequence[int] = (2, 4, 6, 8)) -> str:
    return f"""
[tables.ca_max_bytes]
rows = [{{ device = "cuda", value = "{custom}" }}]
[tables.symm_mem_max_bytes]
by = ["world_size"]
rows = [{{ world_size = {list(world_sizes)}, value = "{symmetric}" }}]
"""


# ---- SGLang -----------------------------------------------------------------------------------------------------


def test_the_tables_of_sglang_0_5_3_come_back_as_they_are() -> None:
    found = constants(export_sglang.export(load_policy("sglang-0.5.3"), "sglang-0.5.3", ALL, ON))
    assert found["CUSTOM_ALL_REDUCE_MAX_SIZE"] == 8 * MIB
    assert found["SYMM_MEM_ALL_REDUCE_MAX_SIZES"] == {
        9: {2: 64 * MIB, 4: 32 * MIB, 6: 64 * MIB, 8: 64 * MIB},
        10: {2: 64 * MIB, 4: 32 * MIB, 6: 128 * MIB, 8: 128 * MIB},
    }


def test_a_cap_that_is_taken_exactly_gets_a_higher_strict_bound_where_the_release_compares_strictly(
    tmp_path: Path,
) -> None:
    mine = policy(tmp_path, caps("1MiB", "16MiB"))
    strict = constants(export_sglang.export(mine, "sglang-0.5.3", HOPPER))
    # custom all-reduce takes multiples of 16 bytes, symmetric memory multiples of 4
    assert strict["CUSTOM_ALL_REDUCE_MAX_SIZE"] == MIB + 16
    assert strict["SYMM_MEM_ALL_REDUCE_MAX_SIZES"] == {9: dict.fromkeys((2, 4, 6, 8), 16 * MIB + 4)}
    later = constants(export_sglang.export(mine, "sglang-0.5.23", HOPPER))
    assert later["CUSTOM_ALL_REDUCE_MAX_SIZE"] == MIB
    assert later["TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES"] == {9: dict.fromkeys((2, 4, 6, 8), 16 * MIB + 4)}
    assert later["ENVIRONMENT"] == {"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}


def test_a_group_without_symmetric_memory_has_no_row(tmp_path: Path) -> None:
    mine = policy(tmp_path, caps("1MiB", "16MiB", (4, 8)))
    found = constants(export_sglang.export(mine, "sglang-0.5.3", HOPPER))
    assert found["SYMM_MEM_ALL_REDUCE_MAX_SIZES"] == {9: {4: 16 * MIB + 4, 8: 16 * MIB + 4}}


def test_several_caps_of_custom_all_reduce_are_refused_and_one_group_is_not(tmp_path: Path) -> None:
    text = """
[tables.ca_max_bytes]
by = ["world_size"]
rows = [{ world_size = 2, value = "8MiB" }, { world_size = [4, 6, 8], value = "1MiB" }]
"""
    mine = policy(tmp_path, text)
    with pytest.raises(ExportError, match=r"one cap of custom all-reduce.*1 MiB.*8 MiB.*--world-size"):
        export_sglang.export(mine, "sglang-0.5.3", HOPPER)
    found = constants(export_sglang.export(mine, "sglang-0.5.3", [Group((9, 0), 8)]))
    assert found["CUSTOM_ALL_REDUCE_MAX_SIZE"] == MIB + 16


def test_caps_that_differ_between_minor_capabilities_are_refused(tmp_path: Path) -> None:
    text = """
[tables.symm_mem_max_bytes]
rows = [
  { capability = "10.0", world_size = 8, value = "64MiB" },
  { capability = "10.3", world_size = 8, value = "32MiB" },
]
"""
    with pytest.raises(ExportError, match=r"10\.x; the policy has several"):
        export_sglang.export(policy(tmp_path, text), "sglang-0.5.3", [Group((10, 0), 8), Group((10, 3), 8)])


SANDWICH = """
[order.all_reduce]
gpu = ["middle", "ca", "symm_mem", "pynccl", "torch_dist"]
cpu = ["torch_dist"]
[routes.middle]
backend = "pynccl"
accepts = [{ gate = "size_at_least", limit = "64KiB" }, { gate = "size_at_most", limit = "256KiB" }]
"""


@pytest.mark.parametrize("release", ["sglang-0.5.3", "sglang-0.5.23", "vllm-0.33"])
def test_a_policy_that_changes_its_mind_twice_is_refused_with_the_first_size(tmp_path: Path, release: str) -> None:
    mine = policy(tmp_path, SANDWICH + caps("4MiB", "16MiB"))
    write = {"vllm-0.33": lambda: export_vllm.export(mine, HOPPER)}
    with pytest.raises(ExportError, match=r"at 65536 bytes \(64 KiB\).*the policy takes NCCL"):
        write.get(release, lambda: export_sglang.export(mine, release, HOPPER))()


def test_a_pick_that_differs_by_dtype_is_refused(tmp_path: Path) -> None:
    text = """
[order.all_reduce]
gpu = ["halves", "ca", "symm_mem", "pynccl", "torch_dist"]
cpu = ["torch_dist"]
[routes.halves]
backend = "pynccl"
accepts = [{ gate = "dtype_in", dtypes = ["float16"] }]
"""
    with pytest.raises(ExportError, match="of float16"):
        export_sglang.export(policy(tmp_path, text), "sglang-0.5.3", HOPPER)


def test_a_policy_without_custom_all_reduce_is_refused_with_the_way_out() -> None:
    with pytest.raises(ExportError, match="--disable-custom-all-reduce"):
        export_sglang.export(load_policy("commbench"), "sglang-0.5.3", HOPPER, frozenset({"symm_mem"}))


# ---- vLLM ---------------------------------------------------------------------------------------------------------


def test_the_tables_of_vllm_0_33_come_back_as_they_work() -> None:
    groups = [Group(c, n) for c in ((9, 0), (10, 0), (10, 3)) for n in (2, 4, 6, 8)]
    found = constants(export_vllm.export(load_policy("vllm-0.33"), groups, frozenset({"ca", "symm_mem"})))
    # the release's table says 64 and 32 MiB for 2 and 4 ranks; custom all-reduce stops at 8 MiB all the same
    assert found["CUSTOM_ALL_REDUCE_MAX_SIZES"]["9.0"] == {2: 8 * MIB, 4: 8 * MIB, 6: 512 * KIB, 8: 256 * KIB}
    assert found["CUSTOM_ALL_REDUCE_MAX_SIZES"]["10.3"] == {2: 4 * MIB, 4: 4 * MIB, 6: 8 * MIB, 8: 4 * MIB}
    assert found["SYMM_MEM_ALL_REDUCE_MAX_SIZES"]["10.0"] == {2: 8 * MIB, 4: 32 * MIB, 6: 128 * MIB, 8: 128 * MIB}
    assert found["ENVIRONMENT"]["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"


def test_vllm_compares_custom_all_reduce_strictly_and_symmetric_memory_not(tmp_path: Path) -> None:
    found = constants(export_vllm.export(policy(tmp_path, caps("1MiB", "16MiB")), [Group((9, 0), 8)]))
    assert found["CUSTOM_ALL_REDUCE_MAX_SIZES"] == {"9.0": {8: MIB + 16}}
    assert found["SYMM_MEM_ALL_REDUCE_MAX_SIZES"] == {"9.0": {8: 16 * MIB}}


def test_vllm_cannot_take_custom_all_reduce_for_8_mib() -> None:
    with pytest.raises(ExportError, match="never takes custom all-reduce for 8 MiB or more"):
        export_vllm.export(load_policy("commbench"), HOPPER)


def test_vllm_reads_its_table_only_beside_symmetric_memory(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="only where symmetric memory is on"):
        export_vllm.export(policy(tmp_path, caps("1MiB", "16MiB", (4,))), [Group((9, 0), 8)])


# ---- the parts ---------------------------------------------------------------------------------------------------


def test_an_exported_module_states_what_it_is_for_and_compiles() -> None:
    text = export_sglang.export(load_policy("sglang-0.5.3"), "sglang-0.5.3", ALL, ON)
    assert "compute capability 10.0: 2, 4, 6, 8 ranks" in (ast.get_docstring(ast.parse(text)) or "")
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("size", [0, 7, 4 * KIB, 8 * MIB + 16, 64 * MIB + 4, 20_096 * KIB, 7_275_020])
def test_sizes_are_written_as_source_that_gives_them_back(size: int) -> None:
    assert eval(size_code(size), {"KiB": KIB, "MiB": MIB}) == size


def test_a_strict_bound_lets_the_largest_multiple_in_and_no_other() -> None:
    for cap in (MIB, MIB + 5, MIB + 15):
        bound = exclusive(cap, 16)
        assert bound > MIB
        assert bound <= MIB + 16
    assert exclusive(0, 16) == 0


def test_sizes_around_a_limit_have_every_alignment() -> None:
    sizes = sizes_to_ask([MIB], 2)
    assert {MIB - 2, MIB, MIB + 2, MIB + 4, MIB + 8, MIB + 16} <= set(sizes)
    assert all(s % 2 == 0 for s in sizes)


def test_a_policy_that_was_tuned_on_cpu_exports_what_it_extends(tmp_path: Path) -> None:
    text = """
[order.all_reduce]
gpu = ["nccl_symm", "qr", "ca", "pymscclpp", "symm_mem", "pynccl", "torch_dist"]
cpu = ["tuned", "shm", "torch_dist"]
[routes.tuned]
backend = "shm_oneshot"
needs = [{ gate = "device_in", devices = ["cpu"] }]
"""
    mine = export_sglang.export(policy(tmp_path, text), "sglang-0.5.3", HOPPER)
    base = export_sglang.export(load_policy("commbench"), "sglang-0.5.3", HOPPER)
    assert constants(mine) == constants(base)


def test_a_call_of_every_asked_size_is_one_that_a_policy_can_answer() -> None:
    bound = load_policy("commbench").bind(Group((9, 0), 8).platform(), "all_reduce", "bfloat16")
    for size in sizes_to_ask([MIB], 2):
        assert bound.decide(CallSignature("all_reduce", "sum", "bfloat16", size, size // 2)).picked
