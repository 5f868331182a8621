"""Limits the port of TensorFlow's gRPC server to the address that the user names.

TensorFlow's server listens at all addresses of the machine, and no option changes this. But the
kernel can select, for each new connection to a port, one of several sockets that listen there:

    new connection ─► kernel: is it to a named address? ─┬─ yes ─► TensorFlow's socket
                                                          └─ no ──► a socket that drops all packets

The second socket and the selection are there before TensorFlow's server, so there is no moment at
which the port is open. A connection that arrives before TensorFlow's server is dropped too, and the
other side repeats it after a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence

from tekso.framework import exposure
from tekso.framework.cluster import host_and_port

_SHARED = "TF_GRPC_REUSE_PORT"  # lets TensorFlow's server share its port with other sockets
_ATTACH_FILTER, _ATTACH_SELECTION = 26, 51  # SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF of Linux
_DROP, _TENSORFLOW = 0, 1  # the sockets, in the order in which they begin to listen

# Instructions of the classic Berkeley Packet Filter: code, jump if true, jump if false, operand.
_Instruction = tuple[int, int, int, int]
_LOAD_BYTE, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _JUMP, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x05, 0x06
_HEADER = 0xFFF00000  # offset of the IP header
_DESTINATION = {4: _HEADER + 16, 6: _HEADER + 24}  # offset of the destination, by IP version

_OPEN: list[socket.socket] = []  # for as long as this process lives


class UnfilteredPortError(RuntimeError):
    """This system cannot limit the port to an address."""


@contextlib.contextmanager
def limited_to(address: str, *, or_open: bool = False) -> Iterator[None]:
    """Limits the port of a server of TensorFlow that is started in the block, for ever.

    Args:
      address: "host:port", the address that the server accepts connections at.
      or_open: whether the port may be open at all addresses if this system has no such filters.

    Raises:
      UnfilteredPortError: this system has no such filters.
      OSError: the port is in use, or the address is not one of this machine.
    """
    host, port = host_and_port(address)
    own = _own(exposure.ips(host), port)
    if exposure.is_everywhere(host):
        yield
        return
    try:
        _OPEN.append(_dropping_socket(own, port))
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise
        if not or_open:
            raise UnfilteredPortError(
                f"this system cannot limit TensorFlow's port to {address} ({error}): that needs "
                f"Linux 4.6 or later. In a closed network, add {exposure.FLAG}"
            ) from None
        yield
        return
    before = os.environ.get(_SHARED)
    os.environ[_SHARED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SHARED]
        else:
            os.environ[_SHARED] = before


def free_port() -> int:
    """Returns a port of this machine that no program uses."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def _own(ips: Sequence[str], port: int) -> list[str]:
    """Returns those of the addresses that are this machine's; the port must be free there."""
    found, errors = [], []
    for ip in ips:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        try:
            socket.create_server((ip, port), family=family).close()
            found.append(ip)
        except OSError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def _dropping_socket(ips: Sequence[str], port: int) -> socket.socket:
    """Returns the first socket at the port, with the selection."""
    family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET  # as gRPC chooses it
    wildcard = "::" if family == socket.AF_INET6 else "0.0.0.0"
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((wildcard, port))
        _attach(made, _ATTACH_SELECTION, selection(ips))
        _attach(made, _ATTACH_FILTER, [(_RETURN, 0, 0, 0)])
        made.listen(1)
    except BaseException:
        made.close()
        raise
    return made


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as tried:
            tried.bind(("::1", 0))
    except OSError:
        return False
    return True


def selection(ips: Sequence[str]) -> list[_Instruction]:
    """Returns a program that selects TensorFlow's socket for packets to the given addresses."""
    four, six = ([_words(ip) for ip in ips if (":" in ip) is is_six] for is_six in (False, True))
    of_four = [line for words in four for line in _if_to(words, _DESTINATION[4])]
    of_four.append((_RETURN, 0, 0, _DROP))
    of_six = [line for words in six for line in _if_to(words, _DESTINATION[6])]
    return [
        (_LOAD_BYTE, 0, 0, _HEADER),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 1, 0, 0x40),
        (_JUMP, 0, 0, len(of_four)),
        *of_four,
        *of_six,
        (_RETURN, 0, 0, _DROP),
    ]


def _words(ip: str) -> list[int]:
    packed = ipaddress.ip_address(ip).packed
    return list(struct.unpack(f">{len(packed) // 4}I", packed))


def _if_to(words: Sequence[int], at: int) -> list[_Instruction]:
    """Returns instructions that select TensorFlow's socket if the words at an offset are equal."""
    lines: list[_Instruction] = []
    for i, word in enumerate(words):
        after = 2 * (len(words) - i) - 1  # instructions that are left, with the return
        lines += [(_LOAD_WORD, 0, 0, at + 4 * i), (_JUMP_IF_EQUAL, 0, after, word)]
    return [*lines, (_RETURN, 0, 0, _TENSORFLOW)]


def _attach(to: socket.socket, option: int, program: Sequence[_Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    to.setsockopt(
        socket.SOL_SOCKET, option, struct.pack("HL", len(program), ctypes.addressof(code))
    )
