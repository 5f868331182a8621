"""Compares image models in Tekso and in PyTorch that have the same weights, in float64.

    python -m benchmarks.image_gradients              all models
    python -m benchmarks.image_gradients resnet50     one of them

Outputs, losses and all gradients are compared, in training (statistics of the batch) and in
evaluation (moving statistics); of SSD300 also matching, default boxes and detections. `make
benchmarks` installs the environment of PyTorch that this command uses.

The losses of later steps cannot show whether the models are the same: rounding alone changes them
by several percent.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environments, workloads

AMOEBANET = workloads.AmoebaNet(64, 10, 3, 8, batch_size=8)
MODES = ("train", "eval")
WEIGHTS, BATCH, LOSS = "weights/", "batch/", "loss"
MIN_SCORE, MOST, MAX_OVERLAP = 0.05, 200, 0.5
"""Of detections: the smallest score, the number for a class and for an image, and the overlap."""

TOLERANCE = 1e-9
"""Largest difference of an array, as a share of its largest element or of 1e-3."""

Arrays = Mapping[str, np.ndarray[Any, Any]]


def main(argv: list[str] | None = None) -> int:
    """Prints the comparison; returns 1 if an array differs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from benchmarks.frameworks import tekso_images  # here: PyTorch's environment has no TensorFlow

    models = tuple(tekso_images.CASES)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_gradients")
    parser.add_argument("model", nargs="?", choices=models, help="default: all models")
    chosen = parser.parse_args(argv).model
    python = environments.default_folder() / "pytorch" / "bin" / "python"
    if not python.exists():
        print(f"there is no {python}: run make benchmarks first", file=sys.stderr)
        return 1
    found = [compared(name, str(python)) for name in ([chosen] if chosen else models)]
    return int(max(found) > TOLERANCE)


def compared(name: str, python: str) -> float:
    """Computes a model in both frameworks, prints the differences, and returns the largest."""
    from benchmarks.frameworks import tekso_images

    with tempfile.TemporaryDirectory() as folder:
        given, answer = Path(folder) / "tekso.npz", Path(folder) / "pytorch.npz"
        arrays: dict[str, Any] = tekso_images.computed(name)
        np.savez(given, **arrays)
        module = "benchmarks.frameworks.pytorch_image_gradients"
        subprocess.run([python, "-m", module, name, str(given), str(answer)], check=True)
        with np.load(answer) as other:
            lines, worst = comparison(arrays, dict(other))
    print("\n  ".join([name, *lines]), flush=True)
    return worst


def comparison(own: Arrays, other: Arrays) -> tuple[list[str], float]:
    """Returns a line for every kind of array and mode, and the largest difference.

    Args:
      own: {"mode/kind" or "mode/kind/path": array}, besides weights and batch; the kind LOSS is a
        number.
      other: the same of the other framework.

    Raises:
      KeyError: the other one has no such array.
    """
    differences: dict[str, dict[str, float]] = {}
    for name, array in own.items():
        if name.startswith((WEIGHTS, BATCH)):
            continue
        scale = max(float(np.abs(array).max()), 1e-3)
        difference = float("inf")  # arrays of other shapes may not be broadcast
        if other[name].shape == array.shape:
            difference = float(np.abs(array - other[name]).max()) / scale
        mode, kind, *path = name.split("/", 2)
        of_kind = differences.setdefault(f"{mode} {kind}", {})
        of_kind["".join(path)] = difference if np.isfinite(difference) else float("inf")
    lines = []
    for group, found in differences.items():
        worst = max(found, key=lambda path: found[path])
        line = f"{found[worst]:.1e}  {group}"
        if group.endswith(f" {LOSS}"):
            line += f" {float(own[group.replace(' ', '/')]):.12f}"
        lines.append(line + (f", {len(found)} arrays; worst: {worst}" if worst else ""))
    return lines, max(max(found.values()) for found in differences.values())


if __name__ == "__main__":
    sys.exit(main())
