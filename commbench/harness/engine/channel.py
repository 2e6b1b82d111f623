"""How a driver and its ranks talk: a local socket that both ends prove a token on, JSON, and raw bytes of arrays.

Framing and the proof (HMAC, both ways) are those of ``multiprocessing.connection``; nothing is pickled, so a message
can say no more than the commands that its receiver knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

Buffer = bytes | bytearray | memoryview

TOKEN_VARIABLE = "COMMBENCH_ENGINE_TOKEN"  # the ranks' environment, which other users cannot read
SOCKET = "socket"  # in the engine's folder, which is the user's alone
_PROOF_S = 10  # a caller that proves nothing within this is dropped
_GONE = (EOFError, OSError)


class Gone(Exception):
    """The other end has closed, or its process is dead."""


class Link:
    """One end. A message is a JSON object and any number of buffers. One thread may send while another receives."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def send(self, message: Mapping[str, Any], buffers: Sequence[Buffer] = ()) -> None:
        """Raises Gone."""
        head = json.dumps({"message": message, "buffers": len(buffers)}).encode()
        try:
            self._connection.send_bytes(head)
            for buffer in buffers:
                self._connection.send_bytes(buffer)
        except _GONE as error:
            raise Gone from error

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        """The next message; waits for it. Raises Gone."""
        try:
            head = json.loads(self._connection.recv_bytes())
            return head["message"], [self._connection.recv_bytes() for _ in range(head["buffers"])]
        except _GONE as error:
            raise Gone from error

    def fileno(self) -> int:
        """For ``multiprocessing.connection.wait``."""
        return int(self._connection.fileno())

    def close(self) -> None:
        self._connection.close()


class Door:
    """Where the ranks of one engine come in: a socket in a folder, and the token that they must know."""

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(32)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(folder / SOCKET))
        self._socket.listen(64)

    def accept(self, timeout_s: float) -> Link | None:
        """The next caller that knows the token; None when none came in time, or one that does not know it."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        caller, _ = self._socket.accept()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _PROOF_S, 0))
        connection = Connection(caller.detach())
        try:
            deliver_challenge(connection, self.token.encode())
            answer_challenge(connection, self.token.encode())
        except (AuthenticationError, *_GONE):
            connection.close()
            return None
        _wait_for_ever(connection)
        return Link(connection)

    def close(self) -> None:
        self._socket.close()


def _wait_for_ever(connection: Any) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as view:
        view.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def enter(folder: Path) -> Link:
    """A rank's end; takes the token out of this process's environment. Raises Gone when nobody listens (any more)."""
    token = os.environ.pop(TOKEN_VARIABLE)
    try:
        return Link(Client(str(folder / SOCKET), "AF_UNIX", authkey=token.encode()))
    except (AuthenticationError, *_GONE) as error:
        raise Gone from error


def closed_quietly(link: Link) -> None:
    """Close a link whose other end may be gone."""
    with contextlib.suppress(*_GONE):
        link.close()
