"""Base classes: `Execution` distributes steps over devices, `ExecutionProgram` runs a task so."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import batch_part
from tekso.framework.batch_part import BatchPart, RowsOf
from tekso.framework.cluster import Cluster
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.shards import Shard, Slices
from tekso.framework.execution.state import ReadKey, Stored, checked_state
from tekso.framework.execution.update_gate import UpdateGate
from tekso.framework.learning_step import LearnerBase
from tekso.framework.params import Configurable
from tekso.framework.signature import Signature
from tekso.framework.step import Step
from tekso.framework.symbolic import specs_of
from tekso.framework.task import Task
from tekso.framework.weight_spec import WeightSpec

Batch = Mapping[str, np.ndarray]


class Execution(Configurable, abc.ABC):
    """Base class of the executions."""

    class Params(Configurable.Params):
        """Params of an execution."""

    batches_differ: bool = False
    """Whether the batches of the training input differ in their number of examples; set it before
    `build`."""

    def join(self, cluster: Cluster) -> None:
        """Makes this process part of a cluster; call it before `setup_devices`.

        Raises:
          ExecutionError: this execution supports only one process.
        """
        raise ExecutionError(
            f"{type(self).__name__} runs in one process, but {cluster.source} defines "
            f"{cluster.size}: set --execution=data_parallel or mesh_sharded, or "
            "--cluster=none for independent runs"
        )

    def expect(self, task: Configurable.Params) -> None:
        """Sets the task for which `setup_devices` chooses threads; called before it.

        Args:
          task: Params of the task, possibly without the values that only its data determines.
        """
        del task

    @abc.abstractmethod
    def setup_devices(self, *, tpu: str | None = None, cpu_devices: int | None = None) -> None:
        """Sets up threads and devices; call it before any TensorFlow operation.

        If TensorFlow has already run in this process, its threads stay as they are.

        Args:
          tpu: name or address of a TPU; None: local GPUs, or the CPU if there are none.
          cpu_devices: number of logical CPU devices to create on this machine.

        Raises:
          ExecutionError: TensorFlow has already run in this process, with too few logical devices.
        """

    def build(
        self,
        task: Task,
        learner: LearnerBase,
        *,
        seed: int,
        batch: Signature,
        dtype: str = "float32",
    ) -> ExecutionProgram:
        """Returns the program of a task; allocates nothing yet.

        Args:
          task: a Task.
          learner: a Learner.
          seed: seed of the initial weights and of all randomness in the steps.
          batch: shape and dtype of every array of the global batch.
          dtype: type in which the layers get float32 weights, and so compute: "float32",
            "bfloat16" or "float16". The weights themselves, their gradients and all sums stay
            float32.

        Raises:
          ExecutionError: the task, the batch and the devices are incompatible.
        """
        dtype = self.activation_dtype(dtype)
        return self.program(Step(task, learner, seed=seed, dtype=dtype), batch)

    def activation_dtype(self, dtype: str) -> str:
        """Returns the type in which the layers compute, given `run.activation_dtype`."""
        return dtype

    @abc.abstractmethod
    def program(self, step: Step, batch: Signature) -> ExecutionProgram:
        """Returns the program of a step; allocates nothing yet.

        Args:
          step: the steps of a task and a learner.
          batch: shape and dtype of every array of the global batch.

        Raises:
          ExecutionError: the task, the batch and the devices are incompatible.
        """


class ExecutionProgram(abc.ABC):
    """A task and a learner under one execution: their state, and the compiled steps.

    Args:
      step: the steps of the task and the learner.

    Attributes:
      serialize_calls: whether callers should make one `call` at a time, with inputs of one shape.
      concurrent_steps: number of steps of one call of `train_steps` that are computed at the same
        time; the results of a run depend on it, and on the number of steps in a call.
    """

    serialize_calls: bool = False
    concurrent_steps: int = 1

    def __init__(self, step: Step) -> None:
        self._step = step

    def specs(self) -> dict[str, WeightSpec]:
        """Returns the specs of all weights and slots by state key ("weights/…", "learner/…")."""
        return self._step.specs.keyed()

    def initialize(self) -> None:
        """Draws the initial state from the seed: the same in every execution."""
        specs = self.specs()
        self.assign(lambda key, where: specs[key].initial_value(self._step.seed, where))

    def initial_value(self, key: str, where: Slices) -> np.ndarray:
        """Returns a slice of the value that `initialize` gives a key."""
        return self.specs()[key].initial_value(self._step.seed, where)

    def restore(self, read: Callable[[str], Stored], keys: Set[str]) -> None:
        """Restores the state from a checkpoint; each process reads the shards of its devices.

        Args:
          read: returns the array of a key, or an object that reads it when it is indexed.
          keys: all keys of the checkpoint.

        Raises:
          ExecutionError: keys are missing or unknown, or shapes differ; the message names them.
        """
        values = checked_state(self.specs(), read, keys)
        self.assign(lambda key, where: values[key][where])

    @abc.abstractmethod
    def assign(self, value: ReadKey, keys: Set[str] | None = None) -> None:
        """Sets the state; each process reads only the slices that its devices store.

        Args:
          value: returns a slice of the new value of a key.
          keys: keys to set, of a state that was set before; None: all.
        """

    @abc.abstractmethod
    def state(self, keys: Set[str] | None = None) -> dict[str, np.ndarray]:
        """Returns a host copy of the state; all processes must call it.

        Args:
          keys: keys to return; None: all.
        """

    @abc.abstractmethod
    def shards(self) -> Iterator[Shard]:
        """Yields the pieces of the state that this process stores in a checkpoint.

        The pieces of all processes together are the state, without overlap. A piece refers to the
        value that it has now, also after later steps. All processes must iterate over them.
        """

    def hold_updates(self, gate: UpdateGate) -> bool:
        """Lets every training step wait for a gate before it changes the state, if possible.

        Call it before the first step.

        Returns: whether it does; otherwise, wait for the gate before every step.
        """
        del gate
        return False

    def own_rows(self, *, training: bool) -> RowsOf | None:
        """Returns which examples of a global batch this process needs; None: all of them.

        Args:
          training: whether the batch is trained on; otherwise it is evaluated.
        """
        del training
        return None

    def own_part(self, batch: Batch, *, training: bool) -> Batch:
        """Returns the examples of a batch that this process needs."""
        rows = self.own_rows(training=training)
        if rows is None or isinstance(batch, BatchPart):
            return batch
        return BatchPart.of(batch, rows(num_examples_of(batch)))

    @abc.abstractmethod
    def train_step(self, batch: Batch, step: int) -> dict[str, Any]:
        """Updates the state with one global batch.

        Args:
          batch: the global batch, or this process's part of it (`Input.own_part` of `own_rows`).
          step: number of the step.

        Returns: "loss" (the mean over the global batch), "total_loss" (with auxiliary losses), the
          means of the task's metrics, and the learner's metrics. The values are scalar tensors,
          whose computation may not have finished yet.
        """

    def train_steps(self, batches: Sequence[Batch], step: int) -> list[dict[str, Any]]:
        """Runs `train_step` for consecutive steps, with as few calls from the host as possible.

        Args:
          batches: of one shape.
          step: number of the first step.

        Returns: the result of `train_step` of every step.
        """
        return [self.train_step(batch, step + i) for i, batch in enumerate(batches)]

    def summary(self) -> list[str]:
        """Returns lines about the training steps of this process, for the end of a run."""
        return []

    @abc.abstractmethod
    def eval_step(self, batch: Batch) -> dict[str, tuple[Any, Any]]:
        """Returns (sum, weight) of "loss" and of every metric over a global batch.

        Args:
          batch: the global batch, or this process's part of it, as in `train_step`.
        """

    @abc.abstractmethod
    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Returns `function(theta, *inputs, ctx)` with the evaluation weights.

        `function` must be pure. Its trace is cached for further calls with the same function
        object. The inputs are nests of arrays, tensors and None. After the first call, several
        threads may call concurrently, unless `serialize_calls` is set.
        """

    def trace(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Traces `function` as `call` does, without computing anything.

        Where a program can, it keeps the trace for later calls. Processes do not have to call it
        together.

        Returns: the nest that `call` returns, with a `tf.TypeSpec` in place of each tensor.
        """

        def run(weights: Mapping[str, tf.Tensor], *inputs: Any) -> Any:
            return self._step.decoded(function, weights, inputs)

        return traced(tf.function(run, autograph=False), self._weight_types(), *inputs)

    def _weight_types(self) -> dict[str, tf.TensorSpec]:
        """Returns {path: shape and type} of the evaluation weights, cast as layers receive them."""
        return specs_of(self._step.used_specs)


def traced(function: Any, *inputs: Any) -> Any:
    """Returns the result of a tf.function with a `tf.TypeSpec` in place of each tensor.

    The trace is kept: a later call with inputs of the same types does not trace again.
    """
    found = function.get_concrete_function(*inputs).structured_outputs
    return tf.nest.map_structure(
        lambda one: one if one is None else tf.type_spec_from_value(one), found
    )


def signature_of(batch: Batch) -> Signature:
    """Returns the signature of the global batch."""
    size = batch_part.num_examples(batch)
    return {name: ((size, *array.shape[1:]), array.dtype) for name, array in batch.items()}


def parts_of(size: int, most: int) -> int:
    """Returns into how many equal parts, at most `most`, a number of examples can be divided."""
    return next(parts for parts in range(most, 0, -1) if size % parts == 0)


def num_examples_of(batch: Batch) -> int:
    """Returns the number of examples in the global batch.

    Raises:
      ExecutionError: the arrays have different numbers of examples.
    """
    sizes = {name: len(array) for name, array in batch.items()}
    if len(set(sizes.values())) != 1:
        raise ExecutionError(f"arrays of a batch have different leading dims: {sizes}")
    return batch_part.num_examples(batch)
