"""Tests of LineReader: line ends, cut lines, invalid UTF-8, and lines returned without delay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tekso.tools import line_reader
from tekso.tools.line_reader import Line, LineReader


def lines_of(path: Path, most: int = 100) -> list[Line]:
    reader, found = LineReader(str(path)), []
    while taken := reader.take(most):
        assert len(taken) <= most
        found += taken
    reader.close()
    return found


@pytest.mark.parametrize("read_bytes", [1, 3, 1 << 16])
def test_lines_end_at_line_feeds_wherever_a_read_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(line_reader, "_READ_BYTES", read_bytes)
    (tmp_path / "in").write_bytes("a é\r\n\n  \nb\rc\x0bd\u2028e\nlast".encode())
    for most in (1, 2, 100):
        found = lines_of(tmp_path / "in", most)
        assert [line.text for line in found] == ["a é", "", "  ", "b\rc\x0bd\u2028e", "last"]
        assert all(line.is_text for line in found)
    (tmp_path / "in").write_bytes(b"")
    assert lines_of(tmp_path / "in") == []
    (tmp_path / "in").write_bytes(b"\n\n")
    assert [line.text for line in lines_of(tmp_path / "in")] == ["", ""]


@pytest.mark.parametrize("read_bytes", [3, 1 << 16])
def test_what_is_beyond_the_longest_line_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(line_reader, "_READ_BYTES", read_bytes)
    monkeypatch.setattr(line_reader, "_LONGEST_BYTES", 5)
    (tmp_path / "in").write_bytes("12345\n123456\n1234é\nnext\n".encode())
    assert lines_of(tmp_path / "in") == [
        Line("12345"),
        Line("12345"),
        Line("1234"),  # half a character is no character
        Line("next"),
    ]


def test_bytes_that_are_no_utf_8_are_replaced_and_reported(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a\xffb\n\xef\xbf\xbd\nfine\n")
    assert lines_of(tmp_path / "in") == [
        Line("a\ufffdb", is_text=False),
        Line("\ufffd"),  # it was there
        Line("fine"),
    ]


def test_standard_input_is_taken_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()

    class Stdin:
        def fileno(self) -> int:
            return read

    monkeypatch.setattr("sys.stdin", Stdin())
    reader = LineReader("-")
    os.write(write, b"one\ntw")
    assert [line.text for line in reader.take(10)] == ["one"]  # without waiting for the rest
    os.write(write, b"o\nthree\nfour\n")
    assert [line.text for line in reader.take(2)] == ["two", "three"]
    os.write(write, b"five")
    os.close(write)
    assert [line.text for line in reader.take(10)] == ["four", "five"]
    assert reader.take(10) == []
    os.close(read)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LineReader("nowhere")
