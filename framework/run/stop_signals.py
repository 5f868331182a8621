"""SIGINT, SIGTERM and SIGHUP: the first signal makes the loop save and stop.

The second one ends the process at once, except for SIGHUP: when a terminal is closed, the kernel
and the shell may both send it. Where SIGHUP is ignored, as by nohup, it stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from tekso.framework.exit_codes import ExitCode
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.stopping_signals import stopping_signals


class StopSignals:
    """Within its `with` block, the first of these signals only sets `received`.

        with StopSignals() as stop:
            while not stop.received:
                ...

    Outside the main thread it does nothing, because Python handles signals only in that thread.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._handle) for number in stopping_signals()
            }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number != signal.SIGHUP:
                os._exit(exit_code(signal.Signals(number)))
            return
        self.received = signal.Signals(number)
        # Not print(): the signal may have interrupted one.
        text = f"\n{self.received.name}: saving and stopping; repeat to stop at once\n"
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, text.encode())


class AgreedStop:
    """Makes all processes of a run stop at the same step when one of them receives a signal.

    Attributes:
      received: the signal, after `poll` has found one.
    """

    def __init__(self, signals: StopSignals, group: ProcessGroup) -> None:
        self._signals, self._group = signals, group
        self.received: signal.Signals | None = None

    def poll(self) -> bool:
        """Whether any process has received a signal; all processes must call it."""
        if self.received is None:
            numbers = self._group.gather(int(self._signals.received or 0))
            self.received = next((signal.Signals(n) for n in numbers if n), None)
        return self.received is not None


def exit_code(received: signal.Signals) -> ExitCode:
    """Returns the exit code that a shell reports for a process that one of the signals ended."""
    return ExitCode(128 + received)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays the first SIGINT until the block ends; the second one interrupts the block."""
    if threading.current_thread() is not threading.main_thread():  # Python handles no signals here
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        signal.raise_signal(signal.SIGINT)
