"""Console output: plain lines for files and pipes, a live progress bar on a terminal."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, Literal, Protocol, TextIO

from tekso.framework.run.report.lines import WIDTH, wrapped

Style = Literal["plain", "evaluation", "good", "warning", "dim"]
_COLOURS = {"plain": "", "evaluation": "cyan", "good": "green", "warning": "yellow", "dim": "dim"}


class Console(Protocol):
    """Shows lines, and the progress of training."""

    @property
    def width(self) -> int:
        """Maximum number of columns of a line."""
        ...

    def line(self, text: str, style: Style = "plain") -> None:
        """Shows a permanent line."""
        ...

    def progress(self, done: int, total: int, doing: str = "") -> None:
        """Shows the progress of training and the current activity, if the console can."""
        ...

    def close(self) -> None:
        """Removes the progress bar; lines can still be written."""
        ...


def console_for(stream: TextIO | None = None) -> Console:
    """Returns the console for a stream (default: stdout); a live console for a terminal."""
    stream = stream or sys.stdout
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LastingConsole(LiveConsole(stream), stream)
    return LastingConsole(PlainConsole(stream), stream)


def drop_output(stream: TextIO) -> None:
    """Discards all that is still written to a stream that failed, also when the process ends."""
    with contextlib.suppress(OSError, ValueError):  # it has no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


class LastingConsole:
    """Shows what another console shows until its stream fails, and then nothing.

    So a run does not end when the reader of its output ends (`| head -1`), when its terminal is
    closed, or when the disk of its output is full.
    """

    def __init__(self, console: Console, stream: TextIO) -> None:
        self._console, self._stream, self._has_failed = console, stream, False

    @property
    def width(self) -> int:
        """Maximum number of columns of a line."""
        return self._console.width

    def line(self, text: str, style: Style = "plain") -> None:
        """Shows a permanent line."""
        self._show(lambda: self._console.line(text, style))

    def progress(self, done: int, total: int, doing: str = "") -> None:
        """Shows the progress of training and the current activity, if the console can."""
        self._show(lambda: self._console.progress(done, total, doing))

    def close(self) -> None:
        """Removes the progress bar; lines can still be written."""
        self._show(self._console.close)

    def _show(self, show: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            show()
        except OSError as error:
            self._has_failed = True
            drop_output(self._stream)
            with contextlib.suppress(OSError):
                print(
                    f"warning: no more lines are shown ({error.strerror}); the command continues, "
                    "and a training run logs its figures in metrics.jsonl",
                    file=sys.stderr,
                )


class PlainConsole:
    """Writes lines only, without colours and without a progress bar."""

    def __init__(self, stream: TextIO, width: int = WIDTH) -> None:
        self._stream, self._width = stream, width

    @property
    def width(self) -> int:
        """Maximum number of columns of a line."""
        return self._width

    def line(self, text: str, style: Style = "plain") -> None:
        """Writes the line; a warning begins with "warning: "."""
        prefix = "warning: " if style == "warning" else ""
        self._stream.write(f"{prefix}{text}\n")
        self._stream.flush()

    def progress(self, done: int, total: int, doing: str = "") -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Does nothing."""


class LiveConsole:
    """Writes coloured lines above a progress bar at the bottom."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console as RichConsole

        self._rich = RichConsole(file=stream, highlight=False, soft_wrap=True)
        self._bar: Any = None
        self._task: Any = None

    @property
    def width(self) -> int:
        """Current number of columns of the terminal, at most 120."""
        return min(shutil.get_terminal_size((WIDTH, 24)).columns, 120)

    def line(self, text: str, style: Style = "plain") -> None:
        """Writes the line above the bar."""
        if style == "warning":
            text = "\n".join(wrapped(f"warning: {text}", self.width))
        self._rich.print(text, style=_COLOURS[style], markup=False)

    def progress(self, done: int, total: int, doing: str = "") -> None:
        """Updates the progress bar."""
        if self._bar is None:
            self._start(done, total)
        self._bar.update(self._task, completed=done, total=total, description=doing or "training")

    def _start(self, done: int, total: int) -> None:
        from rich import progress as bars
        from rich.text import Text

        class Elapsed(bars.ProgressColumn):
            """The time so far, also while the last step is evaluated and decoded."""

            def render(self, task: bars.Task) -> Text:
                seconds = int(task.elapsed or 0.0)
                return Text(str(datetime.timedelta(seconds=seconds)), style="progress.elapsed")

        class Left(bars.TimeRemainingColumn):
            """The estimated time of the steps that are left; nothing after the last one."""

            def render(self, task: bars.Task) -> Text:
                return Text("") if task.finished else Text("left ") + super().render(task)

        self._bar = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(bar_width=None),
            bars.MofNCompleteColumn(),
            Elapsed(),
            Left(),
            console=self._rich,
            refresh_per_second=2,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", completed=done, total=total)
        self._bar.start()

    def close(self) -> None:
        """Removes the progress bar; lines can still be written."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
