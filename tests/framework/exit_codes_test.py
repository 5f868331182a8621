"""Exit codes: those of the documentation, and which error ends a command with which."""

from __future__ import annotations

import errno
import re
import signal
from pathlib import Path

import pytest

from tekso.framework import exit_codes
from tekso.framework.exit_codes import ExitCode

DOCS = Path(__file__).resolve().parents[2] / "docs" / "faults.md"


class DamagedError(Exception):
    """An error with an exit code."""

    exit_code = ExitCode.DAMAGED


class SignalledError(Exception):
    """An error with the exit code of a process that a signal ended."""

    exit_code = 128 + signal.SIGKILL


class StrangeError(Exception):
    """An error whose exit code is none."""

    exit_code = 77


def test_the_documentation_lists_every_code_and_its_number() -> None:
    rows = re.findall(r"^\| (\d+) \| `([A-Z_]+)` \|", DOCS.read_text(), re.MULTILINE)
    assert rows == [(str(int(code)), code.name) for code in ExitCode]


def test_a_signal_has_the_code_that_a_shell_reports() -> None:
    """POSIX: a code above 128; shells use 128 plus the number: SIGHUP 1, SIGINT 2, SIGTERM 15."""
    assert (ExitCode.HUNG_UP, ExitCode.INTERRUPTED, ExitCode.TERMINATED) == (129, 130, 143)
    assert exit_codes.signal_of(137) is signal.SIGKILL
    assert exit_codes.signal_of(1) is None and exit_codes.signal_of(128 + 99) is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x"), 1),
        (DamagedError(), 4),
        (OSError(errno.ENOSPC, "full"), 5),
        (OSError(errno.EACCES, "denied"), 1),
        (KeyboardInterrupt(), 130),
        (SignalledError(), 137),
        (StrangeError(), 1),
    ],
)
def test_an_error_ends_a_command_with_its_code(error: BaseException, expected: int) -> None:
    assert exit_codes.exit_code_of(error) == expected
