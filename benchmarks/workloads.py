"""The workloads: sizes, data, number of weights and FLOPs. Needs only NumPy.

Every framework trains the same model on the same batch, in float32, with Adam at 1e-3. The models
begin with the same weights, which Tekso draws and exports.

Legend: B batch, T length, D width, F feed-forward width, L layers, V vocabulary, K beam, N samples.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

LEARNING_RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8
NORM_EPSILON = 1e-6
BATCH_NORM_EPSILON, BATCH_NORM_DECAY = 1e-5, 0.9
AMOEBANET_EPSILON, AMOEBANET_DECAY = 1e-3, 0.9997
END_ID = 1  # ends a target, and is the first input of a decoder

Batch = dict[str, np.ndarray[Any, Any]]


class _Text:
    vocab_size: int
    length: int
    batch_size: int

    unit = "tokens"

    @property
    def units(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.length

    def batch(self) -> Batch:
        """Returns random tokens and the tokens after them, [B, T] each."""
        return _tokens(self.vocab_size, self.batch_size, self.length)


@dataclasses.dataclass(frozen=True)
class Transformer(_Text):
    """A decoder-only Transformer: tied table, sinusoidal positions, pre-norm, ReLU, biases."""

    vocab_size: int
    dim: int
    num_heads: int
    num_layers: int
    length: int
    batch_size: int

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layers."""
        return 4 * self.dim

    @property
    def num_weights(self) -> int:
        """Number of trained weights."""
        return self.vocab_size * self.dim + self.num_layers * _layer(self.dim) + 2 * self.dim

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products of a step: forward, and twice that backward."""
        d, length = self.dim, self.length
        token = self.num_layers * (12 * d * d + 2 * length * d) + self.vocab_size * d
        return 6 * token * self.units


@dataclasses.dataclass(frozen=True)
class Lstm(_Text):
    """A language model: embedding, stacked LSTM of the same width, softmax with its own table."""

    vocab_size: int
    dim: int
    num_layers: int
    length: int
    batch_size: int

    @property
    def num_weights(self) -> int:
        """Number of trained weights."""
        d, v = self.dim, self.vocab_size
        return v * d + self.num_layers * (8 * d * d + 4 * d) + v * d + v

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products of a step: forward, and twice that backward."""
        token = self.num_layers * 8 * self.dim**2 + self.vocab_size * self.dim
        return 6 * token * self.units


@dataclasses.dataclass(frozen=True)
class ResNet:
    """A ResNet of basic blocks, with the stem of ImageNet: 7x7 of stride 2, 3x3 max pooling."""

    image_size: int
    classes: int
    width: int
    num_blocks: tuple[int, ...]
    batch_size: int

    unit = "images"

    @property
    def units(self) -> int:
        """Images of a step."""
        return self.batch_size

    def convolutions(self) -> list[tuple[int, int, int, int]]:
        """Returns (inputs, outputs, kernel, height and width of the output) of each one."""
        size = self.image_size // 2
        found = [(3, self.width, 7, size)]
        inputs, size = self.width, size // 2
        for group, count in enumerate(self.num_blocks):
            width = self.width * 2**group
            for block in range(count):
                if group and not block:
                    size //= 2
                    found.append((inputs, width, 1, size))
                found += [(inputs, width, 3, size), (width, width, 3, size)]
                inputs = width
        return found

    @property
    def num_weights(self) -> int:
        """Number of trained weights."""
        convolutions = self.convolutions()
        total = sum(i * o * k * k + 2 * o for i, o, k, _ in convolutions)
        return total + (convolutions[-1][1] + 1) * self.classes

    @property
    def flops(self) -> int:
        """FLOPs of the convolutions of a step: forward, and twice that backward."""
        return 6 * self.units * sum(i * o * k * k * s * s for i, o, k, s in self.convolutions())

    def batch(self) -> Batch:
        """Returns random images [B, height, width, 3] and labels [B]."""
        return _images(self.image_size, self.classes, self.batch_size)


@dataclasses.dataclass(frozen=True)
class AmoebaNet:
    """An AmoebaNet-D as GPipe divides it: L normal cells with D channels in the first third."""

    image_size: int
    classes: int
    num_layers: int
    filters: int
    batch_size: int

    unit = "images"

    @property
    def units(self) -> int:
        """Images of a step."""
        return self.batch_size

    def cells(self) -> list[tuple[str, int]]:
        """Returns (kind, channels of a state) of every cell."""
        d = self.filters
        found = [("reduction", d // 2), ("reduction", d)]
        for group in range(3):
            found += [("reduction", d * 2**group)] if group else []
            found += [("normal", d * 2**group)] * (self.num_layers // 3)
        return found

    def convolutions(self) -> list[tuple[int, int, int, int]]:
        """Returns (inputs, outputs, elements of the kernel, height and width of the output)."""
        size, stem = -(-self.image_size // 2), self.filters // 4
        found, dims, was_reduction = [(3, stem, 9, size)], [stem, stem], False
        for kind, c in self.cells():
            q, after = c // 4, -(-size // 2) if kind == "reduction" else size
            found.append((dims[1], c, 1, size))
            if was_reduction or dims[0] != c:
                found.append((dims[0], c, 1, size))
            long = [(c, q, 1, after), (q, q, 7, after), (q, q, 7, after), (q, c, 1, after)]
            if kind == "normal":
                found += [(c, c, 1, size)] * 3 + 2 * long
            else:
                found += [(c, q, 1, size), (q, q, 9, after), (q, c, 1, after), *long]
                found.append((c, c, 1, after))
            dims, size = [dims[1], c * (4 if kind == "normal" else 3)], after
            was_reduction = kind == "reduction"
        return found

    @property
    def num_weights(self) -> int:
        """Number of trained weights."""
        total = sum(i * o * k + 2 * o for i, o, k, _ in self.convolutions())
        return total + (16 * self.filters + 1) * self.classes

    @property
    def flops(self) -> int:
        """FLOPs of the convolutions of a step: forward, and twice that backward."""
        return 6 * self.units * sum(i * o * k * s * s for i, o, k, s in self.convolutions())

    def batch(self) -> Batch:
        """Returns random images [B, height, width, 3] and labels [B]."""
        return _images(self.image_size, self.classes, self.batch_size)


@dataclasses.dataclass(frozen=True)
class Conformer:
    """Conformer blocks as torchaudio defines them, and a softmax over tokens in every frame.

    They have no relative positions.
    """

    vocab_size: int
    dim: int
    num_heads: int
    num_layers: int
    kernel_size: int
    length: int
    batch_size: int

    unit = "frames"

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layers."""
        return 4 * self.dim

    @property
    def units(self) -> int:
        """Frames of a step."""
        return self.batch_size * self.length

    @property
    def num_weights(self) -> int:
        """Number of trained weights."""
        d, v = self.dim, self.vocab_size
        block = 23 * d * d + (30 + self.kernel_size) * d
        return self.num_layers * block + (d + 1) * v

    @property
    def flops(self) -> int:
        """FLOPs of matrix products and convolutions: forward, and twice that backward."""
        d, length = self.dim, self.length
        block = 23 * d * d + 2 * length * d + self.kernel_size * d
        return 6 * (self.num_layers * block + self.vocab_size * d) * self.units

    def batch(self) -> Batch:
        """Returns random frames [B, T, D] and labels [B, T]."""
        random = np.random.default_rng(0)
        shape = (self.batch_size, self.length)
        return {
            "x": random.standard_normal((*shape, self.dim), np.float32),
            "labels": random.integers(0, self.vocab_size, shape, np.int32),
        }


@dataclasses.dataclass(frozen=True)
class FrontEnd:
    """Log-mel features of recordings, as Kaldi's: 25 ms frames every 10 ms; nothing is trained.

    Each step computes the features of the whole batch. What is compared, instead of a loss, is the
    mean feature.
    """

    sample_rate: int
    num_channels: int
    seconds: int
    batch_size: int

    unit = "seconds of audio"

    @property
    def units(self) -> int:
        """Seconds of audio of a step."""
        return self.batch_size * self.seconds

    @property
    def num_weights(self) -> int:
        """There are none."""
        return 0

    @property
    def fft_length(self) -> int:
        """Length of the Fourier transform: the next power of two of a frame."""
        return 1 << math.ceil(math.log2(self.sample_rate // 40))

    @property
    def flops(self) -> int:
        """FLOPs of the Fourier transforms and of the product with the mel weights."""
        size = self.fft_length
        transform = 5 * size * int(math.log2(size)) // 2
        return self.units * 100 * (transform + (size + 2) * self.num_channels)

    def batch(self) -> Batch:
        """Returns noise, [B, N] float32 in [-1, 1)."""
        shape = (self.batch_size, self.seconds * self.sample_rate)
        return {"samples": np.random.default_rng(0).uniform(-0.5, 0.5, shape).astype(np.float32)}


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """Beam search with an encoder-decoder Transformer; every target has `steps` tokens."""

    vocab_size: int
    dim: int
    num_heads: int
    num_layers: int
    source_length: int
    steps: int
    beam_size: int
    batch_size: int

    unit = "tokens"

    @property
    def hidden_dim(self) -> int:
        """Width of the feed-forward layers."""
        return 4 * self.dim

    @property
    def units(self) -> int:
        """Tokens of the best targets of all sources."""
        return self.batch_size * self.steps

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        d = self.dim
        memory_attention = 4 * d * (d + 1) + 2 * d
        layers = self.num_layers * (2 * _layer(d) + memory_attention)
        return self.vocab_size * d + layers + 4 * d

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products of a search, with caches of keys and values."""
        d, source = self.dim, self.source_length
        encoder = self.num_layers * (12 * d * d + 2 * source * d) * self.batch_size * source
        one = self.num_layers * (14 * d * d + 2 * source * d + self.steps * d)
        decoder = (one + self.vocab_size * d) * self.batch_size * self.beam_size * self.steps
        return 2 * (encoder + decoder)

    def batch(self) -> Batch:
        """Returns random sources without padding, [B, source_length]."""
        shape = (self.batch_size, self.source_length)
        return {"source_ids": np.random.default_rng(0).integers(2, self.vocab_size, shape, "i4")}


Workload = Transformer | Lstm | ResNet | AmoebaNet | Conformer | FrontEnd | BeamSearch

WORKLOADS: dict[str, Workload] = {
    # lm.benchmark.Small and lm.benchmark.Wide
    "transformer_small": Transformer(8192, 256, 4, 4, length=128, batch_size=16),
    "transformer_wide": Transformer(16_384, 512, 8, 6, length=128, batch_size=8),
    "lstm": Lstm(256, 512, 2, length=50, batch_size=32),
    "resnet": ResNet(64, 100, 64, (2, 2, 2, 2), batch_size=32),
    "amoebanet": AmoebaNet(64, 100, 6, 64, batch_size=32),
    "conformer": Conformer(1000, 256, 4, 6, kernel_size=31, length=200, batch_size=8),
    "front_end": FrontEnd(16_000, 80, seconds=15, batch_size=8),
    "beam_search": BeamSearch(
        8192, 256, 4, 3, source_length=32, steps=32, beam_size=4, batch_size=16
    ),
}
"""The registered workloads by name."""

TINY: dict[str, Workload] = {
    "transformer_small": Transformer(50, 16, 2, 1, length=6, batch_size=2),
    "transformer_wide": Transformer(60, 32, 4, 2, length=6, batch_size=2),
    "lstm": Lstm(50, 16, 2, length=5, batch_size=2),
    "resnet": ResNet(32, 10, 8, (1, 1), batch_size=2),
    "amoebanet": AmoebaNet(20, 10, 3, 8, batch_size=2),
    "conformer": Conformer(20, 16, 2, 1, kernel_size=3, length=7, batch_size=3),
    "front_end": FrontEnd(8000, 20, seconds=1, batch_size=2),
    "beam_search": BeamSearch(50, 16, 2, 1, source_length=5, steps=4, beam_size=2, batch_size=2),
}
"""The same workloads in sizes that only check the code."""


def sinusoids(length: int, dim: int) -> np.ndarray[Any, Any]:
    """Returns the positions of the Transformers, [length, dim]: sines, then cosines."""
    half = dim // 2
    rates = np.exp(np.arange(half) * -(math.log(1e4) / max(half - 1, 1)))
    angles = np.arange(length)[:, None] * rates[None]
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)


def _layer(dim: int) -> int:
    """Weights of a layer: attention, feed-forward layer of 4 * dim, two normalisations."""
    return 4 * dim * (dim + 1) + 8 * dim * dim + 5 * dim + 4 * dim


def _images(size: int, classes: int, count: int) -> Batch:
    random = np.random.default_rng(0)
    return {
        "x": random.standard_normal((count, size, size, 3), np.float32),
        "labels": random.integers(0, classes, count, np.int32),
    }


def _tokens(vocab_size: int, batch_size: int, length: int) -> Batch:
    drawn = np.random.default_rng(0).integers(0, vocab_size, (batch_size, length + 1), np.int32)
    return {"ids": drawn[:, :-1].copy(), "labels": drawn[:, 1:].copy()}
