"""AmoebaNet-D in PyTorch, as GPipe divides it: stem, two reductions, and three groups of cells."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import nn

from benchmarks import workloads
from benchmarks.frameworks import Weights
from benchmarks.frameworks.amoebanet_cells import OPERATIONS, OUTPUTS
from benchmarks.frameworks.pytorch_modules import put


class AmoebaNet(nn.Module):
    """workloads.AmoebaNet."""

    def __init__(self, w: workloads.AmoebaNet, weights: Weights) -> None:
        super().__init__()
        self.stem = Unit(3, w.filters // 4, (3, 3), 2, weights, "model/stem", has_relu=False)
        self.cells = nn.ModuleList()
        dims, is_after_reduction = [w.filters // 4] * 2, False
        for i, (kind, dim) in enumerate(w.cells()):
            path = f"model/cells/{i}"
            self.cells.append(Cell(kind, dim, dims, is_after_reduction, weights, path))
            dims = [dims[1], dim * len(OUTPUTS[kind])]
            is_after_reduction = kind == "reduction"
        self.classifier = nn.Linear(dims[1], w.classes)
        put(self.classifier.weight, weights["model/classifier/w"].T)
        put(self.classifier.bias, weights["model/classifier/b"])

    def forward(self, x: Any, labels: Any) -> Any:
        """Returns the mean cross-entropy."""
        return F.cross_entropy(self.logits(x), labels)

    def logits(self, x: Any) -> Any:
        """Returns the scores of the classes."""
        before = x = self.stem(x)
        for cell in self.cells:
            before, x = x, cell(x, before)
        return self.classifier(F.relu(x).mean((2, 3)))


class Cell(nn.Module):
    """Five sums of two operations; some of them are concatenated."""

    def __init__(
        self,
        kind: str,
        dim: int,
        dims: list[int],
        is_after_reduction: bool,
        weights: Weights,
        path: str,
    ) -> None:
        super().__init__()
        self.table = OPERATIONS[kind]
        self.outputs = OUTPUTS[kind]
        self.first = Unit(dims[1], dim, (1, 1), 1, weights, f"{path}/first")
        self.second: nn.Module = nn.Identity()
        if is_after_reduction:
            self.second = FactorizedReduction(dims[0], dim, weights, f"{path}/second")
        elif dims[0] != dim:
            self.second = Unit(dims[0], dim, (1, 1), 1, weights, f"{path}/second")
        self.operations = nn.ModuleList(
            operation(
                name,
                dim,
                2 if kind == "reduction" and state < 2 else 1,
                weights,
                f"{path}/operations/{i}",
            )
            for i, (state, name) in enumerate(self.table)
        )

    def forward(self, x: Any, before: Any) -> Any:
        """Returns the output of the cell."""
        states = [self.first(x), self.second(before)]
        for i in range(0, len(self.table), 2):
            left, right = (self.operations[j](states[self.table[j][0]]) for j in (i, i + 1))
            states.append(left + right)
        return torch.cat([states[i] for i in self.outputs], 1)


def operation(name: str, dim: int, stride: int, weights: Weights, path: str) -> nn.Module:
    """Returns an operation of a cell."""
    if name == "none":
        return nn.Identity()
    if name == "1x1":
        return Unit(dim, dim, (1, 1), stride, weights, path)
    if name.startswith(("max", "avg")):
        return Pool(name[:3], int(name[3]), stride)
    narrow = dim // 4
    kernels = [(3, 3)] if name == "3x3" else [(1, 7), (7, 1)]
    shapes = [(dim, narrow, (1, 1)), *((narrow, narrow, k) for k in kernels)]
    shapes.append((narrow, dim, (1, 1)))
    return nn.Sequential(
        *(
            Unit(a, b, kernel, stride if kernel == (3, 3) else 1, weights, f"{path}/layers/{i}")
            for i, (a, b, kernel) in enumerate(shapes)
        )
    )


class Unit(nn.Module):
    """ReLU, a convolution without bias whose output is as large as input / stride, and a norm."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: tuple[int, int],
        stride: int,
        weights: Weights,
        path: str,
        *,
        has_relu: bool = True,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.has_relu = kernel, stride, has_relu
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, bias=False)
        self.norm = norm_of(outputs, weights, path)
        put(self.conv.weight, weights[f"{path}/conv/w"].transpose(3, 2, 0, 1))

    def forward(self, x: Any) -> Any:
        """Returns norm(conv(relu(x)))."""
        x = F.relu(x) if self.has_relu else x
        return self.norm(self.conv(padded(x, self.kernel, self.stride, 0.0)))


class Pool(nn.Module):
    """The maximum or the mean of windows, of the elements inside of the image."""

    def __init__(self, kind: str, size: int, stride: int) -> None:
        super().__init__()
        self.kind, self.size, self.stride = kind, size, stride

    def forward(self, x: Any) -> Any:
        """Returns the pooled image."""
        kernel = (self.size, self.size)
        if self.kind == "max":
            x = padded(x, kernel, self.stride, float("-inf"))
            return F.max_pool2d(x, self.size, self.stride)
        counted = padded(torch.ones_like(x[:1, :1]), kernel, self.stride, 0.0)
        total = F.avg_pool2d(padded(x, kernel, self.stride, 0.0), self.size, self.stride)
        return total / F.avg_pool2d(counted, self.size, self.stride)


class FactorizedReduction(nn.Module):
    """A 1x1 convolution of the even pixels and one of the odd pixels, side by side."""

    def __init__(self, inputs: int, outputs: int, weights: Weights, path: str) -> None:
        super().__init__()
        half = outputs // 2
        self.even = nn.Conv2d(inputs, half, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - half, 1, 2, bias=False)
        self.norm = norm_of(outputs, weights, path)
        put(self.even.weight, weights[f"{path}/even"].transpose(3, 2, 0, 1))
        put(self.odd.weight, weights[f"{path}/odd"].transpose(3, 2, 0, 1))

    def forward(self, x: Any) -> Any:
        """Returns an image of half the height and width."""
        x = F.relu(x)
        shifted = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(x), self.odd(shifted)], 1))


def norm_of(dim: int, weights: Weights, path: str) -> nn.BatchNorm2d:
    """Returns the normalisation of the public code of AmoebaNet."""
    found = nn.BatchNorm2d(
        dim, workloads.AMOEBANET_EPSILON, momentum=1.0 - workloads.AMOEBANET_DECAY
    )
    put(found.weight, weights[f"{path}/norm/scale"])
    put(found.bias, weights[f"{path}/norm/bias"])
    return found


def padded(x: Any, kernel: tuple[int, int], stride: int, value: float) -> Any:
    """Returns images padded for ceil(size / stride) windows; the odd row is at the end."""
    pads: list[int] = []
    for size, k in zip(x.shape[:1:-1], kernel[::-1], strict=True):
        missing = max((-(-size // stride) - 1) * stride + k - size, 0)
        pads += [missing // 2, missing - missing // 2]
    return F.pad(x, pads, value=value) if any(pads) else x
