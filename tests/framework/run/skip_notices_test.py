"""Malformed records that are found during a run are shown once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tekso.framework.input.skips import Origin, Skips
from tekso.framework.run.skip_notices import SkipNotices


def test_every_skipped_record_is_shown_once_when_it_is_found() -> None:
    skips, lines = Skips(200, what="images"), []
    inputs: Any = {
        "input": SimpleNamespace(skipped=lambda: skips.report),
        "dev": SimpleNamespace(skipped=lambda: Skips(1, what="none").report),
    }
    notices = SkipNotices(inputs, lines.append)
    notices.show()
    assert lines == []
    skips.add(Origin("a.png"), "damaged")
    with notices.around(3, 4):
        assert lines == ["input: 1 skipped\n  a.png: damaged"]
    skips.add(Origin("a.png"), "damaged")  # in the next epoch
    notices.show()
    for number in range(150):
        skips.add(Origin("many", number), "damaged")
    notices.show()
    assert len(lines) == 2
    assert lines[1].startswith("input: 150 skipped\n  many, byte 0: damaged\n")
    assert lines[1].endswith("\n  … and 145 more")


def test_records_of_several_sources_are_shown_whichever_comes_first() -> None:
    one, other, lines = Skips(9, what="one"), Skips(9, what="other"), []
    mixture: Any = SimpleNamespace(skipped=lambda: one.report + other.report)
    notices = SkipNotices({"input": mixture}, lines.append)
    other.add(Origin("other.png"), "damaged")
    notices.show()
    one.add(Origin("one.png"), "damaged")
    notices.show()
    assert lines == [f"input: 1 skipped\n  {name}.png: damaged" for name in ("other", "one")]
