"""Names of files in few bytes: the same names, also those that are no valid Unicode."""

from __future__ import annotations

from kept_memory import kept

from tekso.tasks.image.packed_names import PackedNames

NAMES = ["a.png", "", "日本/ü.jpg", "\udcff.png", "\ud800.png"]  # bytes that are not UTF-8; JSON


def test_names_are_those_that_were_given() -> None:
    names = PackedNames(iter(NAMES))
    assert list(names) == NAMES == [names[i] for i in range(len(names))]


def test_a_name_takes_its_bytes_and_8_more() -> None:
    names, size = kept(lambda: PackedNames(f"{number:06d}.png" for number in range(2000)))
    assert names[1999] == "001999.png"
    assert size < 2000 * (len("000000.png") + 8) + 2000
