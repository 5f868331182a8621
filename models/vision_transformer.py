"""VisionTransformer (ViT): a Transformer encoder over the patches of an image.

    patches ─ (class token) ─ positions ─ dropout ─ stack ─ norm ─ pooling ─ linear

    name    dim    layers   heads   trainable weights, patches of 16, 224 pixels, 1,000 classes
    Ti      192    12       3         5,717,416
    S       384    12       6        22,050,664
    B       768    12       12       86,567,656
    L       1024   24       16      304,326,632

Source: Dosovitskiy et al. 2021, "An image is worth 16x16 words", table 1; Ti and S: Touvron et al.
2021, "Training data-efficient image transformers", table 1.

Legend: B batch, T patches and the class token, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.theta import Theta
from tekso.models.image_model import ImageModel
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.linear import Linear
from tekso.models.layers.normalization import LayerNorm, Norm
from tekso.models.layers.patch_embedding import ClassToken, PatchEmbedding
from tekso.models.layers.pooling import mean_over
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.stack import Stack, StackBase, pieces_of_stack
from tekso.models.layers.transformer import TransformerLayer

SIZES = {"Ti": (192, 12, 3), "S": (384, 12, 6), "B": (768, 12, 12), "L": (1024, 24, 16)}
"""{name: (dim, layers, heads)} of the published networks; the feed-forward layer has 4 * dim."""


class VisionTransformer(ImageModel):
    """A Transformer encoder that classifies images; see the module.

    Shapes:
      x: [B, image_size, image_size, channels], numbers of any type
      returns: logits [B, classes], float32 or wider; without a classifier, features [B, T, D]
    Children:
      patches, class_token (with that pooling), positions, stack, final_norm
      classifier: Linear, dims ("embed", "classes")
    Raises:
      ValueError: the patches do not divide the image, or x has another size than image_size.
    Source: Dosovitskiy et al. 2021, eq. 1 to 4.
    """

    class Params(ImageModel.Params):
        """Params of VisionTransformer."""

        dim: int = param("Size of the activations between layers.", default=REQUIRED)
        patch_size: int = param("Height and width of a patch.", default=16)
        patches: PatchEmbedding.Params = param(
            "Embedding of the patches.", default=PatchEmbedding.Params()
        )
        pooling: Literal["class_token", "mean"] = param(
            "What is classified: the output for an additional token, or the mean of all outputs.",
            default="class_token",
        )
        positions: LearnedPositions.Params = param(
            "Positions added to the patches.", default=LearnedPositions.Params()
        )
        dropout_rate: float = param("Dropout of the embedded patches.", default=0.0)
        stack: StackBase.Params = param(
            "The layers.", default=Stack.Params(layer=TransformerLayer.Params())
        )
        final_norm: Norm.Params = param(
            "Normalisation after the last layer.", default=LayerNorm.Params()
        )
        classifier_init: Initializer.Params = param(
            "Initializer of the classifier.", default=Zeros.Params()
        )

    has_features = True
    patches: PatchEmbedding
    class_token: ClassToken
    positions: LearnedPositions
    dropout: Dropout
    stack: StackBase
    final_norm: Norm
    classifier: Linear

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.image_size % p.patch_size:
            raise ValueError(
                f"VisionTransformer: patch_size {p.patch_size} does not divide image_size "
                f"{p.image_size}"
            )
        patches = with_sizes(p.patches, input_dim=p.channels, dim=p.dim).set(
            patch_size=p.patch_size
        )
        self.child("patches", patches)
        if p.pooling == "class_token":
            self.child("class_token", ClassToken.Params(dim=p.dim, dtype=p.dtype))
        length = (p.image_size // p.patch_size) ** 2 + (p.pooling == "class_token")
        self.child("positions", with_sizes(p.positions, dim=p.dim, max_length=length))
        self.child("dropout", Dropout.Params(rate=p.dropout_rate))
        self.child("stack", with_sizes(p.stack, dim=p.dim))
        self.child("final_norm", with_sizes(p.final_norm, dim=p.dim))
        if p.classes is None:
            return
        classifier = Linear.Params(
            dtype=p.dtype,
            input_dim=p.dim,
            output_dim=p.classes,
            init=p.classifier_init,
            dims=("embed", "classes"),
        )
        self.child("classifier", classifier)

    @property
    def feature_dim(self) -> int:
        """Size of the activations."""
        dim: int = self.params.dim
        return dim

    def pieces(self) -> list[Piece]:
        """Returns the embedding, one piece per layer of the stack, and the classifier."""
        first: dict[str, Layer] = {"patches": self.patches, "positions": self.positions}
        if self.params.pooling == "class_token":
            first["class_token"] = self.class_token
        head: dict[str, Layer] = {"final_norm": self.final_norm}
        last = Piece("final_norm", head, self._run_norm)
        if self.params.classes is not None:
            last = Piece("classifier", {**head, "classifier": self.classifier}, self._run_classify)
        return [
            Piece("embedding", first, self._run_embed),
            *pieces_of_stack("stack", self.stack, self._run_layers),
            last,
        ]

    def _run_embed(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x, size = self.images(flow["x"], ctx), self.params.image_size
        if x.shape[1:3] != (size, size):
            raise ValueError(
                f"VisionTransformer: x is {x.shape}, but image_size is {size}: the positions of "
                "other sizes are not learned"
            )
        x = self.patches.fprop(theta.patches, x, ctx)
        if self.params.pooling == "class_token":
            x = self.class_token.fprop(theta.class_token, x, ctx)
        x = self.positions.fprop(theta.positions, x, ctx)
        x = ctx.constrain(x, ("batch", "length", "embed"))
        return {**flow, "x": self.dropout.fprop(Theta(), x, ctx)}

    def _run_layers(
        self, compute: Callable[..., tf.Tensor], theta: Theta, flow: Flow, ctx: StepContext
    ) -> Flow:
        return {**flow, "x": compute(theta.stack, flow["x"], ctx)}

    def _run_norm(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "x": self.final_norm.fprop(theta.final_norm, flow["x"], ctx)}

    def _run_classify(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = ctx.constrain(flow["x"], ("batch", None, "embed"))
        if self.params.pooling == "class_token":
            x = self.final_norm.fprop(theta.final_norm, x[:, 0], ctx)
        else:
            x = mean_over(self.final_norm.fprop(theta.final_norm, x, ctx), [1])
        x = ctx.constrain(x, ("batch", "embed"))
        return {**flow, "x": self.logits(self.classifier.fprop(theta.classifier, x, ctx), ctx)}


def vit(size: str, **changes: Any) -> VisionTransformer.Params:
    """Returns the Params of a published network.

    Args:
      size: "Ti", "S", "B" or "L".
      changes: values of other fields, such as `classes`, `image_size` and `patch_size`.

    Raises:
      ValueError: there is no network of this size.
    """
    if size not in SIZES:
        raise ValueError(f"vit: size is {size!r}, but must be one of {sorted(SIZES)}")
    dim, layers, heads = SIZES[size]
    layer = TransformerLayer.Params(
        norm=LayerNorm.Params(epsilon=1e-6),
        attention=MultiHeadAttention.Params(num_heads=heads),
        feed_forward=FeedForward.Params(hidden_dim=4 * dim, activation="gelu"),
    )
    stack = Stack.Params(num_layers=layers, layer=layer)
    return VisionTransformer.Params(dim=dim, stack=stack).set(**changes)
