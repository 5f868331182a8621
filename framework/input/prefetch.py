"""Prefetching: a thread prepares the batches of the next steps while one is computed."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_PATIENCE_S = 5.0  # how long close() waits for a batch that is being prepared


class Prefetch(Generic[T]):
    """`fetch(start)`, `fetch(start + 1)`, … one after the other, prepared ahead in a thread.

        with Prefetch(input.batch, start=step, stop=steps) as batches:
            for batch in batches:
                …

    An error of `fetch` is raised to the consumer in its turn, after the batches before it.

    Args:
      fetch: function of the step; called from one thread, in order.
      start: first step.
      stop: the step before which to end; None goes on for ever.
      depth: batches that are kept ready; 0 prepares each when it is asked for, without a thread.
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
            raise ValueError(f"depth is {depth}, but has to be at least 0")
        self._work: _Work[T] = _Work(fetch, start, stop, depth)
        # Runs when this object is gone, and at the latest before the interpreter ends.
        self._finalizer = weakref.finalize(self, self._work.close)
        if depth:
            self._work.start()

    def __iter__(self) -> Prefetch[T]:
        """Itself."""
        return self

    def __next__(self) -> T:
        """The next batch.

        Raises:
          StopIteration: there are no more, or it is closed.
          Exception: whatever `fetch` raised for this batch.
        """
        return self._work.take()

    def close(self) -> None:
        """Stops the thread; what is ready is dropped. Closing again does nothing."""
        self._finalizer()

    def __enter__(self) -> Prefetch[T]:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()


class _Work(Generic[T]):
    """What consumer and thread share; it does not keep the Prefetch itself alive."""

    def __init__(self, fetch: Callable[[int], T], start: int, stop: int | None, depth: int) -> None:
        self._fetch = fetch
        self._step = start
        self._stop = stop
        self._depth = depth
        self._changed = threading.Condition()
        self._ready: collections.deque[T] = collections.deque()
        self._error: BaseException | None = None
        self._ended = False  # nothing will be added any more
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

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
