"""The page of flags that the ranks of a host map for their streams' barriers; ranks are threads here."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from commbench.errors import BackendUnavailable
from commbench.measure.torch_device import shared_flags


class Rank:
    """One of several ranks that hand texts to each other."""

    def __init__(self, rank: int, texts: list[str], meet: threading.Barrier, hidden: bool = False) -> None:
        self.rank, self.size = rank, len(texts)
        self._texts, self._meet, self._hidden = texts, meet, hidden

    def gather_texts(self, text: str) -> list[str]:
        self._texts[self.rank] = text
        self._meet.wait(10)
        found = list(self._texts)
        self._meet.wait(10)
        return ["/nowhere/flags"] * self.size if self._hidden and found[0].startswith("/") else found


def together(hidden: int | None = None) -> list[mmap.mmap | BackendUnavailable]:
    texts, meet = ["", ""], threading.Barrier(2)

    def one(rank: int) -> mmap.mmap | BackendUnavailable:
        try:
            return shared_flags(Rank(rank, texts, meet, hidden=rank == hidden))
        except BackendUnavailable as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def test_ranks_see_each_others_flags_and_the_page_has_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMMBENCH_SHM_DIR", str(tmp_path))
    first, second = together()
    assert isinstance(first, mmap.mmap)
    assert isinstance(second, mmap.mmap)
    assert first[:] == bytes(len(first))
    first[64] = 7
    assert second[64] == 7
    assert not list(tmp_path.iterdir())


def test_a_rank_that_cannot_see_the_page_is_named_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMMBENCH_SHM_DIR", str(tmp_path))
    for answer in together(hidden=1):
        assert isinstance(answer, BackendUnavailable)
        assert "rank 1 cannot map rank 0's flags" in str(answer)
    assert not list(tmp_path.iterdir())


def test_no_room_for_the_page_is_told_on_every_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMMBENCH_SHM_DIR", str(tmp_path / "missing"))
    for answer in together():
        assert isinstance(answer, BackendUnavailable)
        assert "no shared memory: no room" in str(answer)
