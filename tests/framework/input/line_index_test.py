"""Lines and texts found block by block: as in the whole file, for any size of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tekso.framework.input import line_index, text_ranges, text_scan, token_rows
from tekso.framework.input.line_index import Chosen, LineIndex
from tekso.framework.input.sources import digest
from tekso.framework.input.text_files import TextFiles
from tekso.framework.input.text_scan import bytes_of_characters, scan_text
from tekso.tasks.mt.parallel_files import ParallelFiles

IN_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n"])
LINES = st.lists(st.tuples(st.binary(max_size=9).map(lambda x: x.replace(b"\n", b"")), ENDS))


def lines_of(data: bytes) -> list[bytes]:
    """The lines of a file, by their definition."""
    found = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    ended = [line.removesuffix(b"\r") for line in found[:-1]]
    return ended + ([found[-1].removesuffix(b"\r")] if found[-1] else [])


@IN_FOLDER
@given(lines=LINES, last=st.binary(max_size=5), read=st.sampled_from([3, 64, 1 << 20]))
def test_lines_are_those_of_the_whole_file(
    tmp_path: Path, lines: list[tuple[bytes, bytes]], last: bytes, read: int
) -> None:
    data = b"".join(line + end for line, end in lines * 40) + last.replace(b"\n", b"")
    path = tmp_path / "a"
    path.write_bytes(data)
    for skip_blank in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(line_index, "READ", read)
            index = LineIndex([str(path)], skip_blank=skip_blank)
            blocks = list(index.blocks())
        found = [
            (block.offsets[0] + begin, block.data[0][begin:end])
            for block in blocks
            for begin, end in block.bounds[0].tolist()
        ]
        expected = [line for line in lines_of(data) if line or not skip_blank]
        assert [line for _, line in found] == expected and len(index) == len(expected)
        assert all(data[place : place + len(line)] == line for place, line in found)
        assert [block.first % 64 for block in blocks] == [0] * len(blocks)
        assert index.digest.hex() == digest([data])
        if len(index) > 64:
            (begin, end) = index.group(1).bounds[0][0].tolist()
            assert index.group(1).data[0][begin:end] == expected[64]


@given(st.lists(st.booleans(), max_size=200))
def test_chosen_numbers_are_found_by_index(mask: list[bool]) -> None:
    array = np.array(mask, bool)
    chosen = Chosen([array[:64], array[64:128], array[128:]])
    numbers = np.flatnonzero(array).tolist()
    assert len(chosen) == len(numbers) and chosen.size == len(mask)
    assert [chosen.number(i) for i in range(len(chosen))] == numbers
    assert (chosen.among(64, len(array[64:])) + 64).tolist() == [n for n in numbers if n >= 64]


@IN_FOLDER
@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0\ufeff"), min_size=1),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    read=st.integers(4, 9),
)
def test_a_text_is_scanned_block_by_block(
    tmp_path: Path, text: str, mark: bytes, read: int
) -> None:
    path = tmp_path / "a"
    path.write_bytes(mark + text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_scan, "READ", read)
        scan = scan_text(str(path))
        places = bytes_of_characters(str(path), [len(text) // 2, len(text)], begin=scan.begin)
    assert (scan.begin, scan.end) == (len(mark), len(mark + text.encode()))
    assert scan.num_characters == len(text)
    assert places == [len(mark + text[: len(text) // 2].encode()), scan.end]


@pytest.mark.parametrize(
    ("data", "reason", "offset"),
    [
        (b"abc\xe2\x82", "not UTF-8: byte 0xe2", 3),
        (b"abcdefg\xe2\x82x", "not UTF-8: byte 0xe2", 7),
        (b"\xffabcdefghij\0", "binary: a NUL byte", 11),
    ],
)
def test_what_is_no_text_is_found_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, reason: str, offset: int
) -> None:
    monkeypatch.setattr(text_scan, "READ", 4)
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(text_scan.NotTextError, match=reason) as caught:
        scan_text(str(tmp_path / "a"))
    assert caught.value.offset == offset


def test_a_long_text_is_read_in_pieces_that_end_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\ufeffone\n\ntwo öne\r\na line longer than a piece\nend"
    (tmp_path / "a").write_text(text, encoding="utf-8", newline="")
    one = TextFiles.Params(files=str(tmp_path / "a"), dev_fraction=0.0).instantiate()
    (whole,) = (record for _, record in one.records())
    assert list(token_rows.texts(one)) == [whole] == [text[1:]]
    monkeypatch.setattr(text_ranges, "PIECE", 9)
    pieces = list(one.pieces())
    assert "".join(piece.record for piece in pieces) == whole and len(pieces) == 3
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.record.endswith("\n") for piece in pieces[:-1])
    data = (tmp_path / "a").read_bytes()
    for piece in pieces:
        assert data[piece.origin.offset :].startswith(piece.record.encode())


def test_fingerprints_are_those_that_stored_vocabularies_have(tmp_path: Path) -> None:
    contents = {"a": b"one\n\ntwo\nthree\n", "b": b"\n", "c": b"four\r\nfive"}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)

    def one(kind: Any = TextFiles, **kwargs: Any) -> str:
        found: str = kind.Params(dev_fraction=0.0, **kwargs).instantiate().fingerprint()
        return found

    digests = {name: bytes.fromhex(digest([data])) for name, data in contents.items()}
    bounds = np.array([[0, 3], [5, 8], [9, 14], [0, 4], [6, 10]], np.int64)
    number = np.array([0, 0, 0, 1, 1], np.int64)
    kept = [digests["a"], digests["c"], number.tobytes(), bounds.tobytes()]
    assert one(files=str(tmp_path / "?"), unit="line") == digest(kept)

    sizes = np.array([[0, 15], [0, 1], [0, 10]], np.int64)
    kept = [*digests.values(), np.arange(3).tobytes(), sizes.tobytes()]
    assert one(files=str(tmp_path / "?")) == digest(kept)

    both = bytes.fromhex(digest([contents["a"], contents["a"]]))
    line = np.arange(4, dtype=np.int32)
    kept = [both, np.zeros(4, np.int32).tobytes(), line.tobytes()]
    pairs = {"source_files": str(tmp_path / "a"), "target_files": str(tmp_path / "a")}
    assert one(ParallelFiles, **pairs) == digest(kept)
