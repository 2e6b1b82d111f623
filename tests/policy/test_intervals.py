"""Winner intervals and the distance to the next threshold, against brute force."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commbench.policy import list_policies, load_policy
from commbench.policy.intervals import answer_of, misaligned, nearest, sized, winners
from commbench.types import DTYPES
from tests.policy.helpers import MIB, call, h100, mi300x

POLICIES = {name: load_policy(name) for name in list_policies()}
PLATFORMS = {
    "h100 x 8": h100(8),
    "h100 x 4": h100(4),
    "b200 x 8": h100(8, capability=(10, 0)),
    "mi300x x 8": mi300x(8, env={}),
}
scenes = st.tuples(st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(PLATFORMS)))
dtypes = st.sampled_from(["float32", "bfloat16", "float64", "int8"])
modes = st.sampled_from(["eager", "graph"])


@settings(max_examples=60, deadline=None)
@given(scene=scenes, dtype=dtypes, mode=modes, around=st.integers(8, 128 * MIB))
def test_one_step_across_the_threshold_changes_the_pick(
    scene: tuple[str, str], dtype: str, mode: str, around: int
) -> None:
    bound = POLICIES[scene[0]].bind(PLATFORMS[scene[1]], "all_reduce", dtype)
    itemsize = DTYPES[dtype].itemsize
    made = call(dtype, around // itemsize * itemsize, mode=mode)
    here = answer_of(bound.verdict(made))
    for below in (True, False):
        near = nearest(bound, made, below)
        if near is None:
            continue
        step = 16 if below else -16  # back towards the call
        assert answer_of(bound.verdict(sized(made, near.size_bytes))) != here
        assert answer_of(bound.verdict(sized(made, near.size_bytes + step))) == here
        assert near.size_bytes - made.size_bytes == near.elements * itemsize


@settings(max_examples=40, deadline=None)
@given(scene=scenes, dtype=dtypes, mode=modes, low=st.integers(0, 9 * MIB))
def test_no_nearer_size_of_the_same_alignment_changes_the_pick(
    scene: tuple[str, str], dtype: str, mode: str, low: int
) -> None:
    bound = POLICIES[scene[0]].bind(PLATFORMS[scene[1]], "all_reduce", dtype)
    itemsize = DTYPES[dtype].itemsize
    made = call(dtype, low // itemsize * itemsize, mode=mode)
    here = answer_of(bound.verdict(made))
    near = nearest(bound, made, below=False)
    last = near.size_bytes if near else made.size_bytes + 4 * MIB
    for size in range(made.size_bytes, last, 16 * 1009):
        assert answer_of(bound.verdict(sized(made, size))) == here


@settings(max_examples=40, deadline=None)
@given(scene=scenes, dtype=dtypes, mode=modes, probe=st.integers(1, 16 * MIB))
def test_winner_intervals_cover_every_size_and_say_what_the_evaluator_says(
    scene: tuple[str, str], dtype: str, mode: str, probe: int
) -> None:
    bound = POLICIES[scene[0]].bind(PLATFORMS[scene[1]], "all_reduce", dtype)
    made = call(dtype, 0, mode=mode)
    intervals = winners(bound, made, 16, 256 * MIB)
    assert intervals[0].first == 16
    assert intervals[-1].last == 256 * MIB
    assert all(a.last + 16 == b.first for a, b in pairwise(intervals))
    assert all(answer_of(a.verdict) != answer_of(b.verdict) for a, b in pairwise(intervals))
    size = probe * 16
    holding = next(i for i in intervals if i.first <= size <= i.last)
    assert answer_of(holding.verdict) == answer_of(bound.verdict(sized(made, size)))


def test_eight_mib_is_one_step_from_custom_all_reduce() -> None:
    bound = POLICIES["sglang-0.5.3"].bind(h100(8, "ca_v1"), "all_reduce", "float32")
    near = nearest(bound, call("float32", 8 * MIB), below=True)
    assert near is not None
    assert (near.elements, near.size_bytes, near.verdict.picked) == (-4, 8 * MIB - 16, "ca")


def test_sizes_that_break_the_alignment_are_told() -> None:
    bound = POLICIES["sglang-0.5.3"].bind(h100(8, "ca_v1", "symm_mem"), "all_reduce", "bfloat16")
    found = [(n.elements, n.verdict.picked) for n in misaligned(bound, call(size_bytes=MIB))]
    assert found == [(2, "symm_mem"), (1, "inplace")]


@pytest.mark.parametrize(("hidden", "first"), [(0, "ca"), (4096, "flashinfer")])
def test_rows_make_a_tensor_that_flashinfer_takes(hidden: int, first: str) -> None:
    bound = POLICIES["vllm-0.33"].bind(h100(4), "all_reduce", "bfloat16")
    assert winners(bound, call(size_bytes=0), 8192, MIB, hidden)[0].verdict.picked == first
