"""Takes steps of models that have loops, on one device and over meshes, and prints what differs.

Started by tests in a process of its own: `control_flow_program.py MODEL 'MESH RULES' …`. The first
step is of plain descent, so that it moves every weight by its gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import ops, workarounds
from tekso.framework.context import StepContext
from tekso.framework.execution import DataParallel, MeshSharded
from tekso.framework.execution.base import signature_of
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers import SGD
from tekso.framework.params import REQUIRED, Params, param
from tekso.framework.schedules import Constant
from tekso.framework.theta import Theta
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.attention_positions import RotaryPositions
from tekso.models.layers.expert_routing import SwitchRouter
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.linear import Linear
from tekso.models.layers.mixture_of_experts import MixtureOfExperts
from tekso.models.layers.normalization import BatchNorm, RMSNorm
from tekso.models.layers.recurrent import Recurrent, RecurrentStack
from tekso.models.layers.recurrent_cells import GruCell, LstmCell
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.stack import RepeatedStack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.lstm_lm import LstmLm
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.task import LanguageModel

BATCH, LENGTH, VOCAB, DIM, HEADS, MLP = 8, 6, 16, 16, 4, 12
SEED, STEP = 2**40 + 3, 2**31 + 1
RATE = 1000.0  # so that a weight moves much further than its own rounding


class RecurrentLayer(Layer):
    """A loop over time, for a loop over depth, with statistics of the batch."""

    class Params(Layer.Params):
        """Params of RecurrentLayer."""

        dim: int = param("Size of the last dim.", default=REQUIRED)

    recurrent: Recurrent
    norm: BatchNorm
    gate: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        dim = self.params.dim
        self.child("norm", BatchNorm.Params(dim=dim, dims=("embed",)))
        cell = GruCell.Params(input_dim=dim, hidden_dim=dim)
        self.child("recurrent", Recurrent.Params(cell=cell))
        self.child("gate", Linear.Params(input_dim=dim, output_dim=dim, dims=("embed", None)))

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext, **side: Any) -> tf.Tensor:
        """Returns x plus what loops make of it, backwards and forwards."""
        y = self.norm.fprop(theta.norm, x, ctx)
        y = tf.transpose(self.recurrent.fprop(theta.recurrent, y, ctx), [1, 0, 2])  # time-major
        backwards = workarounds.reverse(ctx, y, 0, dims=(None, "batch", "embed"))
        forwards = workarounds.reverse(ctx, backwards, 0)
        summary = tf.tanh(tf.reduce_mean(x, 1))  # which the loop reads from outside

        def gated(_: Theta, h: tf.Tensor, y: tf.Tensor, ctx: StepContext) -> Any:
            return tf.tanh(self.gate.fprop(theta.gate, h, ctx)) + summary * y, h

        _, sums = ops.scan(ctx, gated, Theta(), tf.zeros_like(summary), y)
        forwards += sums
        return x + tf.transpose(0.7 * backwards + 0.3 * forwards, [1, 0, 2])


def transformer(stack: Params) -> Params:
    return LanguageModel.Params(
        model=TransformerLm.Params(vocab_size=VOCAB, dim=DIM, stack=stack, dropout_rate=0.1)
    )


def layer(**changes: Any) -> Params:
    return TransformerLayer.Params(
        norm=RMSNorm.Params(),
        attention=MultiHeadAttention.Params(
            num_heads=HEADS, mask="causal", positions=RotaryPositions.Params(), dropout_rate=0.1
        ),
        feed_forward=FeedForward.Params(hidden_dim=MLP),
        dropout_rate=0.1,
    ).set(changes)


def repeated(layer: Params) -> Params:
    return transformer(RepeatedStack.Params(num_layers=3, layer=layer))


def recurrent(cell: Params) -> Params:
    stack = RecurrentStack.Params(num_layers=2, cell=cell, dropout_rate=0.1)
    return LanguageModel.Params(
        model=LstmLm.Params(vocab_size=VOCAB, embedding_dim=DIM, stack=stack)
    )


MODELS = {
    "lstm": lambda: recurrent(LstmCell.Params(hidden_dim=MLP, projection_dim=DIM)),
    "gru": lambda: recurrent(GruCell.Params(hidden_dim=DIM, reset="after")),
    "repeated": lambda: repeated(layer()),
    "repeated_remat": lambda: repeated(Rematerialize.Params(layer=layer())),
    "repeated_moe": lambda: repeated(
        layer(
            feed_forward=MixtureOfExperts.Params(
                num_experts=4, hidden_dim=MLP, router=SwitchRouter.Params(z_weight=0.001)
            )
        )
    ),
    "repeated_recurrent": lambda: repeated(RecurrentLayer.Params()),
}


def batch() -> dict[str, np.ndarray]:
    """Packed texts: several segments in a row, and padding at its end."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    ends = rng.integers(1, LENGTH + 1, (BATCH, 2)).max(1)
    cuts = rng.integers(1, LENGTH, BATCH)
    place = np.arange(LENGTH)
    real = place < ends[:, None]
    segments = np.where(real, 1 + (place >= cuts[:, None]), 0)
    positions = np.where(place < cuts[:, None], place, place - cuts[:, None])
    return {
        "ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "weights": real.astype(np.float32),
        "segment_ids": segments.astype(np.int32),
        "positions": np.where(real, positions, 0).astype(np.int32),
    }


def step(
    execution: Any, task: Any, accumulation: int, *, evaluates: bool
) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns what a step and an evaluation say, and by how much the step moved each weight."""
    learner = Learner.Params(
        optimizer=SGD.Params(),
        schedule=Constant.Params(value=RATE),
        accumulation_steps=accumulation,
    ).instantiate()
    program = execution.build(task, learner, seed=SEED, batch=signature_of(batch()))
    program.initialize()
    before = program.state()
    outputs = {name: float(v) for name, v in program.train_step(batch(), STEP).items()}
    after = program.state()
    evaluation = program.eval_step(batch()) if evaluates else {}
    outputs |= {f"eval/{name}": float(v[0]) / float(v[1]) for name, v in evaluation.items()}
    return outputs, {k: after[k] - v for k, v in before.items() if k.startswith("weights/")}


def difference(plain: Any, other: Any) -> float:
    """Returns the largest difference, relative to the largest number."""
    return float(np.max(np.abs(np.subtract(plain, other))) / (np.max(np.abs(plain)) + 1e-12))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("layouts", nargs="+")
    options = parser.parse_args()
    task = MODELS[options.model]().instantiate()
    MeshSharded.Params(mesh="data:8").instantiate().setup_devices()
    one = DataParallel.Params(towers=1, xla="none").instantiate()
    tf.config.run_functions_eagerly(True)  # takes less time than to trace the reference
    loss, moved = step(one, task, options.accumulation, evaluates=True)
    tf.config.run_functions_eagerly(False)
    report = {}
    for i, text in enumerate(options.layouts):
        mesh, rules = text.split()
        begin = time.monotonic()
        # An evaluation has no loop of its own: it is compared in one layout of a model.
        evaluates = i == 0 and options.accumulation == 1
        found, found_moved = step(
            MeshSharded.Params(mesh=mesh, rules=rules).instantiate(),
            task,
            options.accumulation,
            evaluates=evaluates,
        )
        assert found.keys() == {name for name in loss if evaluates or "eval/" not in name}
        gradients = {key: difference(moved[key], found_moved[key]) for key in moved}
        worst = max(gradients, key=lambda key: gradients[key])
        report[text] = {
            "outputs": max(difference(loss[name], found[name]) for name in found),
            "gradients": gradients[worst],
            "worst": worst,
            "time_s": time.monotonic() - begin,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
