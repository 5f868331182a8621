"""The weights and slots of stages that lie on meshes: variables of the mesh of the stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.execution.base import LEARNER, WEIGHTS
from tekso.framework.execution.mesh.layouts import Layout
from tekso.framework.execution.pipeline.stage_mesh import StageMesh
from tekso.framework.execution.pipeline.stage_state import Flat, StageState
from tekso.framework.execution.pipeline.stages import StagePlan
from tekso.framework.learning_step import COUNTS
from tekso.framework.weight_spec import WeightSpec

_COUNTS = frozenset(LEARNER + path for path in COUNTS)


class MeshStageState(StageState):
    """Variables by stage and state key; the learner's counts are the host's.

    Args:
      plan: the stages.
      learner: its slots lie beside their weights.
      weight_specs: of all weights.
      meshes: that of every stage.
    """

    def __init__(
        self,
        plan: StagePlan,
        learner: Any,
        weight_specs: Mapping[str, WeightSpec],
        meshes: Sequence[StageMesh],
    ) -> None:
        super().__init__(plan, learner, weight_specs, [])
        self._meshes = meshes
        self._layouts = [self._layouts_of(i, mesh) for i, mesh in enumerate(meshes)]

    def _layouts_of(self, stage: int, mesh: StageMesh) -> dict[str, Layout]:
        """How everything that a stage keeps is stored."""
        layout = mesh.layout
        return {
            key: layout.of_stored_weight(spec) if key.startswith(WEIGHTS) else layout.of_slot(spec)
            for key, spec in self.owned_specs(stage).items()
        }

    @contextlib.contextmanager
    def on(self, stage: int) -> Iterator[None]:
        """See StageState; what is computed on a mesh is there already."""
        yield

    def assign(self, value: Callable[[str, tuple[slice, ...]], np.ndarray]) -> None:
        """See StageState; a device is given what it holds."""
        for stage, specs in enumerate(map(self.owned_specs, range(len(self._meshes)))):
            for key, spec in specs.items():
                rows, layout = self._rows[stage][key], self._layouts[stage][key]
                first = 0 if rows is None else rows[0]
                if key in _COUNTS:
                    self._set(stage, key, tf.constant(value(key, ()), spec.dtype))
                    continue

                def part(
                    where: tuple[slice, ...], key: str = key, first: int = first
                ) -> np.ndarray:
                    if first:
                        where = (slice(where[0].start + first, where[0].stop + first), *where[1:])
                    return value(key, where)

                placement = self._meshes[stage].placement
                self._set(stage, key, placement.place(part, spec.shape, layout, spec.dtype))

    def _set(self, stage: int, key: str, placed: tf.Tensor) -> None:
        variables = self._variables[stage]
        if key in variables:
            variables[key].assign(placed)
        else:
            kind = tf.Variable if key in _COUNTS else dtensor.DVariable
            variables[key] = kind(placed, trainable=False, name=key.replace("/", "."))

    def flat(self, stage: int, prefix: str) -> Flat:
        """Returns what lies on the mesh of a stage under a prefix, without it; for use in a step.

        The learner's counts are not among it.
        """
        return {
            key[len(prefix) :]: variable.read_value()
            for key, variable in self._variables[stage].items()
            if key.startswith(prefix) and key not in _COUNTS
        }

    def store(self, stage: int, values: Mapping[str, tf.Tensor]) -> None:
        """Sets some of what lies on the mesh of a stage; for use in a step."""
        placement = self._meshes[stage].placement
        for key, value in values.items():
            placed = placement.relayout(value, self._layouts[stage][key])
            self._variables[stage][key].assign(placed)

    def keeps_weights(self, stage: int) -> bool:
        """Whether a stage keeps any weight."""
        return any(key.startswith(WEIGHTS) for key in self._rows[stage])

    def learning_stages(self) -> list[int]:
        """Returns the numbers of the stages that keep a weight that is learned."""
        return [stage for stage, groups in enumerate(self.groups) if groups]

    def counts(self) -> Flat:
        """Returns the learner's counts."""
        variables = self._variables[0]
        return {path: variables[LEARNER + path].read_value() for path in COUNTS}

    def set_counts(self, counts: Mapping[str, tf.Tensor]) -> None:
        """Sets the learner's counts."""
        for path, value in counts.items():
            self._variables[0][LEARNER + path].assign(value)

    def _whole(self, key: str) -> np.ndarray:
        parts = []
        for stage, rows in enumerate(self._rows):
            if key in rows:
                value = self._variables[stage][key].read_value()
                is_count = key in _COUNTS
                placement = self._meshes[stage].placement
                parts.append(value.numpy() if is_count else placement.whole(value))
                if rows[key] is None:
                    break
        return np.asarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)
