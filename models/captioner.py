"""Captioner: describes an image by a Transformer decoder that attends to features of the image.

    image ─ encoder (ResNet, ViT) ─ linear (+ positions) ─ norm ─ (language token) ─ memory
                                                                                        │
    caption ─ embedding (+ positions) ─ dropout ─ decoder, attends to the memory ─ norm ─ softmax

Legend: B batch, H height, W width, C channels, S features of an image, T caption length, D model
dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.image_model import ImageModel
from tekso.models.layers import masking
from tekso.models.layers.language_token import LanguageToken
from tekso.models.layers.linear import Linear
from tekso.models.layers.normalization import LayerNorm, Norm
from tekso.models.layers.positions import PositionsBase
from tekso.models.layers.sizes import with_sizes
from tekso.models.memory_decoder import Batch, MemoryDecoder


class Captioner(MemoryDecoder):
    """Predicts every token of a caption from those before it and the image; see the module.

    Shapes:
      batch:
        "x": [B, H, W, C]
        "target_ids", "target_labels", "target_segment_ids": [B, T] int32; segment 0 is padding
        "language_ids": [B] int32, with several languages only
      returns: logits [B, T, V]; token_cross_entropy: [B, T] float32
      encode returns: the memory, [B, S, D], or [B, 1 + S, D] with several languages
    Children:
      encoder, projection: Linear, dims ("channels", "embed"), memory_norm, target_embedding,
        decoder; memory_positions, language, target_positions, decoder_norm, softmax (if set)
    Source: Vinyals et al. 2015, "Show and tell"; Xu et al. 2015, "Show, attend and tell";
      Vaswani et al. 2017, for the decoder.
    """

    class Params(MemoryDecoder.Params):
        """Params of Captioner."""

        encoder: ImageModel.Params = param(
            "The network over the image; the model leaves out its classifier.", default=REQUIRED
        )
        memory_positions: PositionsBase.Params | None = param(
            "Positions added to the features, row by row; None: none, as for a ViT, which adds its "
            "own.",
            default=None,
        )
        memory_norm: Norm.Params = param(
            "Normalisation of the features.", default=LayerNorm.Params()
        )
        num_languages: int = param(
            "Number of languages of captions; with several, the memory begins with a token of the "
            "language.",
            default=1,
        )

    encoder: ImageModel
    projection: Linear
    memory_positions: PositionsBase
    memory_norm: Norm
    language: LanguageToken

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.num_languages < 1:
            raise ValueError(f"Captioner: num_languages {p.num_languages} must be at least 1")
        self.child("encoder", p.encoder.copy().set(classes=None))
        projection = Linear.Params(
            dtype=p.dtype,
            input_dim=self.encoder.feature_dim,
            output_dim=p.dim,
            dims=("channels", "embed"),
        )
        self.child("projection", projection)
        if p.memory_positions is not None:
            self.child("memory_positions", with_sizes(p.memory_positions, dim=p.dim))
        self.child("memory_norm", with_sizes(p.memory_norm, dim=p.dim))
        if p.num_languages > 1:
            language = LanguageToken.Params(dim=p.dim, num_languages=p.num_languages)
            self.child("language", language)
        self._add_target_embedding()
        self._add_side("target")
        self._add_stack("decoder")
        self._add_softmax(p.dim)
        self._check_attention({"decoder": "causal"})

    def encode(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the memory of images; see the class."""
        flow: Flow = dict(batch)
        for piece in self._encoder_pieces():
            flow = piece.run(theta, flow, ctx)
        return flow["memory"]

    def _memory(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        found = batch.get("memory")  # a search encodes the images once
        return self.encode(theta, batch, ctx) if found is None else found

    def _sides(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"mask": masking.segments(batch["target_segment_ids"])}

    # --- pieces ---

    def pieces(self, *, label_smoothing: float = 0.0) -> list[Piece]:
        """Returns the pieces of `token_cross_entropy` in order, for pipelines.

        The first piece takes the batch. The pieces of the encoder replace "x" by features; the next
        one adds "memory", the others replace "x" by the activations of the decoder, and the last
        one adds "cross_entropy" [B, T]. Label smoothing applies to training only.
        """
        return [*self._encoder_pieces(), *self._target_pieces(label_smoothing)]

    def _encoder_pieces(self) -> list[Piece]:
        names = ["projection", "memory_norm"]
        names += ["memory_positions"] if self.params.memory_positions is not None else []
        names += ["language"] if self.params.num_languages > 1 else []
        layers: dict[str, Layer] = {name: getattr(self, name) for name in names}
        own = [piece.below("encoder") for piece in self.encoder.pieces()]
        return [*own, Piece("memory", layers, self._run_memory)]

    def _run_memory(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = flow["x"]
        if x.shape.rank == 4:
            x = ctx.constrain(x, ("batch", None, None, "channels"))
            x = tf.reshape(x, [-1, x.shape[1] * x.shape[2], x.shape[3]])
        x = self.projection.fprop(theta.projection, x, ctx)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        if self.params.memory_positions is not None:
            x = self.memory_positions.fprop(theta.memory_positions, x, ctx)
        x = self.memory_norm.fprop(theta.memory_norm, x, ctx)
        if self.params.num_languages > 1:
            ids = flow["language_ids"]
            x = self.language.fprop(theta.language, x, ctx, language_ids=ids)
        return {**flow, "memory": x}
