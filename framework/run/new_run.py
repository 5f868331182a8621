"""Writes the folder of a new run that begins with given weights, without building its program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import files, schedules
from tekso.framework.experiment import Tree
from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoints import CheckpointError, Checkpoints, Description
from tekso.framework.run.logdir import Logdir
from tekso.framework.state import State
from tekso.framework.weight_spec import WeightSpec


@dataclasses.dataclass(frozen=True)
class NewRun:
    """An experiment and the weights that it begins with.

    Attributes:
      model: key of the experiment.
      tree: its Params.
      registered: its Params as registered.
      task: the task, built from the Params, with all sizes.
      weights: {path: weight} of the task.
    """

    model: str
    tree: Tree.Params
    registered: Tree.Params
    task: Any
    weights: Mapping[str, np.ndarray]

    def write(self, logdir: str, *, command: Sequence[str], assets: str = "") -> str:
        """Writes the folder of the run with a checkpoint of step 0; returns the checkpoint's path.

        The state of the learner is its initial state.

        Args:
          logdir: a folder that contains no run.
          command: the command that made the run, for command.txt.
          assets: folder with the tokenizers of the run; "": none.

        Raises:
          CheckpointError: the folder contains a run, the learner does not fit the task, weights
            are missing, unknown or of other shapes, or the checkpoint cannot be written.
          LogdirError: the folder cannot be made.
        """
        specs = self._specs()
        keyed = specs.keyed()
        seed = self.tree.run.seed
        state: dict[str, np.ndarray] = State(
            {path: self._weight(path, spec) for path, spec in specs.weights.items()},
            {path: spec.initial_value(seed) for path, spec in specs.slots.items()},
        ).keyed()
        place = Logdir(logdir)
        if place.model() is not None or Checkpoints(place.checkpoints).steps():
            raise CheckpointError(f"{place.path} contains a run already: give a new folder")
        description = Description(
            step=0,
            model=self.model,
            params=self.tree.to_text(),
            task=self.task.params.to_text(),
            input={"seed": seed, "position": 0},
            tensors={key: spec.described() for key, spec in keyed.items()},
        )
        place.claim(self.model)
        try:
            files.make_folder(place.checkpoints)
            path = Checkpoints(place.checkpoints).path(0)
            checkpoint_files.write(path, state, description)
            if assets and files.exists(assets):
                files.copy_folder(assets, place.assets)
            place.add_command(command)
            place.write_params(self.model, self.tree, self.registered)  # last: now it is a run
        finally:
            place.release()
        return path

    def _specs(self) -> State[Any]:
        specs = self.task.specs()
        learner = schedules.end_with_run(self.tree.learner, self.tree.run.steps).instantiate()
        try:
            slots = learner.slots(specs)
        except ValueError as error:
            raise CheckpointError(
                f"the learner does not fit the model: {error}. Change it by --set learner.…"
            ) from error
        problems = [f"missing {path}" for path in specs if path not in self.weights]
        problems += [f"unknown {path}" for path in self.weights if path not in specs]
        problems += [
            f"{path} is {list(self.weights[path].shape)}, must be {list(spec.shape)}"
            for path, spec in specs.items()
            if path in self.weights and self.weights[path].shape != spec.shape
        ]
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(
                f"the weights do not fit {self.model}: {'; '.join(problems[:8])}{more}"
            )
        return State(specs, slots)

    def _weight(self, path: str, spec: WeightSpec) -> np.ndarray:
        value = self.weights[path].astype(tf.as_dtype(spec.dtype).as_numpy_dtype)
        if not np.isfinite(value.astype(np.float64)).all():
            raise CheckpointError(f"{path} has values that are not finite")
        return value
