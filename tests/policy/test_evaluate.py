"""What every decision keeps, whatever the policy, and the rules of commbench's own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.errors import PolicyError
from commbench.policy import list_policies, load_policy
from commbench.types import DTYPES, CallSignature, Platform
from tests.policy.helpers import MIB, call, cpu, h100, mi300x

POLICIES = {name: load_policy(name) for name in list_policies()}


@st.composite
def platforms(draw: st.DrawFn) -> Platform:
    device = draw(st.sampled_from(["cpu", "cuda", "hip"]))
    capability = {
        "cpu": st.just((0, 0)),
        "cuda": st.sampled_from([(8, 0), (9, 0), (10, 0), (10, 3), (12, 0)]),
        "hip": st.just((9, 4)),
    }[device]
    return Platform(
        device=device,
        capability=draw(capability),
        world_size=draw(st.integers(2, 16)),
        nnodes=draw(st.sampled_from([1, 1, 2])),
        one_host=draw(st.sampled_from([True, False, None])),
        nvlink=draw(st.booleans()),
        multicast=draw(st.booleans()),
        p2p=draw(st.booleans()),
    )


@st.composite
def calls(draw: st.DrawFn) -> CallSignature:
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16", "int8", "float64"]))
    itemsize = DTYPES[dtype].itemsize
    near = draw(st.sampled_from([0, 64, 1 << 10, 16 << 10, MIB, 8 * MIB, 16 * MIB, 64 * MIB, 128 * MIB]))
    numel = max(0, near // itemsize + draw(st.integers(-20, 20)))
    shape = draw(st.sampled_from([(), (numel,), (1, numel)]))
    return CallSignature(
        draw(st.sampled_from(["all_reduce", "all_reduce", "all_gather", "broadcast"])),
        "sum",
        dtype,
        numel * itemsize,
        numel,
        draw(st.sampled_from(["contiguous", "strided", "dense_t"])),
        draw(st.sampled_from(["eager", "graph", "pcg", "compile"])),
        registered=draw(st.booleans()),
        shape=shape,
    )


names = st.sampled_from(sorted(POLICIES))


@settings(max_examples=300, deadline=None)
@given(name=names, platform=platforms(), made=calls())
def test_a_decision_names_one_backend_that_accepts_and_a_reason_for_every_other_ahead(
    name: str, platform: Platform, made: CallSignature
) -> None:
    policy = POLICIES[name]
    bound = policy.bind(platform, made.collective, made.dtype)
    decision = policy.decide(made, platform)
    order = [route.name for route in bound.order]
    ahead = [d.backend for d in decision.declined]
    assert ahead == order[: len(ahead)]
    taken = bound.order[len(ahead)]
    assert taken.backend == decision.picked
    assert (decision.route or decision.picked) == taken.word
    assert bound.refusal(taken.name, made) is None
    assert all(d.reason for d in decision.declined)
    assert all(bound.refusal(d.backend, made) == d.reason for d in decision.declined)


@settings(max_examples=100, deadline=None)
@given(name=names, platform=platforms(), made=calls())
def test_every_rank_decides_alike(name: str, platform: Platform, made: CallSignature) -> None:
    one, other = load_policy(name), load_policy(name)
    other.decide(call(), h100())  # whatever a rank decided before makes no difference
    assert one.decide(made, platform) == other.decide(made, platform)
    assert one.decide(made, platform) == one.decide(made, platform)


@settings(max_examples=150, deadline=None)
@given(name=names, platform=platforms(), made=calls())
def test_the_engine_and_our_coordinator_pick_the_same_unless_the_engine_raises(
    name: str, platform: Platform, made: CallSignature
) -> None:
    verdict = POLICIES[name].verdict(made, platform)
    if verdict.route is not None:
        assert POLICIES[name].decide(made, platform).picked == verdict.route.backend


def test_a_backend_that_is_not_set_up_declines_with_the_reason_it_was_given() -> None:
    platform = cpu(usable={"shm": "/dev/shm is full", "torch_dist": None})
    decision = POLICIES["commbench"].decide(call("float32"), platform)
    assert decision.picked == "torch_dist"
    assert [(d.backend, d.reason) for d in decision.declined] == [("shm", "/dev/shm is full")]


def test_a_backend_that_was_never_set_up_is_not_picked() -> None:
    decision = POLICIES["commbench"].decide(call("float32"), cpu(usable={"torch_dist": None}))
    assert decision.picked == "torch_dist"
    assert decision.declined[0].reason == "not set up for this group"


def test_a_backends_own_hard_limit_sends_the_call_on_with_its_reason() -> None:
    platform = cpu(usable={"shm": None, "torch_dist": None})
    decision = POLICIES["commbench"].decide(call("float32"), platform, {"shm": "has no product"})
    assert (decision.picked, decision.declined[0].reason) == ("torch_dist", "has no product")


def test_nothing_accepting_is_an_error_that_says_why_each_declined() -> None:
    platform = cpu(usable={"shm": "off", "torch_dist": "gloo is missing"})
    with pytest.raises(PolicyError, match=r"shm: off; torch_dist: gloo is missing"):
        POLICIES["commbench"].decide(call("float32"), platform)


@pytest.mark.parametrize("one_host", [False, None])
def test_shared_memory_is_taken_only_where_one_host_is_proven(one_host: bool | None) -> None:
    assert POLICIES["commbench"].decide(call("float32"), cpu(one_host=True)).picked == "shm"
    assert POLICIES["commbench"].decide(call("float32"), cpu(one_host=one_host)).picked == "torch_dist"


@pytest.mark.parametrize(("world_size", "picked"), [(1, "torch_dist"), (2, "shm"), (64, "shm"), (65, "torch_dist")])
def test_shared_memory_serves_two_to_sixty_four_ranks(world_size: int, picked: str) -> None:
    assert POLICIES["commbench"].decide(call("float32"), cpu(world_size)).picked == picked


def test_shared_memory_reduces_no_fp8_but_moves_it() -> None:
    policy = POLICIES["commbench"]
    assert policy.decide(call("float8_e4m3fn"), cpu()).picked == "torch_dist"
    assert policy.decide(call("float8_e4m3fn", collective="all_gather", op=""), cpu()).picked == "shm"


@pytest.mark.parametrize("size_bytes", [0, 8 * MIB])
def test_commbench_takes_a_tensor_of_exactly_the_cap_and_routes_no_empty_one_to_a_kernel(size_bytes: int) -> None:
    decision = POLICIES["commbench"].decide(call(size_bytes=size_bytes), h100())
    assert decision.picked == ("ca" if size_bytes else "torch_dist")
    assert POLICIES["sglang-0.5.3"].decide(call(size_bytes=size_bytes), h100()).picked == (
        "torch_dist" if size_bytes else "ca"
    )


def test_commbench_routes_no_transposed_tensor_to_symm_mem() -> None:
    made = call(size_bytes=32 * MIB, layout="dense_t")
    assert POLICIES["commbench"].decide(made, h100()).picked == "torch_dist"
    assert POLICIES["sglang-0.5.3"].decide(made, h100(8, "symm_mem", "ca_v1")).picked == "symm_mem"


def test_commbench_lets_quick_all_reduce_have_the_sizes_that_it_wins() -> None:
    env = {"ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"}
    assert POLICIES["commbench"].decide(call(size_bytes=4 * MIB), mi300x(env=env)).picked == "qr"
    assert POLICIES["sglang-0.5.3"].decide(call(size_bytes=4 * MIB), mi300x(env=env)).picked == "ca"


def test_the_thresholds_of_shared_memory_are_data_that_can_be_read() -> None:
    policy = POLICIES["commbench"]
    assert policy.values(cpu(2))["shm_one_shot_max_bytes"] == policy.parameters["shm_one_shot_max_bytes"][2]
    assert [(b, s, e) for b, s, e, _ in policy.thresholds("all_reduce", "float32", cpu(4))] == [("shm", 64 << 10, "<=")]


def test_an_environment_variable_moves_its_threshold() -> None:
    env = {"SGLANG_MSCCLPP_MAX_BYTES": "2MB"}  # which SGLang reads as 2 MiB
    made = call(size_bytes=2 * MIB, mode="graph")
    policy = POLICIES["sglang-0.5.3"]
    assert policy.decide(made, h100(8, "pymscclpp")).picked == "pynccl"
    assert policy.decide(made, h100(8, "pymscclpp", env=env)).picked == "pymscclpp"


def test_an_environment_variable_turns_a_switch() -> None:
    env = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    assert POLICIES["vllm-0.33"].decide(call(size_bytes=4 * MIB), h100()).picked == "symm_mem"
    assert POLICIES["vllm-0.33"].decide(call(size_bytes=4 * MIB), h100(env=env)).picked == "ca"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SGLANG_MSCCLPP_MAX_BYTES", "lots", "SGLANG_MSCCLPP_MAX_BYTES='lots' is not a size"),
        ("ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB", "1GB", "ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB='1GB' is not a number"),
        ("ROCM_QUICK_REDUCE_QUANTIZATION", "INT5", "is not one of NONE, FP, INT8, INT6, INT4"),
        ("ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16", "maybe", "is neither true nor false"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        POLICIES["sglang-0.5.3"].decide(call(), h100(env={name: value}))


def test_an_unknown_switch_or_parameter_is_named() -> None:
    with pytest.raises(PolicyError, match="no switch 'warp'"):
        POLICIES["sglang-0.5.3"].decide(call(), h100(8, "warp"))
    with pytest.raises(PolicyError, match="unknown parameter 'colour'"):
        POLICIES["sglang-0.5.3"].decide(call(), h100(settings={"colour": "red"}))


def test_capability_twelve_says_that_the_group_never_comes_up_and_what_the_others_do() -> None:
    verdict = POLICIES["sglang-0.5.3"].verdict(call(), h100(8, "ca_v1", "symm_mem", capability=(12, 0)))
    assert verdict.picked == "ca"
    assert [(f.stage, f.raises) for f in verdict.faults] == [("construction", "KeyError")]


def test_custom_all_reduce_v2_falls_back_to_the_first_version_on_a_pcie_pair() -> None:
    pair = h100(2, nvlink=False, multicast=False)
    bound = POLICIES["sglang-0.5.15"].bind(pair, "all_reduce", "bfloat16")
    assert bound.standing("ca_v2") is not None
    assert bound.standing("ca_v1") is None


def test_vllms_pick_depends_on_the_first_tensor_that_flashinfer_saw() -> None:
    made = call("float32", 256 << 10, shape=(16, 4096))
    policy, pair = POLICIES["vllm-0.33"], h100(2, nvlink=False, multicast=False)
    assert policy.decide(made, pair).picked == "flashinfer"
    seen = h100(2, nvlink=False, multicast=False, settings={"workspace": "1x4096:bfloat16"})
    assert policy.decide(made, seen).picked == "ca"
