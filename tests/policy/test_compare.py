"""The cells in which two policies differ."""

from __future__ import annotations

from commbench.policy import load_policy
from commbench.policy.compare import differences, differences_by_option
from tests.policy.helpers import MIB, h100, mi300x


def side(name: str, platform):
    return load_policy(name), platform


def test_a_policy_does_not_differ_from_itself() -> None:
    assert differences(side("vllm-0.33", h100()), side("vllm-0.33", h100())) == []


def test_the_order_that_changed_between_the_seeds_shows_only_with_quick_all_reduce_on() -> None:
    cells = differences_by_option(side("sglang-0.5.2rc2", mi300x()), side("sglang-0.5.3", mi300x()))
    assert cells.pop("") == []
    assert list(cells) == ["ROCM_QUICK_REDUCE_QUANTIZATION=INT8 or ROCM_QUICK_REDUCE_QUANTIZATION=INT6",
                           "ROCM_QUICK_REDUCE_QUANTIZATION=INT4"]  # fmt: skip
    cell = next(c for c in cells["ROCM_QUICK_REDUCE_QUANTIZATION=INT4"] if (c.mode, c.dtype) == ("eager", "bfloat16"))
    assert (cell.first, cell.last) == (2 * MIB, 16 * MIB - 16)
    assert (cell.left.picked, cell.right.picked) == ("qr", "ca")


def test_a_cap_that_became_inclusive_differs_in_one_step_of_sixteen_bytes() -> None:
    cells = differences(side("sglang-0.5.6", h100()), side("sglang-0.5.10", h100(8, "ca_v1")), ["float32"], ["eager"])
    assert [(c.first, c.last, c.left.picked, c.right.picked) for c in cells] == [(8 * MIB, 8 * MIB, "inplace", "ca")]
