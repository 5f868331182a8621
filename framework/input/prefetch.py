"""Prefetching: a thread prepares the batches of the next steps during the current step."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

from tekso.framework import watchdog

T = TypeVar("T")

_PATIENCE_S = 5.0  # maximum time that close() waits for a batch in preparation


class Prefetch(Generic[T]):
    """An iterator over `fetch(start)`, `fetch(start + 1)`, …, which a thread prepares ahead.

        with Prefetch(input.batch, start=step, stop=steps) as batches:
            for batch in batches:
                …

    An error in `fetch` is raised by the iterator after the earlier batches.

    Args:
      fetch: function of the step; called from one thread, in order.
      start: first step.
      stop: step after the last one; None: no end.
      depth: number of batches prepared ahead; 0 prepares each batch on demand, without a thread.
    """

    def __init__(
        self,
        fetch: Callable[[int], T],
        *,
        start: int = 0,
        stop: int | None = None,
        depth: int = 2,
    ) -> None:
        if depth < 0:
            raise ValueError(f"depth is {depth}, but must be at least 0")
        self._work: _Work[T] = _Work(fetch, start, stop, depth)
        # Runs when this object is garbage-collected, at the latest when the interpreter exits.
        self._finalizer = weakref.finalize(self, self._work.close)
        if depth:
            self._work.start()

    def __iter__(self) -> Prefetch[T]:
        """Returns this object."""
        return self

    def __next__(self) -> T:
        """Returns the next batch.

        Raises:
          StopIteration: there are no more batches, or this object is closed.
          Exception: any error that `fetch` raised for this batch.
        """
        return self._work.take()

    def close(self) -> None:
        """Stops the thread and drops prepared batches. Closing again has no effect."""
        self._finalizer()

    def __enter__(self) -> Prefetch[T]:
        """Returns this object."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes this object."""
        self.close()


class _Work(Generic[T]):
    """The state that consumer and thread share; it has no reference to the Prefetch object."""

    def __init__(self, fetch: Callable[[int], T], start: int, stop: int | None, depth: int) -> None:
        self._fetch = fetch
        self._step = start
        self._stop = stop
        self._depth = depth
        self._changed = threading.Condition()
        self._ready: collections.deque[T] = collections.deque()
        self._error: BaseException | None = None
        self._ended = False  # whether the thread has ended
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        # Without memory for the thread, Python's `start` never returns.
        with watchdog.waiting("the start of the thread for the input", interruptible=True):
            thread.start()
        self._thread = thread

    def take(self) -> T:
        if self._thread is None:
            return self._take_directly()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            if self._closed:
                raise StopIteration
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)

    def _take_directly(self) -> T:
        if self._closed or (self._stop is not None and self._step >= self._stop):
            raise StopIteration
        item = self._fetch(self._step)
        self._step += 1
        return item

    def _run(self) -> None:
        try:
            while not self._closed and (self._stop is None or self._step < self._stop):
                item: Any = self._fetch(self._step)
                self._step += 1
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                    if not self._closed:
                        self._ready.append(item)
                        self._changed.notify_all()
                del item
        except BaseException as error:
            error.add_note(f"while the batch of step {self._step} was prepared")
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
