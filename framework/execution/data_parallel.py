"""Data-parallel execution: every device holds all weights and takes an equal part of the batch.

    global batch ─► a part for each replica (a device) ─► a part for each tower (a core of a CPU)
    tower:   theta, part ─► its share of the loss, gradients, sums of metrics        (pure)
    then:    sum over towers and replicas ─► learner.update ─► weights and slots of every replica

A tower's share is loss_sum / W + auxiliary losses / B with W and B of the global batch, so
gradients are only added up. tf.distribute places variables and moves sums between devices; with one
device it is TensorFlow's default strategy, which does nothing.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.cores import num_cores
from tekso.framework.execution import devices
from tekso.framework.execution.base import Execution, ExecutionProgram, Signature, num_examples
from tekso.framework.execution.data_parallel_program import DataParallelProgram
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.step import Step
from tekso.framework.learning_step import LearnerBase
from tekso.framework.params import param
from tekso.framework.task import Task


class DataParallel(Execution):
    """Synchronous data parallelism over the local devices by tf.distribute."""

    class Params(Execution.Params):
        """Params of DataParallel."""

        towers: int | None = param(
            "Parts of a device's batch that are computed side by side, each by one core. None: one "
            "a core on a CPU that is the only device, if the batch divides evenly; else 1.",
            default=None,
        )
        xla: Literal["auto", "none", "clusters", "step"] = param(
            "What XLA compiles: elementwise clusters between matrix products, each tower's whole "
            "step, or nothing. auto: clusters on CPU, the step on TPU, nothing on GPU.",
            default="auto",
            old_values={"stretches": "clusters"},
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._strategy: tf.distribute.Strategy | None = None

    def setup_devices(self, *, tpu: str | None = None, cpu_devices: int | None = None) -> None:
        """See `Execution`."""
        gpus = [] if tpu or cpu_devices else tf.config.list_physical_devices("GPU")
        if not gpus and not tpu:
            # A tower or a logical device is one stream of ops: no op is split over cores.
            sole_stream = self.params.towers == 1 and (cpu_devices or 1) == 1
            devices.setup_cpu(
                logical_devices=cpu_devices,
                threads_per_op=num_cores() if sole_stream else 1,
            )
        self._strategy = _make_strategy(tpu, cpu_devices)

    def build(
        self, task: Task, learner: LearnerBase, *, seed: int, batch: Signature
    ) -> ExecutionProgram:
        """See `Execution`."""
        batch_size = num_examples(batch)
        strategy = self._strategy or tf.distribute.get_strategy()
        replicas = strategy.num_replicas_in_sync
        parts = learner.params.accumulation_steps
        if batch_size % (replicas * parts):
            near = [n * replicas * parts for n in (batch_size // (replicas * parts),) if n]
            near.append((batch_size // (replicas * parts) + 1) * replicas * parts)
            raise ExecutionError(
                f"input.batch_size {batch_size} does not divide evenly over {replicas} devices and "
                f"{parts} accumulation steps; the nearest that do: {', '.join(map(str, near))}"
            )
        mixing = [layer.path for layer in task.walk() if layer.couples_examples]
        towers = self._num_towers(mixing, strategy, batch_size // (replicas * parts))
        xla = self._xla(strategy)
        if mixing and replicas > 1:
            _check_outside_of_loops(mixing, task, parts=parts, xla=xla)
        step = Step(task, learner, seed=seed)
        return DataParallelProgram(step, strategy, towers=towers, xla=xla)

    def _num_towers(
        self, mixing: list[str], strategy: tf.distribute.Strategy, examples: int
    ) -> int:
        towers = self.params.towers
        if towers is None:
            cores = num_cores()
            alone = strategy.num_replicas_in_sync == 1 and not tf.config.list_logical_devices("GPU")
            return cores if alone and examples % cores == 0 and not mixing else 1
        if towers < 1 or examples % towers:
            raise ExecutionError(
                f"execution.towers is {towers}, which does not divide the {examples} examples that "
                "a device computes at a time"
            )
        if towers > 1 and mixing:
            raise ExecutionError(
                f"execution.towers is {towers}, but {mixing[0]} takes statistics over all examples "
                "of a device: set execution.towers=1"
            )
        return towers

    def _xla(self, strategy: tf.distribute.Strategy) -> str:
        if self.params.xla != "auto":
            return self.params.xla
        if isinstance(strategy, tf.distribute.TPUStrategy):
            return "none"  # tf.distribute compiles what runs on a TPU
        return "none" if tf.config.list_logical_devices("GPU") else "clusters"


def _check_outside_of_loops(mixing: list[str], task: Task, *, parts: int, xla: str) -> None:
    """Raises an ExecutionError where devices would have to exchange statistics inside of a loop.

    tf.distribute can do so neither in a loop nor in a function that is compiled on its own.
    """
    stacked = [spec.path for spec in task.specs().values() if spec.stacked]
    repeated = [p for p in mixing if any(weight.startswith(f"{p}/") for weight in stacked)]
    if parts > 1:
        path, cure = mixing[0], "set learner.accumulation_steps=1"
    elif xla == "step":
        path, cure = mixing[0], "set execution.xla to clusters or none"
    elif repeated:
        path, cure = repeated[0], "write the layers of its repeated stack out"
    else:
        return
    raise ExecutionError(
        f"{path} takes statistics over all devices, which cannot be exchanged inside of a loop or "
        f"of a step that is compiled as a whole: {cure}, or use one device"
    )


def _make_strategy(tpu: str | None, cpu_devices: int | None) -> tf.distribute.Strategy:
    if tpu:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu)
            tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
        except (OSError, ValueError, tf.errors.OpError) as error:
            reason = str(error).partition("\n")[0]
            raise ExecutionError(f"there is no TPU {tpu!r} to connect to: {reason}") from error
        return tf.distribute.TPUStrategy(resolver)
    local = [] if cpu_devices else [d.name for d in tf.config.list_logical_devices("GPU")]
    # An earlier experiment in this process may have made more logical devices than this one uses.
    local = local or [d.name for d in tf.config.list_logical_devices("CPU")][: cpu_devices or 1]
    return _mirrored(local) if len(local) > 1 else tf.distribute.get_strategy()


def _mirrored(devices: list[str]) -> tf.distribute.Strategy:
    """Returns a strategy whose collectives no other strategy or mesh of this process takes part in.

    TensorFlow knows a group of devices by a number. Each strategy counts from the same one, as a
    mesh does, and a group of other devices under a number that is taken is an error.
    """

    class Mirrored(tf.distribute.MirroredStrategy):
        _collective_key_base = next(_GROUPS)

    return Mirrored(devices)


_GROUPS = itertools.count(1 << 20, 1 << 10)
"""First number of the groups of each strategy; a mesh counts from 1."""
