"""Writes loss and gradients of AmoebaNet-D in PyTorch; see benchmarks/amoebanet_gradients.py."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from benchmarks.amoebanet_gradients import GRADIENTS, LOSS, WEIGHTS, WORKLOAD
from benchmarks.frameworks.pytorch_amoebanet import AmoebaNet

_NAMES = {
    "conv/weight": "conv/w",
    "norm/weight": "norm/scale",
    "even/weight": "even",
    "odd/weight": "odd",
    "classifier/weight": "classifier/w",
    "classifier/bias": "classifier/b",
}


def main() -> None:
    """Reads weights from the first file, and writes the second one."""
    with np.load(sys.argv[1]) as given:
        names = [name for name in given.files if name.startswith(WEIGHTS)]
        weights = {"model/" + name.removeprefix(WEIGHTS): given[name] for name in names}
    model: Any = AmoebaNet(WORKLOAD, weights).to(torch.float64)
    batch = WORKLOAD.batch()
    x = torch.from_numpy(batch["x"].transpose(0, 3, 1, 2).copy()).to(torch.float64)
    loss = model(x, torch.from_numpy(batch["labels"]).long())
    loss.backward()
    found = {LOSS: loss.detach().numpy()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        if gradient.ndim >= 2:
            gradient = gradient.transpose(2, 3, 1, 0) if gradient.ndim == 4 else gradient.T
        found[GRADIENTS + path_of(name)] = gradient
    np.savez(sys.argv[2], **found)


def path_of(name: str) -> str:
    """Returns Tekso's path of a parameter."""
    path = name.replace(".", "/")
    for end, own in _NAMES.items():
        path = path.removesuffix(end) + own if path.endswith(end) else path
    parts = path.split("/")
    if "operations" in parts and parts[parts.index("operations") + 2].isdigit():
        parts.insert(parts.index("operations") + 2, "layers")  # of an nn.Sequential
    return "/".join(parts)


if __name__ == "__main__":
    main()
