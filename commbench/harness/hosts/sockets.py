"""Addresses and listening sockets: each on the one interface that is needed."""

from __future__ import annotations

import errno
import socket

from commbench.errors import SpecError

DEFAULT_PORT = 29400  # torchrun's


def listen_on(host: str, port: int) -> socket.socket | None:
    """A listening socket at the first of the host's addresses that is one of this machine's; None where none is (behind
    address translation the machine knows another one). Raises OSError where the port is taken or the name is unknown.

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
                raise OSError(error.errno, f"{error.strerror}: {host}:{port}") from error
        else:
            return listener
    return None


def free_port(host: str) -> int:
    """A port at this machine's address ``host`` that nobody listens on at the moment."""
    listener = listen_on(host, 0)
    if listener is None:
        raise OSError(errno.EADDRNOTAVAIL, f"{host} is no address of this machine")
    with listener:
        return int(listener.getsockname()[1])


def parse_endpoint(text: str) -> tuple[str, int]:
    """(host, port) of ``host:port``, ``host`` or ``[IPv6]:port``; the port is torchrun's where none is named. Raises
    SpecError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text.strip(), str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SpecError(f"--rdzv-endpoint {text!r} is not HOST:PORT; write the first host's name, such as node0:29400")
    return host, int(port)


def interface_of(address: str) -> str | None:
    """The network interface that has this IP address; None where none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == address for a in addresses):
            return name
    return None


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the way to another; None where the other's name is unknown or no way leads there.
    Nothing is sent."""
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        return None
    return None
