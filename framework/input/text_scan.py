"""Checks that files are text and finds characters in them, block by block."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Sequence

import numpy as np

from tekso.framework import files
from tekso.framework.input.line_index import READ, ChangedError, check_no_nul
from tekso.framework.input.sources import Digest
from tekso.framework.input.text import NotTextError, byte_order_mark_size, check_mark


@dataclasses.dataclass(frozen=True)
class TextScan:
    """A text file.

    Attributes:
      begin: first byte of the text, after the byte order mark.
      end: size of the file.
      num_characters: number of characters from `begin` on.
      digest: digest of the file.
    """

    begin: int
    end: int
    num_characters: int
    digest: bytes


def scan_text(path: str) -> TextScan:
    """Reads a file once and checks that it is text.

    Raises:
      NotTextError: the file is empty, binary or in another encoding.
      OSError: the file cannot be read.
    """
    size = files.size_bytes(path)
    total = Digest()
    total.begin(size)
    decoder = codecs.getincrementaldecoder("utf-8")()
    wrong: NotTextError | None = None  # a NUL byte is the better reason, wherever it is
    at = begin = count = 0
    with files.open(path) as file:
        while block := file.read(READ):
            if at == 0:
                check_mark(block)
                begin = byte_order_mark_size(block)
            check_no_nul(path, block, at)
            total.update(block)
            if wrong is None:
                wrong = _decoding_error(decoder, block, at, is_last=at + len(block) >= size)
                count += int(np.count_nonzero(_leads(block)))
            at += len(block)
    if not at:
        raise NotTextError("empty")
    if at != size:
        raise ChangedError(path)
    if wrong is not None:
        raise wrong
    return TextScan(begin, size, count - bool(begin), bytes.fromhex(total.hexdigest()))


def bytes_of_characters(path: str, numbers: Sequence[int], *, begin: int) -> list[int]:
    """Returns the first byte of some characters of a text file.

    Args:
      path: the file.
      numbers: numbers of the characters, ascending; the number of all characters gives the end.
      begin: first byte of the text, from which characters are counted.
    """
    found: list[int] = []
    before, at = 0, begin
    with files.open(path) as file:
        file.seek(begin)
        while len(found) < len(numbers) and (block := file.read(READ)):
            leads = np.flatnonzero(_leads(block))
            while len(found) < len(numbers) and numbers[len(found)] < before + len(leads):
                found.append(at + int(leads[numbers[len(found)] - before]))
            before += len(leads)
            at += len(block)
    return found + [at] * (len(numbers) - len(found))


def _leads(block: bytes) -> np.ndarray:
    """Returns which bytes of UTF-8 begin a character."""
    array: np.ndarray = (np.frombuffer(block, np.uint8) & 0xC0) != 0x80
    return array


def _decoding_error(
    decoder: codecs.IncrementalDecoder, block: bytes, offset: int, *, is_last: bool
) -> NotTextError | None:
    pending = len(decoder.getstate()[0])
    try:
        decoder.decode(block, is_last)
    except UnicodeDecodeError as error:
        place = offset - pending + error.start
        return NotTextError(f"not UTF-8: byte 0x{error.object[error.start]:02x}", place)
    return None
