"""The set-up of a NCCL communicator, over functions that are played here."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commbench.backends import pynccl
from commbench.errors import BackendUnavailable, PeerLost


def library(init: Callable[[Any], int]) -> Any:
    return types.SimpleNamespace(
        ncclCommInitRankConfig=lambda comm, n, name, rank, config: init(comm._obj),
        ncclGetErrorString=lambda code: b"unhandled system error",
        ncclGetLastError=lambda comm: b"",
    )


def communicator(init: Callable[[Any], int], timeout_s: float) -> pynccl.Communicator:
    return pynccl.Communicator(library(init), 2, 0, bytes(pynccl.UNIQUE_ID_BYTES), timeout_s, torch.device("cuda", 3))


def test_nccl_is_set_up_on_a_thread_whose_device_is_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    active: dict[int, torch.device] = {}
    monkeypatch.setattr(pynccl.devices, "activate", lambda device: active.update({threading.get_ident(): device}))
    found: list[torch.device | None] = []

    def init(comm: Any) -> int:
        found.append(active.get(threading.get_ident()))
        comm.value = 0xC0DE
        return pynccl.SUCCESS

    assert communicator(init, 5.0).address == 0xC0DE
    assert found == [torch.device("cuda", 3)]


def test_a_rank_that_does_not_come_ends_the_set_up_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynccl.devices, "activate", lambda device: None)
    come = threading.Event()

    def init(comm: Any) -> int:
        comm.value = 0xC0DE  # as NCCL, which gives the handle before the ranks meet; here it must not be aborted
        come.wait(10)
        return pynccl.SUCCESS

    with pytest.raises(BackendUnavailable, match=r"another rank did not answer within 0\.05 s") as caught:
        communicator(init, 0.05)
    assert isinstance(caught.value.__cause__, PeerLost)
    come.set()
