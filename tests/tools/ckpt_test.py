"""Tests of tekso-ckpt: its output, its files, and its errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoint_files import Description
from tekso.framework.run.logdir import Logdir
from tekso.tools import ckpt

W = {step: np.full((2, 3), float(step), np.float32) for step in (10, 20, 30)}


def save(folder: Path, step: int, model: str = "lm.Some", **tensors: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = Description(step=step, model=model, params="", metrics={"dev/loss": step / 7})
    values = {"weights/w": W.get(step, W[10]), "learner/updates/applied": np.int64(step), **tensors}
    checkpoint_files.write(str(folder / f"step_{step:08d}"), values, about)


@pytest.fixture
def logdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A logdir with three checkpoints, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for step in (10, 20, 30):
        save(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run"


def run(*words: str) -> int:
    return ckpt.main(["tekso-ckpt", *words])


def read(path: str, key: str = "weights/w") -> Any:
    return checkpoint_files.open_verified(path).read(key)


@pytest.mark.parametrize(
    ("which", "mean"),
    [
        (["--logdir=run", "--last=2"], 25.0),
        (["--logdir=run", "--last=3"], 20.0),
        (["--logdir=run", "--steps=30,10"], 20.0),
        (["run/checkpoints/step_00000020", "run/checkpoints/step_00000010/"], 15.0),
    ],
)
def test_average_takes_the_checkpoints_that_are_named(
    logdir: Path, capsys: pytest.CaptureFixture[str], which: list[str], mean: float
) -> None:
    assert run("average", *which, "--output=new/mean") == 0, capsys.readouterr().err
    np.testing.assert_array_equal(read("new/mean"), np.full((2, 3), mean, np.float32))
    printed = capsys.readouterr().out
    assert "averaged" in printed and "--mode=eval --logdir=run --checkpoint=" in printed


def test_damaged_checkpoints_are_passed_over_and_reported(
    logdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = logdir / "checkpoints" / "step_00000020" / "tensors.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    assert run("average", "--logdir=run", "--last=2", "--output=mean") == 0
    assert "skipped: " in capsys.readouterr().err
    np.testing.assert_array_equal(read("mean"), W[20])  # of 10 and 30
    assert run("list", "--logdir=run") == 0
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines()[1:4]] == [
        ["step_00000010", "10"],
        ["step_00000020", "20"],
        ["step_00000030", "30"],
    ]
    assert printed.count(" good ") == 2 and "step_00000020 is damaged: tensors.data" in printed
    assert "dev/loss" in printed and "1.4286" in printed
    assert run("list", "run", "--format=json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["good", "damaged", "good"]
    assert rows[0]["metrics"] == {"dev/loss": 10 / 7}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "a command is missing: expected average, list, "),
        (["averages"], 2, "'averages' is not a command"),
        (["average", "--logdir=run", "--last=2"], 2, "--output is missing"),
        (["average", "--logdir=run", "--output=x"], 2, "either --last=N, or --steps"),
        (["average", "--last=2", "--output=x"], 2, "--logdir is missing"),
        (["average", "--logdir=run", "--last=2", "--steps=10", "--output=x"], 2, "either --last"),
        (["average", "--logdir=run", "--last=2", "--output=run"], 2, "--output=run exists"),
        (["average", "--logdir=run", "--last=0", "--output=x"], 2, "last"),
        (["average", "--logdir=run", "--last=4", "--output=x"], 2, "has 3 good checkpoints: give"),
        (["average", "--logdir=nowhere", "--last=2", "--output=x"], 2, "has none: train first"),
        (["average", "--logdir=run", "--steps=10,25", "--output=x"], 1, "there is no checkpoint"),
        (["average", "--logdir=run", "--steps=ten", "--output=x"], 2, "'ten' is not a step"),
        (["average", "--logdir=run", "--steps=10,10", "--output=x"], 2, "is given twice"),
        (["average", "nowhere/at/all", "--output=x"], 1, "there is no checkpoint in nowhere/"),
        (["average", "--logdir=run", "--last=2", "--output=x/step_00000020"], 2, "step_00000030"),
        (["average", "run/checkpoints/step_00000010", "o/step_00000005", "--output=x"], 1,
         "only checkpoints of one experiment can be averaged"),
        (["average", "run/checkpoints/step_00000010", "o/step_00000006", "--output=x"], 1,
         "weights/w has shape"),
        (["list"], 2, "--logdir is missing"),
        (["list", "--logdir=nowhere"], 2, "has no checkpoints"),
        (["list", "--logdir=run", "--last=2"], 2, "--last works only with average, not with list"),
        (["list", "run", "o"], 2, "unexpected argument 'run'"),
        (["shwo", "run"], 2, "'shwo' is not a command; did you mean show?"),
        (["list", "--logdirs=run"], 2, "no flag --logdirs; did you mean --logdir?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_reported_in_a_line(
    logdir: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    save(logdir.parent / "o", 5, model="lm.Other")
    save(logdir.parent / "o", 6, **{"weights/w": np.zeros((3, 3), np.float32)})
    assert run(*words) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert error.count("\n") == 1, error
    assert not (logdir.parent / "x").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = capsys.readouterr().out
    assert "average:" in printed and "--last=N" in printed


SMALL = [
    "task.model.dim=16",
    "task.model.stack.num_layers=1",
    "task.model.stack.layer.attention.num_heads=2",
    "task.model.stack.layer.feed_forward.hidden_dim=24",
    "task.decode.max_new_tokens=5",
    "input.length=16",
    "learner.ema_decay=0.5",
    "run.checkpoint_every_steps=2",
    "execution.towers=1",
    "execution.xla=none",  # to compile would take longer than all the rest
]


def trainer(*words: str, cwd: Path) -> str:
    command = ["-m", "tekso.tools.trainer", *words]
    done = processes.run(command, cwd=cwd, op_by_op=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loss_of_mean(steps: list[int]) -> float:
    """The loss of run/ with the mean of the weights of checkpoints, without what runs it."""
    _, tree = Logdir("run").experiment()
    given = {"seed": tree.run.seed, "assets_dir": "run/assets"}
    train = tree.input.instantiate(**given)
    dev = tree.eval_inputs["dev"].instantiate(**given, train=tree.input)
    task = tree.task.owner.complete(tree.task, train).instantiate()
    kept = [checkpoint_files.open_verified(f"run/checkpoints/step_{n:08d}") for n in steps]
    mean = {  # of the moving averages, which are what an evaluation takes
        path: np.mean([each.read(f"learner/{path}/ema") for each in kept], axis=0)
        for path in task.specs()
    }
    theta = task.theta({path: tf.constant(value) for path, value in mean.items()})
    batches = [
        {name: tf.constant(array) for name, array in dev.batch(number).items()}
        for number in range(dev.num_batches)
    ]
    sums = [task.loss(theta, batch, StepContext()).loss_sum for batch in batches]
    return float(sum(sums) / sum(map(task.loss_weight, batches)))


@pytest.mark.slow
def test_an_average_is_evaluated_decoded_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question\n" * 40)
    settings = [f"--set={setting}" for setting in [*SMALL, "input.files=a.txt"]]
    model = "--model=lm.text_files.Char"
    trainer(model, "--logdir=run", "--steps=6", *settings, cwd=tmp_path)
    output = "new/checkpoints/step_00000006"
    assert run("average", "--logdir=run", "--last=3", f"--output={output}") == 0

    def evaluate(checkpoint: str) -> Any:
        words = ["--mode=eval", "--logdir=run", f"--checkpoint={checkpoint}", "--format=json"]
        return json.loads(trainer(*words, cwd=tmp_path))["dev"]["loss"]

    last = evaluate("6")
    assert evaluate("best") == last  # of three evaluations, the loss of the last is least
    # A mean over the same examples in float32; the last checkpoint is another one.
    assert evaluate(output) == pytest.approx(loss_of_mean([2, 4, 6]), rel=1e-5)
    assert abs(last / loss_of_mean([2, 4, 6]) - 1) > 1e-4
    assert "after" in trainer(
        "--mode=decode", "--logdir=run", f"--checkpoint={output}", cwd=tmp_path
    )
    printed = trainer(model, "--logdir=new", "--steps=8", *settings, cwd=tmp_path)
    assert "step_00000006: 2 steps are left" in printed and "step 8/8" in printed
