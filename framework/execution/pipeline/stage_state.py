"""The state of a pipeline: variables of the weights and slots of every stage, on its backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution.pipeline.stage_backend import Kind, Part, StageBackend
from tekso.framework.execution.pipeline.stage_specs import StageSpecs
from tekso.framework.execution.pipeline.stages import Rows, StagePlan
from tekso.framework.execution.state import LEARNER, WEIGHTS, State
from tekso.framework.execution.step import Flat, Step
from tekso.framework.learning_step import APPLIED

_KINDS: tuple[tuple[Kind, str], ...] = (("weight", WEIGHTS), ("slot", LEARNER))

Value = Callable[[str, tuple[slice, ...]], np.ndarray]
"""`value(checkpoint key, slices)` returns a slice of the array of a key."""


class StageState:
    """Variables by stage; the counts of the learner are variables of the host.

    Args:
      stage_plan: the stages.
      step: steps of the task and the learner.
      backends: backends of the stages of every replica, [replica][stage]. The first replica stores
        the state.

    Attributes:
      stages: the variables of every stage.
    """

    def __init__(
        self, stage_plan: StagePlan, step: Step, backends: Sequence[Sequence[StageBackend]]
    ) -> None:
        self._stage_plan, self._step, self._backends = stage_plan, step, backends
        self._kept = StageSpecs(stage_plan, step.learner, step.specs)
        self.groups = self._kept.groups
        self.stages: list[State[Any]] = [State({}, {}) for _ in stage_plan.stages]
        self._counts: dict[str, tf.Variable] = {}
        homes = list(enumerate(backends[0]))
        self._read_used = [home.compiled(self._used_graph(s)) for s, home in homes]
        self._read_evaluated = [home.compiled(self._evaluated_graph(s)) for s, home in homes]

    # --- values ---

    def assign(self, value: Value) -> None:
        """Sets all variables; creates them on the first call."""
        for stage, (specs, rows) in enumerate(zip(self._kept.specs, self._kept.rows, strict=True)):
            home, found = self._backends[0][stage], []
            for i, (kind, prefix) in enumerate(_KINDS):
                variables = dict(self.stages[stage][i])
                for path, spec in specs[i].items():
                    part = _shifted(value, prefix + path, rows[i][path])
                    if path in variables:
                        home.assign(variables[path], part, spec, kind)
                    else:
                        variables[path] = home.variable(part, spec, kind)
                found.append(variables)
            self.stages[stage] = State(*found)
        for path in self._step.learner.counters():
            number = tf.constant(value(LEARNER + path, ()), self._step.specs.slots[path].dtype)
            if path in self._counts:
                self._counts[path].assign(number)
            else:
                self._counts[path] = tf.Variable(number, trainable=False)

    def whole(self) -> State[np.ndarray]:
        """Returns the whole state on the host, with the rows of all stages concatenated."""
        found: list[dict[str, np.ndarray]] = []
        for kind in range(2):
            parts: dict[str, list[np.ndarray]] = {}
            for stage, variables in enumerate(self.stages):
                for path, variable in variables[kind].items():
                    if path not in parts or self._kept.rows[stage][kind][path] is not None:
                        array = self._backends[0][stage].whole(variable)
                        parts.setdefault(path, []).append(array)
            found.append({p: a[0] if len(a) == 1 else np.concatenate(a) for p, a in parts.items()})
        counts = {path: np.asarray(v.numpy()) for path, v in self._counts.items()}
        return State(found[0], found[1] | counts)

    def counts(self) -> Flat:
        """Returns the counts of the learner."""
        return {path: variable.read_value() for path, variable in self._counts.items()}

    def set_counts(self, counts: Mapping[str, tf.Tensor]) -> None:
        """Sets the counts of the learner."""
        for path, value in counts.items():
            self._counts[path].assign(value)

    # --- weights for a step ---

    def _used_graph(self, stage: int) -> Callable[[], Flat]:
        def used() -> Flat:
            variables = self.stages[stage].weights
            return self._used(stage, {path: v.read_value() for path, v in variables.items()})

        return used

    def _evaluated_graph(self, stage: int) -> Callable[[tf.Tensor], Flat]:
        def evaluated(applied: tf.Tensor) -> Flat:
            weights, slots = self.stages[stage].map(lambda variable: variable.read_value())
            counts = {APPLIED: self._backends[0][stage].scalar_value(applied)}
            return self._used(
                stage, self._step.evaluation_weights(State(weights, {**slots, **counts}))
            )

        return evaluated

    def _used(self, stage: int, weights: Mapping[str, tf.Tensor]) -> Flat:
        own = self._kept.specs[stage].weights
        return self._backends[0][stage].used(self._step.cast(weights), own)

    def used(self) -> list[Flat]:
        """Returns the weights that every stage stores, as its layers use them, on its backend."""
        return [
            self._backends[0][s].call(self._read_used[s]) if variables.weights else {}
            for s, variables in enumerate(self.stages)
        ]

    def evaluated(self) -> list[Flat]:
        """Returns the weights that every stage stores, as evaluation uses them, on its backend."""
        applied, found = self.counts()[APPLIED], []
        for s, variables in enumerate(self.stages):
            home = self._backends[0][s]
            given = home.scalar(applied, tf.int64)
            found.append(home.call(self._read_evaluated[s], given) if variables.weights else {})
        return found

    def with_copies(self, kept: Sequence[Flat], *, replicas: int) -> dict[tuple[int, int], Flat]:
        """Returns {(replica, stage): weights that it reads}, including copies from other stages.

        Args:
          kept: weights that every stage of the first replica stores.
          replicas: number of replicas to return.
        """
        found = {}
        for replica in range(replicas):
            for stage in self._stage_plan.stages:
                backend, flat = self._backends[replica][stage.index], {}
                for path in stage.weights:
                    is_own = path in kept[stage.index]
                    owner = stage.index if is_own else self._stage_plan.owners[path][0]
                    value = kept[owner][path]
                    if not is_own or replica:
                        value = backend.take(self._backends[0][owner].send(value))
                    flat[path] = value
                found[replica, stage.index] = flat
        return found


def _shifted(value: Value, key: str, rows: Rows) -> Part:
    """Returns a function that slices the array of a key, or only some of its rows."""
    first = 0 if rows is None else rows[0]

    def part(where: tuple[slice, ...]) -> np.ndarray:
        if first:
            where = (slice(where[0].start + first, where[0].stop + first), *where[1:])
        return value(key, where)

    return part
