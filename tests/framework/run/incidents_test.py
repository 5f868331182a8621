"""Incidents of training: what is recorded, and what a replay names as the first cause."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import registry
from tekso.framework.execution import DataParallel
from tekso.framework.execution.base import signature_of
from tekso.framework.initializers import Ones
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import param
from tekso.framework.run import incidents, replay
from tekso.framework.run.checkpoints import Description
from tekso.framework.run.incidents import Incidents
from tekso.framework.run.traced_step import Call, Op
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.framework.theta import Theta
from tekso.tools import trainer

X = {"x": np.array([[1.0, 2.0], [3.0, 0.0], [5.0, 6.0]], np.float32)}


class Curve(Layer):
    """Computes the logarithm or the root: 0 gives an output, or a gradient, that is not finite."""

    class Params(Layer.Params):
        """Params of Curve."""

        kind: str = param("log or sqrt.", default="log")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("scale", [2], dims=("embed",), init=Ones.Params())

    def fprop(self, theta: Theta, x: Any, ctx: Any) -> Any:
        """See the class."""
        scaled = x * theta.scale
        if self.params.kind == "power":
            return tf.pow(scaled * 1e3 + 1.0, 7.0)
        return tf.math.log(scaled) if self.params.kind == "log" else tf.sqrt(scaled)


class Curves(Task):
    """Two curves, one after the other; the first one is the identity for squares."""

    class Params(Task.Params):
        """Params of Curves."""

        kind: str = param("Of the second curve.", default="log")

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("before", Curve.Params(kind="sqrt"))
        self.child("curve", Curve.Params(kind=self.params.kind))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        """Returns the number of examples."""
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def loss(self, theta: Theta, batch: Any, ctx: Any) -> LossSums:
        """Returns the sum of all outputs."""
        x = batch["x"] / 0.0 if self.params.kind == "task" else batch["x"]
        y = self.before.fprop(theta.before, x + 1.0, ctx) - 1.0
        return LossSums(tf.reduce_sum(self.curve.fprop(theta.curve, y, ctx)), {})


def recorded(folder: Path, kind: str, *, with_state: bool = True, steps: Any = (110,)) -> Any:
    """Returns incidents of a program that skipped its step."""
    tree = registry.get("lm.python_source.Tiny")().tree()
    tree.task = Curves.Params(kind=kind)
    tree.learner = Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1))
    task, learner = tree.task.instantiate(), tree.learner.instantiate()
    execution = DataParallel.Params(towers=1, xla="none").instantiate()
    program = execution.build(task, learner, seed=7, batch=signature_of(X))
    program.initialize()
    before = program.state()
    metrics = program.train_step(X, 110)
    after = program.state()
    assert metrics["nonfinite_consecutive"] == 1
    assert all((before[key] == after[key]).all() for key in before if key.startswith("weights/"))
    description = Description(
        step=0,
        model="a.Model",
        params=tree.to_text(),
        task=tree.task.to_text(),
        input={"seed": 7, "skipped_batches": [[50, 50, 60]], "rollbacks": 1},
    )
    asked: list[int] = []

    def batch_of(number: int) -> Any:
        asked.append(number)
        return X

    lines: list[str] = []
    place = str(folder / "incidents")
    found = Incidents(place, batch_of=batch_of, warn=lines.append, imports=["mine"])
    for step in steps:
        found.record(step, metrics, description, program if with_state else None)
    assert asked == [step + 10 for step in steps] and len(lines) == len(steps), lines
    return found


def test_an_incident_has_batch_state_figures_and_params(tmp_path: Path) -> None:
    found = recorded(tmp_path, "log")
    folder = tmp_path / "incidents" / "step_00000110"
    assert found.last == str(folder)
    incident = json.loads((folder / "incident.json").read_text())
    assert (incident["step"], incident["batch"], incident["seed"], incident["model"]) == (
        110,
        120,
        7,
        "a.Model",
    )
    assert incident["metrics"]["loss"] == "-inf"
    assert incident["metrics"]["learning_rate"] == pytest.approx(0.1)
    with np.load(folder / "batch.npz") as batch:
        np.testing.assert_array_equal(batch["x"], X["x"])
    assert "Curves" in (folder / "experiment.txt").read_text()
    command = f"    tekso-trainer --import=mine --mode=replay --incident={folder}\n"
    assert command in (folder / "README.txt").read_text()
    assert (folder / "step_00000110" / "checkpoint.json").exists()


def test_the_oldest_incidents_are_removed(tmp_path: Path) -> None:
    recorded(tmp_path, "log", with_state=False, steps=range(100, 111))
    names = sorted(os.listdir(tmp_path / "incidents"))
    assert names == [f"step_{step:08d}" for step in range(111 - incidents.MOST, 111)]


@pytest.mark.parametrize(
    ("kind", "cause", "gradients"),
    [
        (
            "log",
            r"forward: the output of curve \(Curve\) is not finite; first op: Log\n  at .*math.log",
            2,
        ),
        ("sqrt", r"backward: a gradient in curve \(Curve\) is not finite; first op: SqrtGrad$", 2),
    ],
)
def test_a_replay_names_the_first_layer_and_op(
    tmp_path: Path, kind: str, cause: str, gradients: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recorded(tmp_path, kind).last
    record = replay.replay(folder, warn=print)
    assert re.match(cause, record["cause"]), record["cause"]
    assert record["nonfinite_weights"] == [] and len(record["nonfinite_gradients"]) == gradients
    assert [row[0] for row in record["layers"]] == ["before", "curve"]
    assert record["layers"][0][2:4] == pytest.approx([7.0, 7.0**0.5])  # by hand
    text = replay.explanation(folder, ["mine"])
    assert f"{kind.capitalize()}" in text
    assert text.endswith(f"tekso-trainer --import=mine --mode=replay --incident={folder}")
    assert trainer.main(["tekso-trainer", "--mode=replay", f"--incident={folder}"]) == 0
    shown = capsys.readouterr().out
    assert "output gradient" in shown and record["cause"] in shown


def test_a_replay_tells_the_batch_from_what_the_task_makes_of_it(tmp_path: Path) -> None:
    folder = recorded(tmp_path, "task").last
    what = r"forward: the input of before \(Curve\) is not finite"
    made = rf"{what}, but the batch is: the task makes it before that layer; first op: .*Div"
    assert re.match(made + r"\w*\n  at .* / 0\.0", replay.replay(folder, warn=print)["cause"])
    x = X["x"].copy()
    x.flat[-1] = np.nan
    np.savez(f"{folder}/batch.npz", x=x)
    found = replay.replay(folder, warn=print)["cause"]
    assert re.fullmatch(rf"{what}: see 'x' of the batch, example {len(x) - 1}", found), found


def test_a_replay_names_the_layer_and_op_that_exploded(tmp_path: Path) -> None:
    record = replay.replay(recorded(tmp_path, "power").last, warn=print)
    assert record["nonfinite_gradients"] == [] and np.isfinite(record["loss"])
    assert re.match(
        r"everything is finite, but the largest gradient, .*e\+2\d, has a square that is not a "
        r"float32 number; forward: the first output above 1e\+06 is that of curve \(Curve\), "
        r".*; first op: Pow\n  at .*tf\.pow",
        record["cause"],
    ), record["cause"]


@pytest.mark.parametrize(
    ("gradients", "scale", "expected"),
    [
        ((1.0, 1.0, 5e7), 1.0, "backward: the first gradient above 1e+06 is in stack/b (B)"),
        ((1.0, 5e7, 5e7), 1.0, "backward: the first gradient above 1e+06 is in stack/c (C)"),
        ((1.0, 1.0, 5e7), 1e3, "everything is finite on one device"),
        ((1.0, 1.0, 5.0), 1.0, "everything is finite on one device"),
    ],
)
def test_the_layer_whose_gradient_exploded_first_is_named(
    gradients: tuple[float, float, float], scale: float, expected: str
) -> None:
    """The gradients are those that go into c, out of c into b, and out of b."""
    into_c, into_b, out_of_b = gradients
    step = replay.TracedStep(
        calls=[
            Call("stack/b", "B", 1.0, 1.0, into_b, out_of_b),
            Call("stack/c", "C", 1.0, 1.0, into_c, into_b),
            Call("stack", "Stack", 1.0, 1.0, into_c, out_of_b),
        ],
        exploded_backward=[Op("", "SqrtGrad", "")],
        scale=scale,
    )
    assert expected in replay.cause(step, [])
    assert replay.cause(step, []).endswith("; first op: SqrtGrad") == ("backward" in expected)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    assert replay.cause(replay.TracedStep(), ["before/scale"]) == (
        "the weight before/scale was not finite before the step"
    )


def test_a_folder_that_is_no_incident_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer.main(["tekso-trainer", "--mode=replay", f"--incident={tmp_path}"]) == 1
    assert "is not the folder of an incident" in capsys.readouterr().err
    assert trainer.main(["tekso-trainer", "--mode=replay"]) == 2
    assert "--mode=replay requires --incident=" in capsys.readouterr().err
    recorded(tmp_path, "log", with_state=False)
    with pytest.raises(incidents.IncidentError, match=r"has no state, and .* no checkpoint before"):
        replay.replay(str(tmp_path / "incidents" / "step_00000110"), warn=print)


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (DEEP, "nested too deeply"),
        ("[1, 2]", "list indices"),
        ('{"step": 1, "seed": 2}', r"incident\.json has no 'batch'"),
        ('{"step": "1", "seed": 2, "batch": 3}', "step is not an integer"),
        ('{"step": 1, "seed": NaN, "batch": 3}', "seed is not an integer"),
        ('{"step": true, "seed": 2, "batch": 3}', "step is not an integer"),
    ],
)
def test_a_damaged_description_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "incident.json").write_text(text)
    with pytest.raises(incidents.IncidentError, match=reason):
        replay.replay(str(tmp_path), warn=print)


def archive(shape: str, *, zeros: int = 0, method: int = zipfile.ZIP_STORED) -> bytes:
    """Returns an .npz file whose array x has a given text as its shape."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(zeros)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        file.writestr("x.npy", npy)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: b"PK no archive", "not a zip file"),
        (lambda: archive("(1000000000000,)"), "4,000,000,000,000 bytes has 0"),
        (lambda: archive("(-1, -1)"), "4 bytes has 0"),
        (lambda: archive("(((" * 500), ""),
        (
            lambda: archive("(70, 2**20)", zeros=70 << 20, method=zipfile.ZIP_DEFLATED),
            "at most 67,108,864",
        ),
    ],
)
def test_a_damaged_or_hostile_batch_is_named_before_memory_is_allocated(
    tmp_path: Path, data: Callable[[], bytes], reason: str
) -> None:
    (tmp_path / "batch.npz").write_bytes(data())
    with pytest.raises(incidents.IncidentError, match=rf"batch\.npz cannot be read: .*{reason}"):
        incidents.read_batch(str(tmp_path))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.0])
def test_the_warning_names_the_example_of_the_batch_that_is_not_finite(
    tmp_path: Path, value: float
) -> None:
    x = np.ones([3, 2], np.float32)
    x[1, 1] = value
    batch = {"labels": np.array([1, 2, 3]), "x": x, "y": x}
    lines: list[str] = []
    found = Incidents(
        str(tmp_path),
        batch_of=lambda number: batch,
        warn=lines.append,
        named=lambda text: text.replace("(4)", "(4), index 7 of the data"),
    )
    found.record(4, {"loss": np.nan}, Description(step=0, model="a.Model", params=""), None)
    what = "'x' (example 1 of input.batch(4), index 7 of the data)"
    cause = "" if value == 1.0 else f"{what} has a number that is not finite; "
    said = f"step 5 was not finite and is skipped: {cause}see {tmp_path}/step_00000004"
    assert lines == [said]
