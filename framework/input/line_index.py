"""The lines of parallel text files, found without holding the files in memory.

Of every 64th line, the position is kept; the lines between are found again when they are read:

    file    line 0 ⏎ line 1 ⏎ … line 63 ⏎ line 64 ⏎ …
    kept    ▲                             ▲

So a billion lines take 0.4 GB: 8 bytes for 64 lines of each file, and a bit and a count for the
lines that belong to a split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.sources import Digest
from tekso.framework.input.text import NotTextError, byte_order_mark_size, check_mark

GROUP = 64  # lines
READ = 1 << 20  # bytes that are read together

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Lines:
    """Some consecutive lines of parallel files.

    Attributes:
      first: number of the first line.
      offsets: for each file, the byte at which `data` begins.
      data: for each file, bytes with these lines.
      bounds: for each file, [lines, 2]: first byte of each line in `data`, and the one after its
        last.
    """

    first: int
    offsets: tuple[int, ...]
    data: tuple[bytes, ...]
    bounds: tuple[Ints, ...]

    def __len__(self) -> int:
        return len(self.bounds[0])


class LineIndex:
    """The lines of parallel files; a line ends with LF or CR LF, optional for the last one.

    Args:
      paths: the files. If they have different numbers of lines, `counts` shows it, and nothing may
        be read.
      skip_blank: whether lines without bytes are left out, and not numbered.
      check: called with (path, block of the file, offset of the block) for every block; it may
        raise an error.

    Attributes:
      counts: number of lines of each file.

    Raises:
      OSError: a file cannot be read.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        skip_blank: bool = False,
        check: Callable[[str, bytes, int], None] | None = None,
    ) -> None:
        self._paths = tuple(paths)
        self._skip_blank = skip_blank
        total = Digest()
        scans = [_scan(path, total, skip_blank=skip_blank, check=check) for path in paths]
        self.digest = bytes.fromhex(total.hexdigest())
        self.counts = tuple(count for _, count in scans)
        self._starts = [starts for starts, _ in scans]  # of every 64th line, and the file's end

    def __len__(self) -> int:
        return self.counts[0]

    def blocks(self) -> Iterator[Lines]:
        """Yields all lines in order; the number of each first line is a multiple of 64.

        Raises:
          OSError: a file cannot be read.
          InputError: a file has changed.
        """
        group, num_groups = 0, len(self._starts[0]) - 1
        opened = [files.open(path) for path in self._paths]
        try:
            while group < num_groups:
                ends = [np.searchsorted(one, one[group] + READ, "right") for one in self._starts]
                end = min(num_groups, max(group + 1, int(min(ends)) - 1))
                data = []
                for file, starts in zip(opened, self._starts, strict=True):
                    file.seek(int(starts[group]))
                    data.append(file.read(int(starts[end] - starts[group])))
                yield self._lines(group, end, data)
                group = end
        finally:
            for file in opened:
                file.close()

    def group(self, number: int) -> Lines:
        """Returns the lines 64 * number to 64 * number + 63, or to the last one.

        Raises:
          OSError: a file cannot be read.
          InputError: a file has changed.
        """
        data = [
            files.read(path, int(starts[number]), int(starts[number + 1] - starts[number]))
            for path, starts in zip(self._paths, self._starts, strict=True)
        ]
        return self._lines(number, number + 1, data)

    def _lines(self, begin: int, end: int, data: Sequence[bytes]) -> Lines:
        first = begin * GROUP
        count = min(end * GROUP, len(self)) - first
        bounds = [line_bounds(one, skip_blank=self._skip_blank) for one in data]
        for path, found in zip(self._paths, bounds, strict=True):
            if len(found) != count:
                raise ChangedError(path)
        offsets = tuple(int(starts[begin]) for starts in self._starts)
        return Lines(first, offsets, tuple(data), tuple(bounds))


class Chosen:
    """A subset of the numbers 0, 1, …: one bit per number, and a count per 64 numbers.

    Args:
      masks: whether each number is chosen, in arrays of which all but the last have a multiple of
        64 numbers.

    Attributes:
      size: how many numbers there are, chosen or not.
    """

    def __init__(self, masks: Iterable[npt.NDArray[np.bool_]]) -> None:
        self.size = 0
        bits = [np.zeros(0, np.uint8)]
        for mask in masks:
            self.size += len(mask)
            bits.append(np.packbits(mask))
        self._bits = np.concatenate(bits)
        octets = np.zeros(-(-len(self._bits) // 8) * 8, np.uint8)
        octets[: len(self._bits)] = self._bits
        counts = np.bitwise_count(octets).reshape(-1, 8).sum(axis=1, dtype=np.int64)
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    @property
    def bits(self) -> bytes:
        """Whether each number is chosen, as bits."""
        return self._bits.tobytes()

    def __len__(self) -> int:
        return int(self._before[-1])

    def among(self, first: int, count: int) -> Ints:
        """Returns which of the numbers first, …, first + count - 1 are chosen, less `first`.

        `first` must be a multiple of 64.
        """
        bits = self._bits[first // 8 : -(-(first + count) // 8)]
        return np.flatnonzero(np.unpackbits(bits, count=count))

    def number(self, index: int) -> int:
        """Returns a chosen number by its index among them."""
        group = int(np.searchsorted(self._before, index, "right")) - 1
        bits = np.unpackbits(self._bits[group * 8 : group * 8 + 8])
        return group * GROUP + int(np.flatnonzero(bits)[index - self._before[group]])


class ChangedError(OSError):
    """A file is not as it was when its lines were indexed."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} has changed since the program opened it: start it again")


def line_bounds(data: bytes, *, skip_blank: bool = False) -> Ints:
    """Returns the first byte of every line and the byte after its last: [lines, 2] int64.

    A line ends with LF or CR LF, which is optional in the last line.
    """
    if not data:
        return np.zeros((0, 2), np.int64)
    array = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(array == ord("\n"))
    if not data.endswith(b"\n"):
        ends = np.append(ends, len(data))
    begins = np.concatenate([[0], ends[:-1] + 1])
    before = array[np.maximum(ends - 1, 0)]
    ends = ends - ((before == ord("\r")) & (ends > begins))
    bounds = np.stack([begins, ends], axis=1).astype(np.int64)
    return bounds[ends > begins] if skip_blank else bounds


def _scan(
    path: str, total: Digest, *, skip_blank: bool, check: Callable[[str, bytes, int], None] | None
) -> tuple[Ints, int]:
    """Returns the first byte of every 64th line and the size of a file, and its number of lines."""
    size = files.size_bytes(path)
    total.begin(size)
    starts: list[Ints] = []
    offset = count = 0  # of the bytes whose lines are counted
    rest: list[bytes] = []  # a line that has no end yet
    at = 0
    with files.open(path) as file:
        while block := file.read(READ):
            if check is not None:
                check(path, block, at)
            total.update(block)
            if at == 0:
                offset = byte_order_mark_size(block)
                block, at = block[offset:], offset
            at += len(block)
            cut = block.rfind(b"\n") + 1 if at < size else len(block)
            rest.append(block[:cut])
            if cut:
                lines = line_bounds(b"".join(rest), skip_blank=skip_blank)[:, 0]
                starts.append(lines[-count % GROUP :: GROUP] + offset)
                count += len(lines)
                offset, rest = at - len(block) + cut, []
                rest.append(block[cut:])
            else:
                rest[-1] = block
    if at != size:
        raise ChangedError(path)
    return np.concatenate([*starts, np.array([size], np.int64)]), count


def check_no_nul(path: str, block: bytes, offset: int) -> None:
    """Checks that a block of a file has no NUL byte, which text has not.

    Raises:
      NotTextError: it has one; or the file begins with the mark of an encoding that has them.
    """
    del path
    place = block.find(b"\0")
    if place >= 0:
        if not offset:
            check_mark(block)
        raise NotTextError("binary: a NUL byte", offset + place)
