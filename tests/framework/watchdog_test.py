"""The watchdog ends a process that waits too long, also if Python's lock is held."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tekso.framework import watchdog, watchdog_guard
from tekso.framework.exit_codes import ExitCode
from tekso.framework.watchdog_guard import Guard

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import conftest
from tekso.framework import watchdog, watchdog_guard

watchdog_guard.POLL_S = 0.05

def holding_the_lock():
    print("waiting", flush=True)
    mutex = ctypes.create_string_buffer(256)  # PTHREAD_MUTEX_INITIALIZER
    for _ in range(2):  # the second time, it waits for ever, and signals do not end it
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

with watchdog.watching(
    limit_s=float(sys.argv[3]), program="it", path=sys.argv[2] + "/stalled.txt", advice="go on"
):
    exec(sys.argv[4])
"""


def start(folder: Path, code: str, *, limit_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(folder), str(limit_s), code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_wait_that_holds_the_lock_is_ended_with_all_stacks(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "threading.Thread(target=time.sleep, args=(60,), name='other', daemon=True).start()\n"
        "with watchdog.waiting('process 1 (node2:5000) to sum'): holding_the_lock()",
        limit_s=0.5,
    )
    _, message = process.communicate(timeout=60)
    assert process.returncode == ExitCode.STALLED
    assert "it: waited" in message and "for process 1 (node2:5000) to sum; the stacks" in message
    assert message.rstrip().endswith("; go on")
    stacks = (tmp_path / "stalled.txt").read_text()
    assert "holding_the_lock" in stacks and stacks.count("Thread 0x") + stacks.count("thread") >= 2


def test_repeated_signal_ends_a_wait_that_holds_the_lock(tmp_path: Path) -> None:
    code = (
        "signal.signal(signal.SIGTERM, lambda number, frame: None)\n"
        "with watchdog.waiting('a device'): holding_the_lock()"
    )
    process = start(tmp_path, code, limit_s=600)
    assert process.stdout is not None and process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    # Equal signals may arrive as one, so it is repeated.
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.returncode == ExitCode.STALLED
    assert "SIGTERM was repeated" in process.communicate(timeout=60)[1]


LIMITED = """
import resource
from tekso.framework import out_of_memory
limit = out_of_memory.used_bytes() + {headroom}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
with watchdog.watching(limit_s=60, program="it", path="/nowhere", advice="go on"):
    with watchdog.waiting("step 2 of the devices"):
        guard = open(f"/proc/self/task/{{os.getpid()}}/children").read().strip()
        ignored = lambda: open(f"/proc/{{guard}}/status").read().split("SigIgn:")[1].split()[0]
        # It ignores SIGTERM as soon as it watches. It may inherit the same of SIGINT.
        while not int(ignored(), 16) & 1 << signal.SIGTERM - 1:
            time.sleep(0.001)
        {end}
"""


@pytest.mark.parametrize(
    ("headroom", "end", "ending"),
    [
        (10**6, "os.abort()", "crashed"),
        (10**10, "os.abort()", "crashed"),  # one large allocation may be what failed
        (10**6, "os.kill(os.getpid(), 9)", "ended without a message"),
        (10**10, "os.kill(os.getpid(), 9)", ""),
        (10**6, "pass", ""),
    ],
)
def test_a_crash_without_address_space_is_explained(
    tmp_path: Path, headroom: int, end: str, ending: str
) -> None:
    code = LIMITED.format(headroom=headroom, end=end)
    process = start(tmp_path, code, limit_s=0)  # the watchdog of the code watches
    message = process.communicate(timeout=60)[1]
    codes = {"os.abort()": -signal.SIGABRT, "pass": 0}
    assert process.returncode == codes.get(end, -signal.SIGKILL)
    text = f"it: the process {ending} in step 2 of the devices, and had used "
    assert text in message if ending else "it: " not in message, message
    assert message.rstrip().endswith("; go on") == bool(ending)


def test_interruptible_wait_raises_and_nothing_is_left(tmp_path: Path) -> None:
    code = (
        "try:\n"
        " with watchdog.waiting('the input', interruptible=True): time.sleep(60)\n"
        "except watchdog.StalledError as error: print(error)"
    )
    process = start(tmp_path, code, limit_s=0.5)
    out, message = process.communicate(timeout=60)
    assert (process.returncode, out, message) == (0, "waited too long for the input\n", "")
    assert "waited" in (tmp_path / "stalled.txt").read_text()


def test_a_thread_for_the_input_that_never_starts_is_a_wait(tmp_path: Path) -> None:
    code = (
        "from tekso.framework.input.prefetch import Prefetch\n"
        "threading._start_new_thread = lambda *args: None\n"  # as without memory
        "try: Prefetch(int, start=0)\n"
        "except watchdog.StalledError as error: print(error)"
    )
    process = start(tmp_path, code, limit_s=0.5)
    out, message = process.communicate(timeout=60)
    assert (process.returncode, message) == (0, "")
    assert out == "waited too long for the start of the thread for the input\n"


def test_exit_code_is_the_number_of_the_signal() -> None:
    assert watchdog_guard.EXIT == ExitCode.STALLED


# --- the decisions of the guard, without a process ---


class Waits(dict[int, Any]):
    def __call__(self) -> dict[int, tuple[float, bool, str]]:
        return dict(self)


def polled(guard: Guard, seconds: int) -> list[Any]:
    found = [(i + 1, guard.poll(1.0)) for i in range(seconds)]
    return [(at, result[0], result[2]) for at, result in found if result is not None]


def test_every_new_wait_is_progress() -> None:
    waits = Waits()
    guard = Guard(waits)
    for number in range(1, 30):
        waits.clear()
        waits[number] = (10.0, False, "a step")
        assert polled(guard, 8) == []
    assert polled(guard, 2) == [(2, "exit", "waited 10 s for a step")]


def test_inner_wait_is_named_before_the_outer_one() -> None:
    waits = Waits({1: (5.0, False, "the step"), 2: (5.0, False, "process 1")})
    assert polled(Guard(waits), 5) == [(5, "exit", "waited 5 s for process 1")]


def test_interrupted_wait_that_continues_is_ended() -> None:
    waits = Waits({1: (5.0, True, "the input")})
    found = polled(Guard(waits), 15)
    assert [(at, kind) for at, kind, _ in found] == [(5, "interrupt"), (15, "exit")]


def test_signal_shortens_a_wait_but_not_below_twice_the_longest_one() -> None:
    waits = Waits({1: (1000.0, False, "a step")})
    guard = Guard(waits)
    guard.signals.append(signal.SIGTERM)
    assert polled(guard, 30) == [(30, "exit", "waited 30 s for a step, after SIGTERM")]
    waits = Waits({1: (1000.0, False, "a step")})
    guard = Guard(waits)
    assert polled(guard, 40) == []
    del waits[1]
    waits[2] = (1000.0, False, "another step")
    guard.signals.append(signal.SIGTERM)
    assert [at for at, *_ in polled(guard, 80)] == [80]


def test_time_in_which_the_process_is_suspended_does_not_count() -> None:
    guard = Guard(Waits({1: (5.0, False, "a step")}))
    assert [guard.poll(0.0) for _ in range(100)] == [None] * 100


def test_waits_without_a_watchdog_do_nothing() -> None:
    with watchdog.waiting("nothing"):
        pass


def test_more_waits_than_places_are_not_an_error() -> None:
    made = watchdog._Watchdog(1.0)
    inside, leave = threading.Barrier(watchdog_guard.SLOTS + 2), threading.Event()

    def wait(i: int) -> None:
        with made.waiting(f"wait {i} " + "é" * 600, limit_s=1.0, interruptible=True):
            inside.wait(30)
            leave.wait(30)

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(watchdog_guard.SLOTS + 1)]
    for thread in threads:
        thread.start()
    inside.wait(30)
    found = watchdog_guard.read_waits(made._memory[:])
    leave.set()
    for thread in threads:
        thread.join(30)
    assert len(found) == watchdog_guard.SLOTS
    assert all(not interruptible for _, interruptible, _ in found.values())  # not the main thread
    assert watchdog_guard.read_waits(made._memory[:]) == {}
    assert sorted(made._free) == list(range(watchdog_guard.SLOTS))


@pytest.mark.parametrize("limit_s", [0.0])
def test_limit_of_zero_starts_no_guard(limit_s: float, tmp_path: Path) -> None:
    with watchdog.watching(limit_s=limit_s, program="it", path=str(tmp_path / "x"), advice=""):
        assert watchdog._ACTIVE == []
