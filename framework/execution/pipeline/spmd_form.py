"""Builds a pipeline as one SPMD program, and rejects Params that this form does not support.

mesh    stage:K;data:R                  num_stages and num_replicas
rules   layers:stage;batch:data
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tekso.framework.execution.base import Signature
from tekso.framework.execution.cluster import Cluster
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh import mesh_devices
from tekso.framework.execution.mesh.layouts import MeshLayout
from tekso.framework.execution.mesh.placement import Placement
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.execution.pipeline import spmd_pieces
from tekso.framework.execution.pipeline.loss_pieces import pieces_of_loss
from tekso.framework.execution.pipeline.piece_mixing import check_layers, check_pieces
from tekso.framework.execution.pipeline.piece_traces import PieceTrace, trace_all
from tekso.framework.execution.pipeline.plan import rows_of_stages
from tekso.framework.execution.pipeline.schedule import Gpipe, PipelineSchedule
from tekso.framework.execution.pipeline.spmd_loop import STAGE, SpmdLoop
from tekso.framework.execution.pipeline.spmd_program import DATA, SpmdProgram
from tekso.framework.execution.step import Step
from tekso.framework.learning_step import LearnerBase
from tekso.framework.pieces import Piece
from tekso.framework.task import Task
from tekso.framework.weight_spec import STACK_DIM, WeightSpec

VOCAB = "vocab"


class SpmdForm:
    """Builds one program for all stages.

    Args:
      pipeline: Params of the pipeline.
      schedule: its schedule.

    Raises:
      ExecutionError: a single program does not support other Params of the pipeline.
    """

    def __init__(self, pipeline: Any, schedule: PipelineSchedule) -> None:
        self._params = pipeline
        refused = []
        if not isinstance(schedule, Gpipe):
            refused.append(
                "execution.schedule is not gpipe: set 'gpipe', since all stages compute in the "
                "same tick, first all forward passes and then all backward passes"
            )
        if pipeline.rematerialize == "except_last":
            refused.append(
                "execution.rematerialize is 'except_last': set 'all' or 'none', since all "
                "micro-batches run in one loop"
            )
        if pipeline.balance is not None:
            refused.append(
                "execution.balance is set: remove it, since all stages have the same number of "
                "layers"
            )
        if pipeline.costs != "traced":
            refused.append(
                f"execution.costs is {pipeline.costs!r}: remove it, since this form does not "
                "balance stages by cost"
            )
        if pipeline.workers:
            refused.append(
                "execution.workers is set: remove it, and start the processes as one run "
                "(--cluster)"
            )
        if pipeline.stages_on is not None:
            refused.append(
                "execution.stages_on is set: remove it; execution.num_replicas adds a data axis, "
                "and other axes need execution.form='host'"
            )
        if pipeline.xla != "none":
            refused.append(
                f"execution.xla is {pipeline.xla!r}: set 'none', since this form does not use XLA"
            )
        if refused:
            raise ExecutionError(f"execution.form is 'spmd', and {'; and '.join(refused)}")
        mesh, rules = f"{STAGE}:{pipeline.num_stages}", f"{STACK_DIM}:{STAGE}"
        if pipeline.num_replicas > 1:
            mesh, rules = f"{mesh};{DATA}:{pipeline.num_replicas}", f"{rules};batch:{DATA}"
        self._mesh, self._rules = mesh, rules
        self._on_mesh = MeshSharded.Params(mesh=mesh, rules=rules).instantiate()

    def join(self, cluster: Cluster) -> None:
        """See `Execution`."""
        self._on_mesh.join(cluster)

    def setup_devices(self, *, tpu: str | None, cpu_devices: int | None) -> None:
        """See `Execution`."""
        self._on_mesh.setup_devices(tpu=tpu, cpu_devices=cpu_devices)

    def sizes(
        self,
        pieces: Sequence[Piece],
        traces: Sequence[PieceTrace],
        specs: Mapping[str, WeightSpec],
    ) -> list[int]:
        """Returns the number of pieces of every stage.

        The pieces before the stack count for the first stage, and those after it for the last,
        although every stage computes them.

        Args:
          pieces: the pieces of the task, in order.
          traces: their traces.
          specs: specs of all weights.

        Raises:
          ExecutionError: the pieces are not one repeated stack between other pieces, or the number
            of stages does not divide its layers.
        """
        stages = self._params.num_stages
        spmd_pieces.find(pieces, traces, specs, stages)  # there is one stack, and it divides
        is_in_stack = [piece.rows is not None for piece in pieces]
        before, layers = is_in_stack.index(True), sum(is_in_stack)
        sizes = [layers // stages] * stages
        sizes[0] += before
        sizes[-1] += len(pieces) - before - layers
        return sizes

    def layout(self, task: Task, micro_batch: Signature, *, num_devices: int | None) -> MeshLayout:
        """Returns the mesh and the layout of all tensors.

        Args:
          task: the task.
          micro_batch: signature of a micro-batch of one replica.
          num_devices: number of devices there are; None: as many as needed.

        Raises:
          ExecutionError: there are too few devices, or the layout does not fit the task.
        """
        stages, replicas = self._params.num_stages, self._params.num_replicas
        if num_devices is not None and num_devices < stages * replicas:
            raise ExecutionError(
                f"{rows_of_stages(stages, replicas)} need {stages * replicas} devices, but there "
                f"are {num_devices}: set a smaller execution.num_stages, or "
                f"--cpu_devices={stages * replicas}"
            )
        of_all = {n: ((replicas * s[0], *s[1:]), dtype) for n, (s, dtype) in micro_batch.items()}
        rules = self._rules
        tables = [spec for spec in task.specs().values() if VOCAB in spec.dims]
        sizes = [spec.shape[spec.dims.index(VOCAB)] for spec in tables if not spec.stacked]
        if tables and len(sizes) == len(tables) and not any(size % stages for size in sizes):
            rules = f"{rules};{VOCAB}:{STAGE}"
        on_mesh = MeshSharded.Params(mesh=self._mesh, rules=rules).instantiate()
        return on_mesh.layout(task, of_all, num_devices=num_devices)

    def build(
        self,
        task: Task,
        learner: LearnerBase,
        *,
        seed: int,
        micro_batch: Signature,
        dtype: str,
    ) -> SpmdProgram:
        """Returns the program.

        Args:
          task: the task.
          learner: the learner.
          seed: seed of the weights and of all random numbers in the steps.
          micro_batch: signature of a micro-batch of one replica.
          dtype: type of activations, as in `Execution.build`.

        Raises:
          ExecutionError: this form does not support the task, or there are too few devices.
        """
        p, device_type = self._params, self._on_mesh.device_type
        check_layers(task, form="spmd")
        pieces, specs = pieces_of_loss(task), task.specs()
        traces = trace_all(pieces, specs, micro_batch)
        check_pieces(pieces, traces, specs, micro_batch)
        parts = spmd_pieces.find(pieces, traces, specs, p.num_stages)
        loop = SpmdLoop(parts, p.num_stages, p.num_micro_batches, p.rematerialize == "all")
        layout = self.layout(task, micro_batch, num_devices=self._on_mesh.num_devices())
        placement = Placement(mesh_devices.make_mesh(layout.mesh, device_type))
        return SpmdProgram(Step(task, learner, seed=seed, dtype=dtype), placement, layout, loop)
