"""The weights and slots of the stages: variables on the device of the stage that keeps them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution.base import LEARNER, WEIGHTS
from tekso.framework.execution.pipeline.piece_traces import rows_of
from tekso.framework.execution.pipeline.stages import Rows, StagePlan
from tekso.framework.learning_step import COUNTS
from tekso.framework.weight_spec import WeightSpec

Flat = dict[str, tf.Tensor]


class StageState:
    """Variables by stage and state key.

    Args:
      plan: the stages.
      learner: its slots lie beside their weights; its counts are with the first stage.
      weight_specs: of all weights.
      devices: the device of every stage.
    """

    def __init__(
        self,
        plan: StagePlan,
        learner: Any,
        weight_specs: Mapping[str, WeightSpec],
        devices: Sequence[str],
    ) -> None:
        self._devices = devices
        slots = learner.slots(weight_specs)
        self.specs = {WEIGHTS + path: spec for path, spec in weight_specs.items()}
        self.specs |= {LEARNER + path: spec for path, spec in slots.items()}
        groups = learner.groups(weight_specs)
        self.groups: list[dict[str, Any]] = []
        self._rows: list[dict[str, Rows]] = []
        for stage in plan.stages:
            owned = plan.owned(stage.index)
            rows = {WEIGHTS + path: r for path, r in owned.items()}
            of_stage = {}
            for name, (own_learner, specs) in groups.items():
                own = {p: rows_of(spec, owned[p]) for p, spec in specs.items() if p in owned}
                if own:
                    of_stage[name] = (own_learner, own)
                for path, spec in own.items():
                    for made in own_learner.slots_of(spec).values():
                        is_cut = made.shape != slots[made.path].shape
                        rows[LEARNER + made.path] = owned[path] if is_cut else None
            if stage.index == 0:
                rows |= dict.fromkeys((LEARNER + path for path in COUNTS), None)
            self.groups.append(of_stage)
            self._rows.append(rows)
        self._variables: list[dict[str, tf.Variable]] = [{} for _ in plan.stages]
        self._reads: dict[tuple[int, str], Callable[[], Flat]] = {}

    @contextlib.contextmanager
    def on(self, stage: int) -> Iterator[None]:
        """Computes on the device of a stage."""
        with tf.device(self._devices[stage]):
            yield

    def owned_specs(self, stage: int) -> dict[str, WeightSpec]:
        """Returns {state key: spec, with the rows that the stage has} of what it keeps."""
        return {key: rows_of(self.specs[key], r) for key, r in self._rows[stage].items()}

    def assign(self, value: Callable[[str, tuple[slice, ...]], np.ndarray]) -> None:
        """Sets everything: `value(key, slices)` is asked once for every part."""
        for stage, rows in enumerate(self._rows):
            for key, own in rows.items():
                spec = self.specs[key]
                slices = [slice(0, n) for n in spec.shape]
                if own is not None:
                    slices[0] = slice(*own)
                part = value(key, tuple(slices))
                if key in self._variables[stage]:
                    self._variables[stage][key].assign(part)
                else:
                    with self.on(stage):
                        self._variables[stage][key] = tf.Variable(
                            part, dtype=spec.dtype, trainable=False, name=key.replace("/", ".")
                        )

    def variables(self, stage: int) -> Mapping[str, tf.Variable]:
        """Returns the variables of what a stage keeps, by state key."""
        return self._variables[stage]

    def read(self, stage: int, prefix: str) -> Flat:
        """Returns what a stage keeps under a prefix, without the prefix: by one call."""
        if (stage, prefix) not in self._reads:
            self._reads[stage, prefix] = all_read(
                {
                    key[len(prefix) :]: variable
                    for key, variable in self._variables[stage].items()
                    if key.startswith(prefix)
                }
            )
        with self.on(stage):
            return self._reads[stage, prefix]()

    def whole(self) -> dict[str, np.ndarray]:
        """Returns everything on the host, rows put together."""
        return {key: self._whole(key) for key in self.specs}

    def _whole(self, key: str) -> np.ndarray:
        holders = [stage for stage, rows in enumerate(self._rows) if key in rows]
        parts = [self._variables[stage][key].numpy() for stage in holders]
        if self._rows[holders[0]][key] is None:
            return np.asarray(parts[0])
        return np.concatenate(parts)


def all_read(variables: Mapping[str, tf.Variable]) -> Callable[[], Flat]:
    """Returns a compiled function that reads all of these."""

    def read() -> Flat:
        found = {}
        for path, variable in variables.items():
            with tf.device(variable.device):  # and not where the caller happens to be
                found[path] = variable.read_value()
        return found

    return tf.function(read, autograph=False)
