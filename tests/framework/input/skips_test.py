"""Reports of malformed data say what to do."""

from __future__ import annotations

from tekso.framework.input.skips import Origin, Skips


def test_a_wrong_encoding_has_a_remedy() -> None:
    skips = Skips(5, what="input")
    skips.add(Origin("a.txt", 3), "line 1: blank")
    assert "iconv" not in str(skips.report)
    assert "hold out a larger part of the training files" in str(skips.nothing_left())
    skips.add(Origin("b.txt", 3), "not UTF-8: byte 0xe9")
    assert str(skips.report).splitlines()[-1].endswith("iconv -f latin1 -t utf-8 FILE > NEW_FILE")
