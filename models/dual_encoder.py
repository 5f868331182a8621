"""DualEncoder: embeds images and texts in one space, where an image is close to its texts.

    image ─ encoder ─ mean over the image ─ linear ─ unit length ─┐
                                                                  ├─ cosine similarity
    text ─ embedding (+ positions) ─ stack ─ norm ─ mean over ─ linear ─ unit length
                                                    the tokens

Legend: B batch, T text length, E size of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta
from tekso.models.image_model import ImageModel
from tekso.models.layers import masking
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.linear import Linear
from tekso.models.layers.normalization import LayerNorm, Norm
from tekso.models.layers.pooling import mean_over, mean_over_tokens
from tekso.models.layers.positions import PositionsBase, SinusoidalPositions
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.stack import Stack, StackBase
from tekso.models.layers.transformer import TransformerLayer


class TextTower(Layer):
    """A Transformer encoder whose output is the mean over the tokens of a text.

    Shapes:
      x: {"ids", "segment_ids" [B, T] int32}; segment 0 is padding, which has no effect
      returns: [B, dim]
    Children:
      embedding, positions (if set), stack, final_norm
    """

    class Params(Layer.Params):
        """Params of TextTower."""

        vocab_size: int = param("Number of tokens.", default=REQUIRED)
        dim: int = param("Size of the activations between layers.", default=REQUIRED)
        embedding: Embedding.Params = param(
            "Table of tokens; scaled, so that positions do not dominate.",
            default=Embedding.Params(scale="sqrt_dim"),
        )
        positions: PositionsBase.Params | None = param(
            "Positions added to the embeddings.", default=SinusoidalPositions.Params()
        )
        dropout_rate: float = param("Dropout of the embeddings.", default=0.0)
        stack: StackBase.Params = param(
            "The layers.", default=Stack.Params(layer=TransformerLayer.Params())
        )
        final_norm: Norm.Params = param(
            "Normalisation after the last layer.", default=LayerNorm.Params()
        )

    embedding: Embedding
    positions: PositionsBase
    dropout: Dropout
    stack: StackBase
    final_norm: Norm

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child("embedding", with_sizes(p.embedding, vocab_size=p.vocab_size, dim=p.dim))
        if p.positions is not None:
            self.child("positions", with_sizes(p.positions, dim=p.dim))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        self.child("stack", with_sizes(p.stack, dim=p.dim))
        self.child("final_norm", with_sizes(p.final_norm, dim=p.dim))

    def fprop(self, theta: Theta, x: Mapping[str, tf.Tensor], ctx: StepContext) -> tf.Tensor:
        """See the class."""
        ids, segments = x["ids"], x["segment_ids"]
        y = self.embedding.fprop(theta.embedding, ids, ctx)
        if self.params.positions is not None:
            y = self.positions.fprop(theta.positions, y, ctx)
        y = ctx.constrain(y, ("batch", "length", "embed"))
        y = self.dropout.fprop(Theta(), y, ctx)
        y = self.stack.fprop(theta.stack, y, ctx, mask=masking.segments(segments))
        y = self.final_norm.fprop(theta.final_norm, y, ctx)
        y = ctx.constrain(y, ("batch", None, "embed"))
        y = mean_over_tokens(y, tf.not_equal(segments, 0))
        return ctx.constrain(y, ("batch", "embed"))


class DualEncoder(Layer):
    """Embeds images and texts; see the module.

    Shapes:
      x of fprop: {"x" [B, height, width, channels], "ids", "segment_ids" [B, T] int32}
      returns: embeddings of the images and of the texts, two of [B, E] float32, of unit length
    Children:
      image: an ImageModel without classifier; text: TextTower
      image_head: Linear, dims ("channels", None); text_head: Linear, dims ("embed", None)
    Source: Radford et al. 2021, "Learning transferable visual models from natural language
      supervision", figure 3.
    """

    class Params(Layer.Params):
        """Params of DualEncoder."""

        dim: int = param("Size of an embedding.", default=REQUIRED)
        image: ImageModel.Params = param(
            "The network over the image; the model leaves out its classifier.", default=REQUIRED
        )
        text: TextTower.Params = param("The network over the text.", default=TextTower.Params())

    image: ImageModel
    text: TextTower
    image_head: Linear
    text_head: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.child("image", p.image.copy().set(classes=None))
        self.child("text", p.text)
        for name, size, dim in (
            ("image_head", self.image.feature_dim, "channels"),
            ("text_head", p.text.dim, "embed"),
        ):
            head = Linear.Params(
                dtype=p.dtype, input_dim=size, output_dim=p.dim, use_bias=False, dims=(dim, None)
            )
            self.child(name, head)

    def fprop(
        self, theta: Theta, x: Mapping[str, tf.Tensor], ctx: StepContext
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See the class."""
        images = self.embed_images(theta, x["x"], ctx)
        return images, self.embed_texts(theta, x["ids"], x["segment_ids"], ctx)

    def embed_images(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the embeddings of images, [B, E] float32, of unit length."""
        y = self.image.fprop(theta.image, x, ctx)
        between = [None] * (y.shape.rank - 2)
        y = ctx.constrain(y, ("batch", *between, "channels" if between[1:] else "embed"))
        y = mean_over(y, range(1, y.shape.rank - 1))
        return _unit(self.image_head.fprop(theta.image_head, y, ctx), ctx)

    def embed_texts(
        self, theta: Theta, ids: tf.Tensor, segment_ids: tf.Tensor, ctx: StepContext
    ) -> tf.Tensor:
        """Returns the embeddings of texts, [B, E] float32, of unit length."""
        y = self.text.fprop(theta.text, {"ids": ids, "segment_ids": segment_ids}, ctx)
        return _unit(self.text_head.fprop(theta.text_head, y, ctx), ctx)


def _unit(x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
    x = widen(ctx.constrain(x, ("batch", None)))
    squares = tf.reduce_sum(tf.square(x), 1, keepdims=True)
    return x * tf.math.rsqrt(tf.maximum(squares, 1e-12))
