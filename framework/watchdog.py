"""The watchdog: ends a process that waits too long, and says for whom.

    with watchdog.watching(…):
        with watchdog.waiting("process 1 (node2:5000) to exchange a value", interruptible=True):
            …

The main thread may wait inside TensorFlow, which may hold Python's lock: no thread of this process
could then act, and no signal handler runs. So another process watches it:

    this process ── waits, in shared memory ──► guard ── after the limit of a wait: ──► dump stacks
                 ── signals, by a pipe ───────►                                         interrupt
                                                                                        or exit
                                                                                    ◄── by signals

The handlers of these signals are functions of C (`faulthandler`, `_exit`), which need no lock. Only
the interruption is an exception in Python: it lets the program save what it has.

If the address space is limited, the guard also reports a crash for lack of it.

A wait has a number of its own, so every new wait is progress. Time in which the process is
suspended does not count. After SIGINT or SIGTERM, a wait may last half a minute, or twice as long
as the longest wait so far.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from types import FrameType

from tekso.framework import out_of_memory, watchdog_guard
from tekso.framework.exit_codes import ExitCode
from tekso.framework.watchdog_guard import SLOT, SLOTS

PREPARING = 6.0
"""How much longer than a step a wait may be in which something is compiled or prepared."""


class StalledError(RuntimeError):
    """A wait lasted longer than its limit."""

    exit_code = ExitCode.STALLED


class _Watchdog:
    """The waits of this process, in memory that the guard reads."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.file = os.memfd_create("tekso-waits")
        os.ftruncate(self.file, SLOT.size * SLOTS)
        self._memory = mmap.mmap(self.file, SLOT.size * SLOTS)
        self._numbers = itertools.count(1)
        self._free = list(range(SLOTS))
        self._names: list[str] = []  # of waits of the main thread, the innermost last

    @contextlib.contextmanager
    def waiting(self, name: str, *, limit_s: float, interruptible: bool) -> Iterator[None]:
        try:
            slot = self._free.pop()
        except IndexError:  # more threads wait than there are places: this one is not watched
            yield
            return
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            self._names.append(name)
        start, encoded = slot * SLOT.size, name.encode()[:500]
        flag = interruptible and is_main
        SLOT.pack_into(self._memory, start, 0, limit_s, flag, encoded)
        self._memory[start : start + 8] = next(self._numbers).to_bytes(8, "little")
        try:
            yield
        finally:
            self._memory[start : start + 8] = bytes(8)
            self._free.append(slot)
            if is_main:
                self._names.pop()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raises an error in the main thread."""
        if self._names:
            raise StalledError(f"waited too long for {self._names[-1]}")


_ACTIVE: list[_Watchdog] = []
_PATIENCE = [0.0]  # least factors of the limit


@contextlib.contextmanager
def waiting(
    name: str, *, factor: float = 1.0, limit_s: float | None = None, interruptible: bool = False
) -> Iterator[None]:
    """Registers a wait for the time of the block; does nothing without a watchdog.

    Args:
      name: what, or who, is waited for.
      factor: how much longer than the usual limit the wait may last.
      limit_s: the limit instead, if it is not 0.
      interruptible: whether a StalledError may be raised in the block, if it is in the main thread.
        Otherwise the process ends. Only for waits that are not inside TensorFlow.

    Raises:
      StalledError: the limit has passed.
    """
    if not _ACTIVE:
        yield
        return
    usual_s = _ACTIVE[-1].limit_s
    limit_s = limit_s or usual_s * max(factor, *_PATIENCE)
    with _ACTIVE[-1].waiting(name, limit_s=limit_s, interruptible=interruptible):
        yield


@contextlib.contextmanager
def patient(factor: float) -> Iterator[None]:
    """Lets waits in the block last at least `factor` times the usual limit."""
    _PATIENCE.append(factor)
    try:
        yield
    finally:
        _PATIENCE.remove(factor)


@contextlib.contextmanager
def watching(*, limit_s: float, program: str, path: str, advice: str) -> Iterator[None]:
    """Watches this process for the time of the block.

    Args:
      limit_s: limit of a wait; 0: no watchdog.
      program: name of the command, for messages.
      path: local file to which the stacks of all threads are appended.
      advice: what to do, for the message when the process ends.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not limit_s or not in_main or not hasattr(os, "memfd_create") or _ACTIVE:
        yield
        return
    made = _Watchdog(limit_s)
    with contextlib.ExitStack() as stack:
        stacks, crash = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        limit = out_of_memory.limit_bytes() or 0
        if limit and not faulthandler.is_enabled():
            faulthandler.enable(crash, all_threads=False)
            stack.callback(faulthandler.disable)
        stack.callback(os.close, made.file)
        receiving, sending = os.pipe()
        os.set_blocking(sending, False)
        stack.callback(os.close, sending)  # the guard ends
        stack.enter_context(_handlers(made, stacks.fileno(), sending))
        about = {
            "pid": os.getpid(),
            "memory": made.file,
            "signals": receiving,
            "stacks": stacks.fileno(),
            "crash": crash.fileno(),
            "program": program,
            "path": os.path.abspath(path),
            "advice": advice,
            "address_space": limit,
        }
        command = [sys.executable, "-I", "-S", watchdog_guard.__file__, json.dumps(about)]
        given = (made.file, receiving, stacks.fileno(), crash.fileno())
        with contextlib.suppress(OSError):  # no more processes are allowed: not watched
            guard = subprocess.Popen(command, pass_fds=given, stdin=subprocess.DEVNULL)
            stack.callback(_end, guard)
        os.close(receiving)
        _ACTIVE.append(made)
        stack.callback(_ACTIVE.remove, made)
        yield


def _end(guard: subprocess.Popen[bytes]) -> None:
    guard.kill()
    guard.wait()


@contextlib.contextmanager
def _handlers(watched: _Watchdog, stacks: int, signals: int) -> Iterator[None]:
    """Installs the handlers of the signals of the guard, and sends it those of this process."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = signal.signal(watchdog_guard.INTERRUPT, watched.interrupt)
    faulthandler.register(watchdog_guard.DUMP, file=stacks, all_threads=True)
    # The handler gets the number of the signal, which is the exit code.
    address = ctypes.cast(libc._exit, ctypes.c_void_p)
    former = libc.signal(watchdog_guard.EXIT, address)
    wakeup = signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        libc.signal(watchdog_guard.EXIT, former)
        faulthandler.unregister(watchdog_guard.DUMP)
        signal.signal(watchdog_guard.INTERRUPT, before)
