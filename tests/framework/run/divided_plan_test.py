"""The ranking of executions for losses that couple examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from coupled_losses import Gathered, InBatch, Misplaced
from wrong_losses import Points

from tekso.framework.execution import DataParallel, MeshSharded
from tekso.framework.experiment import Tree
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run import divided_losses, loss_check, run_plan
from tekso.framework.run.run_plan import RunPlan
from tekso.framework.schedules import Constant
from tekso.framework.task import Task


def ranking(
    tmp_path: Path, kind: type[Task], execution: Any, *, accumulated: int = 1, **fields: Any
) -> RunPlan:
    tree = Tree.Params(
        task=kind.Params(),
        input=Points.Params(batch_size=8),
        learner=Learner.Params(
            optimizer=Momentum.Params(),
            schedule=Constant.Params(value=0.1),
            accumulation_steps=accumulated,
        ),
        execution=execution.Params(**fields),
    )
    return run_plan.plan(
        "m", tree, logdir=str(tmp_path), device="cpu", num_devices=2, searches=True
    )


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
