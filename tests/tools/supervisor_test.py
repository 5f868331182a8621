"""The supervisor restarts what ended by no fault of the user, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import pytest

PROGRAM = """
import ctypes, functools, json, os, signal, sys
from pathlib import Path
from tekso.tools import supervisor

supervisor._FIRST_DELAY_S = 0.01
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # this test may run under nohup
folder, ends, restarts = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])

def action():
    done = len(list(folder.glob("try_*")))
    (folder / f"try_{done}").touch()
    end = ends[done]
    if end == "progress":
        (folder / "progress").write_text(str(done))
        return 8
    if end in ("stop", "hang_up"):
        os.kill(os.getppid(), signal.SIGTERM if end == "stop" else signal.SIGHUP)
        signal.pause()
    if end == "wait":
        signal.pause()
    if end < 0:
        os.kill(os.getpid(), -end)
        signal.pause()
    return end

def progress():
    path = folder / "progress"
    return path.read_text() if path.exists() else ""

fork = os.fork

def fork_that_returns_late():
    pid = fork()
    while pid and not made._stopped.is_set() and signal.SIGTERM not in signal.sigpending():
        os.sched_yield()  # the child sends the signal before this process knows it
    return pid

waitpid, kill = os.waitpid, ctypes.CDLL(None).kill

class Signalled:
    # The signal comes within the call, where Python looks for none until the call returns.
    __index__ = functools.partial(kill, os.getpid(), int(signal.SIGTERM))

def waitpid_after_a_signal(pid, options):
    os.waitpid = waitpid
    while not (folder / "try_0").exists():
        os.sched_yield()
    return waitpid(pid, Signalled()) if options == 0 else kill(os.getpid(), 15) or (0, 0)

if ends == ["stop"]:
    os.fork = fork_that_returns_late
if ends == ["wait"]:
    os.waitpid = waitpid_after_a_signal
made = supervisor.Supervisor(restarts=restarts, progress=progress, log=print)
code = made.run(action)
print("tries", len(list(folder.glob("try_*"))))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("ends", "restarts", "code", "tries"),
    [
        ([0], 3, 0, 1),
        ([1], 3, 1, 1),  # the user's error
        ([2], 3, 2, 1),
        ([5], 3, 5, 1),  # a full disk
        ([8, 60, -9, -11, -6, 0], 5, 0, 6),  # lost, stalled, killed, crashed
        ([8, 1], 3, 1, 2),
        ([8, 8, 8], 2, 8, 3),
        ([-9, -9], 1, 137, 2),
        ([8, "progress", 8, 8], 2, 8, 4),  # a new checkpoint gives new restarts
        ([-15], 3, 143, 1),
        (["stop"], 3, 143, 1),
        (["hang_up"], 3, 129, 1),
        (["wait"], 3, 143, 1),  # a signal just before the supervisor waits
    ],
)
def test_what_is_restarted(
    tmp_path: Path, ends: list[Any], restarts: int, code: int, tries: int
) -> None:
    arguments = ["-c", PROGRAM, str(tmp_path), json.dumps(ends), str(restarts)]
    done = processes.run(arguments, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, f"tries {tries}"), done.stderr
    assert done.stdout.count("; restart ") == tries - 1
    assert ("given up" in done.stdout) == (code in (8, 137))
