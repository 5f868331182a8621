"""Consoles: plain lines in files, colours and a bar in terminals."""

from __future__ import annotations

import errno
import io
import os

import pytest

from tekso.framework.run.report.console import console_for


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_plain_lines_without_colours_and_without_what_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    console = console_for(stream)
    console.progress(3, 10, "training")
    console.line("step 1", "evaluation")
    console.line("careful", "warning")
    console.close()
    assert stream.getvalue() == "step 1\nwarning: careful\n"
    assert console.width == 80


def test_a_terminal_gets_colours_and_a_bar_and_each_line_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    console = console_for(stream)
    console.progress(3, 10, "evaluating [dev]")
    console.line("dev at step 3  loss [1.5]", "evaluation")
    console.progress(4, 10)
    console.close()
    text = stream.getvalue()
    assert "\x1b[" in text and "4/10" in text
    assert text.count("dev at step 3  loss [1.5]") == 1


def test_a_dumb_terminal_is_written_to_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    console = console_for(stream)
    console.progress(1, 2)
    console.line("text", "good")
    assert stream.getvalue() == "text\n"


class Closed(io.StringIO):
    """Its reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_a_command_continues_without_lines_if_nobody_reads_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = console_for(Closed())
    for step in range(3):
        console.line(f"step {step}")
    console.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: no more lines are shown (Broken pipe); the command continues")
