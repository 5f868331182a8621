"""Who can connect to a port of this process, and whether the user allowed it.

TensorFlow's gRPC server has no authentication: anyone who connects to its port can run any op in
this process, also ops that read and write files. Therefore a process accepts connections only at
the address that the user names, and an address that other machines can reach needs
`--allow_unauthenticated_network`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from tekso.framework.cluster import host_and_port

FLAG = "--allow_unauthenticated_network"


class ExposureError(ValueError):
    """An address cannot be used as it is named; the text says why and what to do."""


def ips(host: str) -> tuple[str, ...]:
    """Returns the IP addresses of a host, without interface names.

    Raises:
      ExposureError: the host has none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ExposureError(f"this machine knows no address of {host!r}: {error}") from None
    return tuple(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach a host."""
    return all(ipaddress.ip_address(ip).is_loopback for ip in ips(host))


def is_everywhere(host: str) -> bool:
    """Whether a host, 0.0.0.0 or ::, stands for all addresses of this machine."""
    return any(ipaddress.ip_address(ip).is_unspecified for ip in ips(host))


def check(address: str, *, source: str, allowed: bool, others: Sequence[str] = ()) -> None:
    """Checks that a process may listen at an address.

    Args:
      address: "host:port".
      source: the flag or variable that contains it, for messages.
      allowed: whether the user allowed addresses that other machines can reach.
      others: "host:port" of the processes that connect to it.

    Raises:
      ExposureError: the user did not allow it, or the other processes cannot reach it.
    """
    host, _ = host_and_port(address)
    if not is_loopback(host):
        if not allowed:
            raise ExposureError(
                f"{source}: other machines can reach {address}, and TensorFlow's gRPC has no "
                "authentication: anyone who connects to this port can run any op here, and read "
                "and write files. On one machine, use localhost. On a network where only your own "
                f"machines can reach the port, add {FLAG}; docs/several_processes.md says how to "
                "fence it"
            )
        return
    for other in others:
        name, _ = host_and_port(other)
        if name != host and not is_loopback(name):
            raise ExposureError(
                f"{source}: {address} is {', '.join(ips(host))} on this machine, which {other} "
                "cannot reach: name this process by its network address"
            )


def describe(address: str) -> str:
    """Returns a line that says at which address this process listens, and who can reach it."""
    host, _ = host_and_port(address)
    found = ips(host)
    where = address if host in found else f"{address} ({', '.join(found)})"
    if is_loopback(host):
        return f"listening at {where}, which only programs of this machine can reach"
    return f"listening at {where}, where anyone who can connect can run any op ({FLAG})"
