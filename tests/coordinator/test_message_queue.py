"""The message queue with real processes: order, sizes, slow and dead peers, and what is left behind."""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks, start_ranks, world

WRITER = 2
COUNT = 10_000
RING = 1 << 20


def message(i: int) -> Any:
    """The i-th object: mostly small, some of the ring's size and beyond, of several kinds."""
    chance = random.Random(i)
    if i % 2500 == 100:
        return {"i": i, "data": chance.randbytes(3 * RING + i)}
    if i % 100 == 0:
        return {"i": i, "data": bytes([i % 251]) * 200_000}
    return (i, None, "x" * chance.randrange(2000), [1.5] * (i % 7))


def fingerprint(value: Any, before: int) -> int:
    return zlib.crc32(repr(value).encode() if not isinstance(value, dict) else value["data"], before)


def exchange(rank: int, size: int, folder: str) -> dict[str, Any]:
    os.environ["COMMBENCH_SHM_DIR"] = folder
    from commbench.coordinator.message_queue import MessageQueue
    from commbench.errors import CollectiveError, PeerLost

    group = world(120).cpu_group
    queue = MessageQueue(group, WRITER, capacity_bytes=RING, timeout_s=120, remote=[3])
    found: dict[str, Any] = {"readers": (queue.local_readers, queue.remote_readers)}
    state = 0
    if rank == WRITER:
        for i in range(COUNT):
            value = message(i)
            queue.enqueue(value)
            state = fingerprint(value, state)
    else:
        for i in range(COUNT):
            state = fingerprint(queue.dequeue(), state)
            if rank == 1 and i % 500 == 0:
                time.sleep(0.01)  # slower than the others, who must not overtake what it has not read
    found["state"] = state
    found["left"] = [p.name for p in Path(folder).iterdir()]
    # both ways of calling, and an object that cannot be pickled
    found["broadcast"] = queue.broadcast_object({"a": 1} if rank == WRITER else None)
    for name, call in (
        ("unpicklable", lambda: queue.broadcast_object(lambda: None)),
        ("wrong side", lambda: queue.dequeue(1) if rank == WRITER else queue.enqueue(1)),
    ):
        try:
            call()
        except CollectiveError as error:
            found[name] = str(error)
    found["after"] = queue.broadcast_object("fine")
    if rank == WRITER:  # not before all have started to wait
        time.sleep(1.5)
    else:
        started = time.monotonic()
        try:
            queue.dequeue(timeout_s=0.3)
        except PeerLost as error:
            found["late"] = (str(error), error.rank, time.monotonic() - started)
    if rank == WRITER:
        queue.close()
        queue.close()
        return found
    if rank == 3:  # a socket may have stopped between the halves of an object, so the queue is given up
        try:
            queue.dequeue(5)
        except CollectiveError as error:
            found["closed"] = str(error)
        return found
    try:
        queue.dequeue(20)
    except CollectiveError as error:
        found["closed"] = str(error)
    queue.close()
    try:
        queue.dequeue()
    except CollectiveError as error:
        found["own close"] = str(error)
    return found


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("segments")
    return run_ranks(exchange, 4, str(folder), timeout_s=280), folder


Exchanged = tuple[list[dict[str, Any]], Path]


def test_ten_thousand_objects_of_all_sizes_arrive_in_order_at_near_and_far_readers(exchanged: Exchanged) -> None:
    ranks, _ = exchanged
    assert ranks[0]["readers"] == ((0, 1), (3,))
    assert len({rank["state"] for rank in ranks}) == 1
    assert ranks[0]["state"] != 0


def test_every_rank_gets_what_is_broadcast(exchanged: Exchanged) -> None:
    assert [rank["broadcast"] for rank in exchanged[0]] == [{"a": 1}] * 4


def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(exchanged: Exchanged) -> None:
    for rank in exchanged[0]:
        assert "cannot be pickled" in rank["unpicklable"]
        assert rank["after"] == "fine"


def test_writing_on_a_reader_and_reading_on_the_writer_are_errors(exchanged: Exchanged) -> None:
    for i, rank in enumerate(exchanged[0]):
        assert f"rank {WRITER} writes and the others read; this is rank {i}" in rank["wrong side"]


def test_a_reader_gives_up_in_time_and_names_the_writer(exchanged: Exchanged) -> None:
    for i, rank in enumerate(exchanged[0]):
        if i != WRITER:
            text, peer, seconds = rank["late"]
            assert f"writer {WRITER} sent nothing" in text
            assert peer == WRITER
            assert 0.25 < seconds < 1.4


def test_a_closed_queue_tells_its_readers(exchanged: Exchanged) -> None:
    ranks, _ = exchanged
    for i in (0, 1):
        assert f"writer {WRITER} closed the queue" in ranks[i]["closed"]
        assert "make a new one" in ranks[i]["own close"]
    assert "unusable since an earlier failure" in ranks[3]["closed"]


def test_the_segment_has_no_name_while_it_is_used_or_after(exchanged: Exchanged) -> None:
    ranks, folder = exchanged
    assert [rank["left"] for rank in ranks] == [[]] * 4
    assert list(folder.iterdir()) == []


def a_reader_ends(rank: int, size: int, folder: str) -> Any:
    os.environ["COMMBENCH_SHM_DIR"] = folder
    from commbench.coordinator.message_queue import MessageQueue
    from commbench.errors import CollectiveError, PeerLost

    queue = MessageQueue(world(60).cpu_group, 0, capacity_bytes=1 << 16, timeout_s=60)
    assert queue.broadcast_object("start") == "start"
    if rank == 2:
        return "gone"
    if rank == 1:  # alive, but reads no more than it must
        text = "nothing"
        try:
            while True:
                queue.dequeue()
        except CollectiveError as error:
            text = str(error)
        return text
    started = time.monotonic()
    try:
        while True:
            queue.enqueue(b"x" * 10_000)
    except PeerLost as error:
        lost = (str(error), error.rank, time.monotonic() - started)
    try:
        queue.enqueue(1)
    except CollectiveError as error:
        return (*lost, str(error))


def test_a_writer_names_a_reader_that_is_gone_long_before_the_timeout(tmp_path: Path) -> None:
    writer, reader, _ = run_ranks(a_reader_ends, 3, str(tmp_path))
    text, peer, seconds, afterwards = writer
    assert "reader 2 is gone without reading" in text
    assert peer == 2
    assert seconds < 30
    assert "unusable since an earlier failure: PeerLost" in afterwards
    assert "writer 0 closed the queue" in reader
    assert list(tmp_path.iterdir()) == []


def waits_to_be_killed(rank: int, size: int, folder: str, ready: str) -> None:
    os.environ["COMMBENCH_SHM_DIR"] = folder
    from commbench.coordinator.message_queue import MessageQueue

    queue = MessageQueue(world(60).cpu_group, 0)
    queue.broadcast_object(rank)
    Path(ready, str(rank)).touch()
    time.sleep(300)


def test_nothing_is_left_when_all_processes_are_killed(tmp_path: Path) -> None:
    folder, ready = tmp_path / "segments", tmp_path / "ready"
    folder.mkdir()
    ready.mkdir()
    ranks, results = start_ranks(waits_to_be_killed, 2, str(folder), str(ready))
    end = time.monotonic() + 120
    while len(list(ready.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(list(ready.iterdir())) == 2
    for process in ranks:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    results.close()
    assert list(folder.iterdir()) == []
