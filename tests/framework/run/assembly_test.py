"""What a run does with its inputs before the first step: warnings, and data that has changed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import small_tasks

from tekso.framework.execution.errors import ExecutionError
from tekso.framework.experiment import Run, Tree
from tekso.framework.input.input import Batch, Input
from tekso.framework.params import param
from tekso.framework.run import assembly, training_data
from tekso.framework.run.assembly import assemble
from tekso.framework.run.checkpoint_description import Description
from tekso.tasks.lm.synthetic import SyntheticTokens
from tekso.tools import decode_tasks

CODE = '''"""Points of two classes, moved by what a file says of each split."""

import json

import numpy as np

from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.arrays import Arrays
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.params import param
from tekso.framework.registry import register
from tekso.framework.schedules import Constant
from tekso.models.layers.linear import Linear
from tekso.tasks.classification.task import Classification


class Points(Arrays):
    class Params(Arrays.Params):
        shift: float = param("Added to x.", default=0.0)
        label: int = param("Of the second point.", default=2)

    def load(self, split):
        with open("moved.json") as file:
            moved = json.load(file)[split] + self.params.shift
        labels = np.array([1, self.params.label, 1])
        return {"x": np.arange(6.0).reshape(3, 2) + moved, "labels": labels}


@register
class Tiny(Experiment):
    """Two points a batch."""

    def task(self):
        return Classification.Params(model=Linear.Params(input_dim=2))

    def input(self):
        return Points.Params(batch_size=2)

    def eval_inputs(self):
        return {"dev": HeldOut.Params()}

    def learner(self):
        return Learner.Params(optimizer=AdamW.Params(), schedule=Constant.Params(value=0.01))

    def run(self):
        return Run.Params(steps=1)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "points.py").write_text(CODE)
    return tmp_path


def trainer(folder: Path, *flags: str, train: int, dev: int) -> subprocess.CompletedProcess[str]:
    (folder / "moved.json").write_text(f'{{"train": {train}, "dev": {dev}}}')
    command = ["-m", "tekso.tools.trainer", "--import=points", "--logdir=run", *flags]
    return processes.run(command, cwd=folder, op_by_op=True)


def test_what_is_doubtful_is_shown_and_only_data_that_is_used_must_be_unchanged(
    folder: Path,
) -> None:
    begin = ["--model=points.Tiny", "--set=execution.xla=none"]
    begin += ["--set=learner.schedule.warmup_steps=7"]
    done = trainer(folder, *begin, train=0, dev=0)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert re.search(
        r"warning: eval_inputs.dev: (\d+) of \1 examples are training examples", output
    )
    assert "warning: input: 1 of the classes 0 to 2 have no training example (0)" in output
    assert (
        "warning: learner.schedule.warmup_steps is 7, but the schedule ends after 1 step: "
        in output
    )

    done = trainer(folder, "--mode=eval", train=5, dev=0)
    assert done.returncode == 0 and "warmup_steps" not in done.stdout + done.stderr, done.stderr
    done = trainer(folder, *begin, "--steps=2", train=5, dev=0)
    assert done.returncode and "Points.load('train')" in done.stderr
    done = trainer(folder, "--mode=eval", train=0, dev=5)
    assert done.returncode and "Points.load('dev')" in done.stderr
    assert "returns different examples than before in this logdir" in done.stderr


def test_training_data_that_a_setting_changes_is_a_warning(folder: Path) -> None:
    begin = ["--model=points.Tiny", "--set=execution.xla=none"]
    assert trainer(folder, *begin, train=0, dev=0).returncode == 0
    expected = r"warning: the training examples are not those of the checkpoint of step 1 \('input"
    for flags in (["--mode=eval"], ["--steps=2"]):
        done = trainer(folder, *flags, "--set=input.shift=3", train=0, dev=0)
        output = done.stdout + done.stderr
        assert done.returncode == 0 and re.search(rf"{expected}\.shift' changed\)", output), output
        assert ("train in another --logdir" in output) == ("--steps=2" in flags)
    done = trainer(folder, "--steps=3", "--set=input.shift=3.0", train=0, dev=0)
    assert done.returncode == 0 and "the training examples" not in done.stdout + done.stderr
    done = trainer(folder, "--mode=eval", "--set=input.label=3", train=0, dev=0)
    assert re.search(
        r"cannot be restored: .*come from the training input, where 'input\.label'.* changed: "
        r"task\.model\.output_dim : 3 -> 4; task\.num_classes : 3 -> 4\n",
        done.stderr,
    ), done.stderr


def test_training_data_that_only_the_warning_needs_may_be_gone() -> None:
    tree = Tree.Params(input=SyntheticTokens.Params(batch_size=2, length=8, vocab_size=9))
    trained = Description(step=1, model="", params=tree.to_text(), input={"training_data": "1"})
    tree.input.batch_size, tree.input.length = 3, 7

    class Gone(Input):
        def excerpt(self) -> list[Batch]:
            raise OSError("no such file")

    for gone, trains in ((False, True), (False, False), (True, False)):
        input = Gone(Input.Params()) if gone else tree.input.instantiate()
        text = training_data.warning(trained, tree, input, trains=trains)
        assert ("of step 1 ('input.length' changed)" in text) is not gone
        assert text.endswith("train in another --logdir") is trains
    with pytest.raises(OSError, match="no such file"):
        training_data.warning(trained, tree, Gone(Input.Params()), trains=True)


class Batches(Input):
    """Has its own `batch`."""

    class Params(Input.Params):
        """Params of Batches."""

        batch_size: int = param("Examples in a batch.", default=2)
        threads: int = param("Changes no data.", default=1)
        ids: int = param("First id.", default=0)

    @property
    def num_batches(self) -> int:
        return 3

    def batch(self, step: int) -> Batch:
        start = self.params.ids + step * self.params.batch_size
        return {"ids": np.arange(start, start + self.params.batch_size)}


def test_batches_of_another_size_or_order_are_not_taken_for_other_data() -> None:
    before = Tree.Params(input=Batches.Params(), run=Run.Params())
    trained = Description(
        step=1, model="", params=before.to_text(),
        input=training_data.described(before.input.instantiate()),
    )  # fmt: skip

    def warned(**changes: Any) -> bool:
        tree = before.copy()
        for name, value in changes.items():
            tree.set({"run.seed" if name == "seed" else f"input.{name}": value})
        return bool(training_data.warning(trained, tree, tree.input.instantiate(), trains=True))

    assert not warned(threads=2)
    assert not warned(threads=2, batch_size=3) and not warned(ids=1, seed=1)
    assert warned(ids=1)


def test_of_several_tasks_only_the_data_of_the_one_to_decode_with_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[bool] = []
    load = small_tasks.Flowers.load

    def noted(self: Any, split: Any) -> Any:
        read.append(self.params.two_classes)
        return load(self, split)

    monkeypatch.setattr(small_tasks.Flowers, "load", noted)
    tree = small_tasks.Iris().tree()
    parts = assemble(tree, assets_dir=str(tmp_path), reads_data=False, one_task="virginica")
    assert set(read) == {True}
    tree.run.keep_best.set(metric="accuracy", goal="max")
    assert parts.description("small.Iris").goal == "max"
    parts = decode_tasks.of_task(parts, "virginica")
    assert parts.input.params.two_classes and parts.task.params.num_classes == 2


def test_evaluation_batches_with_no_examples_to_compare_on_a_device_are_refused() -> None:
    dev = SyntheticTokens.Params(vocab_size=5, length=2, batch_size=3).instantiate()
    expected = (
        r"eval_inputs\.dev has batches of 3 examples, fewer than the 4 devices of all processes, "
        r"whose examples loss \(Pairs\) compares: set eval_inputs\.dev\.batch_size to at least 4"
    )
    with pytest.raises(ExecutionError, match=expected):
        assembly._check_eval_batches({"dev": dev}, 4, "loss (Pairs)")
    assembly._check_eval_batches({"dev": dev}, 3, "loss (Pairs)")
