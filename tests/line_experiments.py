"""A package with experiments of a user, which fit a line, and the trainer on it.

The model is so small that a process spends most of its time on starting. The folder with the
package is a fixture of the tests of tools.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import processes

from tekso.tools import trainer

EXPERIMENTS = '''
"""Experiments of a package of its own."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tekso.framework import ops, schedules
from tekso.framework.experiment import Experiment, Run
from tekso.framework.initializers import Normal
from tekso.framework.input.input import ExampleInput
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import param
from tekso.framework.registry import register
from tekso.framework.task import Decoded, LossSums, Task


class Points(ExampleInput):
    class Params(ExampleInput.Params):
        dim: int = param("Size of x.", default=3)

    @property
    def num_examples(self):
        return 50

    def examples(self, index, epoch):
        x = np.random.default_rng(5).normal(size=(50, self.params.dim)).astype(np.float32)[index]
        return {"x": x, "y": 2 * x[:, 0] - 1, "weights": np.ones(len(index), np.float32)}


class Regression(Task):
    class Params(Task.Params):
        dim: int = param("Size of x.", default=3)
        dropout: float = param("Rate of dropout on x.", default=0.1)

    def __init__(self, params):
        super().__init__(params)
        self.weight("w", [self.params.dim], dims=("embed",), init=Normal.Params())

    def loss_weight(self, batch):
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta, batch, ctx):
        x = ops.dropout(ctx, batch["x"], self.params.dropout, self)
        error = tf.square(tf.linalg.matvec(x, theta.w) - batch["y"])
        return LossSums(tf.reduce_sum(batch["weights"] * error))

    def decode(self, program, input):
        w = program.call(read_w).numpy()
        return Decoded(f"w is {w[0]:.3f}", [{"w": w.tolist()}])


def read_w(theta, ctx):
    return theta.w


@register
class Line(Experiment):
    """Fits a line."""

    def task(self):
        return Regression.Params()

    def input(self):
        return Points.Params(batch_size=10)

    def eval_inputs(self):
        return {"dev": Points.Params(batch_size=20, order="once")}

    def learner(self):
        return Learner.Params(
            optimizer=Adam.Params(), schedule=schedules.Cosine.Params(initial_value=0.05)
        )

    def run(self):
        return Run.Params(
            steps=40, log_every_steps=10, eval_every_steps=15, checkpoint_every_steps=8
        )


@register
class Other(Line):
    """Fits a line under another name."""


@register
class Misspelt(Line):
    """Sets what is not there."""

    def run(self):
        return super().run().set(stepz=3)


@register
class Faulty(Line):
    """Has a fault that no message explains."""

    def run(self):
        return 1 / 0
'''
LINE = "--model=lines.experiments.Line"


def main(*args: str) -> int:
    """Runs the trainer in this process; for what ends before TensorFlow's devices are set up."""
    return trainer.main(["tekso-trainer", "--import=lines", *args])


def command(*args: str) -> list[str]:
    return ["-m", "tekso.tools.trainer", "--import=lines", *args]


def run(package: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return processes.run(command(*args), cwd=package, timeout=120)
