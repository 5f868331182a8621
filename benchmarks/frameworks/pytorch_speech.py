"""Speech in PyTorch: Conformer blocks as torchaudio defines them, and log-mel features."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import nn

from benchmarks import workloads
from benchmarks.frameworks import Weights
from benchmarks.frameworks.pytorch_transformer import Attention, norm, put


class FeedForward(nn.Module):
    """A feed-forward layer of a block; half of its output is added."""

    def __init__(self, dim: int, weights: Weights, path: str) -> None:
        super().__init__()
        self.norm = norm(dim, weights, f"{path}_norm")
        self.hidden, self.output = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        for part, name in ((self.hidden, "hidden"), (self.output, "output")):
            put(part.weight, weights[f"{path}/{name}/w"].T)
            put(part.bias, weights[f"{path}/{name}/b"])

    def forward(self, x: Any) -> Any:
        """Returns the sum."""
        return x + 0.5 * self.output(F.silu(self.hidden(self.norm(x))))


class Convolution(nn.Module):
    """The convolution module of a block; its output is added."""

    def __init__(self, w: workloads.Conformer, weights: Weights, path: str) -> None:
        super().__init__()
        self.layer_norm = norm(w.dim, weights, f"{path}_norm")
        self.gated, self.output = nn.Linear(w.dim, 2 * w.dim), nn.Linear(w.dim, w.dim)
        both = [weights[f"{path}/{name}/w"] for name in ("value", "gate")]
        put(self.gated.weight, np.concatenate(both, 1).T)
        both = [weights[f"{path}/{name}/b"] for name in ("value", "gate")]
        put(self.gated.bias, np.concatenate(both))
        put(self.output.weight, weights[f"{path}/output/w"].T)
        put(self.output.bias, weights[f"{path}/output/b"])
        size = w.kernel_size
        self.depthwise = nn.Conv1d(w.dim, w.dim, size, padding=(size - 1) // 2, groups=w.dim)
        kernel = weights[f"{path}/depthwise/w"].reshape(size, 1, w.dim)
        put(self.depthwise.weight, kernel.transpose(2, 1, 0))
        put(self.depthwise.bias, weights[f"{path}/depthwise/b"])
        momentum = 1.0 - workloads.BATCH_NORM_DECAY
        self.batch_norm = nn.BatchNorm1d(w.dim, workloads.BATCH_NORM_EPSILON, momentum)
        put(self.batch_norm.weight, weights[f"{path}/norm/scale"])
        put(self.batch_norm.bias, weights[f"{path}/norm/bias"])

    def forward(self, x: Any) -> Any:
        """Returns the sum."""
        y = F.glu(self.gated(self.layer_norm(x)), -1)
        y = F.silu(self.batch_norm(self.depthwise(y.transpose(1, 2))))
        return x + self.output(y.transpose(1, 2))


class Block(nn.Module):
    """A Conformer block."""

    def __init__(self, w: workloads.Conformer, weights: Weights, path: str) -> None:
        super().__init__()
        self.first = FeedForward(w.dim, weights, f"{path}/first")
        self.attention_norm = norm(w.dim, weights, f"{path}/attention_norm")
        self.attention = Attention(w.dim, w.num_heads, weights, f"{path}/attention")
        self.convolution = Convolution(w, weights, f"{path}/convolution")
        self.second = FeedForward(w.dim, weights, f"{path}/second")
        self.norm = norm(w.dim, weights, f"{path}/norm")

    def forward(self, x: Any) -> Any:
        """Returns the output of the block."""
        x = self.first(x)
        x = x + self.attention(self.attention_norm(x), causal=False)
        return self.norm(self.second(self.convolution(x)))


class Conformer(nn.Module):
    """workloads.Conformer."""

    def __init__(self, w: workloads.Conformer, weights: Weights) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(Block(w, weights, f"blocks/{i}") for i in range(w.num_layers))
        )
        self.softmax = nn.Linear(w.dim, w.vocab_size)
        put(self.softmax.weight, weights["softmax/w"])
        put(self.softmax.bias, weights["softmax/b"])

    def forward(self, x: Any, labels: Any) -> Any:
        """Returns the mean cross-entropy."""
        return F.cross_entropy(self.softmax(self.blocks(x)).flatten(0, 1), labels.flatten())


def mel_constants(w: workloads.FrontEnd) -> tuple[Any, Any]:
    """Returns the window [samples of a frame] and the mel weights [fft / 2 + 1, channels]."""
    size = w.sample_rate // 40
    place = 2 * math.pi * torch.arange(size, dtype=torch.float64) / (size - 1)
    window = (0.5 - 0.5 * torch.cos(place)) ** 0.85
    hz = torch.arange(w.fft_length // 2 + 1, dtype=torch.float64) * w.sample_rate / w.fft_length
    lowest, highest = (1127 * math.log(1 + edge / 700) for edge in (20.0, w.sample_rate / 2))
    edges = torch.linspace(lowest, highest, w.num_channels + 2, dtype=torch.float64)
    mel = 1127 * torch.log(1 + hz / 700)[:, None]
    width = edges[1] - edges[0]
    triangle = torch.minimum((mel - edges[:-2]) / width, (edges[2:] - mel) / width)
    return window.float(), triangle.clamp(min=0).float()


def log_mel(samples: Any, window: Any, mel_weights: Any) -> Any:
    """Returns Kaldi's features of samples in [-1, 1): [B, N] -> [B, T, channels]."""
    size = window.shape[0]
    x = (32_768 * samples).unfold(1, size, size * 2 // 5)
    x = x - x.mean(2, keepdim=True)
    x = x - 0.97 * torch.cat([x[..., :1], x[..., :-1]], 2)
    fft_length = 2 * (mel_weights.shape[0] - 1)
    power = torch.fft.rfft(x * window, fft_length).abs().square()
    floor = torch.finfo(torch.float32).eps
    return (power @ mel_weights).clamp(min=floor).log()
