"""The workloads in PyTorch: eager, or with torch.compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import nn

from benchmarks import workloads
from benchmarks.frameworks import Built, UnsupportedError, Weights
from benchmarks.frameworks.pytorch_beam_search import EncoderDecoder, beam_search
from benchmarks.frameworks.pytorch_speech import Conformer, log_mel, mel_constants
from benchmarks.frameworks.pytorch_transformer import Layer, Table


class TransformerLm(nn.Module):
    """workloads.Transformer."""

    def __init__(self, w: workloads.Transformer, weights: Weights) -> None:
        super().__init__()
        self.table = Table(w.vocab_size, w.dim, w.length, weights, "model/embedding/table")
        self.layers = nn.ModuleList(
            Layer(w.dim, w.num_heads, weights, f"model/stack/layers/{i}")
            for i in range(w.num_layers)
        )
        self.norm = nn.LayerNorm(w.dim, eps=workloads.NORM_EPSILON)

    def forward(self, ids: Any, labels: Any) -> Any:
        """Returns the mean cross-entropy."""
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, causal=True)
        logits = self.table.logits(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class LstmLm(nn.Module):
    """workloads.Lstm; the second bias of PyTorch's LSTM is the constant forget bias 1."""

    def __init__(self, w: workloads.Lstm, weights: Weights) -> None:
        super().__init__()
        self.embedding = nn.Embedding(w.vocab_size, w.dim)
        self.lstm = nn.LSTM(w.dim, w.dim, w.num_layers, batch_first=True)
        self.softmax = nn.Linear(w.dim, w.vocab_size)
        put(self.embedding.weight, weights["model/embedding/table"])
        put(self.softmax.weight, weights["model/softmax/w"])
        put(self.softmax.bias, weights["model/softmax/b"])
        for i in range(w.num_layers):
            cell = f"model/stack/layers/{i}/cell/"
            for name, key in (("ih", "w_input"), ("hh", "w_recurrent")):
                matrix = weights[cell + key].reshape(w.dim, 4 * w.dim).T
                put(getattr(self.lstm, f"weight_{name}_l{i}"), matrix)
            put(getattr(self.lstm, f"bias_ih_l{i}"), weights[cell + "b"].reshape(-1))
            forget = getattr(self.lstm, f"bias_hh_l{i}")
            put(forget, np.repeat(np.array([0, 1, 0, 0], np.float32), w.dim))
            forget.requires_grad_(False)

    def forward(self, ids: Any, labels: Any) -> Any:
        """Returns the mean cross-entropy."""
        x, _ = self.lstm(self.embedding(ids))
        return F.cross_entropy(self.softmax(x).flatten(0, 1), labels.flatten())


class ConvNorm(nn.Module):
    """A convolution without bias, and batch normalisation."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, weights: Weights, path: str
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        momentum = 1.0 - workloads.BATCH_NORM_DECAY
        self.norm = nn.BatchNorm2d(outputs, workloads.BATCH_NORM_EPSILON, momentum)
        put(self.conv.weight, weights[f"{path}/conv/w"].transpose(3, 2, 0, 1))
        put(self.norm.weight, weights[f"{path}/norm/scale"])
        put(self.norm.bias, weights[f"{path}/norm/bias"])

    def forward(self, x: Any) -> Any:
        """Returns norm(conv(x))."""
        return self.norm(self.conv(x))


class BasicBlock(nn.Module):
    """A residual block of two 3x3 convolutions."""

    def __init__(self, inputs: int, width: int, stride: int, weights: Weights, path: str) -> None:
        super().__init__()
        self.first = ConvNorm(inputs, width, 3, stride, weights, f"{path}/convs/0")
        self.second = ConvNorm(width, width, 3, 1, weights, f"{path}/convs/1")
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.shortcut = ConvNorm(inputs, width, 1, stride, weights, f"{path}/shortcut")

    def forward(self, x: Any) -> Any:
        """Returns the output of the block."""
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


class ResNet(nn.Module):
    """workloads.ResNet."""

    def __init__(self, w: workloads.ResNet, weights: Weights) -> None:
        super().__init__()
        self.stem = ConvNorm(3, w.width, 7, 2, weights, "model/stem/conv")
        blocks: list[BasicBlock] = []
        inputs = w.width
        for group, count in enumerate(w.num_blocks):
            width = w.width * 2**group
            for i in range(count):
                stride = 2 if group and not i else 1
                path = f"model/blocks/{len(blocks)}"
                blocks.append(BasicBlock(inputs, width, stride, weights, path))
                inputs = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, w.classes)
        put(self.classifier.weight, weights["model/classifier/w"].T)
        put(self.classifier.bias, weights["model/classifier/b"])

    def forward(self, x: Any, labels: Any) -> Any:
        """Returns the mean cross-entropy."""
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        return F.cross_entropy(self.classifier(self.blocks(x).mean((2, 3))), labels)


def put(parameter: Any, value: Any) -> None:
    """Sets a parameter."""
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))


def build(workload: workloads.Workload, weights: Weights, variant: str) -> Built:
    """Returns the workload; the variant is "eager" or "compile"."""
    arrays = {name: torch.from_numpy(array) for name, array in workload.batch().items()}
    if isinstance(workload, workloads.BeamSearch):
        if variant == "compile":
            raise UnsupportedError("the search is a Python loop, which is measured eagerly")
        return _search(workload, weights, arrays["source_ids"].long())
    if isinstance(workload, workloads.FrontEnd):
        run_features = torch.compile(log_mel) if variant == "compile" else log_mel
        constants = mel_constants(workload)

        def features() -> float:
            with torch.inference_mode():
                return float(run_features(arrays["samples"], *constants).mean())

        return Built(features, 0, _versions())
    model: Any
    if isinstance(workload, workloads.Transformer):
        model, inputs = TransformerLm(workload, weights), [arrays["ids"].long()]
    elif isinstance(workload, workloads.Lstm):
        model, inputs = LstmLm(workload, weights), [arrays["ids"].long()]
    elif isinstance(workload, workloads.Conformer):
        model, inputs = Conformer(workload, weights), [arrays["x"]]
    else:
        # Convolutions of CPUs are faster with the channels last.
        model = ResNet(workload, weights).to(memory_format=torch.channels_last)
        inputs = [arrays["x"].permute(0, 3, 1, 2)]
    inputs.append(arrays["labels"].long())
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(
        trained,
        workloads.LEARNING_RATE,
        (workloads.BETA1, workloads.BETA2),
        workloads.EPSILON,
        fused=True,
    )
    run = torch.compile(model) if variant == "compile" else model

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = run(*inputs)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return Built(step, sum(weight.numel() for weight in trained), _versions())


def _search(workload: workloads.BeamSearch, weights: Weights, sources: Any) -> Built:
    model = EncoderDecoder(workload, weights).eval()

    def step() -> float:
        with torch.inference_mode():
            _, log_probs = beam_search(model, sources, workload)
            return float(log_probs.mean())

    return Built(step, sum(weight.numel() for weight in model.parameters()), _versions())


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "numpy": np.__version__}
