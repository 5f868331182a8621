"""Norms, update ratios and histograms of weights by layer: `run.weight_figures_every_steps`.

    weights before a call ─► steps ─► weights after it
           └── norm of the difference / norm ──┘   = update ratio

The figures are computed on the host from the state of the program, so they are the same in every
execution. They cost two copies of the state, and do not change a step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.state import WEIGHTS
from tekso.framework.weight_spec import WeightSpec

Figures = Mapping[str, float]
Arrays = Mapping[str, np.ndarray]


class WeightFigures:
    """Compares the weights before and after every `every`-th step.

    Args:
      program: its state has the weights; all processes of a run must read it.
      every: steps between two comparisons.
      write: called with the step, {figure: value}, and the trained weights of each layer.
    """

    def __init__(
        self,
        program: ExecutionProgram,
        every: int,
        write: Callable[[int, Figures, Arrays], None],
    ) -> None:
        self._program, self._every, self._write = program, every, write

    @contextlib.contextmanager
    def around(self, first: int, last: int) -> Iterator[None]:
        """Compares the weights before and after a call, if one of its steps is due."""
        if last // self._every == (first - 1) // self._every:
            yield
            return
        before = self._layers()
        yield
        after = self._layers()
        self._write(last, figures(before, after, steps=last - first + 1), after)

    def _layers(self) -> dict[str, np.ndarray]:
        specs, found = self._program.specs(), {}
        for key, value in self._program.state().items():
            if key.startswith(WEIGHTS) and specs[key].trainable:
                found.update(by_layer(specs[key], value))
        return found


def by_layer(spec: WeightSpec, value: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the weight of each layer of a stack by its path in an unrolled stack.

    Shapes:
      value: the shape of `spec`
      returns: {path: the shape of `spec` without its stack dims}
    """
    if not spec.stacked:
        return {spec.path: value}
    indices = itertools.product(*map(range, spec.shape[: spec.stacked]))
    return {spec.path_of_layer(index): value[index] for index in indices}


def figures(before: Arrays, after: Arrays, *, steps: int = 1) -> dict[str, float]:
    """Returns the norm of every weight, and its update ratio per step.

    Args:
      before: weights by path.
      after: the same weights some steps later.
      steps: number of these steps; the update ratio is divided by it.

    Returns: {"norm/PATH": norm after the steps, "update_ratio/PATH": norm of the change divided by
      the norm before, per step; 0 / 0 is 0}.
    """
    found = {}
    for path, value in after.items():
        old, new = before[path].astype(np.float64), value.astype(np.float64)
        change, norm = float(np.linalg.norm(new - old)), float(np.linalg.norm(old))
        found[f"norm/{path}"] = float(np.linalg.norm(new))
        ratio = change / norm if norm else float("inf")
        found[f"update_ratio/{path}"] = ratio / steps if change else 0.0
    return found
