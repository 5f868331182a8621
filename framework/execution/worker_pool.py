"""Workers that compute functions, may be lost at any time, and come back.

    submit ──► tasks ──► thread of a worker ──► worker ──► future
                 ▲             │ lost
                 └─────────────┘ another worker computes the task; the thread connects again

A worker that answers again is connected at once, whether or not others are still lost. TensorFlow's
ClusterCoordinator instead waits until all lost workers are back, so a run whose last two workers
were lost would not continue with the first of them that returns.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, executor

from tekso.framework import watchdog
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline import remote
from tekso.framework.exit_codes import ExitCode

WORKER, SERVER = "worker", "ps"  # names of TensorFlow's jobs
_ATTEMPTS = 3  # of a task on workers that are not lost, for example after a broken connection
_PROBE_S = 5.0  # in which a process that is not suspended answers
BROKEN_CONNECTION = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)
_OP_ERRORS = (tf.errors.OpError, RuntimeError)  # the latter if a copy of a tensor fails
_SOONER = 0.9  # of the limit of a step, so that the message names the lost workers


class LostServerError(ExecutionError):
    """A parameter server was lost, and with it the weights since the last checkpoint."""

    exit_code = ExitCode.PROCESS_LOST

    def __init__(self, server: str) -> None:
        super().__init__(
            f"a parameter server was lost ({server}), and with it the weights since the last "
            "checkpoint: start it again with the same command, and repeat this command to resume"
        )


@dataclasses.dataclass(order=True)
class _Task:
    """A function to compute; the one that was submitted first goes first."""

    number: int
    function: Callable[..., Any] = dataclasses.field(compare=False)
    args: Any = dataclasses.field(compare=False)
    future: concurrent.futures.Future[Any] = dataclasses.field(compare=False)
    attempts: int = dataclasses.field(default=0, compare=False)


class WorkerPool:
    """Computes functions on workers; TensorFlow is connected to a cluster with these processes.

    Args:
      workers: addresses of the tasks of the job "worker".
      servers: addresses of the tasks of the job "ps".
    """

    def __init__(self, workers: Sequence[str], servers: Sequence[str]) -> None:
        self._workers, self.servers = list(workers), list(servers)
        self._cluster = context.get_server_def()
        self._own = f"/job:{self._cluster.job_name}"
        self._tasks: queue.PriorityQueue[_Task] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._updating = threading.RLock()  # during an update, ops may fail
        self._absent: set[str] = set()  # addresses of workers that are lost
        self._lost: LostServerError | None = None
        for index in range(len(workers)):
            # A daemon, because it may wait for a lost worker when the run ends.
            name = f"worker {workers[index]}"
            threading.Thread(target=self._serve, args=[index], name=name, daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Lets the next free worker compute a function.

        Args:
          function: a concrete function without side effects; another worker computes it again if
            its worker is lost.
          args: its arguments; tensors may be on the parameter servers.

        Returns:
          What it returns, with tensors of this process; or the error, which is LostServerError if a
          parameter server was lost.
        """
        task = _Task(next(self._numbers), function, args, concurrent.futures.Future())
        self._tasks.put(task)
        if self._lost is not None:
            self._cancel(self._lost)
        return task.future

    def wait(self, futures: Sequence[concurrent.futures.Future[Any]]) -> None:
        """Waits until one of several futures is done."""
        while not _one_is_done(futures, 1.0):
            if len(self._absent) < len(self._workers):
                continue
            name = f"one of the lost workers to come back: {', '.join(self._workers)}"
            with watchdog.waiting(name, factor=_SOONER):
                while len(self._absent) == len(self._workers) and not _one_is_done(futures, 0.2):
                    pass

    def lost_server(self) -> LostServerError | None:
        """Returns an error if a parameter server does not answer, or is not the same process."""
        with self._updating:
            for index, address in enumerate(self.servers):
                if self._lost is None and not _answers(SERVER, index):
                    self._lost = LostServerError(address)
                    self._cancel(self._lost)
            return self._lost

    def _cancel(self, error: LostServerError) -> None:
        """Ends all tasks that no worker has begun: without weights, none can be computed."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait().future.set_exception(error)

    # --- the thread of a worker ---

    def _serve(self, index: int) -> None:
        with _own_executor():
            while self._lost is None:
                self._compute(index, self._tasks.get())

    def _compute(self, index: int, task: _Task) -> None:
        try:
            with tf.device(_device(WORKER, index)):
                found = task.function(*task.args)
            with tf.device(self._own):  # copied, because the worker may be lost before their use
                found = tf.nest.map_structure(tf.identity, found, expand_composites=True)
            task.future.set_result(found)
        except _OP_ERRORS as error:
            self._failed(index, task, error)
        except Exception as error:  # raised again by the thread that waits for the future
            task.future.set_exception(error)

    def _failed(self, index: int, task: _Task, error: Exception) -> None:
        """Finds out what was lost, and lets another worker compute the task."""
        if (lost := self.lost_server()) is not None:
            task.future.set_exception(lost)
        elif not self._is_connected(index):
            self._absent.add(self._workers[index])
            self._tasks.put(task)
            self._connect_again(index)
        elif isinstance(error, BROKEN_CONNECTION) and task.attempts < _ATTEMPTS:
            task.attempts += 1
            self._tasks.put(task)
        else:
            task.future.set_exception(error)

    def _is_connected(self, index: int) -> bool:
        with self._updating:
            return _answers(WORKER, index)

    def _connect_again(self, index: int) -> None:
        """Waits until a lost worker is back, and connects to it; ends if a server is lost."""
        address = self._workers[index]
        while self.lost_server() is None:
            if remote.answers(address, _PROBE_S) and self._update(index):
                self._absent.discard(address)
                return
            time.sleep(0.2)

    def _update(self, index: int) -> bool:
        """Connects to the workers that answer; returns whether this one is connected."""
        with self._updating:
            # TensorFlow waits for every process of the cluster, also for one that is lost.
            cluster = copy.deepcopy(self._cluster)
            (job,) = (job for job in cluster.cluster.job if job.name == WORKER)
            for i, address in enumerate(self._workers):
                if not remote.answers(address, _PROBE_S):
                    del job.tasks[i]
            if index not in job.tasks:
                return False
            try:
                context.context().update_server_def(cluster)
            except _OP_ERRORS:  # a process was lost in this moment
                return False
            return _answers(WORKER, index)


def _one_is_done(futures: Sequence[concurrent.futures.Future[Any]], timeout_s: float) -> bool:
    first = concurrent.futures.FIRST_COMPLETED
    return bool(concurrent.futures.wait(futures, timeout=timeout_s, return_when=first).done)


def _device(job: str, index: int) -> str:
    return f"/job:{job}/replica:0/task:{index}"


@contextlib.contextmanager
def _own_executor() -> Iterator[None]:
    """Lets this thread run ops by an executor of its own: all that share one get its errors."""
    made = executor.new_executor(enable_async=False)
    with context.executor_scope(made):
        yield


def _answers(job: str, index: int) -> bool:
    """Returns whether a process computes, and is the one that TensorFlow is connected to."""
    try:
        with _own_executor(), tf.device(_device(job, index)):
            tf.identity(tf.zeros([])).numpy()
    except _OP_ERRORS:
        return False
    return True
