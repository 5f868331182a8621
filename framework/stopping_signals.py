"""The signals that ask a run to save its state and stop."""

from __future__ import annotations

import signal

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stopping_signals() -> list[signal.Signals]:
    """Returns SIGINT, SIGTERM and SIGHUP; without SIGHUP if it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in _ALL if not (is_ignored and number == signal.SIGHUP)]
