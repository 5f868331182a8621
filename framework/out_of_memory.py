"""Errors of an allocation without memory for it, and the limit of the address space.

    shortage_of    recognises such an error by type or text: Python, NumPy, the operating system,
                   TensorFlow and XLA raise different ones, and those of checkpoints and files would
                   otherwise be taken for damage
    explaining     in a run: converts it to an OutOfMemoryError that says when, and what resumes
    explained      the text; `tools/command_errors.py` prints it for all other commands

If C++ code crashes instead, `watchdog_guard.py` reports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
from collections.abc import Callable, Iterator

_OF_LIBRARIES = re.compile(  # TensorFlow, XLA, and C++ in general
    r"(OOM when allocating|[Oo]ut of memory|[Cc]annot allocate memory|std::bad_alloc)"
    r".*?(?=\s*(\[Op:|\{\{|\[\[|\n|$))"
)
_LIMITED = re.compile(  # they have other reasons without a limit
    r"can't start new thread|(\S+): failed to map segment from shared object"
)
_MALLOC_ARENA_MAX = -8
_TENSORS = "TF_MKL_ALLOC_MAX_BYTES"
_LEAST_FOR_TENSORS = 64 << 20
_WHAT_TO_DO = "reduce the batch size or the model"


class OutOfMemoryError(MemoryError):
    """There is not enough memory; the text says for what, when, and what to do."""


def shortage_of(error: BaseException) -> str | None:
    """Returns what could not be allocated; None for an error with another reason."""
    text = str(getattr(error, "message", "") or error)
    if isinstance(error, MemoryError):
        return text.partition("\n")[0] or "no memory for an object of Python"
    if isinstance(error, OSError):
        return text if error.errno == errno.ENOMEM else None
    if limit_bytes() is not None and (found := _LIMITED.search(text)):
        return f"no memory for {'the stack of a thread' if found[1] is None else found[1]}"
    found = _OF_LIBRARIES.search(text)
    return found[0].strip() if found else None


def explained(error: BaseException, *, when: str = "", again: str = "") -> str | None:
    """Returns the text about an error of memory; None for an error with another reason.

    Args:
      error: the error.
      when: what the command was doing: "at step 3".
      again: what follows "repeat the command".
    """
    if isinstance(error, OutOfMemoryError):
        return str(error)
    reason = shortage_of(error)
    if reason is None:
        return None
    first = f"out of memory {when}".rstrip()
    limit = limit_bytes()
    if limit is None:
        return f"{first}: {reason}. {_sentence(_WHAT_TO_DO)}, and repeat the command{again}"
    return (
        f"{first}: {reason}. {_sentence(limit_text(limit))}: increase the limit, or "
        f"{_WHAT_TO_DO}, and repeat the command{again}"
    )


@contextlib.contextmanager
def explaining(when: Callable[[], str], again: Callable[[], str]) -> Iterator[None]:
    """Converts errors of memory in the block to an OutOfMemoryError; see `explained`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or shortage_of(error) is None:
            raise
        text = explained(error, when=when(), again=again())
        raise OutOfMemoryError(text) from error


def limit_bytes() -> int | None:
    """Returns the limit of the address space (`ulimit -v`); None if there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def used_bytes() -> int:
    """Returns how much of its address space this process uses."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):  # not Linux
        return 0


def left_bytes() -> int | None:
    """Returns how much of a limited address space is not in use; None without a limit."""
    limit = limit_bytes()
    return None if limit is None else limit - used_bytes()


def limit_text(limit: int) -> str:
    """Returns a text about the limit, and how much is in use."""
    return (
        f"the address space is limited to {limit / 1e6:,.0f} MB (ulimit -v), of which "
        f"{used_bytes() / 1e6:,.0f} MB are in use"
    )


def save_address_space() -> None:
    """Lets malloc reserve less address space, if it is limited.

    Every arena reserves 64 MB, and there may be eight for each core.
    """
    if limit_bytes() is not None:
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            ctypes.CDLL(None).mallopt(_MALLOC_ARENA_MAX, 1)


def limit_tensors() -> None:
    """Limits the memory of tensors, if the address space is limited, before the first tensor.

    With oneDNN, TensorFlow's allocator of tensors on a CPU takes all address space that is left if
    it needs more than there is. It then throws `std::bad_alloc`, which ends the process, because it
    has no memory to note what it took. With a limit it raises an error instead. By default, its
    limit is the memory of the machine.
    """
    left = left_bytes()
    if left is not None:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        most = max(_LEAST_FOR_TENSORS, min(left * 3 // 4, machine))
        os.environ.setdefault(_TENSORS, str(most))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
