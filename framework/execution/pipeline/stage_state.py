"""The state of a pipeline: variables of the weights and slots of every stage, on its backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution.pipeline.stage_backend import Kind, Part, StageBackend
from tekso.framework.execution.pipeline.stage_specs import StageSpecs
from tekso.framework.execution.pipeline.stages import Rows, StagePlan
from tekso.framework.execution.shards import (
    Shard,
    Slices,
    chunks,
    cut_out,
    is_sliceable,
    of_arrays,
)
from tekso.framework.execution.state import ReadKey
from tekso.framework.learning_step import APPLIED
from tekso.framework.state import LEARNER, WEIGHTS, State
from tekso.framework.step import Flat, Step
from tekso.framework.weight_spec import WeightSpec

_KINDS: tuple[tuple[Kind, str], ...] = (("weight", WEIGHTS), ("slot", LEARNER))


class StageState:
    """Variables by stage; the counts of the learner are variables of the host.

    Args:
      stage_plan: the stages.
      step: steps of the task and the learner.
      backends: backends of the stages of every replica, [replica][stage]. The first replica stores
        the state.

    Attributes:
      stages: the variables of every stage.
      trained: for every stage, the weights that it updates.
    """

    def __init__(
        self, stage_plan: StagePlan, step: Step, backends: Sequence[Sequence[StageBackend]]
    ) -> None:
        self._stage_plan, self._step, self._backends = stage_plan, step, backends
        self._by_stage = StageSpecs(stage_plan, step.learner, step.specs)
        self.trained = self._by_stage.trained
        self.stages: list[State[Any]] = [State({}, {}) for _ in stage_plan.stages]
        self._counts: dict[str, tf.Variable] = {}
        stages = list(enumerate(backends[0]))
        self._read_used = [b.compiled(self._used_graph(s)) for s, b in stages]
        self._read_evaluated = [b.compiled(self._evaluated_graph(s)) for s, b in stages]

    # --- values ---

    def assign(self, value: ReadKey, keys: Set[str] | None = None) -> None:
        """Sets the variables of some keys; None: of all, and creates them on the first call."""
        own = zip(self._backends[0], self._by_stage.specs, self._by_stage.rows, strict=True)
        for stage, (backend, specs, rows) in enumerate(own):
            found = []
            for i, (kind, prefix) in enumerate(_KINDS):
                variables = dict(self.stages[stage][i])
                for path, spec in specs[i].items():
                    if keys is not None and prefix + path not in keys:
                        continue
                    part = _shifted(value, prefix + path, rows[i][path])
                    if path in variables:
                        backend.assign(variables[path], part, spec, kind)
                    else:
                        variables[path] = backend.variable(part, spec, kind)
                found.append(variables)
            self.stages[stage] = State(*found)
        for path in self._step.learner.counters():
            if keys is not None and LEARNER + path not in keys:
                continue
            number = tf.constant(value(LEARNER + path, ()), self._step.specs.slots[path].dtype)
            if path in self._counts:
                self._counts[path].assign(number)
            else:
                self._counts[path] = tf.Variable(number, trainable=False)

    def shards(self) -> Iterator[Shard]:
        """Yields the state in chunks; of a stacked weight, every stage has its rows."""
        specs, seen = self._step.specs.keyed(), set()
        for stage, i in itertools.product(range(len(self.stages)), range(len(_KINDS))):
            backend, (kind, prefix) = self._backends[0][stage], _KINDS[i]
            for path, variable in self.stages[stage][i].items():
                key, rows = prefix + path, self._by_stage.rows[stage][i][path]
                if rows is None and key in seen:
                    continue
                seen.add(key)
                spec = self._by_stage.specs[stage][i][path]
                for where, shard in backend.shards(variable, spec, kind):
                    of = _moved(where, rows[0] if rows is not None else 0)
                    yield from _chunks(key, specs[key], shard, of)
        for path, count in self._counts.items():
            yield from _chunks(LEARNER + path, specs[LEARNER + path], count.read_value(), ())

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
        own = self._by_stage.specs[stage].weights
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
            backend = self._backends[0][s]
            given = backend.scalar(applied, tf.int64)
            found.append(backend.call(self._read_evaluated[s], given) if variables.weights else {})
        return found

    def with_copies(self, stored: Sequence[Flat], *, replicas: int) -> dict[tuple[int, int], Flat]:
        """Returns {(replica, stage): weights that it reads}, including copies from other stages.

        Args:
          stored: weights that every stage of the first replica stores.
          replicas: number of replicas to return.
        """
        found = {}
        for replica in range(replicas):
            for stage in self._stage_plan.stages:
                backend, flat = self._backends[replica][stage.index], {}
                for path in stage.weights:
                    is_own = path in stored[stage.index]
                    owner = stage.index if is_own else self._stage_plan.owners[path][0]
                    value = stored[owner][path]
                    if not is_own or replica:
                        value = backend.take(self._backends[0][owner].send(value))
                    flat[path] = value
                found[replica, stage.index] = flat
        return found


def _shifted(value: ReadKey, key: str, rows: Rows) -> Part:
    """Returns a function that slices the array of a key, or only some of its rows."""
    first = 0 if rows is None else rows[0]

    def part(where: Slices) -> np.ndarray:
        return value(key, _moved(where, first))

    return part


def _moved(where: Slices, rows: int) -> Slices:
    """Returns slices moved along dim 0."""
    if not rows:
        return where
    return (slice(where[0].start + rows, where[0].stop + rows), *where[1:])


def _chunks(key: str, spec: WeightSpec, shard: tf.Tensor, of: Slices) -> Iterator[Shard]:
    """Yields the chunks of a shard; `of` is its position."""
    return chunks(key, spec.shape, spec.dtype, lambda where: cut_out(shard, where, of), of)


def storable(shards: Iterable[Shard]) -> Iterator[Shard]:
    """Yields the shards of this process; joins those that cannot be stored in several chunks."""
    apart = []
    for shard in shards:
        if is_sliceable(shard.dtype) or shard.is_whole:
            yield shard
        else:
            apart.append(shard)
    yield from of_arrays(assembled(apart))


def assembled(shards: Iterable[Shard]) -> dict[str, np.ndarray]:
    """Returns whole arrays of a state whose shards are all in this process."""
    state: dict[str, np.ndarray] = {}
    for shard in shards:
        if shard.key not in state:
            dtype = tf.as_dtype(shard.dtype).as_numpy_dtype
            state[shard.key] = np.empty(shard.shape, dtype)
        state[shard.key][shard.where] = np.asarray(shard.read())
    return state
