"""A session on arrays in memory, in a process that sets its devices first; prints JSON.

session_arrays_program.py FOLDER    saves a run in FOLDER
"""

import json
import os
import signal
import sys
import unittest.mock
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import config

from tekso.framework.context import StepContext
from tekso.framework.execution import MeshSharded, devices
from tekso.framework.experiment import Experiment
from tekso.framework.input.arrays import Arrays
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import Params
from tekso.framework.run import averaging
from tekso.framework.run.opened import open_run
from tekso.framework.run.session import Session
from tekso.framework.run.weights import load_task
from tekso.framework.schedules import Constant
from tekso.framework.task import Scored
from tekso.framework.theta import flatten
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification

X = np.random.default_rng(0).normal(size=(40, 6))

ONE_LAYER = {"task.model.hidden_dims": []}
"""Settings of sessions that are about executions; most of their time is for each weight."""


class Signs(Arrays):
    def load(self, split: str) -> Any:
        del split
        return {"x": X, "labels": (X.sum(1) > 0).astype(np.int32)}


class Mine(Experiment):
    def task(self) -> Params:
        return Classification.Params(model=Mlp.Params(hidden_dims=[5]))

    def input(self) -> Params:
        return Signs.Params(batch_size=8)

    def eval_inputs(self) -> dict[str, Params]:
        return {"dev": HeldOut.Params()}

    def learner(self) -> Params:
        schedule = Constant.Params(value=0.1)
        return Learner.Params(optimizer=Momentum.Params(), schedule=schedule, ema_decay=0.9)


def error(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


def predictions(found: dict[str, Any], session: Session) -> None:
    made = session.predict({"x": X[:5]})  # float64
    theta = session.theta(use="evaluation")
    x = tf.constant(X[:5], tf.float32)
    logits = session.task.model.fprop(theta.model, x, StepContext(mode="eval"))
    found["logits"] = bool(np.allclose(made["logits"], logits, rtol=1e-6, atol=1e-6))
    found["labels"] = bool(np.array_equal(made["labels"], np.argmax(logits, 1)))
    found["rows"] = [len(session.predict({"x": x[:rows]})["labels"]) for rows in (1, 3)]
    found["one example"] = error(session.predict, {"x": X[0]})
    found["no dict"] = [error(session.predict, X), error(session.assign, X)]
    found["narrow"] = error(session.predict, {"x": X[:, :5]})

    def predict(theta: Any, batch: Any, ctx: StepContext) -> Any:
        return {"y": batch["no array of the input" if "x" in batch else "x"]}

    with unittest.mock.patch.object(session.task, "predict", predict):
        found["not given"] = error(session.predict, {"labels": np.zeros(3, np.int32)})
        found["own KeyError"] = error(session.predict, {"x": X})


def without_data(found: dict[str, Any], folder: str) -> None:
    """Loads tasks after the data has gone, of this version and as an earlier one saved them."""
    checkpoint = os.path.join(folder, "checkpoints", "step_00000002")
    averaging.write_average(f"{folder}/averaged", [open_run(folder).checkpoint])

    def load(self: Any, split: str) -> Any:
        raise FileNotFoundError(2, "no such file", "data.npy")

    with unittest.mock.patch.object(Signs, "load", load):
        tasks = [load_task(path) for path in (folder, checkpoint, f"{folder}/averaged")]
        found["classes"] = [task.params.num_classes for task in tasks]
        found["completed"] = open_run(folder).completed_tree().task.num_classes
        found["open"] = repr(open_run(folder).tree().task.num_classes)
        with open(f"{checkpoint}/checkpoint.json") as file:
            description = json.load(file)
        del description["task"]
        with open(f"{checkpoint}/checkpoint.json", "w") as file:
            json.dump(description, file)
        found["earlier"] = error(load_task, folder)
    found["earlier with data"] = load_task(folder).params.num_classes


def arguments(found: dict[str, Any], session: Session) -> None:
    """Arguments that make no sense."""
    theta = {path: np.asarray(w) for path, w in flatten(session.theta()).items()}
    bad = {"complex": lambda w: w + 0j, "nan": lambda w: w * np.nan}
    for name, change in bad.items():
        found[name] = error(session.assign, {path: change(w) for path, w in theta.items()})
    found["instance"] = error(Session, Mine())
    found["class"] = error(Session, int)
    found["minus"] = error(session.train, -1)
    found["true"] = error(session.train, True)
    found["batches"] = [error(session.evaluate, "dev", max_batches=n) for n in (0, -1, "1", 1.5)]
    found["names"] = error(session.evaluate, ["dev"])


def scores(found: dict[str, Any], session: Session) -> None:
    """An evaluation has the figures of `Task.score`; one of some batches has not."""
    session.task.score = lambda *args, **kwargs: Scored({"mine": 7.0})
    found["scored"] = session.evaluate("dev")["mine"]
    found["scored in part"] = "mine" in session.evaluate("dev", max_batches=np.int64(1))


def interrupted(found: dict[str, Any]) -> None:
    """A signal within the second step ends a training after it."""
    whole, session = Session(Mine), Session(Mine)
    step = session.program.train_step

    def train_step(batch: Any, number: int) -> Any:
        if number == 1:
            signal.raise_signal(signal.SIGINT)
        return step(batch, number)

    session.program.train_step = train_step  # type: ignore[method-assign]
    try:
        session.train(4)
    except KeyboardInterrupt:
        found["interrupted"] = [session.step, len(session.history)]
    session.train(2)
    found["continued"] = session.history == whole.train(4)


def traced(found: dict[str, Any], session: Session) -> None:
    """The loss in a `tf.function`."""
    theta, batch = session.theta(), session.input.batch(0)
    tensors = {name: tf.constant(array) for name, array in batch.items()}
    loss = tf.function(lambda batch: session.loss(theta, batch), autograph=False)(tensors)
    found["traced"] = [float(loss), float(session.loss(theta, batch))]


def executions(found: dict[str, Any]) -> None:
    """Replicas and meshes one after another; a mesh switches the graph optimizer off."""
    mesh = MeshSharded.Params(mesh="data:4", rules="batch:data")
    given: list[tuple[Any, Any]] = [
        ({}, None),
        ({"execution": mesh}, None),
        ({}, 2),
        ({"execution": mesh.copy().set({"mesh": "data:2"})}, 2),
        ({"run.deterministic": True}, None),
        ({}, None),
    ]
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    found["losses"], found["process"] = [], []
    for settings, cpu_devices in given:
        session = Session(Mine, {**ONE_LAYER, **settings}, cpu_devices=cpu_devices)
        found["losses"].append([figures["loss"] for figures in session.train(2)])
        options = tf.config.optimizer.get_experimental_options()
        is_off = options.get("disable_meta_optimizer", False)
        found["process"].append([is_off, config.is_op_determinism_enabled()])
    found["none"] = error(devices.setup_cpu, logical_devices=0)


def main(folder: str) -> None:
    devices.setup_cpu(logical_devices=4)
    # Until the executions, which check that it is on: it takes longer than the steps.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    found: dict[str, Any] = {}
    session = Session(Mine, cpu_devices=2)  # and four stay
    session.train(2)
    predictions(found, session)
    session.save(folder)
    without_data(found, folder)
    arguments(found, session)
    scores(found, session)
    traced(found, session)
    interrupted(found)
    executions(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
