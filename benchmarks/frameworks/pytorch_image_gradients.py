"""Writes outputs, loss and gradients of a model in PyTorch; see benchmarks/image_gradients.py.

Its arguments are a model, the file of Tekso's arrays, and the file that it writes.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from benchmarks.frameworks import pytorch_amoebanet
from benchmarks.frameworks.pytorch_images import Network, resnet50, unet, unet3d, vit_ti
from benchmarks.frameworks.pytorch_ssd import multibox, ssd300
from benchmarks.image_gradients import AMOEBANET, BATCH, MODES, WEIGHTS

_NAMES = {
    "conv/weight": "conv/w",
    "norm/weight": "norm/scale",
    "even/weight": "even",
    "odd/weight": "odd",
    "classifier/weight": "classifier/w",
    "classifier/bias": "classifier/b",
}


def main() -> None:
    """Reads weights and a batch from the first file, and writes the second one."""
    name, given, answer = sys.argv[1:]
    with np.load(given) as file:
        weights, batch = (
            {key.removeprefix(part): file[key] for key in file.files if key.startswith(part)}
            for part in (WEIGHTS, BATCH)
        )
    arrays: dict[str, Any] = {}
    for mode in MODES:
        found, gradients = MODELS[name](weights, batch, mode == "train")
        arrays |= {f"{mode}/{key}": value.detach().numpy() for key, value in found.items()}
        for path, gradient in gradients.items():
            arrays[f"{mode}/gradients/{path}"] = gradient
    np.savez(answer, **arrays)


def of_paths(model: Any, weights: Any, batch: Any, training: bool) -> tuple[Any, Any]:
    """Returns outputs and gradients of a model that is a function of weights by path."""
    tensors = {path: torch.from_numpy(w).requires_grad_() for path, w in weights.items()}
    net, x = Network(tensors, training=training), torch.from_numpy(batch["x"]).movedim(-1, 1)
    y = model(net, x)
    found = multibox(y, batch, training) if model is ssd300 else classified(y, batch)
    found["loss"].backward()
    gradients = {path: t.grad.numpy() for path, t in tensors.items() if t.grad is not None}
    return found, gradients


def classified(logits: Any, batch: Any) -> dict[str, Any]:
    """Returns logits, with the classes as the last dim, and the mean cross-entropy."""
    loss = F.cross_entropy(logits, torch.from_numpy(batch["labels"]))
    return {"logits": logits.movedim(1, -1), "loss": loss}


def of_amoebanet(weights: Any, batch: Any, training: bool) -> tuple[Any, Any]:
    """Returns outputs and gradients of the module that the benchmark has."""
    named = {f"model/{path}": value for path, value in weights.items()}
    torch.set_default_dtype(torch.float64)
    model: Any = pytorch_amoebanet.AmoebaNet(AMOEBANET, named).train(training)
    for path, buffer in model.named_buffers():
        moving = path.replace(".", "/").replace("running_mean", "moving_mean")
        moving = path_of(moving.replace("running_var", "moving_variance"))
        if moving in weights:
            buffer.copy_(torch.from_numpy(weights[moving]))
    found = classified(model.logits(torch.from_numpy(batch["x"]).movedim(-1, 1)), batch)
    found["loss"].backward()
    gradients = {}
    for parameter_name, parameter in model.named_parameters():
        gradient = parameter.grad.numpy()
        if gradient.ndim >= 2:
            gradient = gradient.transpose(2, 3, 1, 0) if gradient.ndim == 4 else gradient.T
        gradients[path_of(parameter_name)] = gradient
    return found, gradients


def path_of(name: str) -> str:
    """Returns Tekso's path of a parameter."""
    path = name.replace(".", "/")
    for end, own in _NAMES.items():
        path = path.removesuffix(end) + own if path.endswith(end) else path
    parts = path.split("/")
    if "operations" in parts and parts[parts.index("operations") + 2].isdigit():
        parts.insert(parts.index("operations") + 2, "layers")  # of an nn.Sequential
    return "/".join(parts)


MODELS: dict[str, Any] = {
    "amoebanet": of_amoebanet,
    **{
        model.__name__: functools.partial(of_paths, model)
        for model in (resnet50, vit_ti, ssd300, unet, unet3d)
    },
}
"""The models of tekso_images.CASES: {name: outputs and gradients by weights, batch and mode}."""

if __name__ == "__main__":
    main()
