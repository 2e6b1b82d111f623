"""torchrun, whose stores listen only on the address that they are named by.

torch's own TCPStore listens on every interface of the host, and who reaches it can join the job. Here it listens on
loopback where the ranks meet on one host, and on the interface of the rendezvous' address where they meet on several.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from commbench.harness.hosts.sockets import listen_on

_PLACES = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers", "multi_tenant")


class BoundStore(TCPStore):
    """A TCPStore that, where it serves, listens on ``host_name``'s address and no other."""

    def __init__(self, *args: Any, **named: Any) -> None:
        named |= dict(zip(_PLACES, args, strict=False))
        if named.get("is_master") and named.get("master_listen_fd") is None:
            listener = listen_on(str(named["host_name"]), int(named["port"]))
            if listener is not None:
                named["port"] = listener.getsockname()[1]
                named["master_listen_fd"] = listener.detach()
        super().__init__(**named)


def bind_stores() -> None:
    """From now on the stores that torch makes in this process are BoundStores."""
    # torch.distributed has a function of the same name as its module
    for name in ("torch.distributed", "torch.distributed.rendezvous"):
        setattr(importlib.import_module(name), "TCPStore", BoundStore)  # noqa: B010 - a class that mypy keeps fixed


def main() -> None:
    bind_stores()
    from torch.distributed.run import main as torchrun  # after binding: its modules take the name on import

    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
