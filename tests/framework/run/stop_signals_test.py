"""Signals: the first asks, the second ends."""

from __future__ import annotations

import os
import signal
import threading

import processes
import pytest

from tekso.framework.run.stop_signals import StopSignals, exit_code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_noted_and_the_handlers_come_back(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    given = signal.signal(number, before)  # this test may run under nohup
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number
    assert signal.signal(number, given) == before
    assert f"{number.name}: saving and stopping" in capfd.readouterr().err
    assert exit_code(number) == 128 + number


TWICE = """
import os, signal
from tekso.framework.run.stop_signals import StopSignals
with StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("never here", flush=True)
"""


def test_the_second_signal_ends_at_once() -> None:
    done = processes.run(["-c", TWICE])
    assert (done.returncode, done.stdout) == (130, "still here\n")


HANGUPS = """
import os, signal, sys
from tekso.framework.run.stop_signals import StopSignals
signal.signal(signal.SIGHUP, getattr(signal, sys.argv[1]))
with StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
    print(stop.received and stop.received.name, flush=True)
"""


@pytest.mark.parametrize(("before", "received"), [("SIG_DFL", "SIGHUP"), ("SIG_IGN", "None")])
def test_a_second_hangup_is_ignored_and_nohup_all_of_them(before: str, received: str) -> None:
    done = processes.run(["-c", HANGUPS, before])
    assert (done.returncode, done.stdout) == (0, f"{received}\n"), done.stderr


def test_outside_the_main_thread_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter() -> None:
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(60)
    assert seen == [before]
