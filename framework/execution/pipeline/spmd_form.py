"""A pipeline as one SPMD program: what goes with it, and how it is built.

mesh    stage:K;data:R                  num_stages and num_replicas
rules   layers:stage;batch:data
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tekso.framework.execution.base import Signature
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh import mesh_devices
from tekso.framework.execution.mesh.cluster import Cluster
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
      ExecutionError: other Params of the pipeline do not go with it.
    """

    def __init__(self, pipeline: Any, schedule: PipelineSchedule) -> None:
        self._params = pipeline
        refused = []
        if not isinstance(schedule, Gpipe):
            refused.append(
                "execution.schedule is another one than gpipe: set 'gpipe', since all stages "
                "compute in the same tick, forwards and then backwards"
            )
        if pipeline.rematerialize == "except_last":
            refused.append(
                "execution.rematerialize is 'except_last': set 'all' or 'none', since the "
                "micro-batches are parts of one loop"
            )
        if pipeline.balance is not None:
            refused.append(
                "execution.balance is set: leave it out, since every stage has equally many layers"
            )
        if pipeline.costs != "traced":
            refused.append(
                f"execution.costs is {pipeline.costs!r}: leave it out, since nothing is shared out "
                "by cost"
            )
        if pipeline.workers:
            refused.append(
                "execution.workers are set: leave them out, and start the processes as those of "
                "one run (--cluster)"
            )
        if pipeline.stages_on is not None:
            refused.append(
                "execution.stages_on is set: leave it out; a data axis beside the stages is "
                "execution.num_replicas, and other axes need execution.form='host'"
            )
        if pipeline.xla != "none":
            refused.append(
                f"execution.xla is {pipeline.xla!r}: set 'none', since this form compiles nothing "
                "by XLA"
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
        """Returns the number of pieces of every stage: with the first what is before the stack.

        Every stage computes what is before and after it.

        Args:
          pieces: of the task, in order.
          traces: of the same.
          specs: of all weights.

        Raises:
          ExecutionError: they are no repeated stack between other pieces, or do not divide.
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
        """Returns how all tensors lie.

        Args:
          task: the task.
          micro_batch: signature of what a replica computes at a time.
          num_devices: how many there are; None: as many as are asked for.

        Raises:
          ExecutionError: there are too few devices, or the task does not fit.
        """
        stages, replicas = self._params.num_stages, self._params.num_replicas
        if num_devices is not None and num_devices < stages * replicas:
            raise ExecutionError(
                f"{rows_of_stages(stages, replicas)} need {stages * replicas} devices, and there "
                f"are {num_devices}: set a smaller execution.num_stages, or give "
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
        self, task: Task, learner: LearnerBase, *, seed: int, micro_batch: Signature
    ) -> SpmdProgram:
        """Returns the program.

        Args:
          task: the task.
          learner: the learner.
          seed: of weights and of all randomness in the steps.
          micro_batch: signature of what a replica computes at a time.

        Raises:
          ExecutionError: task and devices do not go together.
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
        return SpmdProgram(Step(task, learner, seed=seed), placement, layout, loop)
