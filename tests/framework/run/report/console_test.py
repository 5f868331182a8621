"""Consoles: plain lines in files, colours and a bar in terminals."""

from __future__ import annotations

import errno
import io
import os
import re

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


def test_the_time_goes_on_while_the_last_step_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    now = [0.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: now[0])
    stream = Terminal()
    console = console_for(stream)
    console.progress(9, 10)
    assert "left" in stream.getvalue()
    now[0] = 20.0
    console.progress(10, 10)
    end = len(stream.getvalue())
    now[0] = 100.0
    console.progress(10, 10, "evaluating dev")
    console.close()
    text = stream.getvalue()[end:]
    assert "0:01:40" in text and "left" not in text


def test_a_warning_is_wrapped_at_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    console_for(stream).line("the schedule ends after 20 steps, before the warm-up", "warning")
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert text == "warning: the schedule ends after 20\n    steps, before the warm-up\n"


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
