"""Restarts a training run whose process ended: `tekso-trainer --supervise`, without a scheduler.

    supervisor ── fork ──► trainer ── exit code ──► supervisor ── fork ──► trainer, which resumes

A run is restarted after a crash, after it lost another process or a worker, and after a wait that
did not end. Errors in the settings, the data or the user's code end it, and so do signals to stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from tekso.framework import files
from tekso.framework.exit_codes import ExitCode
from tekso.framework.stopping_signals import stopping_signals

_AGAIN = (ExitCode.PROCESS_LOST, ExitCode.STALLED)
_STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 60.0  # before a restart
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1  # between looks at the trainer


def checkpoints_in(logdir: str) -> list[str]:
    """Returns the names of the checkpoints in a logdir."""
    with contextlib.suppress(OSError):
        return files.names(files.join(logdir, "checkpoints"))
    return []


class Supervisor:
    """Runs a function in forks of this process until it succeeds.

    Args:
      restarts: how often it is restarted without progress.
      progress: returns a value that changes when the run makes progress.
      log: shows a line.
    """

    def __init__(
        self, *, restarts: int, progress: Callable[[], object], log: Callable[[str], None]
    ) -> None:
        self._restarts, self._progress, self._log = restarts, progress, log
        self._stopped, self._signal = threading.Event(), signal.SIGTERM
        self._child = 0

    def run(self, action: Callable[[], int]) -> int:
        """Returns the exit code of the last fork; in a fork, the exit code of `action`."""
        before = {number: signal.signal(number, self._stop) for number in stopping_signals()}
        try:
            count, progress = 0, self._progress()
            while True:
                status = self._fork(action, before)
                code = os.waitstatus_to_exitcode(status)
                if not self._is_worth_it(code):
                    return code if code >= 0 else 128 - code
                if (now := self._progress()) != progress:
                    count, progress = 0, now
                count += 1
                if count > self._restarts:
                    self._log(f"{_ending(code)}; given up after {self._restarts} restarts")
                    return code if code >= 0 else 128 - code
                delay_s = min(_FIRST_DELAY_S * 2 ** (count - 1), _LONGEST_DELAY_S)
                self._log(f"{_ending(code)}; restart {count} of {self._restarts} in {delay_s:g} s")
                if self._stopped.wait(delay_s):
                    return ExitCode(128 + self._signal)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _fork(self, action: Callable[[], int], before: Mapping[signal.Signals, Any]) -> int:
        """Runs the action in a fork; returns its status."""
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal to stop waits until this process knows the fork, and the fork its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPED_BY)
        is_stopped = self._stopped.is_set()  # before there was a fork to pass the signal on to
        self._child = os.fork()
        if self._child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPED_BY)
            if is_stopped:
                self._pass_on()
            status = self._wait()
            self._child = 0
            return status
        code = 1
        try:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPED_BY)
            code = action()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _wait(self) -> int:
        """Returns the status of the fork, when it has ended.

        Python runs handlers of signals between calls. A signal just before a call that blocks would
        wait for its end, so no call blocks for long.
        """
        pause_s = _SHORTEST_PAUSE_S
        while True:
            found, status = os.waitpid(self._child, os.WNOHANG)
            if found:
                return status
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _is_worth_it(self, code: int) -> bool:
        if self._stopped.is_set():
            return False
        return code in _AGAIN or (code < 0 and -code not in _STOPPED_BY)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Stops the run: passes the signal on, but a terminal sends SIGINT to the trainer too."""
        self._signal = signal.Signals(number)
        self._stopped.set()
        if number != signal.SIGINT and self._child:
            self._pass_on()

    def _pass_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self._child, self._signal)


def _ending(code: int) -> str:
    """Returns a text that says how the trainer ended."""
    if code < 0:
        return f"the trainer was ended by {signal.Signals(-code).name}"
    return f"the trainer ended with exit code {code} ({ExitCode(code).name})"
