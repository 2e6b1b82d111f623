"""torchrun, whose stores listen only on the address that they are named by.

torch's own TCPStore listens on every interface of the host, and who reaches it can join the job. Here it listens on
loopback where the ranks meet on one host, and on the interface of the rendezvous' address where they meet on several.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from typing import Any

import torch.distributed as dist

_PLACES = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant")
_TorchStore = dist.TCPStore


class BoundStore(_TorchStore):
    """A TCPStore that, where it serves, listens on ``host_name``'s address and no other."""

    def __init__(self, *args: Any, **named: Any) -> None:
        named |= dict(zip(_PLACES, args, strict=False))
        if named.get("is_master") and named.get("master_listen_fd") is None:
            listener = listen_on(str(named["host_name"]), int(named["port"]))
            if listener is not None:
                named["port"] = listener.getsockname()[1]
                named["master_listen_fd"] = listener.detach()
        super().__init__(**named)


def listen_on(host: str, port: int) -> socket.socket | None:
    """A listening socket at the first of the host's addresses that is one of this machine's; None where none is (behind
    address translation the machine knows another one). Raises OSError where the port is taken.

    ``localhost`` is 127.0.0.1, whatever else the system calls so: torch's clients try every address of a name.
    """
    found = socket.getaddrinfo("127.0.0.1" if host == "localhost" else host, port, type=socket.SOCK_STREAM)
    for family, kind, protocol, _, address in found:
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(4096)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise
        else:
            return listener
    return None


def bind_stores() -> None:
    """From now on the stores that torch makes in this process are BoundStores."""
    from torch.distributed import rendezvous

    # mypy knows both names as the class that is being replaced
    for module in (dist, rendezvous):
        with contextlib.suppress(AttributeError):
            module.TCPStore = BoundStore  # type: ignore[misc,assignment]


def main() -> None:
    bind_stores()
    from torch.distributed.run import main as torchrun  # after binding: its modules take the name on import

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
