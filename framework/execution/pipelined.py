"""Pipelined execution: cuts a task into stages and a batch into micro-batches.

    execution.num_stages         4       devices of the pipeline; each runs some of the pieces
    execution.num_micro_batches  16      equal parts of a batch, computed one after the other
    execution.schedule           1f1b    order of the work on each device

Gradients match single-device training for any number of stages and micro-batches, with one
exception: in training, batch statistics (BatchNorm) are computed over a micro-batch.

Source: Huang et al. 2018, "GPipe: Efficient training of giant neural networks using pipeline
parallelism" (arXiv 1811.06965).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.execution import devices
from tekso.framework.execution.base import Execution, ExecutionProgram, Signature, num_examples
from tekso.framework.execution.cluster import Cluster
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.execution.pipeline import partition, remote, stages
from tekso.framework.execution.pipeline.actions import by_device
from tekso.framework.execution.pipeline.loss_pieces import pieces_of_loss
from tekso.framework.execution.pipeline.measured_costs import Timer, measured_costs
from tekso.framework.execution.pipeline.piece_costs import cost_of
from tekso.framework.execution.pipeline.piece_mixing import check_layers, check_pieces
from tekso.framework.execution.pipeline.piece_traces import PieceTrace, trace_all
from tekso.framework.execution.pipeline.plan import PipelinePlan, rows_of_stages
from tekso.framework.execution.pipeline.program import PipelineProgram
from tekso.framework.execution.pipeline.schedule import PipelineSchedule, num_stages_of, schedule_of
from tekso.framework.execution.pipeline.schedule_check import checked_actions
from tekso.framework.execution.pipeline.spmd_form import SpmdForm
from tekso.framework.execution.pipeline.stage_backend import DeviceBackend, StageBackend
from tekso.framework.execution.pipeline.stages_on_mesh import StagesOnMesh
from tekso.framework.execution.step import Step, used_specs
from tekso.framework.learning_step import LearnerBase
from tekso.framework.params import param
from tekso.framework.pieces import Piece
from tekso.framework.primitives.fusion import XlaFusion, no_fusion
from tekso.framework.task import Task
from tekso.framework.weight_spec import WeightSpec


class Pipelined(Execution):
    """A pipeline of stages, one or more per device."""

    class Params(Execution.Params):
        """Params of Pipelined."""

        num_stages: int = param(
            "Number of devices of the pipeline, each with a part of the model.", default=2
        )
        num_micro_batches: int = param(
            "Equal parts of a batch that pass through the stages one after the other.", default=4
        )
        schedule: str | PipelineSchedule.Params = param(
            "Order of the work on each device: gpipe, 1f1b, interleaved_1f1b, zero_bubble_h1, or "
            "Params of a Schedule.",
            default="1f1b",
        )
        rematerialize: Literal["none", "all", "except_last"] = param(
            "Micro-batches for which a stage saves only its inputs and recomputes the rest in the "
            "backward pass.",
            default="none",
        )
        balance: list[int] | None = param(
            "Number of pieces of every stage; None: minimises the cost of the most expensive "
            "stage.",
            default=None,
        )
        costs: Literal["traced", "measured"] = param(
            "Cost of a piece, by which pieces are assigned to stages: operations and bytes of its "
            "traced graph, or the time that this kind of piece takes on the first device, measured "
            "when the pipeline is built.",
            default="traced",
        )
        num_replicas: int = param(
            "Number of parallel pipelines, each with its share of every micro-batch.", default=1
        )
        workers: list[str] = param(
            "Addresses (host:port) of tekso-worker processes that provide their devices, one "
            "replica after the other; empty: the devices of this process.",
            default=[],
        )
        form: Literal["host", "spmd"] = param(
            "What runs the stages: host: threads of this process; spmd: one program for all stages "
            "(for repeated stacks, and TPUs).",
            default="host",
        )
        stages_on: MeshSharded.Params | None = param(
            "Shards every stage over its own mesh, by rules; None: one device per stage.",
            default=None,
        )
        xla: Literal["none", "clusters"] = param(
            "What XLA compiles: nothing, or elementwise clusters between matrix products.",
            default="none",
            old_values={"stretches": "clusters"},
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        for name in ("num_stages", "num_micro_batches", "num_replicas"):
            if getattr(p, name) < 1:
                raise ExecutionError(
                    f"execution.{name} is {getattr(p, name)}, but must be at least 1"
                )
        for address in p.workers:
            remote.split(address)
        self._schedule = schedule_of(p.schedule)
        self._on_mesh: StagesOnMesh | None = None
        self._spmd: SpmdForm | None = None
        if p.form == "spmd":
            self._spmd = SpmdForm(p, self._schedule)
        elif p.stages_on is not None:
            self._on_mesh = StagesOnMesh(p.stages_on.instantiate(), p)
        self._devices: list[str] = []  # devices of other processes
        self.timer: Timer = time.perf_counter
        """The clock for measured costs."""

    def join(self, cluster: Cluster) -> None:
        """See `Execution`; only `form="spmd"` supports several processes."""
        if self._spmd is None:
            super().join(cluster)
        else:
            self._spmd.join(cluster)

    def setup_devices(self, *, tpu: str | None = None, cpu_devices: int | None = None) -> None:
        """See `Execution`."""
        if self._spmd is not None:
            self._spmd.setup_devices(tpu=tpu, cpu_devices=cpu_devices)
            return
        if self._on_mesh is not None and not tpu:
            self._on_mesh.setup_devices(cpu_devices=cpu_devices)
            return
        if tpu:
            raise ExecutionError(
                "execution.form='host' cannot use the cores of a TPU: use "
                "--execution=mesh_sharded there, or execution.form='spmd' for a repeated stack"
            )
        if self.params.workers:
            devices.setup_cpu(logical_devices=cpu_devices, threads_per_op=1)
            self._devices = remote.connect(self.params.workers)
            return
        needed = self.params.num_stages * self.params.num_replicas
        gpus = [] if cpu_devices else tf.config.list_physical_devices("GPU")
        if not gpus:
            devices.setup_cpu(logical_devices=cpu_devices or needed, threads_per_op=1)

    def build(
        self,
        task: Task,
        learner: LearnerBase,
        *,
        seed: int,
        batch: Signature,
        dtype: str = "float32",
    ) -> ExecutionProgram:
        """See `Execution`."""
        parts = learner.params.accumulation_steps
        if self._spmd is not None:
            micro = self.micro_batch(batch, parts=parts)
            return self._spmd.build(task, learner, seed=seed, micro_batch=micro, dtype=dtype)
        on_mesh, dtype = self._on_mesh, self.activation_dtype(dtype)
        if on_mesh is not None:
            layout = self.stage_layout(task, batch, parts=parts, num_devices=on_mesh.num_devices())
            names = on_mesh.names(layout)
            plan = self.plan(task, batch, parts=parts, devices=names, dtype=dtype)
            backends = on_mesh.backends(plan, layout)
        else:
            names = self._devices or _local_devices()
            plan = self.plan(task, batch, parts=parts, devices=names, dtype=dtype)
            backends = device_backends(plan)
        step = Step(task, learner, seed=seed, dtype=dtype)
        replan = functools.partial(
            self.plan, task, parts=parts, devices=names, dtype=dtype, like=plan
        )
        return PipelineProgram(step, plan, backends, batch=batch, replan=replan)

    def activation_dtype(self, dtype: str) -> str:
        """Returns the type of activations, given `run.activation_dtype`."""
        return dtype if self._on_mesh is None else self._on_mesh.activation_dtype(dtype)

    def micro_batch(
        self, batch: Signature, *, parts: int, num_micro_batches: int | None = None
    ) -> Signature:
        """Returns the signature of the micro-batch that one replica computes.

        Raises:
          ExecutionError: the batch does not divide evenly.
        """
        p, size = self.params, num_examples(batch)
        count = parts * (num_micro_batches or p.num_micro_batches) * p.num_replicas
        if size % count:
            near = [n for n in (size // count * count, (size // count + 1) * count) if n]
            others = parts * p.num_replicas
            even = [m for m in range(1, size // others + 1) if size % (m * others) == 0]
            fewer = f", or micro-batches: {', '.join(map(str, even))}" if even else ""
            of_parts = f", {parts} accumulation steps" if parts > 1 else ""
            of_replicas = f", {p.num_replicas} replicas" if p.num_replicas > 1 else ""
            raise ExecutionError(
                f"input.batch_size {size} does not divide evenly over {p.num_micro_batches} "
                f"micro-batches (execution.num_micro_batches){of_replicas}{of_parts}; the nearest "
                f"that do: {', '.join(map(str, near))}{fewer}"
            )
        return {n: ((size // count, *shape[1:]), dtype) for n, (shape, dtype) in batch.items()}

    def _most_micro_batches(self, size: int, parts: int) -> int:
        """Returns into how many micro-batches a batch of another size is split.

        Raises:
          ExecutionError: accumulation steps and replicas do not divide it.
        """
        p = self.params
        for count in range(p.num_micro_batches, 0, -1):
            if size % (parts * p.num_replicas * count) == 0:
                with contextlib.suppress(ExecutionError):
                    checked_actions(
                        self._schedule, num_devices=p.num_stages, num_micro_batches=count
                    )
                    return count
        raise ExecutionError(
            f"a batch of {size} examples cannot be split for this pipeline: {parts} accumulation "
            f"steps (learner.accumulation_steps) x {p.num_replicas} replicas "
            f"(execution.num_replicas) x the micro-batches that execution.schedule={p.schedule!r} "
            "accepts have to divide it. Batches of this input differ in size: choose 1 replica, no "
            "accumulation and the schedule 1f1b, or an input whose batches have one size"
        )

    def stage_layout(
        self, task: Task, batch: Signature, *, parts: int, num_devices: int | None
    ) -> MeshLayout:
        """Returns the layout on the mesh of a stage, or on the mesh of `form="spmd"`.

        Args:
          task: the task.
          batch: signature of the global batch.
          parts: number of accumulation steps.
          num_devices: number of devices of all stages together; None: the number needed.

        Raises:
          ExecutionError: mesh and rules do not fit the model, the batch or the devices.
        """
        micro = self.micro_batch(batch, parts=parts)
        if self._spmd is not None:
            return self._spmd.layout(task, micro, num_devices=num_devices)
        if self._on_mesh is not None:
            return self._on_mesh.layout(task, micro, num_devices=num_devices)
        raise ExecutionError(
            "the stages are not on a mesh: neither execution.stages_on nor execution.form='spmd' "
            "is set"
        )

    def plan(
        self,
        task: Task,
        batch: Signature,
        *,
        parts: int,
        devices: list[str] | None,
        dtype: str = "float32",
        like: PipelinePlan | None = None,
    ) -> PipelinePlan:
        """Returns the plan of a pipeline: the stages of a task, their devices and the schedule.

        Allocates nothing permanently. If devices are given, each kind of piece is run, to detect
        whether it couples examples, and for measured costs also to measure its time.

        Args:
          task: the task.
          batch: signature of the global batch.
          parts: number of accumulation steps.
          devices: names of the available devices; None: placeholder names for those needed.
          dtype: type of activations, as in `build`.
          like: the plan for batches of another shape. The stages have the same pieces, and a batch
            that the micro-batches do not divide is split into fewer.

        Raises:
          ExecutionError: the task, the batch, the devices and the Params are incompatible.
        """
        p = self.params
        needed = p.num_stages * p.num_replicas
        names = [f"device {i}" for i in range(needed)] if devices is None else devices
        if needed > len(names):
            more = "add execution.workers" if p.workers else f"set --cpu_devices={needed}"
            raise ExecutionError(
                f"{rows_of_stages(p.num_stages, p.num_replicas)} need {needed} devices, but there "
                f"are {len(names)} ({', '.join(names)}): set execution.num_stages to at most "
                f"{max(len(names) // p.num_replicas, 1)}, or {more}"
            )
        count = p.num_micro_batches
        if like is not None:
            count = self._most_micro_batches(num_examples(batch), parts)
        micro = self.micro_batch(batch, parts=parts, num_micro_batches=count)
        check_layers(task, form=p.form)
        pieces, specs = pieces_of_loss(task), task.specs()
        traces = trace_all(pieces, specs, micro)
        if devices is not None and like is None:
            check_pieces(pieces, traces, specs, micro)
        if dtype != "float32":
            specs = used_specs(specs, dtype)
            traces = trace_all(pieces, specs, micro)
        costs: Sequence[float]
        if like is None:
            device = None if devices is None or self._on_mesh is not None else devices[0]
            costs = self._costs(pieces, traces, specs, micro, device)
            sizes = self.sizes(pieces, costs)
            if self._spmd is not None:
                sizes = self._spmd.sizes(pieces, traces, specs)
        else:
            costs, sizes = like.piece_costs, [len(s.pieces) for s in like.stage_plan.stages]
        stage_plan = stages.stage_plan(pieces, traces, sizes, specs, micro)
        actions = checked_actions(self._schedule, num_devices=p.num_stages, num_micro_batches=count)
        plan = PipelinePlan(
            stage_plan=stage_plan,
            by_device=by_device(actions, p.num_stages),
            devices=[names[r * p.num_stages :][: p.num_stages] for r in range(p.num_replicas)],
            batch_size=num_examples(batch),
            num_parts=parts,
            num_micro_batches=count,
            rematerialize=p.rematerialize,
            xla=p.xla,
            costs=p.costs,
            piece_costs=costs,
        )
        return plan

    def _costs(
        self,
        pieces: list[Piece],
        traces: list[PieceTrace],
        specs: dict[str, WeightSpec],
        micro: Signature,
        device: str | None,
    ) -> list[float]:
        """Returns the cost of every piece, forward and backward over a micro-batch."""
        if self.params.costs == "traced":
            return [cost_of(trace) for trace in traces]
        fuse = XlaFusion() if self.params.xla == "clusters" else no_fusion
        return measured_costs(
            pieces, traces, specs, micro, device=device, timer=self.timer, fuse=fuse
        )

    def sizes(self, pieces: list[Piece], costs: list[float]) -> list[int]:
        """Returns the number of pieces of every stage, given the cost of each piece."""
        num_devices, stages_of = self.params.num_stages, self._schedule.num_stages
        num_stages = num_stages_of(self._schedule, num_devices)
        enough = (d for d in range(num_devices, 0, -1) if 1 <= stages_of(d) <= len(pieces))
        return partition.balance(
            [piece.name for piece in pieces],
            costs,
            num_stages,
            self.params.balance,
            num_devices=num_devices,
            most_devices=next(enough, 0),
        )


def device_backends(plan: PipelinePlan) -> list[list[StageBackend]]:
    """Returns one backend per stage, each on one device: [replica][stage]."""
    compiles = plan.xla == "clusters"
    return [
        [
            DeviceBackend(plan.device_of(r, s.index), compiles=compiles)
            for s in plan.stage_plan.stages
        ]
        for r in range(plan.num_replicas)
    ]


def _local_devices() -> list[str]:
    gpus = tf.config.list_logical_devices("GPU")
    return [d.name for d in gpus or tf.config.list_logical_devices("CPU")]
