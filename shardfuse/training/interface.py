"""Which network interface gloo is to take between hosts, where a host's own name does not tell."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping

_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def gloo_interface(environment: Mapping[str, str]) -> str | None:
    """Return the interface that leads to the first host; None where gloo finds its own.

    Gloo listens where the host's name leads to. On Debian and Ubuntu that is 127.0.1.1, which no
    other host reaches: one rank is refused the connection, and the others wait.

    Args:
        environment: of a rank, by its launcher.
    """
    num_ranks = environment.get("WORLD_SIZE", "1")
    if environment.get("LOCAL_WORLD_SIZE", num_ranks) == num_ranks:
        return None  # all are on this host
    if "GLOO_SOCKET_IFNAME" in environment or _is_reachable(socket.gethostname()):
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it only chooses the way.
            probe.connect((environment.get("MASTER_ADDR", ""), 9))
            address = probe.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(address).is_loopback:
        return None
    return next((name for name in _names() if address_of(name) == address), None)


def _names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def address_of(interface: str) -> str:
    """Return the IPv4 address of an interface; empty where it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _is_reachable(host: str) -> bool:
    """Return whether the address that gloo takes of this host's name is one that others reach."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.bind(address)
            except OSError:
                continue  # the next one, as gloo does
        return not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    return False
