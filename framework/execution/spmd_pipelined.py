"""Pipelined execution as one SPMD program for all stages, for models with one repeated stack.

    execution.num_stages         4       devices of the pipeline; each has as many layers
    execution.num_micro_batches  16      equal parts of a batch, computed one after the other

The program runs on a mesh `stage:K;data:R` by the rules `layers:stage;batch:data`, where K is
num_stages and R is num_replicas, and by `vocab:stage` if K divides the rows of all tables of words.
It can run on several processes, and on the cores of a TPU. In every tick all stages compute, and
then pass on their activations; see `pipeline/spmd_loop.py`. Gradients match single-device training
for any number of stages and micro-batches.

Source: Xu et al. 2021, "GSPMD: General and scalable parallelization for ML computation graphs"
(arXiv 2105.04663), section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from tekso.framework.cluster import Cluster
from tekso.framework.costs.piece_costs import cost_of
from tekso.framework.costs.piece_traces import PieceTrace, trace_all
from tekso.framework.coupling import coupling, named
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh.program import MeshProgram
from tekso.framework.execution.mesh.sharding_mesh import MeshParams, ShardingMesh
from tekso.framework.execution.pipeline import spmd_pieces, stages
from tekso.framework.execution.pipeline.actions import by_device
from tekso.framework.execution.pipeline.loss_pieces import pieces_of_loss
from tekso.framework.execution.pipeline.piece_coupling import check_layers, check_pieces
from tekso.framework.execution.pipeline.plan import PipelinePlan, rows_of_stages
from tekso.framework.execution.pipeline.schedule import Gpipe
from tekso.framework.execution.pipeline.schedule_check import checked_actions
from tekso.framework.execution.pipeline.spmd_loop import STAGE, SpmdLoop
from tekso.framework.execution.pipeline.spmd_loss import DATA, SpmdLoss, check_stages
from tekso.framework.execution.pipeline.staged_execution import (
    StagedExecution,
    check_adds_gradients,
)
from tekso.framework.params import OldField, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.signature import Signature, num_examples
from tekso.framework.step import Step, used_specs
from tekso.framework.symbolic import specs_of_batch
from tekso.framework.task import Task
from tekso.framework.weight_spec import STACK_DIM, WeightSpec

VOCAB = "vocab"


class SpmdPipelined(StagedExecution):
    """A pipeline as one program for all stages, for models with one repeated stack."""

    class Params(StagedExecution.Params):
        """Params of SpmdPipelined."""

        old_fields: ClassVar[Mapping[str, OldField]] = {
            "form": OldField("--execution=spmd_pipelined is what execution.form=spmd was"),
            "schedule": OldField(
                "all stages compute in the same tick, first all forward passes and then all "
                "backward passes, as in gpipe"
            ),
            "balance": OldField("all stages have the same number of layers"),
            "costs": OldField("stages are not balanced by cost"),
            "workers": OldField("start the processes as one run (--cluster)"),
            "stages_on": OldField("execution.num_replicas adds a data axis to the mesh"),
            "xla": OldField("XLA compiles nothing of this program"),
        }

        rematerialize: Literal["none", "all"] = param(
            "Micro-batches for which a stage saves only its inputs and recomputes the rest in the "
            "backward pass.",
            default="none",
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        mesh, rules = f"{STAGE}:{p.num_stages}", f"{STACK_DIM}:{STAGE}"
        if p.num_replicas > 1:
            mesh, rules = f"{mesh};{DATA}:{p.num_replicas}", f"{rules};batch:{DATA}"
        self._params_of_mesh = MeshParams(mesh=mesh, rules=rules)
        self._mesh = ShardingMesh(self._params_of_mesh)

    def join(self, cluster: Cluster) -> None:
        """See `Execution`."""
        self._mesh.join(cluster)

    def setup_devices(self, *, tpu: str | None = None, cpu_devices: int | None = None) -> None:
        """See `Execution`."""
        self._mesh.setup_devices(tpu=tpu, cpu_devices=cpu_devices)

    def program(self, step: Step, batch: Signature) -> MeshProgram:
        """See `Execution`."""
        task = step.task
        check_adds_gradients(task, "spmd_pipelined")
        micro = self.micro_batch(batch, parts=step.learner.params.accumulation_steps)
        found = self._traced(task, micro, task.specs())
        check_pieces(found.pieces, found.traces, found.specs, micro)
        loop = self._loop(found.parts)
        layout = self._layout(task, micro, num_devices=self._mesh.num_devices())
        placement = Placement(self._mesh.make(layout.mesh))
        loss = SpmdLoss(step, placement, layout, loop)
        return MeshProgram(step, placement, layout, loss=loss)

    def plan(
        self, task: Task, batch: Signature, *, parts: int, dtype: str = "float32"
    ) -> PipelinePlan:
        """See `StagedExecution`.

        The pieces before the stack count for the first stage, and those after it for the last,
        although every stage computes them.
        """
        p, micro = self.params, self.micro_batch(batch, parts=parts)
        parts, count = self.division(num_examples(batch), parts)
        found = self._traced(task, micro, used_specs(task.specs(), dtype))
        actions = checked_actions(
            Gpipe.Params().instantiate(),
            num_devices=p.num_stages,
            num_micro_batches=count,
        )
        return PipelinePlan(
            stage_plan=stages.stage_plan(
                found.pieces, found.traces, self._sizes(found.pieces), found.specs, micro
            ),
            by_device=by_device(actions, p.num_stages),
            devices=self._by_replica(self._placeholder_names()),
            batch_size=num_examples(batch),
            num_parts=parts,
            num_micro_batches=count,
            rematerialize=p.rematerialize,
            xla="none",
            piece_costs=[cost_of(trace) for trace in found.traces],
        )

    def _traced(self, task: Task, micro: Signature, specs: Mapping[str, WeightSpec]) -> _Traced:
        """Returns the pieces of a task; there is one stack, whose layers the stages divide."""
        check_layers(task)
        for layer in coupling(task):
            raise ExecutionError(
                f"{named(layer)} couples the examples of a batch, which --execution=spmd_pipelined "
                "does not support; use --execution=pipelined or --execution=mesh_sharded"
            )
        pieces = pieces_of_loss(task)
        traces = trace_all(pieces, specs, micro)
        parts = spmd_pieces.find(pieces, traces, specs, self.params.num_stages)
        flow: Flow = specs_of_batch(micro)
        for trace in traces[: [piece.rows is not None for piece in pieces].index(True)]:
            flow = {**flow, **trace.writes}
        check_stages(self._loop(parts), flow, specs, num_examples(micro))
        return _Traced(pieces, traces, specs, parts)

    def _loop(self, parts: spmd_pieces.StackPieces) -> SpmdLoop:
        p = self.params
        return SpmdLoop(parts, p.num_stages, p.num_micro_batches, p.rematerialize == "all")

    def _sizes(self, pieces: Sequence[Piece]) -> list[int]:
        """Returns the number of pieces of every stage."""
        count = self.params.num_stages
        is_in_stack = [piece.rows is not None for piece in pieces]
        before, layers = is_in_stack.index(True), sum(is_in_stack)
        sizes = [layers // count] * count
        sizes[0] += before
        sizes[-1] += len(pieces) - before - layers
        return sizes

    def layout(
        self, task: Task, batch: Signature, *, parts: int, num_devices: int | None
    ) -> MeshLayout:
        """Returns the mesh and the layout of all tensors; needs no device.

        Args:
          task: the task.
          batch: signature of the global batch.
          parts: number of accumulation steps.
          num_devices: number of devices there are; None: as many as needed.

        Raises:
          ExecutionError: there are too few devices, or the layout does not fit the task.
        """
        return self._layout(task, self.micro_batch(batch, parts=parts), num_devices=num_devices)

    def _layout(self, task: Task, micro: Signature, *, num_devices: int | None) -> MeshLayout:
        count, replicas = self.params.num_stages, self.params.num_replicas
        if num_devices is not None and num_devices < count * replicas:
            raise ExecutionError(
                f"{rows_of_stages(count, replicas)} need {count * replicas} devices, but there "
                f"are {num_devices}: set a smaller execution.num_stages, or "
                f"--cpu_devices={count * replicas}"
            )
        of_all = {n: ((replicas * s[0], *s[1:]), dtype) for n, (s, dtype) in micro.items()}
        params = self._params_of_mesh
        tables = [spec for spec in task.specs().values() if VOCAB in spec.dims]
        sizes = [spec.shape[spec.dims.index(VOCAB)] for spec in tables if not spec.stacked]
        if tables and len(sizes) == len(tables) and not any(size % count for size in sizes):
            params = MeshParams(mesh=params.mesh, rules=f"{params.rules};{VOCAB}:{STAGE}")
        return ShardingMesh(params).layout(task, of_all, num_devices=num_devices)


class _Traced(NamedTuple):
    """The pieces of a task, traced for a micro-batch of one replica."""

    pieces: Sequence[Piece]
    traces: Sequence[PieceTrace]
    specs: Mapping[str, WeightSpec]
    parts: spmd_pieces.StackPieces
