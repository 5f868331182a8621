"""A loss that pieces do not compute is refused by every form of pipeline, with both methods."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from tekso.framework.execution import ExecutionError, Pipelined, SpmdPipelined, StagesOnMesh
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.pipeline.loss_pieces import pieces_of_loss
from tekso.framework.pieces import LOSS_SUM, Piece
from tekso.framework.task import LossSums, Task, TaskError
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification


class Thrice(Classification):
    """Three times the loss."""

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        sums = super().loss(theta, batch, ctx)
        return LossSums(3 * sums.loss_sum, sums.metrics)


class InPieces(Thrice):
    """The same in pieces."""

    def pieces(self) -> list[Piece]:
        def thrice(theta: Any, flow: Any, ctx: Any) -> Any:
            return {**flow, LOSS_SUM: 3 * flow[LOSS_SUM]}

        return [*super().pieces(), Piece("thrice", {}, thrice)]


class Shifted(Mlp):
    """Other scores."""

    def fprop(self, theta: Any, x: Any, ctx: Any) -> Any:
        return 1.0 + super().fprop(theta, x, ctx)


def task_of(kind: Any, model: Any = Mlp) -> Any:
    sizes = {"input_dim": 3, "output_dim": 2, "hidden_dims": [5]}
    return kind.Params(num_classes=2, model=model.Params(**sizes)).instantiate()


def line(method: Any) -> str:
    method = inspect.unwrap(method)
    return f"{inspect.getsourcefile(method)}:{inspect.getsourcelines(method)[1]}"


@pytest.mark.parametrize(
    "params",
    [
        Pipelined.Params(),
        SpmdPipelined.Params(),
        Pipelined.Params(stages_on=StagesOnMesh.Params(mesh="model:2")),
    ],
    ids=["host", "spmd", "stages on meshes"],
)
def test_a_loss_that_the_pieces_do_not_compute_is_refused(params: Any) -> None:
    execution = params.copy().set(num_stages=2, num_micro_batches=2).instantiate()
    arrays = {
        "x": np.zeros([4, 3], np.float32),
        "labels": np.zeros([4], np.int32),
        "weights": np.ones([4], np.float32),
    }
    with pytest.raises(ExecutionError) as error:
        execution.plan(task_of(Thrice), signature_of(arrays), parts=1)
    assert str(error.value).startswith(
        f"Thrice.loss ({line(Thrice.loss)}) overrides what Classification.pieces "
        f"({line(Classification.pieces)}) computes. "
    )


def test_a_model_whose_fprop_the_pieces_do_not_compute_is_refused() -> None:
    task = task_of(Classification, model=Shifted)
    with pytest.raises(TaskError, match=r"^Shifted.fprop \(.* overrides what Mlp.pieces") as error:
        pieces_of_loss(task)
    assert "override pieces() in Shifted as well" in str(error.value)
    with pytest.raises(TaskError, match=r"^Shifted.fprop"):  # on one device, too
        task.loss(task.init(seed=0), {"x": np.zeros([4, 3], np.float32)}, None)


def test_who_overrides_the_pieces_as_well_is_believed() -> None:
    assert [piece.name for piece in pieces_of_loss(task_of(InPieces))][-2:] == ["loss", "thrice"]


class OnePiece(Task):
    """A task that says nowhere where it can be cut."""

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        return LossSums(0.0)  # type: ignore[arg-type]


def test_a_task_of_one_piece_has_a_loss_of_its_own() -> None:
    assert len(pieces_of_loss(OnePiece.Params().instantiate())) == 1
