"""The process that watches another one for its watchdog; see `watchdog.py`.

It ends a process whose wait lasts too long. If the process itself ends without ending its guard,
and its address space is limited, the guard writes that this is probably the reason: if the process
crashed, which it notes in a file, or if it had used most of its address space.

It imports nothing of Tekso, so that it starts in milliseconds and needs little memory.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable

SLOT = struct.Struct("<QdB503s")  # number, limit in seconds, whether it can be interrupted, name
SLOTS = 32
DUMP, INTERRUPT, EXIT = 50, 51, 60  # signals that nothing else uses; EXIT is ExitCode.STALLED
POLL_S = 1.0
_GRACE_S = 10.0  # for a wait that was interrupted
_DUMP_S = 1.0
_AFTER_SIGNAL_S = 30.0
_POLL_LIMITED_S = 0.2  # if the address space is limited
_NEARLY = 0.8  # of the limit of the address space
_AGAIN_S = 2.0  # for the watched process to end by itself after a second signal


class Guard:
    """Finds waits that last too long.

    Args:
      waits: returns {number: (limit in seconds, whether it can be interrupted, name)}.
    """

    def __init__(self, waits: Callable[[], dict[int, tuple[float, bool, str]]]) -> None:
        self._waits = waits
        self._ages: dict[int, float] = {}
        self._longest_s = 0.0
        self._interrupted: dict[int, float] = {}  # when, by age
        self.signals: list[int] = []
        self._since_second_s = 0.0

    def poll(self, elapsed_s: float) -> tuple[str, int, str] | None:
        """Returns what to do now, the number of a wait and the reason; or None.

        Args:
          elapsed_s: time since the last call, in which the watched process could run.
        """
        waits = self._waits()
        ended = self._ages.keys() - waits.keys()
        self._longest_s = max([self._longest_s, *(self._ages[number] for number in ended)])
        self._ages = {number: self._ages.get(number, 0.0) + elapsed_s for number in waits}
        if len(self.signals) > 1:
            self._since_second_s += elapsed_s
            if self._since_second_s >= _AGAIN_S:
                return "exit", 0, f"{self._signal()} was repeated, and the process did not react"
        for number, (limit_s, is_interruptible, name) in sorted(waits.items(), reverse=True):
            age = self._ages[number]
            reason = f"waited {age:.0f} s for {name}"
            if self.signals:
                after_signal_s = max(_AFTER_SIGNAL_S, 2 * self._longest_s)
                limit_s = min(limit_s, after_signal_s)
                reason += f", after {self._signal()}"
            if age < limit_s:
                continue
            if not is_interruptible:
                return "exit", number, reason
            since = self._interrupted.setdefault(number, age)
            if since == age:
                return "interrupt", number, reason
            if age - since >= _GRACE_S:
                return "exit", number, reason
        return None

    def _signal(self) -> str:
        try:
            return signal.Signals(self.signals[0]).name
        except ValueError:
            return f"signal {self.signals[0]}"


def read_waits(memory: bytes) -> dict[int, tuple[float, bool, str]]:
    """Returns the waits in the shared memory."""
    found = {}
    for i in range(SLOTS):
        number, limit_s, flag, name = SLOT.unpack_from(memory, i * SLOT.size)
        if number:
            found[number] = (limit_s, bool(flag), name.rstrip(b"\0").decode("utf-8", "replace"))
    return found


def _is_stopped(pid: int) -> bool:
    """Whether a process was suspended, as by Ctrl-Z or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def main() -> None:
    """Watches the parent process until it ends."""
    about = json.loads(sys.argv[1])
    pid, memory, signals = about["pid"], about["memory"], about["signals"]
    peak, limit = _address_space_peak(pid), about["address_space"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the parent
        signal.signal(number, signal.SIG_IGN)
    guard = Guard(lambda: read_waits(os.pread(memory, SLOT.size * SLOTS, 0)))
    before = time.monotonic()
    while True:
        # It is read all the time, because the kernel does not know it of a process that has ended.
        peak = max(peak, _address_space_peak(pid)) if limit else 0
        readable, _, _ = select.select([signals], [], [], _POLL_LIMITED_S if limit else POLL_S)
        received = os.read(signals, 64) if readable else b""
        if os.getppid() != pid or (readable and not received):  # it ended without ending the guard
            _report_exhausted(about, peak)
            return
        if received:
            known = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            guard.signals += [number for number in received if number in known]
        now = time.monotonic()
        elapsed_s, before = min(now - before, 2 * POLL_S), now
        found = guard.poll(0.0 if _is_stopped(pid) else elapsed_s)
        if found is not None:
            _act(about, *found)
            if found[0] == "exit":
                return


def _address_space_peak(pid: int) -> int:
    """Returns the peak of the address space of a process in bytes; 0 if it is unknown."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return 1024 * int(file.read().partition("VmPeak:")[2].split()[0])
    except (OSError, IndexError, ValueError):  # it has ended; or not Linux
        return 0


def _report_exhausted(about: dict[str, object], peak: int) -> None:
    """Writes a line if a process has probably crashed for lack of address space.

    C++ code does not check every allocation, so TensorFlow may end the process without a message.
    """
    limit = int(str(about["address_space"]))
    crashed = bool(limit) and os.fstat(int(str(about["crash"]))).st_size > 0
    if not limit or not (crashed or peak >= _NEARLY * limit):
        return
    waits = read_waits(os.pread(int(str(about["memory"])), SLOT.size * SLOTS, 0))
    during = f" in {waits[max(waits)][2]}" if waits else ""
    os.write(
        2,
        f"\n{about['program']}: the process {'crashed' if crashed else 'ended without a message'}"
        f"{during}, and had used {peak / 1e6:,.0f} of {limit / 1e6:,.0f} MB of its address space "
        "(ulimit -v): if it needed more, increase the limit, or reduce the batch size or the "
        f"model; {about['advice']}\n".encode(),
    )


def _act(about: dict[str, object], kind: str, number: int, reason: str) -> None:
    pid = int(str(about["pid"]))
    path = _write_stacks(about, pid, reason)
    if kind == "interrupt":
        os.kill(pid, INTERRUPT)
        return
    more = f"; the stacks of all threads are in {path}" if path else ""
    if number:
        more += f"; {about['advice']}"
    os.write(2, f"\n{about['program']}: {reason}{more}\n".encode())
    os.kill(pid, EXIT)


def _write_stacks(about: dict[str, object], pid: int, reason: str) -> str:
    """Writes the stacks of all threads of the process to its file; returns the path, or ""."""
    stacks, path = int(str(about["stacks"])), str(about["path"])
    begin = os.fstat(stacks).st_size
    os.kill(pid, DUMP)
    time.sleep(_DUMP_S)
    text = os.pread(stacks, 1 << 20, begin)
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    try:
        with open(path, "ab") as file:
            file.write(f"{when}: process {pid} {reason}\n\n".encode() + text + b"\n")
    except OSError:
        return ""
    return path


if __name__ == "__main__":
    main()
