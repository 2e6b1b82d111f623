"""Objects from one rank to all others of a group: shared memory on the writer's host, sockets to other hosts.

On the writer's host all ranks map one file: a page of positions, then a ring of bytes. An object is a run of pieces,
each a header (its length, and whether more follows) and a part of the pickle; a piece never wraps around the end.
An object larger than the ring streams through it. The writer moves its position after a piece is written, and waits
while the slowest reader has not made room; a reader moves its own position after it has taken a piece. All positions
only grow, each has one owner and a cache line of its own.

The file has a random name and mode 0600, and its name is gone as soon as all have mapped it, so that nothing is left
however the processes end. Each process holds a record lock on the file, which ends with it: that tells a peer that is
gone from one that is slow.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import mmap
import os
import platform
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commbench.coordinator.hosts import in_the_same_node_as, shared_memory_folder
from commbench.coordinator.objects import pickled, unpickled
from commbench.errors import BackendUnavailable, CollectiveError, PeerLost
from commbench.native.segment import make_file

DEFAULT_CAPACITY = 8 << 20  # bytes of the ring
DEFAULT_TIMEOUT_S = 60.0
HOST_VARIABLE = "COMMBENCH_QUEUE_HOST"  # the address that readers on other hosts connect to

_LINE = 64
_WORD = 8
_WRITTEN, _CLOSED = 0, 1  # words of the writer's line
_MORE = 1 << 62  # set in a piece's header where the object goes on
_ERROR = 1 << 61  # set where the object is the text of an error
_LENGTH = _ERROR - 1
_FRAME = struct.Struct("<Q")
_OWNER_LOCK = "hhqqi"  # struct flock, as Linux and macOS order it for fcntl
_LOOK_EVERY_S = 0.2  # how often a waiting process looks whether its peer lives
_LONGEST_NAP_S = 1e-3

_ordered = platform.machine() in ("x86_64", "AMD64", "i686")
_lock = threading.Lock()


def _fence() -> None:
    """Order the stores before it against those after. x86 does so by itself; elsewhere a lock's own fences do."""
    if not _ordered:
        with _lock:
            pass
        with _lock:
            pass


class MessageQueue:
    """Rank ``writer`` of the group sends objects, every other rank gets each of them in order. Collective to make.

    capacity_bytes: the ring's size. timeout_s: how long ``enqueue`` waits for room and ``dequeue`` for an object.
    remote: ranks to serve by socket although they are on the writer's host (for tests); ranks on other hosts always
    are. One thread at a time may use it. Raises CollectiveError for a writer that is no rank of the group,
    BackendUnavailable (on every rank) where a reader can neither map the file nor connect.
    """

    def __init__(
        self,
        cpu_group: Any,
        writer: int = 0,
        *,
        capacity_bytes: int = DEFAULT_CAPACITY,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        remote: Iterable[int] = (),
    ) -> None:
        self.rank, self.world_size = dist.get_rank(cpu_group), dist.get_world_size(cpu_group)
        if not 0 <= writer < self.world_size:
            raise CollectiveError(f"message queue: writer={writer} is no rank of a group of {self.world_size}")
        if capacity_bytes < 4096 or capacity_bytes % _WORD:
            raise CollectiveError(f"message queue: capacity {capacity_bytes} must be a multiple of 8, at least 4096")
        self.writer = writer
        self.timeout_s = timeout_s
        self._capacity = capacity_bytes
        near = in_the_same_node_as(cpu_group, writer)
        far = set(remote) | {rank for rank, same in enumerate(near) if not same}
        self.local_readers = tuple(r for r in range(self.world_size) if r != writer and r not in far)
        self.remote_readers = tuple(sorted(far - {writer}))
        self._broken = ""
        self._closed = False
        self._ring: _Ring | None = None
        self._sockets: dict[int, socket.socket] = {}
        self._set_up(cpu_group)

    # ---- set-up -----------------------------------------------------------------------------------------

    def _set_up(self, cpu_group: Any) -> None:
        listener: socket.socket | None = None
        path: Path | None = None
        offer: list[Any] = [None]
        problem = ""
        token = secrets.token_bytes(32)
        size = _Ring.size_bytes(self.world_size, self._capacity)
        fd = -1
        try:
            if self.rank == self.writer:
                try:
                    if self.local_readers:
                        fd, path = make_file(shared_memory_folder())
                        os.posix_fallocate(fd, 0, size)  # a full file system is an error here, not a SIGBUS later
                    if self.remote_readers:
                        listener = socket.create_server((_own_address(), 0), backlog=len(self.remote_readers))
                        listener.settimeout(self.timeout_s)
                    offer = [(str(path), listener.getsockname() if listener else None, token)]
                except OSError as error:
                    problem = f"writer {self.rank}: {error}"
            dist.broadcast_object_list(offer, src=dist.get_global_rank(cpu_group, self.writer), group=cpu_group)
            if offer[0] is not None:
                place, address, token = offer[0]
                try:
                    if self.rank in self.local_readers:
                        fd = os.open(place, os.O_RDWR | os.O_CLOEXEC)
                    if fd >= 0:
                        self._ring, fd = _Ring(fd, size, self._capacity, self.world_size, self.rank), -1
                    if listener is not None:
                        self._sockets = _accept(listener, self.remote_readers, token, self.timeout_s)
                    elif self.rank in self.remote_readers:
                        self._sockets = {self.writer: _connect(address, self.rank, token, self.timeout_s)}
                except OSError as error:
                    problem = f"rank {self.rank}: {error}"
            problems: list[Any] = [None] * self.world_size
            dist.all_gather_object(problems, problem, group=cpu_group)
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
            if listener is not None:
                listener.close()
            if fd >= 0:
                os.close(fd)
        failed = next((p for p in problems if p), "")
        if failed:
            self.close()
            raise BackendUnavailable(
                "message queue", failed, f"enlarge /dev/shm, or set {HOST_VARIABLE} to an address of the writer's host"
            )

    # ---- use --------------------------------------------------------------------------------------------

    def enqueue(self, obj: Any, timeout_s: float | None = None) -> None:
        """Send an object to all readers; on return it may change. On the writer only.

        Waits for room as long as the slowest reader leaves none. Raises CollectiveError for an object that cannot be
        pickled (nothing is sent then), PeerLost naming the readers that are gone or read nothing within the timeout;
        after that the queue is unusable, and says so to all.
        """
        data, failure = pickled(obj)
        if failure is not None:
            raise failure
        self._send(data, 0, timeout_s)

    def dequeue(self, timeout_s: float | None = None) -> Any:
        """The next object. On readers only. Raises PeerLost when the writer is gone or sends nothing in time,
        CollectiveError when it closed the queue, or when it had an object that cannot be pickled."""
        self._check(writing=False)
        patience = _Patience(self.timeout_s if timeout_s is None else timeout_s)
        if self._ring is not None:
            try:
                flags, data = self._ring.read(patience, self.writer, self._where())
            except BaseException as error:
                if self._ring.torn:
                    self._broken = f"{type(error).__name__}: {error}"
                raise
        else:
            flags, data = self._receive(patience)
        tensor = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        if flags & _ERROR:
            raise CollectiveError(f"rank {self.writer} could not send: {bytes(data).decode(errors='replace')}")
        return unpickled(tensor, self.writer)

    def broadcast_object(self, obj: Any = None, timeout_s: float | None = None) -> Any:
        """The writer's object on every rank; every rank calls it. An object that cannot be pickled raises
        CollectiveError on all of them."""
        if self.rank != self.writer:
            return self.dequeue(timeout_s)
        data, failure = pickled(obj)
        self._send(data, 0 if failure is None else _ERROR, timeout_s)
        if failure is not None:
            raise failure
        return obj

    def close(self) -> None:
        """Leave the queue. Readers may still take what was sent; then they are told that it is closed."""
        if self._closed:
            return
        self._closed = True
        if self._ring is not None:
            self._ring.close(writer=self.rank == self.writer)
        for connection in self._sockets.values():
            connection.close()

    # ---- inside -----------------------------------------------------------------------------------------

    def _check(self, writing: bool) -> None:
        if self._closed:
            raise CollectiveError("message queue: closed; make a new one")
        if self._broken:
            raise CollectiveError(f"message queue: unusable since an earlier failure: {self._broken}")
        if writing != (self.rank == self.writer):
            raise CollectiveError(
                f"message queue: rank {self.writer} writes and the others read; this is rank {self.rank}"
            )

    def _where(self) -> str:
        return f"message queue on rank {self.rank}"

    def _send(self, data: torch.Tensor, flags: int, timeout_s: float | None) -> None:
        self._check(writing=True)
        patience = _Patience(self.timeout_s if timeout_s is None else timeout_s)
        view = data.numpy().data
        try:
            if self._ring is not None:
                self._ring.write(view, flags, patience, self.local_readers)
            for reader, connection in self._sockets.items():
                self._send_by_socket(reader, connection, view, flags, patience)
        except BaseException as error:
            # an object that went half way cannot be taken back: nothing after it would be understood
            self._broken = f"{type(error).__name__}: {error}"
            if self._ring is not None:
                self._ring.mark_closed()
            for connection in self._sockets.values():
                connection.close()
            raise

    def _send_by_socket(
        self, reader: int, connection: socket.socket, view: memoryview, flags: int, patience: _Patience
    ) -> None:
        connection.settimeout(max(0.001, patience.left_s()))
        try:
            connection.sendall(_FRAME.pack(len(view) | flags))
            connection.sendall(view)
        except TimeoutError:
            raise PeerLost(f"message queue: reader {reader} took nothing for {patience.limit_s:g} s", reader) from None
        except OSError as error:
            raise PeerLost(f"message queue: reader {reader} is gone: {error}", reader) from error

    def _receive(self, patience: _Patience) -> tuple[int, bytearray]:
        connection = self._sockets[self.writer]
        try:
            (word,) = _FRAME.unpack(_exactly(connection, _FRAME.size, patience))
            return word & ~_LENGTH, _exactly(connection, word & _LENGTH, patience)
        except TimeoutError:
            self._broken = "a timeout may have cut an object in two"
            raise PeerLost(
                f"message queue: writer {self.writer} sent nothing to rank {self.rank} for {patience.limit_s:g} s",
                self.writer,
            ) from None
        except OSError as error:
            self._broken = str(error)
            raise PeerLost(
                f"message queue: writer {self.writer} closed the queue or is gone: {error}", self.writer
            ) from error


class _Patience:
    """Waiting that starts with yielding and ends in short naps, up to a limit."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def until(self, ready: Callable[[], bool], look: Callable[[], None]) -> bool:
        """Whether ``ready`` came true in time. ``look`` is called now and then, and raises when waiting is in vain."""
        for _ in range(200):
            if ready():
                return True
            os.sched_yield()
        nap, next_look = 2e-5, time.monotonic() + _LOOK_EVERY_S
        while not ready():
            now = time.monotonic()
            if now >= self._end:
                return False
            if now >= next_look:
                look()
                next_look = now + _LOOK_EVERY_S
            time.sleep(nap)
            nap = min(1.5 * nap, _LONGEST_NAP_S)
        return True


class _Ring:
    """The mapped file of one process. Owns the descriptor, whose record lock tells others that the process lives."""

    def __init__(self, fd: int, size: int, capacity: int, ranks: int, rank: int) -> None:
        try:
            self._map = mmap.mmap(fd, size)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        self._rank = rank
        self._capacity = capacity
        self._first = size - capacity
        self._whole = memoryview(self._map)
        self._bytes = self._whole[self._first :]
        self._words = self._whole[: self._first].cast("q")
        self._headers = self._bytes.cast("q")
        self._mine = (1 + rank) * (_LINE // _WORD)
        self.torn = False  # a read ended inside an object

    @staticmethod
    def size_bytes(ranks: int, capacity: int) -> int:
        return -(-(1 + ranks) * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE + capacity

    def alive(self, rank: int) -> bool:
        """Whether the process of that rank still holds its lock."""
        asked = struct.pack(_OWNER_LOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind: int = struct.unpack(_OWNER_LOCK, fcntl.fcntl(self._fd, fcntl.F_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK

    def write(self, data: memoryview, flags: int, patience: _Patience, readers: tuple[int, ...]) -> None:
        """Write an object in pieces. Raises PeerLost naming the readers that keep it from finishing."""
        words, capacity = self._words, self._capacity
        lines = [(1 + r) * (_LINE // _WORD) for r in readers]
        sent, total = 0, len(data)
        while True:
            written = words[_WRITTEN]
            place = written % capacity
            # small objects wait until they fit as a whole, large ones for a quarter of the ring
            needed = min(_WORD + total - sent, capacity - place, capacity // 4)

            def room(written: int = written) -> int:
                return capacity - (written - min([words[line] for line in lines]))

            if room() < needed:
                self._wait_for_room(lambda: room() >= needed, patience, readers, written)  # noqa: B023 - called at once
            length = min(total - sent, room() - _WORD, capacity - place - _WORD)
            last = sent + length == total
            self._headers[place // _WORD] = length | flags | (0 if last else _MORE)
            self._bytes[place + _WORD : place + _WORD + length] = data[sent : sent + length]
            sent += length
            _fence()
            words[_WRITTEN] = written + _WORD + -(-length // _WORD) * _WORD
            if last:
                return

    def _wait_for_room(
        self, ready: Callable[[], bool], patience: _Patience, readers: tuple[int, ...], written: int
    ) -> None:
        def look() -> None:
            gone = [r for r in readers if not self.alive(r)]
            if gone:
                raise PeerLost(f"message queue: {_readers(gone)} gone without reading all that was sent", gone[0])

        if not patience.until(ready, look):
            look()
            behind = {r: written - self._words[(1 + r) * (_LINE // _WORD)] for r in readers}
            slow = [r for r in readers if behind[r] == max(behind.values())]
            raise PeerLost(
                f"message queue: no room for {patience.limit_s:g} s, {_readers(slow)} {behind[slow[0]]} bytes behind",
                slow[0],
            )

    def read(self, patience: _Patience, writer: int, where: str) -> tuple[int, bytearray]:
        """The flags and bytes of the next object. Raises PeerLost or CollectiveError."""
        words, mine, capacity = self._words, self._mine, self._capacity
        parts: bytearray | None = None
        self.torn = False
        while True:
            position = words[mine]
            if words[_WRITTEN] == position:
                self._wait_for_data(position, patience, writer, where)
            _fence()
            place = position % capacity
            header = self._headers[place // _WORD]
            length = header & _LENGTH
            piece = self._bytes[place + _WORD : place + _WORD + length]
            if parts is None:
                parts = bytearray(piece)
            else:
                parts += piece
            _fence()
            self.torn = bool(header & _MORE)
            words[mine] = position + _WORD + -(-length // _WORD) * _WORD
            if not self.torn:
                return header & _ERROR, parts

    def _wait_for_data(self, position: int, patience: _Patience, writer: int, where: str) -> None:
        words = self._words

        def look() -> None:
            if words[_WRITTEN] != position:
                return
            if words[_CLOSED]:
                raise CollectiveError(f"{where}: writer {writer} closed the queue")
            if not self.alive(writer):
                raise PeerLost(f"{where}: writer {writer} is gone", writer)

        if not patience.until(lambda: words[_WRITTEN] != position, look):
            look()
            raise PeerLost(f"{where}: writer {writer} sent nothing for {patience.limit_s:g} s", writer)

    def mark_closed(self) -> None:
        self._words[_CLOSED] = 1

    def close(self, writer: bool) -> None:
        if writer:
            self.mark_closed()
        for view in (self._headers, self._words, self._bytes, self._whole):
            view.release()
        # a traceback that somebody keeps may hold a piece; the memory then goes with it
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)


def _readers(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"reader {ranks[0]} is"
    return f"readers {', '.join(map(str, ranks))} are"


# ---- sockets ------------------------------------------------------------------------------------------------


def _own_address() -> str:
    """The address at which other hosts reach this one: the user's word, else the one that faces the master."""
    told = os.environ.get(HOST_VARIABLE)
    if told:
        return told
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # no packet is sent: this asks the routing table
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        return str(probe.getsockname()[0])


def _accept(
    listener: socket.socket, readers: tuple[int, ...], token: bytes, timeout_s: float
) -> dict[int, socket.socket]:
    """A connection of each reader. Whoever does not know the token is turned away."""
    end = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    while len(found) < len(readers):
        listener.settimeout(max(0.001, end - time.monotonic()))
        connection, _ = listener.accept()
        patience = _Patience(min(5.0, timeout_s))
        try:
            greeting = _exactly(connection, len(token) + _FRAME.size, patience)
        except OSError:
            connection.close()
            continue
        (reader,) = _FRAME.unpack(greeting[len(token) :])
        if not hmac.compare_digest(bytes(greeting[: len(token)]), token) or reader not in readers:
            connection.close()
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found[reader] = connection
    return found


def _connect(address: tuple[str, int], rank: int, token: bytes, timeout_s: float) -> socket.socket:
    connection = socket.create_connection(address[:2], timeout=timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token + _FRAME.pack(rank))
    return connection


def _exactly(connection: socket.socket, size: int, patience: _Patience) -> bytearray:
    """That many bytes. Raises TimeoutError, and ConnectionError at the end of the stream."""
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        connection.settimeout(max(0.001, patience.left_s()))
        n = connection.recv_into(view[filled:])
        if n == 0:
            raise ConnectionError("the connection was closed")
        filled += n
    return data
