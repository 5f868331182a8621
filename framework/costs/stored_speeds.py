"""Stores the speeds that programs measure on this machine, and measures them again when needed.

    ~/.cache/tekso/NAME_KEY.json    {"reference": time of a fixed piece of work, "speeds": …}

A file is read by all later plans. Each of them does the fixed piece of work of `reference_work.py`
first. If it shows that the machine is faster than when the speeds were measured, or that they were
measured while other programs ran and none do now, they are measured again.

KEY contains whatever changes speeds: the processor, the number of cores that the process may use,
the version of TensorFlow, and the environment variables that set how it computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tekso.framework import files
from tekso.framework.cores import num_cores
from tekso.framework.costs import reference_work
from tekso.framework.costs.reference_work import Reference
from tekso.framework.execution.errors import ExecutionError

Run = Callable[..., Any]
"""Returns what `printed_by` returns for the same arguments."""

_VERSION = 27
_CPUINFO = Path("/proc/cpuinfo")
_ENVIRONMENT = re.compile(r"(TF_)?XLA_.*|ONEDNN_.*|DNNL_.*|OMP_.*|KMP_.*|TF_\w*(ONEDNN|THREADS).*")
"""Variables that set how TensorFlow computes."""
_NOT_MEASURED = "the speed of this machine could not be measured"
_OF_SCIKIT_LEARN = frozenset({"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"})
"""Variables that importing scikit-learn sets, which are about loading OpenMP and forking."""
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Condition:
    """How far the speeds that this process has read apply to the machine as it is now.

    Attributes:
      slowdown: how many times as long as on the idle machine a fixed piece of work takes now.
      is_slow: whether that is more than the scatter of an idle machine.
      measured_busy: whether other programs used the machine when the speeds were measured.
    """

    slowdown: float = 1.0
    is_slow: bool = False
    measured_busy: bool = False

    def text(self) -> str:
        """Returns a sentence for the reader of a plan; "" if there is nothing to say."""
        slow = f"this machine is {self.slowdown:.1f} times as slow now as when it is idle"
        if self.measured_busy:
            now = f", and {slow}" if self.is_slow else ""
            return (
                "other programs used this machine when its speed was measured, so the step may be "
                f"planned too long{now}; the first plan on the idle machine measures again"
            )
        return f"{slow}; the plan is for the idle machine" if self.is_slow else ""


_read: dict[str, Condition] = {}


def condition() -> Condition:
    """Returns the condition of all speeds that this process has read, the worst of each."""
    found = list(_read.values())
    return Condition(
        max((one.slowdown for one in found), default=1.0),
        any(one.is_slow for one in found),
        any(one.measured_busy for one in found),
    )


def stored(name: str, measure: Callable[[Run], Any], read: Callable[[Any], T], *, cost: str) -> T:
    """Returns what was measured on this machine before, from its file, or measures it.

    A line on stderr says so, and why, before it measures. Other processes wait until the file is
    written.

    Args:
      name: beginning of the name of the file.
      measure: returns what the file stores as JSON. Its argument runs programs.
      read: returns the result from that; a file for which it fails is written again.
      cost: how long that takes, for the line.

    Raises:
      ExecutionError: `read` raises a ValueError for what was just measured.
    """
    path = _path(name)
    with _locked(path):
        now = _reference()
        why = ""
        if path.exists():
            try:
                record = json.loads(path.read_text())
                found, before = read(record["speeds"]), _reference_of(record["reference"])
                why = now.reason_to_repeat(before)
                if not why:
                    _read[name] = _condition(now, before)
                    return found
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                why = f"{path} is damaged"
        print(
            f"measuring the speed of this machine {'again ' if why else ''}({cost}); the next "
            f"plans read it from {path}" + (f". Why: {why}" if why else ""),
            file=sys.stderr,
            flush=True,
        )
        references = [now]

        def run(module: str, *args: str) -> Any:
            printed = printed_by(module, *args)
            references.append(reference_work.measure())
            return printed

        speeds = measure(run)
        try:
            found, before = read(speeds), reference_work.together(references)
        except ValueError as error:
            raise ExecutionError(f"{_NOT_MEASURED}: {error}") from error
        record = {"reference": dataclasses.asdict(before), "speeds": speeds}
        with contextlib.suppress(OSError):  # it is measured again next time
            files.write_atomically(str(path), json.dumps(record) + "\n")
    _read[name] = _condition(references[-1], before)
    return found


def speed_of(value: Any) -> float:
    """Returns a speed, or a number by which one divides.

    Raises:
      ValueError: it is not positive or not finite.
    """
    found = float(value)
    if not 0.0 < found < math.inf:
        raise ValueError(f"{found:g} is no speed")
    return found


def time_of(value: Any) -> float:
    """Returns a time in seconds, which may be 0.

    Raises:
      ValueError: it is negative or not finite.
    """
    found = float(value)
    if not 0.0 <= found < math.inf:
        raise ValueError(f"{found:g} s is no time")
    return found


def _reference_of(fields: Any) -> Reference:
    found = Reference(**fields)
    return Reference(*map(speed_of, dataclasses.astuple(found)))


@functools.cache
def _reference() -> Reference:
    return reference_work.measure()


def _condition(now: Reference, before: Reference) -> Condition:
    return Condition(now.slowdown(before), now.is_slower(before), before.is_busy)


def printed_by(module: str, *args: str) -> Any:
    """Returns the JSON that `main(*args)` of a module prints last, in a process of its own.

    Raises:
      ExecutionError: the process ended with an error.
    """
    program = [sys.executable, "-c", f"from {module} import main; main(*{args!r})"]
    done = subprocess.run(
        program, capture_output=True, text=True, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    if done.returncode:
        ended = f"{module} ended with exit code {done.returncode}"
        if done.returncode < 0:  # by the system if there is too little memory, for example
            ended = f"{module} was ended by {signal.Signals(-done.returncode).name}"
        last = (done.stderr.strip().splitlines() or [ended])[-1]
        raise ExecutionError(f"{_NOT_MEASURED}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process has the lock of a file; some file systems have no locks."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(
                    "waiting for another process, which measures the speed of this machine or "
                    "reads it",
                    file=sys.stderr,
                    flush=True,
                )
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _path(name: str) -> Path:
    key = hashlib.sha256("\n".join(_parts_of_key()).encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "tekso" / f"{name}_{key}.json"


def _parts_of_key() -> list[str]:
    from importlib.metadata import PackageNotFoundError, version

    found = ""
    for package in ("tensorflow", "tensorflow-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        break
    names = {name for name in os.environ if _ENVIRONMENT.fullmatch(name)} - _OF_SCIKIT_LEARN
    settings = [f"{name}={os.environ[name]}" for name in sorted(names)]
    return [str(_VERSION), found, *_processor(), str(num_cores()), *settings]


def _processor() -> list[str]:
    """Returns the lines of /proc/cpuinfo that say what the first processor is."""
    try:
        first = _CPUINFO.read_text().partition("\n\n")[0]
    except OSError:
        first = ""
    # An ARM has no name and no flags there, but features, and numbers of its maker and its design.
    found = re.findall(r"^(?:model name|flags|Features|CPU \w+)\s*:.*$", first, re.MULTILINE)
    return found or [platform.processor(), platform.machine()]
