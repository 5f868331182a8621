"""Backends that run the stages of a pipeline.

A stage runs on one device (`DeviceBackend`) or on a mesh of devices (`MeshBackend`, see
mesh_backend.py). Its functions take and return tensors of its backend; `send` and `take` move a
tensor to another backend. The rest of a pipeline is the same for both.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tekso.framework.context import Examples, StepContext
from tekso.framework.execution.shards import Slices, whole
from tekso.framework.execution.workarounds.call_counts import counted_alone
from tekso.framework.primitives.fusion import Fuse, SharedTraces, XlaFusion, no_fusion
from tekso.framework.step import Flat
from tekso.framework.weight_spec import WeightSpec

Kind = Literal["weight", "slot"]
"""What a variable stores; a mesh may shard slots more finely than weights."""

Part = Callable[[tuple[slice, ...]], np.ndarray]
"""Returns a slice of an array."""

Specs = Mapping[str, WeightSpec]


class StageBackend(abc.ABC):
    """The device or devices that run one stage of one replica.

    Attributes:
      name: name for messages.
      device: device on which the results of `gather` are used.
      fuse: compiles elementwise clusters of the forward and backward pass of the stage.
      fuse_update: compiles the updates of its weights.
    """

    name: str
    device: str
    fuse: Fuse
    fuse_update: Fuse

    # --- tensors, from the host ---

    @abc.abstractmethod
    def put(self, array: np.ndarray | tf.Tensor) -> tf.Tensor:
        """Places an array of a batch, whose dim 0 counts examples."""

    @abc.abstractmethod
    def scalar(self, value: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor:
        """Places a number or an ordinary scalar tensor in the form of `scalar_spec`."""

    @abc.abstractmethod
    def spread(self, x: tf.Tensor) -> tf.Tensor:
        """Places an ordinary tensor; every device gets all of it."""

    @abc.abstractmethod
    def send(self, x: tf.Tensor) -> Any:
        """Returns a tensor of this backend in the form that `take` of another backend accepts."""

    @abc.abstractmethod
    def take(self, sent: Any) -> tf.Tensor:
        """Places a tensor sent by another backend of this kind; it keeps its layout."""

    @abc.abstractmethod
    def local(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a replicated tensor of this backend as an ordinary one."""

    @abc.abstractmethod
    def gather(self, x: tf.Tensor) -> tf.Tensor:
        """Returns any tensor of this backend, gathered, as an ordinary one."""

    # --- variables ---

    @abc.abstractmethod
    def variable(self, part: Part, spec: WeightSpec, kind: Kind) -> tf.Variable:
        """Returns a new variable; every device gets its shard of the value."""

    @abc.abstractmethod
    def assign(self, variable: tf.Variable, part: Part, spec: WeightSpec, kind: Kind) -> None:
        """Assigns a value to a variable that `variable` returned."""

    @abc.abstractmethod
    def read(self, variable: tf.Variable) -> tf.Tensor:
        """Returns the value of a variable; only for use outside of compiled functions."""

    @abc.abstractmethod
    def shards(
        self, variable: tf.Variable, spec: WeightSpec, kind: Kind
    ) -> Iterator[tuple[Slices, tf.Tensor]]:
        """Yields the distinct shards of a variable: where they are, and their present values."""

    # --- functions ---

    @abc.abstractmethod
    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of tensors of this backend, traced once for inputs of one shape."""

    @abc.abstractmethod
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a compiled function; returns its result when it is computed."""

    @abc.abstractmethod
    def trace(self, function: Callable[..., Any], *args: Any) -> None:
        """Traces a compiled function without running it, if the backend can do so."""

    @abc.abstractmethod
    def check(self, graph: tf.Graph) -> None:
        """Rejects a traced graph with ops that this backend does not support.

        Raises:
          ExecutionError: names the line of such an op.
        """

    # --- in the graph of a function ---

    @abc.abstractmethod
    def scalar_spec(self, dtype: tf.DType) -> tf.TensorSpec:
        """Returns the spec of a scalar argument of a function."""

    @abc.abstractmethod
    def scalar_value(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a scalar argument of a function as a tensor of shape []."""

    @abc.abstractmethod
    def condition(self, x: tf.Tensor) -> tf.Tensor:
        """Returns such an argument as a condition for `select` of weight_update.py."""

    @abc.abstractmethod
    def context(self, weights: Flat, specs: Specs, examples: Examples) -> StepContext:
        """Returns the context of some examples of a batch.

        Args:
          weights: weights that the stage reads, {path: tensor}.
          specs: specs of these weights; of stacked weights, only the rows of the stage.
          examples: the examples.
        """

    @abc.abstractmethod
    def used(self, weights: Flat, specs: Specs) -> Flat:
        """Returns stored weights as the layers use them."""

    @abc.abstractmethod
    def stored(self, x: tf.Tensor, spec: WeightSpec, kind: Kind) -> tf.Tensor:
        """Returns a value sharded as a variable of this kind."""

    @abc.abstractmethod
    def replicated(self, x: tf.Tensor) -> tf.Tensor:
        """Returns a tensor replicated on every device."""


class DeviceBackend(StageBackend):
    """One device, of this process or of another one.

    Args:
      device: name of the device.
      compiles: whether XLA compiles elementwise clusters.
    """

    def __init__(self, device: str, *, compiles: bool) -> None:
        self.name = self.device = device
        self.fuse = XlaFusion() if compiles else no_fusion
        self.fuse_update = self.fuse if compiles else SharedTraces()

    def put(self, array: np.ndarray | tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        with tf.device(self.name):
            return tf.identity(tf.convert_to_tensor(array))

    def scalar(self, value: tf.Tensor | float, dtype: tf.DType) -> tf.Tensor:
        """See `StageBackend`."""
        with tf.device(self.name):
            return tf.identity(tf.convert_to_tensor(value, dtype))

    def spread(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return self.take(x)

    def send(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return x

    def take(self, sent: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        with tf.device(self.name):  # TensorFlow splits a function with inputs of several devices
            return tf.identity(sent)

    def local(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return x

    def gather(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return x

    def variable(self, part: Part, spec: WeightSpec, kind: Kind) -> tf.Variable:
        """See `StageBackend`."""
        name = spec.path.replace("/", ".")
        with tf.device(self.name):
            return tf.Variable(_all(part, spec), dtype=spec.dtype, trainable=False, name=name)

    def assign(self, variable: tf.Variable, part: Part, spec: WeightSpec, kind: Kind) -> None:
        """See `StageBackend`."""
        variable.assign(_all(part, spec))

    def read(self, variable: tf.Variable) -> tf.Tensor:
        """See `StageBackend`."""
        with tf.device(self.name):
            return variable.read_value()

    def shards(
        self, variable: tf.Variable, spec: WeightSpec, kind: Kind
    ) -> Iterator[tuple[Slices, tf.Tensor]]:
        """See `StageBackend`."""
        yield whole(spec.shape), self.read(variable)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `StageBackend`."""
        compiled: Callable[..., Any] = counted_alone(tf.function(function, autograph=False))
        return compiled

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `StageBackend`."""
        with tf.device(self.name):
            return function(*args)

    def trace(self, function: Callable[..., Any], *args: Any) -> None:
        """See `StageBackend`."""
        with tf.device(self.name):
            function.get_concrete_function(*args)  # type: ignore[attr-defined]

    def check(self, graph: tf.Graph) -> None:
        """See `StageBackend`; a device supports all ops."""

    def scalar_spec(self, dtype: tf.DType) -> tf.TensorSpec:
        """See `StageBackend`."""
        return tf.TensorSpec((), dtype)

    def scalar_value(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return x

    def condition(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return x

    def context(self, weights: Flat, specs: Specs, examples: Examples) -> StepContext:
        """See `StageBackend`."""
        return StepContext(fuse=self.fuse, **examples.arguments())

    def used(self, weights: Flat, specs: Specs) -> Flat:
        """See `StageBackend`."""
        return weights

    def stored(self, x: tf.Tensor, spec: WeightSpec, kind: Kind) -> tf.Tensor:
        """See `StageBackend`."""
        return x

    def replicated(self, x: tf.Tensor) -> tf.Tensor:
        """See `StageBackend`."""
        return tf.convert_to_tensor(x)


def _all(part: Part, spec: WeightSpec) -> np.ndarray:
    return part(whole(spec.shape))
