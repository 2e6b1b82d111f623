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


def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One without a group, whose communicator is not a blocking one: every call is in progress when it returns."""
    monkeypatch.setattr(pynccl.devices, "activate", lambda device: None)
    monkeypatch.setattr(pynccl.devices, "is_capturing", lambda: False)

    def init(comm: Any) -> int:
        comm.value = 0xC0DE
        return pynccl.SUCCESS

    made: Any = object.__new__(pynccl.PyNcclBackend)
    made._comm, made._connected, made.calls = communicator(init, 5.0), set(), 0
    made._comm.library.ncclCommGetAsyncError = lambda comm, state: setattr(state._obj, "value", pynccl.SUCCESS)
    made._handle, made._stream = made._comm.address, lambda: 0
    made._library = types.SimpleNamespace(ncclSend=lambda *_: 0, ncclRecv=lambda *_: 0)
    made.group = types.SimpleNamespace(world_size=2)
    return made


def test_only_the_first_call_of_a_kind_takes_a_thread_also_where_calls_end_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def call() -> int:
        threads.append(threading.get_ident())
        return pynccl.IN_PROGRESS

    made = backend(monkeypatch)
    for kind in ("one", "one", "other"):
        made._run((kind, 8), kind, call, None)
    assert [thread == threading.get_ident() for thread in threads] == [False, True, False]


def test_a_scatter_holds_the_memory_that_its_calls_have_the_addresses_of(monkeypatch: pytest.MonkeyPatch) -> None:
    made = backend(monkeypatch)
    seen: list[Any] = []
    monkeypatch.setattr(made, "_grouped", lambda kind, calls, held: seen.append((calls, held)), raising=False)
    made.scatter(torch.ones(8, 2)[:, 0], torch.empty(4), 0)
    ((calls, held),) = seen
    assert len(calls) == 3
    for call in calls:
        assert any(t.data_ptr() <= call.args[0] < t.data_ptr() + t.untyped_storage().nbytes() for t in held)
        assert all(t.is_contiguous() for t in held)
