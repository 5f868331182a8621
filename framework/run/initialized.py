"""Initialized: where one weight of a new run comes from, and its values, read slice by slice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tekso.framework.execution.shards import Slices
from tekso.framework.run.checkpoint_errors import DamagedCheckpointError
from tekso.framework.run.warm_start_sources import WarmStartError
from tekso.framework.run.weight_files import StoredWeights
from tekso.framework.run.weights import Use, weight_key
from tekso.framework.state import WEIGHTS
from tekso.framework.weight_spec import WeightSpec


@dataclasses.dataclass(frozen=True)
class Initialized:
    """Where one weight of a new run comes from.

    Attributes:
      spec: of the weight.
      name: of the source in `run.warm_start`; "" if the weight keeps its initial value.
      keys: paths in the checkpoint: one, or one for each layer of a stack.
      row: which layer of a stack in the checkpoint; None: the weight is none of a stack there.
      shape: in the checkpoint.
    """

    spec: WeightSpec
    name: str = ""
    keys: tuple[str, ...] = ()
    row: int | None = None
    shape: tuple[int, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether only a part of the weight is taken from the checkpoint."""
        return bool(self.name) and self.shape != self.spec.shape

    def value(
        self,
        source: StoredWeights,
        use: Use,
        where: Slices,
        *,
        initial: Callable[[Slices], np.ndarray],
    ) -> np.ndarray:
        """Returns a slice of the weight; reads little more than this slice.

        Args:
          source: the checkpoint.
          use: which weights of the checkpoint.
          where: the slice.
          initial: returns a slice of the initial value that the weight has without a checkpoint.

        Raises:
          WarmStartError: a value is not finite.
          DamagedCheckpointError: bytes of the checkpoint have changed.
        """
        common = tuple(
            slice(min(s.start, size), min(s.stop, size))
            for s, size in zip(where, self.shape, strict=True)
        )
        if any(s.start == s.stop for s in common):  # the slice is beyond what is stored
            return initial(where)
        try:
            found = self._stored(source, use, common)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"run.warm_start.{self.name}.checkpoint: {source.path} is damaged: {error}. Name "
                "an earlier checkpoint of the run"
            ) from error
        if not np.isfinite(found).all():
            raise WarmStartError(
                f"{' and '.join(self.keys[:2])} of {source.path} has values that are not finite: "
                "take an earlier checkpoint"
            )
        found = found.astype(tf.as_dtype(self.spec.dtype).as_numpy_dtype, copy=False)
        if common == where:
            return found
        value = np.array(initial(where))
        value[tuple(slice(s.stop - s.start) for s in common)] = found
        return value

    def _stored(self, source: StoredWeights, use: Use, where: Slices) -> np.ndarray:
        """Reads a slice; the layers of a stack may be tensors of their own."""

        def part(path: str, where: Slices) -> np.ndarray:
            return source.read_slice(weight_key(path, source.read, source.keys, use), where)

        if self.row is not None:
            found: np.ndarray = part(self.keys[0], (slice(self.row, self.row + 1), *where))[0]
            return found
        stacks = len(where) - len(source.shape(WEIGHTS + self.keys[0]))
        if not stacks:
            return part(self.keys[0], where)
        numbers = np.arange(len(self.keys)).reshape(self.shape[:stacks])[where[:stacks]]
        layers = [part(self.keys[i], where[stacks:]) for i in numbers.ravel().tolist()]
        return np.stack(layers).reshape([s.stop - s.start for s in where])
