"""Reports of malformed data say what to do."""

from __future__ import annotations

from tekso.framework.input.skips import BadRecordError, Origin, Skips, reason_of


def test_a_wrong_encoding_has_a_remedy() -> None:
    skips = Skips(5, what="input")
    skips.add(Origin("a.txt", 3), "line 1: blank")
    assert "iconv" not in str(skips.report)
    assert "hold out a larger part of the training files" in str(skips.nothing_left())
    skips.add(Origin("b.txt", 3), "not UTF-8: byte 0xe9")
    assert str(skips.report).splitlines()[-1].endswith("iconv -f latin1 -t utf-8 FILE > NEW_FILE")


def test_a_position_is_shown_in_its_unit_or_not_at_all() -> None:
    assert str(Origin("a.png")) == "a.png"
    assert str(Origin("a.txt", 0)) == "a.txt, byte 0"
    assert str(BadRecordError(Origin("digits", 3, "record"), "blank")) == "digits, record 3: blank"
    assert Origin("a.txt", 5).at(2) == Origin("a.txt", 7)
    assert Origin("text 3 in memory").at(2) == Origin("text 3 in memory", 2)
    assert Origin("digits", 3, "record").at(2) == Origin("digits", 3, "record")


def test_a_file_in_an_older_token_cache_is_counted_once() -> None:
    skips = Skips(1, what="input")
    skips.add(Origin("a.png"), "empty")
    skips.add(Origin("a.png", 0), "empty")
    assert str(skips.report) == "1 skipped\n  a.png: empty"


def test_the_reason_of_an_error_does_not_name_the_file() -> None:
    assert reason_of(BadRecordError(Origin("a.png"), "no image")) == "no image"
    assert reason_of(FileNotFoundError(2, "No such file", "a.png")) == "No such file"
    assert reason_of(OSError("broken")) == "broken" and reason_of(ValueError("x")) == "x"
