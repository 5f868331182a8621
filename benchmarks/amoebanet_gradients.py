"""Compares the gradients of the first step of AmoebaNet-D in Tekso and in PyTorch, in float64.

    python -m benchmarks.amoebanet_gradients

The losses of later steps cannot show whether the models are the same: rounding alone changes them
by several percent. `make benchmarks` installs the environment of PyTorch that this command uses.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environments, workloads

WORKLOAD = workloads.AmoebaNet(64, 10, 3, 8, batch_size=8)
WEIGHTS, GRADIENTS, LOSS = "weights/", "gradients/", "loss"
TOLERANCE = 1e-9
"""Largest difference of a gradient, as a share of its largest element or of 1e-3."""

Arrays = Mapping[str, np.ndarray[Any, Any]]


def main() -> int:
    """Prints the comparison; returns 1 if a gradient differs."""
    python = environments.default_folder() / "pytorch" / "bin" / "python"
    if not python.exists():
        print(f"there is no {python}: run make benchmarks first", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "tekso.npz", Path(folder) / "pytorch.npz"
        arrays: dict[str, Any] = tekso()
        np.savez(given, **arrays)
        module = "benchmarks.frameworks.pytorch_amoebanet_gradients"
        subprocess.run([str(python), "-m", module, str(given), str(found)], check=True)
        with np.load(given) as own, np.load(found) as other:
            lines, worst = comparison(dict(own), dict(other))
    print("\n".join(lines))
    return int(worst > TOLERANCE)


def comparison(own: Arrays, other: Arrays) -> tuple[list[str], float]:
    """Returns lines about losses and gradients, and the largest difference of a gradient.

    Args:
      own: "loss", and the gradients by path.
      other: the same of the other framework.

    Raises:
      KeyError: the other one has no such gradient.
    """
    paths = [name for name in own if name.startswith(GRADIENTS)]
    differences = {}
    for path in paths:
        scale = max(float(np.abs(own[path]).max()), 1e-3)
        difference = float(np.abs(own[path] - other[path]).max()) / scale
        differences[path] = difference if np.isfinite(difference) else float("inf")
    order = sorted(differences, key=lambda path: -differences[path])
    lines = [
        f"loss {float(own[LOSS]):.12f}, {float(other[LOSS]):.12f}",
        f"{len(paths)} gradients; largest differences, as shares of their largest elements:",
        *(f"  {differences[p]:.1e}  {p.removeprefix(GRADIENTS)}" for p in order[:5]),
    ]
    return lines, differences[order[0]]


def tekso() -> dict[str, np.ndarray[Any, Any]]:
    """Returns weights, loss and gradients of Tekso's first step."""
    import tensorflow as tf

    from tekso.framework.context import StepContext
    from tekso.models.amoebanet import AmoebaNet

    w, batch = WORKLOAD, WORKLOAD.batch()
    model = AmoebaNet.Params(
        num_layers=w.num_layers,
        filters=w.filters,
        image_size=w.image_size,
        classes=w.classes,
        dtype="float64",
    ).instantiate()
    specs = model.specs()
    weights = {path: spec.initial_value(0) for path, spec in specs.items()}
    trained = [path for path, spec in specs.items() if spec.trainable]

    def step(values: dict[str, tf.Tensor]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([values[path] for path in trained])
            x = tf.constant(batch["x"], tf.float64)
            ctx = StepContext(mode="train", seed=0, step=1)
            logits = model.fprop(model.theta(values), x, ctx)
            nats = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["labels"], logits)
            loss = tf.reduce_mean(nats)
        return loss, tape.gradient(loss, [values[path] for path in trained])

    values = {path: tf.constant(value, tf.float64) for path, value in weights.items()}
    loss, gradients = tf.function(step, autograph=False)(values)
    return {
        **{WEIGHTS + path: np.asarray(value) for path, value in weights.items()},
        **{GRADIENTS + path: g.numpy() for path, g in zip(trained, gradients, strict=True)},
        LOSS: loss.numpy(),
    }


if __name__ == "__main__":
    sys.exit(main())
