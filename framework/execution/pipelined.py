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
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import tensorflow as tf

from tekso.framework.costs.piece_costs import Timer, cost_of, measured_costs
from tekso.framework.costs.piece_traces import PieceTrace, trace_all
from tekso.framework.execution import devices
from tekso.framework.execution.base import ExecutionProgram
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline import partition, remote, stages
from tekso.framework.execution.pipeline.actions import by_device
from tekso.framework.execution.pipeline.loss_pieces import pieces_of_loss
from tekso.framework.execution.pipeline.piece_coupling import check_layers, check_pieces
from tekso.framework.execution.pipeline.plan import PipelinePlan, rows_of_stages
from tekso.framework.execution.pipeline.program import PipelineProgram
from tekso.framework.execution.pipeline.schedule import PipelineSchedule, num_stages_of, schedule_of
from tekso.framework.execution.pipeline.schedule_check import checked_actions
from tekso.framework.execution.pipeline.stage_backend import DeviceBackend, StageBackend
from tekso.framework.execution.pipeline.stage_placement import PlacedStages, StagePlacement
from tekso.framework.execution.pipeline.staged_execution import (
    StagedExecution,
    check_adds_gradients,
)
from tekso.framework.params import OldField, param
from tekso.framework.pieces import Piece
from tekso.framework.primitives.fusion import XlaFusion, no_fusion
from tekso.framework.signature import Signature, num_examples
from tekso.framework.step import Step, used_specs
from tekso.framework.task import Task
from tekso.framework.weight_spec import WeightSpec


class Pipelined(StagedExecution):
    """A pipeline of stages, one or more per device."""

    class Params(StagedExecution.Params):
        """Params of Pipelined."""

        old_fields: ClassVar[Mapping[str, OldField]] = {
            "form": OldField(
                "one program for all stages (form=spmd) is --execution=spmd_pipelined",
                {"spmd": "tekso.framework.execution.spmd_pipelined:SpmdPipelined"},
            )
        }

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
        workers: list[str] = param(
            "Addresses (host:port) of tekso-worker processes that provide their devices, one "
            "replica after the other; empty: the devices of this process.",
            default=[],
        )
        stages_on: StagePlacement.Params | None = param(
            "Where the stages run. StagesOnMesh: every stage is sharded over its own mesh, by "
            "rules; None: one device per stage.",
            default=None,
            old_values={
                "tekso.framework.execution.mesh_sharded:MeshSharded": "tekso.framework.execution."
                "pipeline.stages_on_mesh:StagesOnMesh"
            },
        )
        xla: Literal["none", "clusters"] = param(
            "What XLA compiles: nothing, or elementwise clusters between matrix products (and "
            "large products on CPUs where that is faster).",
            default="none",
            old_values={"stretches": "clusters"},
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        for address in p.workers:
            remote.split(address)
        self._schedule = schedule_of(p.schedule)
        self.stages_on: StagePlacement | None = None
        if p.stages_on is not None:
            if p.workers:
                raise ExecutionError(
                    "execution.stages_on is set, and execution.workers is set: stages on workers "
                    "have one device each; remove execution.workers or execution.stages_on"
                )
            sizes = {"num_stages": p.num_stages, "num_replicas": p.num_replicas}
            self.stages_on = p.stages_on.instantiate(**sizes)
        self._devices: list[str] = []  # devices of other processes
        self.timer: Timer = time.perf_counter
        """The clock for measured costs."""

    def setup_devices(self, *, tpu: str | None = None, cpu_devices: int | None = None) -> None:
        """See `Execution`."""
        if self.stages_on is not None and not tpu:
            self.stages_on.setup_devices(cpu_devices=cpu_devices)
            return
        if tpu:
            raise ExecutionError(
                "--execution=pipelined cannot use the cores of a TPU: use --execution=mesh_sharded "
                "there, or --execution=spmd_pipelined for a repeated stack"
            )
        if self.params.workers:
            devices.setup_cpu(logical_devices=cpu_devices, threads_per_op=1)
            self._devices = remote.connect(self.params.workers)
            return
        needed = self.params.num_stages * self.params.num_replicas
        gpus = [] if cpu_devices else tf.config.list_physical_devices("GPU")
        if not gpus:
            devices.setup_cpu(logical_devices=cpu_devices or needed, threads_per_op=1)

    def program(self, step: Step, batch: Signature) -> ExecutionProgram:
        """See `Execution`."""
        task, parts = step.task, step.learner.params.accumulation_steps
        if self.stages_on is None:
            placed = PlacedStages(self._devices or _local_devices(), device_backends)
        else:
            placed = self.stages_on.place(task, self.micro_batch(batch, parts=parts))
        plan = self.plan(task, batch, parts=parts, devices=placed.names, dtype=step.dtype)
        backends = placed.backends(plan)
        replan = functools.partial(
            self.plan, task, parts=parts, devices=placed.names, dtype=step.dtype, earlier=plan
        )
        return PipelineProgram(step, plan, backends, batch=batch, replan=replan)

    def activation_dtype(self, dtype: str) -> str:
        """See `Execution`."""
        return dtype if self.stages_on is None else self.stages_on.activation_dtype(dtype)

    def _accepts(self, num_micro_batches: int) -> bool:
        """See `StagedExecution`."""
        with contextlib.suppress(ExecutionError):
            checked_actions(
                self._schedule,
                num_devices=self.params.num_stages,
                num_micro_batches=num_micro_batches,
            )
            return True
        return False

    def _indivisible(self, size: int) -> str:
        """See `StagedExecution`."""
        p = self.params
        return (
            f"a batch of {size} examples cannot be split for this pipeline: {p.num_replicas} "
            "replicas (execution.num_replicas) x the micro-batches that "
            f"execution.schedule={p.schedule!r} accepts have to divide it. Batches of this input "
            "differ in size: choose 1 replica and the schedule 1f1b, or an input whose batches "
            "have one size"
        )

    def plan(
        self,
        task: Task,
        batch: Signature,
        *,
        parts: int,
        dtype: str = "float32",
        devices: list[str] | None = None,
        earlier: PipelinePlan | None = None,
    ) -> PipelinePlan:
        """Returns the plan of a pipeline: the stages of a task, their devices and the schedule.

        Allocates nothing permanently. If devices are given, each kind of piece is run, to detect
        whether it couples examples, and for measured costs also to measure its time.

        Args:
          task: the task.
          batch: signature of the global batch.
          parts: number of accumulation steps.
          dtype: type of activations, as in `build`.
          devices: names of the available devices; None: placeholder names for those needed.
          earlier: a plan for batches of another shape. The stages have the same pieces, and a
            batch that the micro-batches do not divide is split into fewer.

        Raises:
          ExecutionError: the task, the batch, the devices and the Params are incompatible.
        """
        check_adds_gradients(task, "pipelined")
        p = self.params
        needed = p.num_stages * p.num_replicas
        names = self._placeholder_names() if devices is None else devices
        if needed > len(names):
            more = "add execution.workers" if p.workers else f"set --cpu_devices={needed}"
            raise ExecutionError(
                f"{rows_of_stages(p.num_stages, p.num_replicas)} need {needed} devices, but there "
                f"are {len(names)} ({', '.join(names)}): set execution.num_stages to at most "
                f"{max(len(names) // p.num_replicas, 1)}, or {more}"
            )
        is_other = earlier is not None
        micro = self.micro_batch(batch, parts=parts, is_other=is_other)
        parts, count = self.division(num_examples(batch), parts, is_other=is_other)
        check_layers(task)
        pieces, own = pieces_of_loss(task), task.specs()
        specs = used_specs(own, dtype)
        traces = trace_all(pieces, specs, micro)
        if devices is not None and earlier is None:
            full = traces if specs == own else trace_all(pieces, own, micro)
            check_pieces(pieces, full, own, micro)
        costs: Sequence[float]
        if earlier is None:
            device = None if devices is None or self.stages_on is not None else devices[0]
            costs = self._costs(pieces, traces, specs, micro, device)
            sizes = self.sizes(pieces, costs)
        else:
            costs, sizes = earlier.piece_costs, [len(s.pieces) for s in earlier.stage_plan.stages]
        stage_plan = stages.stage_plan(pieces, traces, sizes, specs, micro)
        actions = checked_actions(self._schedule, num_devices=p.num_stages, num_micro_batches=count)
        return PipelinePlan(
            stage_plan=stage_plan,
            by_device=by_device(actions, p.num_stages),
            devices=self._by_replica(names),
            batch_size=num_examples(batch),
            num_parts=parts,
            num_micro_batches=count,
            rematerialize=p.rematerialize,
            xla=p.xla,
            costs=p.costs,
            piece_costs=costs,
        )

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
