"""Checks that data is text: UTF-8, not empty, without NUL bytes."""

from __future__ import annotations

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_OTHER_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class NotTextError(ValueError):
    """The bytes are not text; `offset` is the first invalid byte."""

    def __init__(self, reason: str, offset: int = 0) -> None:
        super().__init__(reason)
        self.offset = offset


def to_text(data: bytes) -> str:
    """Decodes UTF-8.

    Raises:
      NotTextError: the bytes are empty, binary or in another encoding.
    """
    if not data:
        raise NotTextError("empty")
    check_mark(data)
    nul = data.find(b"\0")
    if nul >= 0:
        raise NotTextError("binary: a NUL byte", nul)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotTextError(f"not UTF-8: byte 0x{data[error.start]:02x}", error.start) from error


def check_mark(data: bytes) -> None:
    """Checks that bytes do not begin with the byte order mark of another encoding.

    Raises:
      NotTextError: they do.
    """
    for mark, encoding in _OTHER_ENCODINGS.items():
        if data.startswith(mark):
            raise NotTextError(f"not UTF-8: it begins with the byte order mark of {encoding}")


def check_text(text: str) -> str:
    """Checks decoded text.

    Raises:
      NotTextError: it is empty, has NUL characters or characters that UTF-8 cannot encode.
    """
    if not text:
        raise NotTextError("empty")
    if "\0" in text:
        raise NotTextError("binary: a NUL character", text.index("\0"))
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise NotTextError("a lone surrogate, which UTF-8 cannot encode", error.start) from error
    return text


def byte_order_mark_size(data: bytes) -> int:
    """Returns the size of the UTF-8 byte order mark at the beginning: 3 or 0 bytes."""
    return len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0
