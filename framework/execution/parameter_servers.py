"""Asynchronous and hybrid data parallelism: workers compute gradients, servers store the weights.

    Asynchronous   every worker computes a batch of its own, with the newest weights at its start
    Hybrid         a group of workers computes a batch together; groups do not wait for each other

Workers and parameter servers are `tekso-worker` processes. The trainer drives them with
TensorFlow's ParameterServerStrategy and a pool of its own; see `worker_pool.py`.

Sources:
  Dean et al. 2012, "Large scale distributed deep networks" (DistBelief), section 4.1, Downpour SGD
  with n_fetch = n_push = 1. Abadi et al. 2016, "TensorFlow: A system for large-scale machine
  learning", section 4.4. Hybrid: asynchronous groups of synchronous replicas, Dean 2015,
  "Large-scale deep learning for intelligent computer systems".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tekso.framework import port_filter
from tekso.framework.execution import devices
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.execution.data_parallel_program import DataParallelProgram
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.parameter_server_program import ParameterServerProgram
from tekso.framework.execution.pipeline import remote
from tekso.framework.execution.updates import Updates
from tekso.framework.execution.whole_batches import check_whole
from tekso.framework.execution.worker_pool import SERVER, WORKER, WorkerPool
from tekso.framework.params import param
from tekso.framework.step import Step
from tekso.framework.task import Task

_TRAINER = "chief"


@dataclasses.dataclass(frozen=True)
class Servers:
    """The connected processes.

    Attributes:
      strategy: creates variables on the parameter servers.
      pool: computes functions on the workers.
    """

    strategy: tf.distribute.ParameterServerStrategy
    pool: WorkerPool


class Asynchronous(Updates):
    """Every worker computes batches of its own, and does not wait for the other workers."""

    class Params(Updates.Params):
        """Params of Asynchronous."""

        workers: list[str] = param(
            "Addresses (host:port) of the tekso-worker processes that compute gradients.",
            default=[],
        )
        parameter_servers: list[str] = param(
            "Addresses (host:port) of the tekso-worker processes that store weights and slots. The "
            "first one computes the updates.",
            default=[],
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        for name, kind in (("workers", "worker"), ("parameter_servers", "parameter server")):
            if not getattr(p, name):
                raise ExecutionError(
                    f"execution.updates.{name} is empty: {type(self).__name__} needs at least one "
                    f"{kind}; start tekso-worker processes and list their addresses"
                )
        addresses = [*p.workers, *p.parameter_servers]
        for address in addresses:
            remote.split(address)
            if addresses.count(address) > 1:
                raise ExecutionError(
                    f"execution.updates lists {address} twice: every worker and parameter server "
                    "must be a separate process"
                )
        self._servers: Servers | None = None

    @property
    def num_groups(self) -> int:
        """The number of batches that are computed at the same time."""
        return len(self.params.workers)

    def setup_devices(self, *, tpu: str | None, cpu_devices: int | None) -> None:
        """See `Updates`.

        Raises:
          ExecutionError: a TPU or several devices were requested, or a process does not answer.
        """
        kind = type(self).__name__
        if tpu or (cpu_devices or 1) > 1:
            flag = "--tpu" if tpu else f"--cpu_devices={cpu_devices}"
            raise ExecutionError(
                f"{flag} does not work with execution.updates={kind}, whose workers compute on one "
                "device each: remove the flag, or set execution.updates to None"
            )
        devices.setup_cpu(logical_devices=None, threads_per_op=1)
        self._servers = _connect(self.params.workers, self.params.parameter_servers)

    @property
    def num_parts(self) -> int:
        """See `Updates`: the number of workers of a group."""
        return len(self.params.workers) // self.num_groups

    def check_parts(self, task: Task, size: int, accumulation: int) -> None:
        """See `Updates`."""
        parts = self.num_parts
        check_whole(task, parts, "parts by workers", "use synchronous training on one process")
        if size % (parts * accumulation):
            raise ExecutionError(
                f"input.batch_size {size} does not divide evenly over {parts} workers of a group "
                f"and {accumulation} accumulation steps"
            )

    def program(self, local: DataParallelProgram, step: Step) -> ExecutionProgram:
        """See `Updates`."""
        if self._servers is None:
            raise ExecutionError("call setup_devices before program")
        return ParameterServerProgram(
            step,
            local,
            self._servers.strategy,
            self._servers.pool,
            num_groups=self.num_groups,
            workers_per_group=self.num_parts,
        )


class Hybrid(Asynchronous):
    """Groups of workers: synchronous within a group, asynchronous between groups.

    A group is not a fixed set of workers: a free worker computes the next part of any batch, so a
    worker that is lost does not stop its group.
    """

    class Params(Asynchronous.Params):
        """Params of Hybrid."""

        num_groups: int = param(
            "Number of batches that are computed at the same time, each by workers / num_groups "
            "workers. 1: synchronous.",
            default=1,
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        workers, groups = len(self.params.workers), self.params.num_groups
        if groups < 1 or workers % groups:
            raise ExecutionError(
                f"execution.updates.num_groups is {groups}, which does not divide the {workers} "
                "workers of execution.updates.workers"
            )

    @property
    def num_groups(self) -> int:
        """See `Asynchronous`."""
        groups: int = self.params.num_groups
        return groups


def _connect(workers: list[str], parameter_servers: list[str]) -> Servers:
    """Connects this process to workers and parameter servers.

    Raises:
      ExecutionError: one of them does not answer.
    """
    for address in [*workers, *parameter_servers]:
        remote.wait_for(address, 60.0)
    own = f"localhost:{port_filter.free_port()}"  # TensorFlow starts a server here too
    cluster = tf.train.ClusterSpec({WORKER: workers, SERVER: parameter_servers, _TRAINER: [own]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type=_TRAINER, task_id=0, rpc_layer="grpc"
    )
    try:
        with port_filter.limited_to(own):
            strategy = tf.distribute.ParameterServerStrategy(resolver)
            tf.config.list_logical_devices()  # starts the server
    except (OSError, RuntimeError, tf.errors.OpError) as error:
        reason = str(error).partition("\n")[0]
        raise ExecutionError(f"cannot connect to the parameter servers: {reason}") from error
    return Servers(strategy, WorkerPool(workers, parameter_servers))
