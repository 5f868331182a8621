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
        self._is_done = False

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._began is None:
            steps = f"{self._first} to {self._last}"
            self._log(f"no profile was written: this process ran none of the steps {steps}")
        self._close("the last")

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
        if last >= self._last:
            self._close(str(last))

    def _close(self, last: str) -> None:
        """Writes the profile, if one is being recorded; `last` is the last of its steps."""
        if self._began is None or self._is_done:
            return
        self._is_done = True
        tf.profiler.experimental.stop()
        self._log(f"profile of steps {self._began}-{last}: {self._folder}")
