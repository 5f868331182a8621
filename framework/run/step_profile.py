"""`--profile_steps=a-b`: records TensorFlow's profile of some training steps, for TensorBoard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from tekso.framework import files


class StepProfile:
    """Profiles the calls that contain steps from `first` to `last`; a resumed run may skip some.

    Args:
      first: number of the first step, from 1.
      last: number of the last step.
      folder: folder for the profile; TensorBoard's profiler finds it by the logdir above.
      log: called with lines about the profile.
    """

    def __init__(self, first: int, last: int, *, folder: str, log: Callable[[str], None]) -> None:
        self._first, self._last = first, last
        self._folder, self._log = folder, log
        self._began: int | None = None
        self._ended = 0  # last step that was profiled
        self._is_done = self._is_explained = False

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._began is None and not self._is_explained:
            wanted = _steps_text(self._first, self._last)
            self._log(f"no profile was written: this process did not run {wanted}")
        self._close()

    def check_run(self, step: int, steps: int) -> None:
        """Logs why a process that continues after a step will profile nothing, if it will not.

        Args:
          step: steps done.
          steps: number of steps of the whole run.
        """
        if self._last <= step or self._first > steps:
            reason = f"{step} are done" if self._last <= step else f"run.steps is {steps}"
            wanted = _steps_text(self._first, self._last)
            self._log(f"no profile will be written of {wanted}: {reason}")
            self._is_explained = True

    @contextlib.contextmanager
    def around(self, first: int, last: int) -> Iterator[None]:
        """Profiles a call of the steps from `first` to `last`, if one of them is to be profiled."""
        if self._is_done or last < self._first:
            yield
            return
        if self._began is None:
            if first > self._last:
                self._is_done = True
                yield
                return
            files.make_folder(self._folder)
            tf.profiler.experimental.start(self._folder)
            self._began = first
        with tf.profiler.experimental.Trace("train", step_num=first, _r=1):
            yield
        self._ended = last
        if last >= self._last:
            self._close()

    def _close(self) -> None:
        """Writes the profile, if one is being recorded."""
        if self._began is None or self._is_done:
            return
        self._is_done = True
        tf.profiler.experimental.stop()
        self._log(f"profile of {_steps_text(self._began, self._ended)}: {self._folder}")


def _steps_text(first: int, last: int) -> str:
    return f"steps {first}-{last}" if last > first else f"step {first}"
