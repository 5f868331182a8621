"""Which task trains in a step: a pure function of the seed and the step, by weights of the tasks.

Step s has the number u(s) = (s · golden ratio + shift) mod 1 (see mixtures.py). The tasks divide
[0, 1) in proportion to their weights in that step, and the step belongs to the task whose interval
contains u(s). These numbers are evenly spread: a task with a share of 0.1 trains about every tenth
step, and never waits long, however much data the others have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.errors import InputError
from tekso.framework.params import REQUIRED, Configurable, param

_ROTATION = 2654435769  # 2**32 divided by the golden ratio
_TURN = 1 << 32
_BLOCK = 1 << 16  # steps that are computed together

Floats = npt.NDArray[np.float64]


class Mixing(Configurable):
    """Base class: the share of every task in the steps of a run."""

    class Params(Configurable.Params):
        """Params of a mixing."""

    def shares(self, steps: npt.NDArray[np.int64], sizes: Mapping[str, int | None]) -> Floats:
        """Returns relative weights of the tasks in some steps.

        Args:
          steps: the steps.
          sizes: {task: number of examples of its data; None: unknown}, in the order of the tasks.

        Shapes:
          steps: [n]
          returns: [n, tasks], not negative
        """
        raise NotImplementedError(f"{type(self).__name__} has no shares()")

    def check(self, sizes: Mapping[str, int | None]) -> None:
        """Checks the Params, given the tasks and the sizes of their data.

        Raises:
          InputError: the Params do not fit; or a task would never be trained.
        """

    def _where(self, name: str) -> str:
        path: str = self.params.path_of(name)
        return path

    def _check_weights(self, name: str, weights: Mapping[str, float], tasks: Sequence[str]) -> None:
        """Raises an InputError for an unknown task, or a weight that is negative or infinite."""
        for task, weight in weights.items():
            if task not in tasks:
                raise InputError(
                    f"{self._where(name)} names {task!r}, but the tasks are {', '.join(tasks)}"
                )
            if not weight >= 0 or math.isinf(weight):
                raise InputError(
                    f"{self._where(name)}: the weight of {task!r} is {weight}, but must be a "
                    "number from 0"
                )


class ByWeight(Mixing):
    """Shares in proportion to fixed weights."""

    class Params(Mixing.Params):
        """Params of ByWeight."""

        weights: dict[str, float] = param(
            "{task: relative weight}. Tasks that are not named have the weight 1.", default={}
        )

    def check(self, sizes: Mapping[str, int | None]) -> None:
        """See Mixing."""
        weights = dict(self.params.weights)
        self._check_weights("weights", weights, list(sizes))
        for task in sizes:
            if weights.get(task, 1.0) == 0:
                raise InputError(
                    f"{self._where('weights')}: the weight of {task!r} is 0, so it would never be "
                    "trained: give it a weight above 0, or remove the task"
                )

    def shares(self, steps: npt.NDArray[np.int64], sizes: Mapping[str, int | None]) -> Floats:
        """See Mixing."""
        weights = [float(self.params.weights.get(task, 1.0)) for task in sizes]
        return np.tile(np.array(weights), (len(steps), 1))


class ByTemperature(Mixing):
    """Shares by the amount of data: p_i proportional to n_i^(1 / T).

    T = 1 trains every example equally often. A larger T gives tasks with little data a larger
    share; with an infinite T all tasks have the same.

    Source: Arivazhagan et al. 2019 (arXiv 1907.05019), section 4.2.
    """

    class Params(Mixing.Params):
        """Params of ByTemperature."""

        temperature: float = param("T, above 0.", default=5.0)
        sizes: dict[str, int] = param(
            "{task: n_i}. Tasks that are not named: the number of examples of their input.",
            default={},
        )

    def check(self, sizes: Mapping[str, int | None]) -> None:
        """See Mixing."""
        p = self.params
        if not p.temperature > 0:
            raise InputError(
                f"{self._where('temperature')} is {p.temperature}, but must be above 0"
            )
        self._check_weights("sizes", p.sizes, list(sizes))
        for task, size in sizes.items():
            if p.sizes.get(task, size) is None:
                raise InputError(
                    f"{self._where('sizes')}: the input of {task!r} does not know its number of "
                    f"examples; set {self._where('sizes')}[{task!r}]"
                )
            if not p.sizes.get(task, size):
                raise InputError(
                    f"{self._where('sizes')}: {task!r} has no examples, so it is never trained"
                )

    def shares(self, steps: npt.NDArray[np.int64], sizes: Mapping[str, int | None]) -> Floats:
        """See Mixing."""
        p = self.params
        counts = np.array([float(p.sizes.get(task, size) or 0) for task, size in sizes.items()])
        return np.tile((counts / counts.max()) ** (1.0 / p.temperature), (len(steps), 1))


class BySteps(Mixing):
    """Shares that change over the run: linear between given points, constant outside of them."""

    class Params(Mixing.Params):
        """Params of BySteps."""

        steps: list[int] = param("Steps of the points, ascending.", default=REQUIRED)
        weights: list[dict[str, float]] = param(
            "{task: relative weight} of every point. Tasks that are not named have the weight 0.",
            default=REQUIRED,
        )

    def check(self, sizes: Mapping[str, int | None]) -> None:
        """See Mixing."""
        p = self.params
        steps, weights = list(p.steps), [dict(point) for point in p.weights]
        if not steps or len(steps) != len(weights) or steps != sorted(set(steps)):
            raise InputError(
                f"{self._where('steps')} is {steps}, with {len(weights)} points in "
                f"{self._where('weights')}: give one point for each step, in ascending order"
            )
        for number, (step, point) in enumerate(zip(steps, weights, strict=True)):
            self._check_weights("weights", point, list(sizes))
            if not sum(point.values()):
                raise InputError(
                    f"{self._where('weights')}[{number}]: all weights are 0 at step {step}, so "
                    "there is nothing to train"
                )
        for task in sizes:
            if not any(point.get(task, 0.0) for point in weights):
                raise InputError(
                    f"{self._where('weights')}: the weight of {task!r} is 0 at every point, so it "
                    "would never be trained: give it a weight above 0, or remove the task"
                )

    def shares(self, steps: npt.NDArray[np.int64], sizes: Mapping[str, int | None]) -> Floats:
        """See Mixing."""
        p = self.params
        columns = [
            np.interp(steps, list(p.steps), [point.get(task, 0.0) for point in p.weights])
            for task in sizes
        ]
        return np.stack(columns, 1)


class TaskOrder:
    """The task of every step, and how often it was trained before.

    Args:
      mixing: shares of the tasks.
      sizes: {task: number of examples of its data}.
      seed: seed of the run.
    """

    def __init__(self, mixing: Mixing, sizes: Mapping[str, int | None], *, seed: int) -> None:
        self._mixing, self._sizes = mixing, dict(sizes)
        self._shift = int(shuffle.key_of(seed, "tasks")[0]) % _TURN
        self._before = [np.zeros(len(sizes), np.int64)]  # counts before every block
        self._block: tuple[int, npt.NDArray[np.int64]] | None = None

    def place(self, step: int) -> tuple[str, int]:
        """Returns the task of a step, and its number of earlier steps."""
        number, inside = divmod(step, _BLOCK)
        while len(self._before) <= number:
            done = self._tasks(len(self._before) - 1)
            self._before.append(self._before[-1] + np.bincount(done, minlength=len(self._sizes)))
        tasks = self._tasks(number)
        task = int(tasks[inside])
        earlier = int(self._before[number][task] + np.count_nonzero(tasks[:inside] == task))
        return list(self._sizes)[task], earlier

    def _tasks(self, number: int) -> npt.NDArray[np.int64]:
        """Returns the tasks of all steps of a block."""
        if self._block is None or self._block[0] != number:
            steps = np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.int64)
            turns = (steps.astype(np.uint64) * np.uint64(_ROTATION) + np.uint64(self._shift)) % (
                np.uint64(_TURN)
            )
            shares = self._mixing.shares(steps, self._sizes)
            ends = np.cumsum(shares, 1) / shares.sum(1, keepdims=True)
            u = turns.astype(np.float64) / _TURN
            tasks = np.minimum((ends <= u[:, None]).sum(1), len(self._sizes) - 1)
            self._block = number, tasks
        return self._block[1]
