"""The ranking of executions for losses that couple examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coupled_losses import Gathered, InBatch, Misplaced
from wrong_losses import Points, Squares

from tekso.framework.execution import DataParallel, Hybrid, MeshSharded
from tekso.framework.experiment import Experiment, Tree
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run import divided_losses, divided_plan, loss_check, run_plan
from tekso.framework.run.divided_losses import Division
from tekso.framework.run.divided_plan import DividedStep
from tekso.framework.run.run_plan import RunPlan
from tekso.framework.run.session import Session
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.models.layers.normalization import BatchNorm


def tree(
    kind: type[Task], execution: Any, *, size: int = 8, accumulated: int = 1, **fields: Any
) -> Tree.Params:
    return Tree.Params(
        task=kind.Params(),
        input=Points.Params(batch_size=size),
        learner=Learner.Params(
            optimizer=Momentum.Params(),
            schedule=Constant.Params(value=0.1),
            accumulation_steps=accumulated,
        ),
        execution=execution.Params(**fields),
    )


def ranking(tmp_path: Path, kind: type[Task], execution: Any, **fields: Any) -> RunPlan:
    params = tree(kind, execution, **fields)
    return run_plan.plan(
        "m", params, logdir=str(tmp_path), device="cpu", num_devices=2, searches=True
    )


def find(kind: type[Task], division: Division) -> DividedStep:
    params = tree(kind, DataParallel, size=6)
    return divided_plan.find(params, kind.Params().instantiate(), division, assets_dir=None)


def test_a_plan_has_the_problem_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(InBatch, Division(2))
    assert "in training, the first 6 examples have a loss sum of" in found.problem
    text = find(InBatch, Division(1, 2)).problem
    assert "in training, the first 6 examples have a loss sum of" in text and "two parts" in text
    assert find(InBatch, Division()) == find(Gathered, Division(2)) == DividedStep()
    monkeypatch.setattr(Points, "batch", lambda *_: 1 / 0)
    found = find(InBatch, Division(2))
    assert found.problem == ""
    assert found.warnings == (
        "it could not be checked whether the loss of InBatch on 2 devices equals that of one: "
        "division by zero",
    )
    monkeypatch.setattr(loss_check, "MOST_BYTES", 1)
    (warning,) = find(InBatch, Division(2)).warnings
    assert "too large to check" in warning


def of_workers(
    tmp_path: Path, kind: type[Task], *, size: int = 8, steps_per_call: int = 2, **fields: Any
) -> list[str]:
    updates = Hybrid.Params(workers=["a:1", "a:2"], parameter_servers=["b:1"], **fields)
    params = tree(kind, DataParallel, size=size, updates=updates)
    params.run.steps_per_call = steps_per_call
    return run_plan.plan("m", params, logdir=str(tmp_path), device="cpu").problems


def test_a_plan_refuses_the_parts_of_workers_as_training_does(tmp_path: Path) -> None:
    (problem,) = of_workers(tmp_path, InBatch)
    assert "of a batch: in training, the first 8 examples have a loss sum of" in problem
    assert "in two parts with 4 examples each" in problem
    (problem,) = of_workers(tmp_path, Gathered)
    assert "the batch is computed in 2 parts by workers" in problem
    (problem,) = of_workers(tmp_path, Squares, size=7)
    assert problem.startswith("input.batch_size 7 does not divide evenly over 2 workers")
    assert of_workers(tmp_path, Squares) == of_workers(tmp_path, InBatch, num_groups=2) == []
    (problem,) = of_workers(tmp_path, Squares, num_groups=2, steps_per_call=1)
    assert problem.startswith("run.steps_per_call is 1, but the execution computes 2 steps")


@pytest.mark.parametrize("execution", [DataParallel, MeshSharded])
def test_a_ranking_refuses_several_devices_for_the_loss_of_each_and_not_one(
    tmp_path: Path, execution: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, check = [], divided_losses.check
    monkeypatch.setattr(
        divided_losses, "check", lambda *args, **kw: checked.append(1) or check(*args, **kw)
    )
    plan = ranking(tmp_path, InBatch, execution)
    names = [step.name for step in plan.others]
    assert "data_parallel, 2 devices" not in names and "data_parallel, 1 device" in names
    text = plan.rejected["data_parallel"]
    assert text.startswith("refused: InBatch.loss (")
    assert "have a loss sum of" in text and "gathers_examples = True" in text
    assert (text == f"refused: {plan.problem}") == (execution is DataParallel)
    assert len(checked) == 1


def test_a_ranking_has_several_devices_for_the_loss_of_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ranking(tmp_path, Gathered, DataParallel)
    assert "data_parallel, 2 devices" in [step.name for step in plan.others]
    monkeypatch.setattr(loss_check, "MOST_BYTES", 1)
    plan = ranking(tmp_path, InBatch, MeshSharded)
    (step,) = [one for one in plan.others if one.name == "data_parallel, 2 devices"]
    assert "InBatch couples the examples of a batch, and is too large to check" in step.notes[-1]


def test_a_ranking_refuses_accumulation_steps_for_the_loss_of_each(tmp_path: Path) -> None:
    plan = ranking(tmp_path, InBatch, DataParallel, accumulated=2)
    assert plan.others == ()
    for name in ("data_parallel, 1 device", "mesh_sharded"):
        assert plan.rejected[name].startswith("refused: InBatch.loss ("), name


def test_a_ranking_refuses_towers_of_a_device_and_not_of_a_mesh(tmp_path: Path) -> None:
    plan = ranking(tmp_path, Misplaced, DataParallel, towers=2)
    assert plan.rejected["data_parallel, 1 device"].startswith("refused: Misplaced.loss (")
    assert "mesh_sharded" not in plan.rejected


class Normalised(Squares):
    """Normalises by the statistics of a batch."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("norm", BatchNorm.Params(dim=3))
        self.child("more", BatchNorm.Params(dim=3))

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        x = self.norm.fprop(theta.norm, batch["x"], ctx)
        x = self.more.fprop(theta.more, x, ctx)
        return super().loss(theta, {**batch, "x": x}, ctx)


STATISTICS = (
    "in training, the batch statistics of norm (BatchNorm) and 1 other layer are computed within "
    "each of 2 parts of a batch (accumulation steps, or workers of execution.updates): losses are "
    "not those of whole batches"
)


class OfStatistics(Experiment):
    def task(self) -> Any:
        return Normalised.Params()

    def input(self) -> Any:
        return Points.Params(batch_size=6)

    def learner(self) -> Any:
        return Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))


def test_a_session_and_a_plan_warn_of_statistics_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for accumulated, warned in ((1, ()), (2, (STATISTICS,))):
        params = tree(Normalised, DataParallel, size=6, accumulated=accumulated)
        plan = run_plan.plan("m", params, logdir=str(tmp_path), device="cpu")
        assert (plan.warnings, plan.problems) == (warned, [])
        lines: list[str] = []
        monkeypatch.setattr(Session, "_warn", lambda _, more, lines=lines: lines.extend(more))
        settings = {"learner.accumulation_steps": accumulated, "execution.xla": "none"}
        Session(OfStatistics, settings).train(1)
        assert tuple(line for line in lines if "statistics" in line) == warned


def test_a_loss_that_is_refused_has_the_warning_too() -> None:
    found = find(InBatch, Division(1, 2))
    assert found.problem and "statistics of norm (BatchNorm) are" in found.warnings[0]
