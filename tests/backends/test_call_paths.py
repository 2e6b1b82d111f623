"""The call path of each GPU backend, driven against its provider's published signatures (simulation.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.backends import call_paths
from tests.ranks import run_ranks

TWO = 2
# One path of each kind is enough for every day; the others are those of the same files with another provider or kernel.
EVERY_DAY = {"pynccl", "symm_mem", "ca-sgl_kernel", "qr-sgl_kernel", "pymscclpp", "flashinfer"}
EVERY_DAY_FAILURES = {"pynccl", "ca-sgl_kernel"}


def cases(names: Iterable[str], often: set[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in often else [pytest.mark.slow]) for name in names]


@pytest.fixture(scope="module", params=cases(call_paths.CASES, EVERY_DAY))
def path(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    return request.param, run_ranks(call_paths.whole_path, TWO, request.param)


def test_results_are_right_eager_and_in_replays_whose_inputs_are_overwritten(path: Any) -> None:
    _, ranks = path
    for seen in ranks:
        assert seen["wrong"] == []
        assert seen["counted"]


def test_the_provider_is_told_with_its_choice_of_kernel(path: Any) -> None:
    case, ranks = path
    word = {"symm_mem": "two-shot", "symm_mem_multimem": "multimem", "symm_mem_oneshot": "one-shot",
            "pynccl": "NCCL 2.32.3", "qr-aiter": "aiter quick all-reduce INT6"}.get(case, "")  # fmt: skip
    assert all(word in seen["provider"] and seen["provider"] for seen in ranks)
    assert all(seen["quantised"] == ("int6" if case.startswith("qr-") else "") for seen in ranks)


def test_a_capture_that_fails_on_one_rank_restores_the_state_and_is_known_to_all_who_registered(path: Any) -> None:
    case, ranks = path
    assert ranks[-1]["failed_capture"] == "ValueError: a scripted failure of the model"
    assert all(seen["mode_after"] == "eager" for seen in ranks)
    if case.startswith("ca-"):  # its graph would wait for the failed rank's addresses
        assert "rank 1: CollectiveError: its capture failed" in ranks[0]["failed_capture"]
        assert "must not be replayed" in ranks[0]["failed_capture"]


def test_what_a_provider_rejects_is_declined_in_words(path: Any) -> None:
    case, ranks = path
    declined = ranks[0]["declined"]
    assert declined == ranks[1]["declined"]
    assert "contiguous" in declined["strided"]
    assert "contiguous" in declined["transposed"]
    if case == "pynccl":
        return
    assert declined["empty"]
    assert "exceed" in declined["large"]
    if case == "nccl_symm":
        return
    assert "float8_e5m2" in declined["dtype"]
    assert declined["op"]
    assert declined["odd"]


@pytest.mark.parametrize(
    "path", cases((c for c in call_paths.CASES if c.startswith("ca-") and c != "ca-rocm"), EVERY_DAY), indirect=True
)
def test_custom_all_reduce_registers_after_the_capture_and_copies_in_place_inputs(path: Any) -> None:
    _, ranks = path
    for seen in ranks:
        assert seen["setup"][-2:] == ["init_custom_ar", "register_buffer"]
        assert seen["eager"] == ["all_reduce"]
        assert seen["capture"] == ["all_reduce", "all_reduce", "get_graph_buffer_ipc_meta", "register_graph_buffers"]
        assert seen["end"][-6:].count("cudaFree") == 2
        assert "dispose" in seen["end"]


@pytest.mark.parametrize("path", cases(["ca-rocm"], set()), indirect=True)
def test_on_rocm_custom_all_reduce_shares_tensors_by_handles_and_registers_after_the_capture(path: Any) -> None:
    _, ranks = path
    for seen in ranks:
        assert seen["setup"][:3] == ["meta_size", "allocate_meta_buffer", "get_meta_buffer_ipc_handle"]
        assert seen["setup"][-2:] == ["init_custom_ar", "register_buffer"]
        assert seen["eager"] == ["all_reduce_unreg"]
        assert seen["capture"] == [
            "all_reduce_reg", "all_reduce_unreg", "get_graph_buffer_ipc_meta", "register_graph_buffers",
        ]  # fmt: skip
        assert "dispose" in seen["end"]


@pytest.mark.parametrize("case", cases(call_paths.SETUP_STEPS, EVERY_DAY_FAILURES))
def test_a_rank_that_fails_at_any_step_of_the_set_up_turns_the_backend_off_on_all_with_its_reason(case: str) -> None:
    _check_reasons(case, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["pynccl", "ca-sgl_kernel", "pymscclpp"])
def test_the_same_with_four_ranks(case: str) -> None:
    _check_reasons(case, 4)


def _check_reasons(case: str, size: int) -> None:
    ranks = run_ranks(call_paths.fails_at_each_step, size, case)
    for step in call_paths.SETUP_STEPS[case]:
        reasons = {reasons[step] for reasons in ranks}
        assert len(reasons) == 1, (step, reasons)
        culprit = 0 if step in call_paths.ON_FIRST_RANK_ONLY else size - 1
        assert f"rank {culprit}: " in reasons.pop(), step
    assert [reasons["none"] for reasons in ranks] == [None] * size


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("pynccl", [("nccl", "ncclGetUniqueId"), ("nccl", "ncclCommInitRankConfig"), ("nccl", "ncclAllReduce")]),
        pytest.param("nccl_symm", [("nccl", "ncclCommWindowRegister")], marks=pytest.mark.slow),
        ("ca-sgl_kernel", [("sgl_kernel", f) for f in ("init_custom_ar", "all_reduce", "register_buffer")]),
        pytest.param("ca-vllm", [("vllm", "all_reduce"), ("cudart", "cudaIpcOpenMemHandle")], marks=pytest.mark.slow),
        pytest.param("ca-flashinfer", [("flashinfer", "all_reduce")], marks=pytest.mark.slow),
        pytest.param(
            "ca-rocm",
            [("sgl_kernel", f) for f in ("init_custom_ar", "all_reduce_unreg", "allocate_meta_buffer")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qr-sgl_kernel", [("sgl_kernel", "init_custom_qr"), ("sgl_kernel", "qr_all_reduce")], marks=pytest.mark.slow
        ),
        pytest.param("qr-aiter", [("aiter", "qr_all_reduce"), ("aiter", "qr_open_handles")], marks=pytest.mark.slow),
        pytest.param(
            "pymscclpp",
            [("sgl_kernel", "mscclpp_init_context"), ("sgl_kernel", "mscclpp_allreduce")],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_changed_signature_makes_the_path_fail(case: str, changes: list[tuple[str, str]]) -> None:
    for outcomes in run_ranks(call_paths.with_changed_signatures, TWO, case, changes):
        assert set(outcomes) == {function for _, function in changes}
        assert "passed" not in outcomes.values(), outcomes


def test_pynccl_runs_every_collective_and_reports_an_asynchronous_error_after_an_abort() -> None:
    for seen in run_ranks(call_paths.every_collective_of_nccl, TWO):
        assert seen["wrong"] == []
        assert "asynchronous error" in seen["errors"][0]
        assert "aborted" in seen["errors"][1]
        assert "ncclCommAbort" in seen["calls"]
        assert not seen["alive"]


def test_a_rank_that_stays_away_from_nccls_first_call_of_a_size_is_missed_after_the_timeout() -> None:
    seen = run_ranks(call_paths.first_call_without_the_last_rank, TWO)[0]
    assert seen["first"] == "PeerLost: ncclAllReduce: another rank did not answer within 1 s"
    assert "the communicator was aborted after an earlier failure" in seen["next"]
    assert seen["took_s"] < 2.5  # the played kernel waits for 3 s


def test_symmetric_memory_grows_to_its_cap_and_a_growth_that_fails_fails_everywhere_leaving_the_input() -> None:
    for seen in run_ranks(call_paths.growth, TWO):
        mib = 1 << 20
        assert seen["sizes"] == [mib, mib, 2 * mib, 2 * mib, 8 * mib]
        assert "exceed the cap of 8 MiB" in seen["too_large"]
        assert "rank 1: ProviderError: scripted failure of empty" in seen["failed_growth"]
        assert seen["untouched"]


def test_mscclpp_is_tuned_by_the_slowest_rank_and_all_ranks_launch_alike() -> None:
    ranks = run_ranks(call_paths.tuned, TWO)
    assert ranks[0] == ranks[1]
    # rank 0 alone would have chosen 256 threads, which are slow on rank 1
    assert set(ranks[0].values()) == {(512, 21)}
    assert max(ranks[0]) == 1 << 20
