"""What a notebook does, after an operation of TensorFlow; prints what came out, as JSON.

session_program.py FOLDER    FOLDER/run is a run of two steps by the trainer
"""

import json
import sys

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution import MeshSharded, Pipelined
from tekso.framework.run.session import Session
from tekso.framework.run.weights import load_task, load_weights
from tekso.framework.theta import flatten

SETTINGS = {
    "input.batch_size": 4,
    "*.num_layers": 1,
    "run.steps": 2,
    "learner.ema_decay": 0.5,
    "execution.xla": "none",
    "execution.towers": 1,
}


def error(function: object, *args: object, **kwargs: object) -> str:
    try:
        function(*args, **kwargs)  # type: ignore[operator]
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


def main(folder: str) -> None:
    tf.ones([2]) + 1  # the kernel has already used TensorFlow
    found: dict[str, object] = {}
    mesh = {"execution": MeshSharded.Params(mesh="data:2"), "input.batch_size": 4}
    found["mesh"] = error(Session, "lm.text_files.Bytes", {**files(folder), **mesh})
    pipeline = {"execution": Pipelined.Params(num_stages=2)}
    found["pipeline"] = error(Session, "lm.text_files.Bytes", {**files(folder), **pipeline})
    session = Session("lm.text_files.Bytes", {**files(folder), **SETTINGS})
    batch = session.input.batch(0)
    theta = session.theta()
    before = session.loss(theta, batch)
    gradients = flatten(session.gradients(theta, batch))
    found["norm"] = float(np.sqrt(sum(float(tf.reduce_sum(g * g)) for g in gradients.values())))
    found["before"] = float(before)
    wrong = {**batch, "ids": batch["ids"].astype(np.float64)}
    del wrong["weights"]
    found["batch"] = error(session.loss, theta, wrong)
    found["predict"] = error(session.predict, batch)
    found["figures"] = session.train(2)
    found["end"] = error(session.train, 1)
    for use in ("training", "evaluation"):
        task = load_task(f"{folder}/run")
        loaded = flatten(load_weights(task, f"{folder}/run", use=use))
        ours = flatten(session.theta(use=use))
        same = {path: np.array_equal(ours[path], loaded[path]) for path in ours}
        found[use] = all(same.values()) and ours.keys() == loaded.keys()
    moved = [not np.array_equal(ours[p], flatten(session.theta())[p]) for p in ours]
    found["averages_differ"] = all(moved)
    second = Session("lm.text_files.Bytes", {**files(folder), **SETTINGS})
    found["second"] = [f["loss"] for f in second.train(1)]
    assign, assigned = second.program.assign, []
    second.program.assign = lambda value, keys: (assigned.extend(keys), assign(value, keys))
    second.assign(load_weights(task.model, f"{folder}/run"), path="model")
    found["assigned_keys"] = sorted(assigned)
    found["assigned"] = all(
        np.array_equal(value, loaded[path]) for path, value in flatten(second.theta()).items()
    )
    third = Session("lm.text_files.Bytes", {**files(folder), **SETTINGS})
    third.train(1)
    found["evaluated"] = third.evaluate("dev")["loss"]
    third.evaluate("dev", max_batches=1)  # a part, which is no figure of the run
    found["saved"] = third.save(f"{folder}/saved")
    found["saved again"] = third.save(f"{folder}/saved/")
    found["taken"] = error(third.save, f"{folder}/run")
    layer = task.model.stack
    x = tf.ones([2, 3, 128])
    ctx = StepContext(mode="eval", seed=0, step=0)
    child = load_weights(layer, f"{folder}/run")
    found["child"] = list(layer.fprop(child, x, ctx).shape) if child else []
    found["missing"] = error(load_weights, layer, f"{folder}/run", prefix="model/no")
    third.task.loss_weight = lambda batch: tf.reduce_mean(batch["weights"])
    third._check = None
    found["mean"] = error(third.train, 1)
    third.task.loss_weight = lambda batch: batch["no"]  # after the step was traced
    third.train(1)
    print(json.dumps(found))


def files(folder: str) -> dict[str, object]:
    return {"input.files": f"{folder}/text/*.txt"}


if __name__ == "__main__":
    main(sys.argv[1])
