"""Runs the actions of every device in a thread, each as soon as the work it needs is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import tensorflow as tf

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.actions import Action, Event, WorkKey, needs
from tekso.framework.exit_codes import ExitCode

Worker = tuple[int, int]
"""Replica and device."""


class StageError(ExecutionError):
    """A stage failed; the text names the stage, the action and the reason."""

    exit_code = ExitCode.FAILED


class Workers:
    """Threads that stay alive from step to step.

    Args:
      count: number of threads.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="stage")

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Returns `function` of every item, computed concurrently.

        Raises: the error of the first item, in order, that failed.
        """
        futures = [self._pool.submit(function, item) for item in items]
        wait(futures)
        return [future.result() for future in futures]

    def run(
        self,
        orders: Mapping[Worker, Sequence[Action]],
        perform: Callable[[Worker, Action], None],
        *,
        num_stages: int,
        name_of: Callable[[Worker, Action], str],
        also_needs: Callable[[Action], Sequence[WorkKey]] = lambda action: (),
    ) -> dict[Worker, list[Event]]:
        """Runs all actions.

        Args:
          orders: {(replica, device): its actions in order}. Replicas do not wait for each other.
          perform: `perform(worker, action)` runs an action after the work that it needs.
          num_stages: number of stages of a replica.
          name_of: returns a name of an action for an error.
          also_needs: work that an action waits for in addition to `actions.needs`.

        Returns: {worker: its actions with start and end, in seconds of `time.perf_counter`}.

        Raises:
          StageError: an action failed; all workers were stopped.
        """
        lines = {worker[0]: _Line() for worker in orders}
        failed: list[tuple[str, BaseException]] = []

        def work(worker: Worker) -> list[Event]:
            line = lines[worker[0]]
            events: list[Event] = []
            for action in orders[worker]:
                try:
                    if not line.wait_for((*needs(action[2:], num_stages), *also_needs(action))):
                        return events
                    start = time.perf_counter()
                    perform(worker, action)
                except BaseException as error:
                    failed.append((name_of(worker, action), error))
                    for other in lines.values():
                        other.stop()
                    return events
                events.append(Event(action, start, time.perf_counter()))
                line.done(action[2:])
            return events

        try:
            found = self.map(work, list(orders))
        except BaseException:  # an interruption: no thread may wait for work that is never done
            for line in lines.values():
                line.stop()
            raise
        if failed:
            name, error = failed[0]
            if not isinstance(error, (tf.errors.OpError, OSError)):
                error.add_note(name)  # an error in user code: the traceback says where
                raise error
            kind = type(error).__name__
            raise StageError(f"{name} failed: {kind}: {line_with_reason(error)}") from error
        return dict(zip(orders, found, strict=True))


def line_with_reason(error: BaseException) -> str:
    """Returns the line of a TensorFlow error message that states the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    frames = ("Graph execution error", "Detected at node", "<stack traces", "File ", "[[")
    said = [line for line in lines if not line.startswith(frames)]
    return (said or lines or ["no reason is given"])[0][:300]


class _Line:
    """The work that is done in one replica of the pipeline."""

    def __init__(self) -> None:
        self._done: set[WorkKey] = set()
        self._changed = threading.Condition()
        self._stopped = False

    def wait_for(self, work: Sequence[WorkKey]) -> bool:
        """Waits until all of this work is done; returns False if `stop` was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or all(w in self._done for w in work))
            return not self._stopped

    def done(self, work: WorkKey) -> None:
        with self._changed:
            self._done.add(work)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
