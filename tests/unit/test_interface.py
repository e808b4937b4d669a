"""The network interface between hosts, where a host's own name leads to itself alone."""

from __future__ import annotations

import socket

import pytest

from shardfuse.training import attempts
from shardfuse.training.attempts import gloo_interface, interface_address

ACROSS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


class Way:
    """A socket that has found the way by eth7."""

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        assert address[0] == "10.0.0.5"

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.6", 1


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's name is one of 127.0.1.1."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")


def test_loopback_has_its_address() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("none7") == ""


@pytest.mark.usefixtures("debian")
def test_the_interface_that_leads_to_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"lo": "127.0.0.1", "eth3": "10.1.0.6", "eth7": "10.0.0.6"}
    monkeypatch.setattr(attempts, "_interface_names", lambda: list(addresses))
    monkeypatch.setattr(attempts, "interface_address", addresses.__getitem__)
    monkeypatch.setattr(attempts, "_is_reachable_by_others", lambda host: host != "localhost")
    monkeypatch.setattr(attempts.socket, "socket", lambda *kind: Way())
    environment = ACROSS | {"MASTER_ADDR": "10.0.0.5"}
    assert gloo_interface(environment) == "eth7"
    assert gloo_interface(environment | {"LOCAL_WORLD_SIZE": "4"}) is None
    assert gloo_interface(environment | {"GLOO_SOCKET_IFNAME": "eth3"}) is None
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-1")
    assert gloo_interface(environment) is None


@pytest.mark.usefixtures("debian")
@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.host.invalid"])
def test_two_launchers_on_one_host_need_none(address: str) -> None:
    """They meet at a loopback address; a name that leads nowhere is an error of torchrun."""
    assert gloo_interface(ACROSS | {"MASTER_ADDR": address}) is None


def test_names_that_gloo_cannot_listen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback, unknown, or of another host."""

    def found(host: str, *_: object, **__: object) -> list[object]:
        if host == "unknown":
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert not attempts._is_reachable_by_others("127.0.1.1")
    assert not attempts._is_reachable_by_others("unknown")
    assert not attempts._is_reachable_by_others("192.0.2.7")  # of no host
    assert attempts._is_reachable_by_others("0.0.0.0")
