"""Trains and evaluates a small dual encoder on one device, a mesh and replicas; for a test."""

from __future__ import annotations

import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution import DataParallel, MeshSharded
from tekso.framework.execution.base import signature_of
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.schedules import Constant
from tekso.models.dual_encoder import DualEncoder, TextTower
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.vision_transformer import vit
from tekso.tasks.contrastive.task import Contrastive

EXECUTIONS: dict[str, Any] = {
    "one device": lambda: DataParallel.Params(towers=1, xla="none"),
    "mesh": lambda: MeshSharded.Params(mesh="data:2", rules="batch:data", xla="none"),
    "replicas": lambda: DataParallel.Params(xla="none"),
}


def task() -> Any:
    """Returns a dual encoder of a ViT and a Transformer of a layer each."""
    layer = TransformerLayer.Params(
        attention=MultiHeadAttention.Params(num_heads=2),
        feed_forward=FeedForward.Params(hidden_dim=16),
        dropout_rate=0.1,
    )
    stack = Stack.Params(num_layers=1, layer=layer)
    image = vit("Ti", image_size=8, patch_size=4).set(dim=8, stack=stack)
    text = TextTower.Params(vocab_size=12, dim=8, stack=stack)
    return Contrastive.Params(model=DualEncoder.Params(dim=6, image=image, text=text))


def batch(seed: int, size: int) -> dict[str, np.ndarray]:
    """Returns a batch whose second example does not count."""
    r = np.random.default_rng(seed)
    lengths = r.integers(2, 6, size)
    weights = np.ones(size, np.float32)
    weights[1] = 0.0
    return {
        "x": r.normal(size=[size, 8, 8, 3]).astype(np.float32),
        "target_labels": r.integers(1, 12, [size, 5]).astype(np.int32),
        "target_segment_ids": (np.arange(5) < lengths[:, None]).astype(np.int32),
        "weights": weights,
    }


def main() -> None:
    """Prints {execution: losses and gradient norms of 2 steps, and the sums of an evaluation}."""
    MeshSharded.Params(mesh="devices:2").instantiate().setup_devices()
    learner = Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.5))
    found = {}
    for name, params in EXECUTIONS.items():
        # The reference is computed op by op, which takes less time than to trace its steps.
        tf.config.run_functions_eagerly(name == "one device")
        execution = params().instantiate()
        if name == "replicas":
            execution.setup_devices(cpu_devices=2)
        program = execution.build(
            task().instantiate(), learner.instantiate(), seed=3, batch=signature_of(batch(0, 8))
        )
        program.initialize()
        steps = [program.train_step(batch(i, 8), i) for i in range(2)]
        numbers = [float(step[key]) for step in steps for key in ("loss", "gradient_norm")]
        sums = program.eval_step(batch(9, 5))  # of 2 devices, one has an example more
        numbers += [float(x) for key in sorted(sums) for x in sums[key]]
        found[name] = numbers
    print(json.dumps(found))


if __name__ == "__main__":
    main()
