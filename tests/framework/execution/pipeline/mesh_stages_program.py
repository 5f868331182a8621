"""Trains a model on one device and with stages on meshes, or as one program; for tests.

All pipelines of a call are in one process, on as many logical devices as the first one asks for.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import equality_program
import small_models
from equality_program import Skipping, skipping_batch
from traced_calls import op_by_op

from tekso.framework.execution import (
    DataParallel,
    Pipelined,
    SpmdPipelined,
    StagesOnMesh,
    devices,
)
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.mesh import step_errors
from tekso.framework.theta import Theta
from tekso.models.layers.mixture_of_experts import MixtureOfExperts
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.stack import RepeatedStack
from tekso.models.vision_transformer import VisionTransformer
from tekso.tasks.image.task import ImageClassification


def packed(batch: dict[str, Any]) -> dict[str, Any]:
    """Two texts in every example."""
    examples, length = batch["ids"].shape
    ends = np.random.default_rng(5).integers(2, length - 1, [examples, 1])
    backends = np.arange(length)
    is_second = backends >= ends
    positions = np.where(is_second, backends - ends, backends).astype(np.int32)
    return {**batch, "segment_ids": is_second.astype(np.int32) + 1, "positions": positions}


class Checking(Skipping):
    """One of the blocks fails if there is a large number in the batch."""

    def _block(self, index: int, theta: Theta, flow: Any, ctx: Any) -> Any:
        if index == 5:
            most = tf.reduce_max(flow["x"])
            with tf.control_dependencies([tf.debugging.Assert(most < 50.0, [most])]):
                flow = {**flow, "h": tf.nest.map_structure(_same, flow["h"])}
        return super()._block(index, theta, flow, ctx)


class ExpertBlock(MixtureOfExperts):
    """x + experts(x), without attention."""

    class Params(MixtureOfExperts.Params):
        """Params of ExpertBlock."""

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: Any, *, mask: Any = None, positions: Any = None
    ) -> tf.Tensor:
        return x + super().fprop(theta, x, ctx)


def stacked(num_layers: int, layer: Any) -> Any:
    """A language model of repeated layers."""
    return small_models.language_model(RepeatedStack.Params(num_layers=num_layers, layer=layer))


def stacked_images() -> Any:
    """Repeated layers after a convolution."""
    layer = small_models.Block.Params(input_dim=8, hidden_dim=16)
    model = VisionTransformer.Params(
        image_size=small_models.SIDE,
        channels=3,
        classes=small_models.CLASSES,
        dim=8,
        patch_size=8,
        stack=RepeatedStack.Params(num_layers=1, layer=layer),
    )
    return ImageClassification.Params(model=model, num_classes=small_models.CLASSES)


EXPERTS = small_models.layer(
    feed_forward=small_models.experts(small_models.SwitchRouter.Params()),
    norm_position="post",
    dropout_rate=0.0,
)

small_models.MODELS["stacked"] = lambda: stacked(2, small_models.layer())
small_models.MODELS["stacked_blocks"] = lambda: stacked(4, small_models.block())
small_models.MODELS["stacked_moe"] = lambda: stacked(
    2,
    ExpertBlock.Params(
        input_dim=small_models.DIM,
        num_experts=4,
        hidden_dim=small_models.MLP,
        router=small_models.SwitchRouter.Params(),
        dropout_rate=0.1,
    ),
)
# The table has more rows than tokens, and experts return statistics of the layer.
small_models.MODELS["padded_remat_moe"] = lambda: stacked(
    1, Rematerialize.Params(layer=EXPERTS)
).set({"model.embedding.vocab_multiple": small_models.VOCAB + 4})
small_models.MODELS["stacked_images"] = stacked_images


def _same(x: Any) -> Any:
    return None if x is None else tf.identity(x)


def params_of(pipeline: dict[str, Any]) -> Any:
    """Returns Params; the mesh, its rules and axes among them are those of every stage."""
    rest = dict(pipeline)
    if rest.pop("execution", None) == "spmd_pipelined":
        return SpmdPipelined.Params().set(rest)
    of_mesh = ("mesh", "rules", "slots_axis", "weights_axis", "activation_dtype")
    on = {name: rest.pop(name) for name in of_mesh if name in rest}
    params = Pipelined.Params(stages_on=StagesOnMesh.Params().set(on))
    return params.set(rest)


def fail(execution: Any) -> str:
    """Returns what a step says in which a stage fails, and the type of it."""
    batch = skipping_batch(0, 8)
    learner = equality_program.learner("dense")
    task = Checking.Params().instantiate()
    program = execution.build(task, learner, seed=7, batch=signature_of(batch))
    program.initialize()
    program.train_step(batch, 0)
    batch["x"][5, 2] = 100.0
    try:
        program.train_step(batch, 1)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class _CountedError(Exception):
    """Ends a step when its graph has been made."""


def graph_size(execution: Any, model: str, size: int) -> int:
    """Returns how many operations the graph of a training step has, and those of its loops."""

    def count(graph: Any) -> None:
        graph = graph.as_graph_def()
        raise _CountedError(len(graph.node) + sum(len(f.node_def) for f in graph.library.function))

    batch = equality_program.batch_of(model, 0, size)
    task = equality_program.task_of(model)
    program = execution.build(
        task, equality_program.learner(model), seed=7, batch=signature_of(batch)
    )
    program.initialize()
    step_errors.refuse_unsupported = count
    try:
        program.train_step(batch, 0)
    except _CountedError as counted:
        return int(counted.args[0])
    raise AssertionError("the step was not traced")


def main() -> None:
    """Reads {"model", "pipelines": [Params of Pipelined], …}; the first result is one device's."""
    job = json.loads(sys.argv[1])
    pipelines = [params_of(p).instantiate() for p in job["pipelines"]]
    pipelines[0].setup_devices(
        cpu_devices=8 if any(p.get("num_replicas") for p in job["pipelines"]) else None
    )
    devices.set_graph_optimizer(job.get("optimized", True))
    if job["model"] == "checking":
        print(json.dumps([fail(p) for p in pipelines]), flush=True)
        return
    if job.get("graph_sizes"):
        sizes = [graph_size(p, job["model"], job["size"]) for p in pipelines]
        print(json.dumps(sizes), flush=True)
        return
    if job.get("packed"):
        plain = small_models.batch
        small_models.batch = lambda *args, **rest: packed(plain(*args, **rest))
    alone = DataParallel.Params(towers=1, xla="none").instantiate()
    with op_by_op():
        results = [equality_program.run(alone, job)]
    results += [equality_program.run(p, job) for p in pipelines]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
