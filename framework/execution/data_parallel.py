"""Data-parallel execution: each device stores all weights and computes an equal part of the batch.

    global batch ─► one part per replica (a device) ─► one part per tower (a CPU core)
    tower:   theta, part ─► share of the loss, gradients, sums of metrics        (pure)
    then:    sum over towers and replicas ─► learner.update ─► weights and slots of every replica

With several processes, each has one device and computes its own part of the batch: there is one
replica per process, and `process_sums.py` sums over them.

The share of a tower is loss_sum / W + auxiliary losses / B, where W and B are the loss weight and
the number of examples of the global batch. So gradients are summed, never averaged. Within a
process, tf.distribute places variables and all-reduces sums. With one device it is TensorFlow's
default strategy, which does nothing.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.cluster import Cluster
from tekso.framework.cores import num_cores
from tekso.framework.counting import counted, multiples_near
from tekso.framework.coupling import coupling, named, sums_over_replicas
from tekso.framework.execution import devices, runtime
from tekso.framework.execution.base import Execution, ExecutionProgram
from tekso.framework.execution.data_parallel_program import DataParallelProgram
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.process_sums import ProcessSums
from tekso.framework.execution.updates import Updates
from tekso.framework.execution.whole_batches import ACCUMULATION, check_whole
from tekso.framework.layer import Layer
from tekso.framework.params import Configurable, param
from tekso.framework.params import tree as params_tree
from tekso.framework.signature import Signature, num_examples
from tekso.framework.step import Step
from tekso.framework.task import Task


class DataParallel(Execution):
    """Synchronous data parallelism over the devices of a process, or over several processes."""

    class Params(Execution.Params):
        """Params of DataParallel."""

        towers: int | None = param(
            "Parts of a device's batch that are computed concurrently, each on one core. None: one "
            "part per core of the process, if its only device is a CPU and the batch divides "
            "evenly; otherwise 1.",
            default=None,
        )
        xla: Literal["auto", "none", "clusters", "step"] = param(
            "What XLA compiles: elementwise clusters between matrix products (and large products "
            "on CPUs where that is faster), the whole training and evaluation step of each tower, "
            "or nothing. auto: clusters on CPU, the step on TPU, nothing on GPU.",
            default="auto",
            old_values={"stretches": "clusters"},
        )
        updates: Updates.Params | None = param(
            "How updates of other processes are combined. Asynchronous or Hybrid: workers compute "
            "gradients, and parameter servers store the weights; None: synchronous, over the "
            "devices of the process or the processes of --cluster.",
            default=None,
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._strategy: tf.distribute.Strategy | None = None
        self._cluster: Cluster | None = None
        self._expects_coupling = False
        updates = self.params.updates
        self._updates: Updates | None = updates.instantiate() if updates is not None else None

    def join(self, cluster: Cluster) -> None:
        """See `Execution`."""
        if self._updates is not None:
            raise ExecutionError(
                f"execution.updates is {type(self._updates).__name__}, whose workers are driven by "
                f"one process, but {cluster.source} defines {cluster.size} processes: set "
                "--cluster=none, or execution.updates to None for synchronous updates"
            )
        self._cluster = cluster

    def expect(self, task: Configurable.Params) -> None:
        """See `Execution`."""
        layers = [v for _, v, _ in params_tree.walk(task) if isinstance(v, Layer.Params)]
        self._expects_coupling = any(layer.owner.couples_examples for layer in layers)

    def setup_devices(self, *, tpu: str | None = None, cpu_devices: int | None = None) -> None:
        """See `Execution`."""
        if self._updates is not None:
            self._updates.setup_devices(tpu=tpu, cpu_devices=cpu_devices)
            return
        if self._cluster is not None:
            _check_one_device(tpu, cpu_devices)
        gpus = [] if tpu or cpu_devices else tf.config.list_physical_devices("GPU")
        if not gpus and not tpu:
            # With several towers or logical devices, each runs one op at a time on one core.
            towers = self.params.towers or (1 if self._expects_coupling else None)
            sole_stream = towers == 1 and (cpu_devices or 1) == 1
            devices.setup_cpu(
                logical_devices=cpu_devices,
                threads_per_op=self._num_cores() if sole_stream else 1,
            )
        if self._cluster is not None:
            runtime.describe(self._cluster)
            runtime.start("GPU" if gpus else "CPU", self._cluster)
            return
        self._strategy = _make_strategy(tpu, cpu_devices)

    def program(self, step: Step, batch: Signature) -> ExecutionProgram:
        """See `Execution`."""
        task, parts = step.task, step.learner.params.accumulation_steps
        batch_size = num_examples(batch)
        check_whole(task, parts, *ACCUMULATION)
        if self._updates is not None:
            self._updates.check_parts(task, batch_size, parts)
            local = self._program_alone(step, batch_size // self._updates.num_parts // parts)
            return self._updates.program(local, step)
        strategy = self._strategy or tf.distribute.get_strategy()
        processes = ProcessSums()
        if self._cluster is not None:
            processes = ProcessSums(self._cluster.process, self._cluster.size)
        replicas = strategy.num_replicas_in_sync * processes.size
        unit = ("process", "processes") if processes.size > 1 else ("device",)
        check_size(batch_size, replicas=replicas, parts=parts, unit=unit)
        towers = self._num_towers(task, strategy, batch_size // (replicas * parts))
        xla = self._xla(strategy)
        check_statistics(task, replicas=replicas, parts=parts, xla=xla)
        return DataParallelProgram(step, strategy, processes, towers=towers, xla=xla)

    def _program_alone(self, step: Step, examples: int) -> DataParallelProgram:
        """Returns the program of one device that computes some examples at a time."""
        strategy = tf.distribute.get_strategy()
        towers = 1  # a worker may share its cores with other workers
        if self.params.towers is not None:
            towers = self._num_towers(step.task, strategy, examples)
        return DataParallelProgram(step, strategy, towers=towers, xla=self._xla(strategy))

    def _num_cores(self) -> int:
        """Returns the number of cores for this process."""
        return max(1, num_cores() // (self._cluster.num_local if self._cluster else 1))

    def _num_towers(self, task: Task, strategy: tf.distribute.Strategy, examples: int) -> int:
        alone = strategy.num_replicas_in_sync == 1 and not tf.config.list_logical_devices("GPU")
        cores = self._num_cores() if alone else 1
        sums = alone and self._cluster is None and self.params.xla != "step"
        return num_towers(self.params.towers, task, examples, cores=cores, sums=sums)

    def _xla(self, strategy: tf.distribute.Strategy) -> str:
        if self.params.xla != "auto":
            return str(self.params.xla)
        if isinstance(strategy, tf.distribute.TPUStrategy):
            return "none"  # on a TPU, tf.distribute compiles the step
        return "none" if tf.config.list_logical_devices("GPU") else "clusters"


_CANNOT_SUM = (
    ", and towers cannot sum them in a repeated stack, in a step that is compiled as a whole, or "
    "with several devices or processes"
)


def num_towers(
    wanted: int | None, task: Task, examples: int, *, cores: int, sums: bool = True
) -> int:
    """Returns the number of towers of a device.

    Args:
      wanted: `execution.towers`.
      task: the task.
      examples: number of examples that the device computes at a time.
      cores: number of cores for its towers; 1 unless it is the only device and a CPU.
      sums: whether the towers can sum over each other, for layers that couple examples: in one
        graph, of one device.

    Raises:
      ExecutionError: the wanted number does not fit the examples or the task.
    """
    found = coupling(task)
    if wanted is None:
        return 1 if found or examples % cores else cores
    if wanted < 1 or examples % wanted:
        raise ExecutionError(
            f"execution.towers is {wanted}, which does not divide the {examples} examples that "
            "one device computes at a time"
        )
    repeated = repeated_statistics(task)
    whole = [x for x in found if not sums or x.path in repeated or not sums_over_replicas(x)]
    if wanted > 1 and whole:
        raise ExecutionError(
            f"execution.towers is {wanted}, but {named(whole[0])} computes statistics over all "
            f"examples of a device{_CANNOT_SUM if repeated or not sums else ''}: set "
            "execution.towers=1"
        )
    return wanted


def _check_one_device(tpu: str | None, cpu_devices: int | None) -> None:
    """Raises an ExecutionError if a process of several would have more than one device."""
    if tpu:
        raise ExecutionError(
            "--tpu: DataParallel trains on a TPU from one process, but this run has several: set "
            "--cluster=none"
        )
    found, cure = cpu_devices or 1, "leave out --cpu_devices; execution.towers uses the cores"
    if not cpu_devices:
        found = max(1, len(tf.config.list_physical_devices("GPU")))
        cure = "start a process for each GPU, and let it see only this one (CUDA_VISIBLE_DEVICES)"
    if found > 1:
        raise ExecutionError(
            f"with several processes, each process of DataParallel computes on one device, but "
            f"this one has {found}: {cure}"
        )


def check_size(
    size: int, *, replicas: int, parts: int, unit: tuple[str, ...] = ("device",)
) -> None:
    """Checks that replicas and their accumulation steps compute equal parts of a batch.

    Args:
      size: number of examples of the batch.
      replicas: number of replicas.
      parts: number of accumulation steps.
      unit: what a replica is, and its plural.

    Raises:
      ExecutionError: the number of examples cannot be divided so.
    """
    if size % (replicas * parts):
        near = multiples_near(size, replicas * parts)
        raise ExecutionError(
            f"input.batch_size {size} does not divide evenly over {counted(replicas, *unit)} and "
            f"{counted(parts, 'accumulation step')}; "
            f"the nearest that do: {', '.join(map(str, near))}"
        )


def check_statistics(task: Task, *, replicas: int, parts: int, xla: str) -> None:
    """Checks that devices do not have to all-reduce batch statistics in a loop.

    tf.distribute supports this neither in a loop (over `parts`, the accumulation steps, or over the
    layers of a repeated stack) nor in a separately compiled function.

    Raises:
      ExecutionError: they would.
    """
    names = [named(layer) for layer in coupling(task)]
    if replicas == 1 or not names:
        return
    repeated = repeated_statistics(task)
    if parts > 1:
        name, cure = names[0], "set learner.accumulation_steps=1"
    elif xla == "step":
        name, cure = names[0], "set execution.xla to clusters or none"
    elif repeated:
        name, cure = repeated[0], "unroll its repeated stack"
    else:
        return
    raise ExecutionError(
        f"{name} sums statistics over all devices, which is not supported in a loop or in a step "
        f"that is compiled as a whole: {cure}, or use one device"
    )


def repeated_statistics(task: Task) -> list[str]:
    """Returns the paths of the layers of repeated stacks that couple examples."""
    stacked = [spec.path for spec in task.specs().values() if spec.stacked]
    paths = [layer.path for layer in coupling(task)]
    return [p for p in paths if any(weight.startswith(f"{p}/") for weight in stacked)]


def _make_strategy(tpu: str | None, cpu_devices: int | None) -> tf.distribute.Strategy:
    if tpu:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu)
            tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
        except (OSError, ValueError, tf.errors.OpError) as error:
            reason = str(error).partition("\n")[0]
            raise ExecutionError(f"cannot connect to the TPU {tpu!r}: {reason}") from error
        return tf.distribute.TPUStrategy(resolver)
    local = [] if cpu_devices else [d.name for d in tf.config.list_logical_devices("GPU")]
    # An earlier experiment in this process may have created more logical devices than needed here.
    local = local or [d.name for d in tf.config.list_logical_devices("CPU")][: cpu_devices or 1]
    return _mirrored(local) if len(local) > 1 else tf.distribute.get_strategy()


def _mirrored(devices: list[str]) -> tf.distribute.Strategy:
    """Returns a MirroredStrategy whose collectives have group numbers of their own.

    TensorFlow identifies a group of devices by a number. By default, every strategy and every mesh
    counts from the same number. It is an error to use a number again for other devices.
    """

    class Mirrored(tf.distribute.MirroredStrategy):  # type: ignore[misc]  # it has no types
        _collective_key_base = next(_GROUPS)

    return Mirrored(devices)


_GROUPS = itertools.count(1 << 20, 1 << 10)
"""First group number of each strategy; a mesh counts from 1."""
