"""A shared port accepts connections to the named address only; no TensorFlow is needed."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from tekso.framework import port_filter


def _answers(ip: str, port: int) -> bool:
    """Whether a server answers; a dropped connection is repeated by the kernel after a second."""
    try:
        with socket.create_connection((ip, port), timeout=0.3) as connection:
            connection.settimeout(5.0)
            return connection.recv(1) == b"!"
    except OSError:
        return False


def _server(port: int) -> socket.socket:
    """Listens at all addresses of the machine, as TensorFlow's server does."""
    family = socket.AF_INET6 if port_filter._has_ipv6() else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if os.environ["TF_GRPC_REUSE_PORT"] == "1":
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind(("", port))
    listener.listen(5)

    def reply() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.sendall(b"!")
            connection.close()

    threading.Thread(target=reply, daemon=True).start()
    return listener


@pytest.mark.parametrize(
    ("host", "reached", "dropped"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.2"),
        ("127.0.0.2", "127.0.0.2", "127.0.0.1"),
        ("[::1]", "::1", "127.0.0.1"),
    ],
)
def test_only_the_named_address_is_reached(host: str, reached: str, dropped: str) -> None:
    if reached == "::1" and not port_filter._has_ipv6():
        pytest.skip("this machine has no IPv6")
    port = port_filter.free_port()
    with port_filter.limited_to(f"{host}:{port}"):
        assert not _answers(reached, port)  # before the server is there, everything is dropped
        listener = _server(port)
    assert "TF_GRPC_REUSE_PORT" not in os.environ
    for _ in range(5):
        assert _answers(reached, port)
    assert not _answers(dropped, port)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_port_in_use_is_an_error_and_not_shared() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(OSError, match="Address already in use"),
        port_filter.limited_to(f"127.0.0.1:{other.getsockname()[1]}"),
    ):
        raise AssertionError("shared")


def test_two_limited_servers_cannot_share_a_port() -> None:
    address = f"127.0.0.1:{port_filter.free_port()}"
    with port_filter.limited_to(address):
        pass
    with (
        pytest.raises(OSError, match="Address already in use"),
        port_filter.limited_to(address),
    ):
        raise AssertionError("shared")


def test_address_of_another_machine_is_an_error() -> None:
    with (
        pytest.raises(OSError, match="Cannot assign requested address"),
        port_filter.limited_to(f"192.0.2.77:{port_filter.free_port()}"),
    ):
        raise AssertionError("listening")


def test_system_without_filters_is_refused_unless_the_port_may_be_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port_filter, "_ATTACH_SELECTION", 9999)  # an option that no system has
    address = f"127.0.0.1:{port_filter.free_port()}"
    with (
        pytest.raises(port_filter.UnfilteredPortError, match="cannot limit TensorFlow's port"),
        port_filter.limited_to(address),
    ):
        raise AssertionError("open")
    with port_filter.limited_to(address, or_open=True):
        pass
