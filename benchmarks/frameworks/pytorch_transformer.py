"""Layers of Transformers in PyTorch, with fused projections and PyTorch's own attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import nn

from benchmarks import workloads
from benchmarks.frameworks import Weights

Cache = tuple[Any, Any]


class Table(nn.Module):
    """The embedding with positions, which is also the softmax."""

    def __init__(self, vocab_size: int, dim: int, length: int, weights: Weights, path: str) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, dim)
        self.scale = math.sqrt(dim)
        positions = torch.from_numpy(workloads.sinusoids(length, dim))
        self.register_buffer("positions", positions, persistent=False)
        put(self.table.weight, weights[path])

    def forward(self, ids: Any, first: int = 0) -> Any:
        """Returns embedded tokens [B, T, D]; `first` is the position of the first."""
        return self.table(ids) * self.scale + self.positions[first : first + ids.shape[1]]

    def logits(self, x: Any) -> Any:
        """Returns the scores of all tokens."""
        return F.linear(x, self.table.weight)


class Attention(nn.Module):
    """Multi-head attention to the input, or to a memory."""

    def __init__(self, dim: int, num_heads: int, weights: Weights, path: str) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        matrices = [weights[f"{path}/{name}"].reshape(dim, dim) for name in "qkv"]
        biases = [weights[f"{path}/{name}_bias"].reshape(dim) for name in "qkv"]
        put(self.qkv.weight, np.concatenate(matrices, 1).T)
        put(self.qkv.bias, np.concatenate(biases))
        put(self.out.weight, weights[f"{path}/out"].reshape(dim, dim).T)
        put(self.out.bias, weights[f"{path}/out_bias"])

    def heads(self, x: Any) -> Any:
        """Returns [B, heads, T, head_dim]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
        """Returns the output for queries, keys and values."""
        x = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(x.transpose(1, 2).flatten(2))

    def keys_values(self, memory: Any) -> Cache:
        """Returns the keys and values of a memory."""
        dim = memory.shape[-1]
        k, v = F.linear(memory, self.qkv.weight[dim:], self.qkv.bias[dim:]).chunk(2, -1)
        return self.heads(k), self.heads(v)

    def query(self, x: Any) -> Any:
        """Returns the queries of x."""
        dim = x.shape[-1]
        return self.heads(F.linear(x, self.qkv.weight[:dim], self.qkv.bias[:dim]))

    def forward(self, x: Any, causal: bool) -> Any:
        """Returns the output of self-attention."""
        q, k, v = (self.heads(part) for part in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v, causal=causal)


class Layer(nn.Module):
    """A pre-norm layer, with attention to a memory if the weights have it."""

    def __init__(self, dim: int, num_heads: int, weights: Weights, path: str) -> None:
        super().__init__()
        self.attention_norm = norm(dim, weights, f"{path}/attention_norm")
        self.attention = Attention(dim, num_heads, weights, f"{path}/attention")
        if f"{path}/memory_attention/q" in weights:
            self.memory_attention_norm = norm(dim, weights, f"{path}/memory_attention_norm")
            self.memory_attention = Attention(dim, num_heads, weights, f"{path}/memory_attention")
        self.feed_forward_norm = norm(dim, weights, f"{path}/feed_forward_norm")
        self.hidden, self.output = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        for part, name in ((self.hidden, "hidden"), (self.output, "output")):
            put(part.weight, weights[f"{path}/feed_forward/{name}/w"].T)
            put(part.bias, weights[f"{path}/feed_forward/{name}/b"])

    def feed_forward(self, x: Any) -> Any:
        """Adds the output of the feed-forward layer."""
        return x + self.output(F.relu(self.hidden(self.feed_forward_norm(x))))

    def forward(self, x: Any, causal: bool) -> Any:
        """Returns the output of a layer without a memory."""
        return self.feed_forward(x + self.attention(self.attention_norm(x), causal))

    def extend(self, x: Any, cache: Cache, memory: Cache) -> tuple[Any, Cache]:
        """Reads one more token of a target; returns the output and the new cache."""
        q, k, v = (
            self.attention.heads(part)
            for part in self.attention.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        cache = (torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2))
        x = x + self.attention.attend(q, *cache)
        q = self.memory_attention.query(self.memory_attention_norm(x))
        return self.feed_forward(x + self.memory_attention.attend(q, *memory)), cache


def norm(dim: int, weights: Weights, path: str) -> Any:
    """Returns a layer normalisation."""
    found = nn.LayerNorm(dim, eps=workloads.NORM_EPSILON)
    put(found.weight, weights[f"{path}/scale"])
    put(found.bias, weights[f"{path}/bias"])
    return found


def put(parameter: Any, value: Any) -> None:
    """Sets a parameter."""
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
