"""What GPU backends choose by themselves: kernels, launches, shapes, sizes of buffers."""

from __future__ import annotations

import itertools

import pytest
import torch

from commbench.backends import flashinfer, pymscclpp, symm_mem
from commbench.backends.staging import Staging, Views, bytes_from_environment
from commbench.errors import BackendUnavailable, CollectiveError


@pytest.mark.parametrize(
    ("capability", "world_size", "multicast", "kernel"),
    [
        ((9, 0), 2, True, "two-shot"),
        ((9, 0), 4, True, "multimem"),
        ((9, 0), 8, False, "two-shot"),
        ((10, 0), 4, True, "two-shot"),
        ((10, 3), 8, True, "multimem"),
        ((12, 0), 8, True, "two-shot"),
    ],
)
def test_symm_mem_takes_the_kernel_that_engines_take(
    capability: tuple[int, int], world_size: int, multicast: bool, kernel: str
) -> None:
    assert symm_mem.engines_kernel(capability, world_size, multicast) == kernel


def test_a_launch_is_as_fast_as_its_slowest_rank_and_ties_go_to_the_smaller() -> None:
    small, large = (256, 21), (512, 84)
    ranks = [{(1024, small): 1e-6, (1024, large): 2e-6}, {(1024, small): 5e-6, (1024, large): 2e-6}]
    assert pymscclpp.best_launches(ranks) == {1024: large}
    assert pymscclpp.best_launches([{(1024, small): 2e-6, (1024, large): 2e-6}]) == {1024: small}


@pytest.mark.parametrize(("cap", "last"), [(1 << 20, 1 << 20), (3 << 19, 1 << 21), (1, 1 << 10)])
def test_a_cap_that_is_no_power_of_two_is_tuned_up_to_the_next(cap: int, last: int) -> None:
    sizes = pymscclpp.sizes_to_tune(cap)
    assert sizes[-1] == last
    assert all(b == 2 * a for a, b in itertools.pairwise(sizes))


def test_flashinfer_sees_a_message_as_rows_of_whole_packs_or_not_at_all() -> None:
    assert flashinfer._rows(4096, 2) == (4, 1024)
    assert flashinfer._rows(8, 2) == (1, 8)
    assert flashinfer._rows(4, 2) == (0, 0)  # 8 bytes are half a pack
    assert flashinfer._rows(1500, 4) == (0, 0)
    assert flashinfer._rows(0, 4) == (0, 0)


def test_a_staging_buffer_gives_the_same_view_each_time_keeps_what_it_had_and_never_overflows() -> None:
    made: list[torch.Tensor] = []

    def make(size_bytes: int) -> torch.Tensor:
        made.append(torch.empty(size_bytes, dtype=torch.uint8))
        return made[-1]

    staging = Staging("mine", 3 << 20, make)
    shape = torch.Size([16, 16])
    floats = staging.views(torch.float32)
    first = floats[shape]
    assert floats[shape] is first
    assert first.data_ptr() == made[0].data_ptr()
    grown = floats[torch.Size([1 << 19])]
    assert [len(m) for m in made] == [1 << 20, 2 << 20]
    assert grown.data_ptr() == made[1].data_ptr()
    assert floats[shape] is not first  # it lies in the new memory; the old one is still there
    staging.reserve(3 << 20)
    assert len(made[2]) == 3 << 20
    with pytest.raises(CollectiveError, match="do not fit its buffer, which grows to 3 MiB"):
        floats[torch.Size([(3 << 18) + 1])]
    staging.release()
    assert not floats


def test_views_share_one_memory() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    Views(torch.int32, lambda _: memory)[torch.Size([4])].fill_(7)
    assert Views(torch.int8, lambda _: memory)[torch.Size([16])].tolist() == [7, 0, 0, 0] * 4


@pytest.mark.parametrize(("text", "words"), [("lots", "MINE_BYTES=lots"), ("0", "leaves no room")])
def test_a_size_that_makes_no_sense_is_named_with_its_variable(
    text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE_BYTES", text)
    with pytest.raises(BackendUnavailable, match=words):
        bytes_from_environment("mine", "MINE_BYTES", 1)
