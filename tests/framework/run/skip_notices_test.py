"""Malformed records that are found during a run are shown once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tekso.framework.input.skips import Origin, SkipReport, Skips
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


def test_records_of_several_sources_are_shown_in_any_order() -> None:
    first, second, lines = Skips(9, what="a"), Skips(9, what="b"), []
    inputs: Any = {
        "input": SimpleNamespace(skipped=lambda: sum((first.report, second.report), SkipReport()))
    }
    notices = SkipNotices(inputs, lines.append)
    second.add(Origin("b.png"), "damaged")
    notices.show()
    first.add(Origin("a.png"), "damaged")
    notices.show()
    assert lines == ["input: 1 skipped\n  b.png: damaged", "input: 1 skipped\n  a.png: damaged"]
