"""Tables: aligned, folded on a terminal without cutting a figure, plain text."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from tekso.framework import tables

HEADER = ("weight", "shape", "bytes")
ROWS = [("decoder/self_attention/query/w", "3 × 5", "1,234,567"), ("b", "5", "7")]


def test_columns_are_aligned_and_two_spaces_apart() -> None:
    assert tables.table(HEADER, ROWS, right=(2,), indent="  ") == [
        "  weight                          shape      bytes",
        "  decoder/self_attention/query/w  3 × 5  1,234,567",
        "  b                               5              7",
    ]
    assert tables.table((), [("a", "bc"), ("def", "g")]) == ["a    bc", "def  g"]
    assert tables.table(HEADER, []) == ["weight  shape  bytes"]
    assert tables.table((), []) == []


def test_a_text_is_folded_to_the_width_and_its_remark_is_below_it() -> None:
    remarks = {0: ["  sharded over model"], 1: ["  replicated"]}
    lines = tables.table(HEADER, ROWS, right=(2,), width=40, remarks=remarks)
    assert lines[-3:] == ["  sharded over model", lines[-2], "  replicated"]
    assert max(map(len, lines)) <= 40
    folded = lines[1:-3]
    assert len(folded) == 2
    assert "".join(line.split("  ")[0] for line in folded) == ROWS[0][0]
    assert folded[0].endswith("3 × 5  1,234,567")


def test_a_path_is_folded_at_a_slash() -> None:
    rows = [("model/stack/layers/0/feed_forward/norm", "3"), ("b/c", "5")]
    lines = tables.table(("weight", "n"), rows, right=(1,), width=30)
    assert [line.rstrip("35 ") for line in lines][1:] == [
        "model/stack/layers/0/", "feed_forward/norm", "b/c",
    ]  # fmt: skip
    assert [len(line) for line in lines] == [len(lines[0]), len(lines[0]), 17, len(lines[0])]


@pytest.mark.parametrize("width", [1, 20, 30, 33, 80, None])
def test_figures_are_whole_at_every_width(width: int | None) -> None:
    rows = [(f"name {i} " * 9, f"{10**i:,}", f"{i / 7:.4f}") for i in range(12)]
    text = "\n".join(tables.table(("name", "count", "share"), rows, right=(1, 2), width=width))
    for _, count, share in rows:
        assert f" {count} " in text and share in text
    assert "…" not in text and "\x1b" not in text


def test_a_cell_is_not_read_as_markup() -> None:
    assert tables.table((), [("[bold]x[/bold]", ":smile:", "\\[1]")]) == [
        "[bold]x[/bold]  :smile:  \\[1]"
    ]


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert tables.terminal_width(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", "80")
    assert tables.terminal_width(Terminal()) == 80
    monkeypatch.setenv("COLUMNS", "300")
    assert tables.terminal_width(Terminal()) == 120


def test_rich_is_imported_only_for_a_table() -> None:
    code = "import sys, tekso.framework.tables; sys.exit('rich' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=dict(os.environ), check=False, timeout=100)
    assert done.returncode == 0
