"""Beam search in PyTorch, with caches of keys and values that follow the hypotheses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import nn

from benchmarks import workloads
from benchmarks.frameworks import Weights
from benchmarks.frameworks.pytorch_transformer import Layer, Table, norm


class EncoderDecoder(nn.Module):
    """The model of workloads.BeamSearch."""

    def __init__(self, w: workloads.BeamSearch, weights: Weights) -> None:
        super().__init__()
        length = max(w.source_length, w.steps)
        self.table = Table(w.vocab_size, w.dim, length, weights, "model/target_embedding/table")
        layers = {
            side: nn.ModuleList(
                Layer(w.dim, w.num_heads, weights, f"model/{side}/layers/{i}")
                for i in range(w.num_layers)
            )
            for side in ("encoder", "decoder")
        }
        self.encoder, self.decoder = layers["encoder"], layers["decoder"]
        self.encoder_norm = norm(w.dim, weights, "model/encoder_norm")
        self.decoder_norm = norm(w.dim, weights, "model/decoder_norm")

    def encode(self, sources: Any) -> Any:
        """Returns the memory [B, S, D]."""
        x = self.table(sources)
        for layer in self.encoder:
            x = layer(x, causal=False)
        return self.encoder_norm(x)


def beam_search(model: Any, sources: Any, w: workloads.BeamSearch) -> tuple[Any, Any]:
    """Returns the best targets [B, steps] and their log-probabilities [B]."""
    batch, beam = len(sources), w.beam_size
    rows = batch * beam
    # The hypotheses of a source share its memory.
    memory = model.encode(sources).repeat_interleave(beam, 0)
    memories = [layer.memory_attention.keys_values(memory) for layer in model.decoder]
    empty = memory.new_zeros(rows, w.num_heads, 0, w.dim // w.num_heads)
    caches = [(empty, empty) for _ in model.decoder]
    # At first, all hypotheses of a source are equal: only one may continue.
    totals = torch.full((batch, beam), -torch.inf)
    totals[:, 0] = 0.0
    tokens = torch.full((rows, 1), workloads.END_ID)
    targets = tokens.new_zeros(rows, 0)
    first_rows = torch.arange(batch)[:, None] * beam
    for t in range(w.steps):
        x = model.table(tokens, t)
        for i, layer in enumerate(model.decoder):
            x, caches[i] = layer.extend(x, caches[i], memories[i])
        log_probs = F.log_softmax(model.table.logits(model.decoder_norm(x[:, 0])), -1)
        log_probs[:, workloads.END_ID] = -torch.inf
        scores = (totals[:, :, None] + log_probs.unflatten(0, (batch, beam))).flatten(1)
        totals, found = scores.topk(beam)
        parents = (first_rows + found // w.vocab_size).flatten()
        tokens = (found % w.vocab_size).flatten()[:, None]
        targets = torch.cat([targets[parents], tokens], 1)
        caches = [(k[parents], v[parents]) for k, v in caches]
    return targets.unflatten(0, (batch, beam))[:, 0], totals[:, 0]
