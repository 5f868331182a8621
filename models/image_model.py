"""ImageModel: base of the models that map images to class scores."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from tekso.framework import window_ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import Flow, Piece
from tekso.framework.primitives.precision import widen
from tekso.framework.primitives.windows import spatial_dims
from tekso.framework.theta import Theta
from tekso.models.layers.dropout import Dropout
from tekso.models.layers.linear import Linear
from tekso.models.layers.pooling import GlobalAveragePool


class ImageModel(Layer):
    """Base of the models of images: `fprop` runs the pieces of the model one after the other.

    Without a classifier (`classes` is None), a model that `has_features` encodes images.

    Shapes:
      x: [batch, height, width, channels], numbers of any type
      returns: logits [batch, classes], float32 or wider; without a classifier, features [batch,
        length, feature_dim] or [batch, height, width, feature_dim]
    Raises:
      ValueError: a size is not positive, or x is not an image with `channels` channels; the model
        needs a classifier.
    """

    class Params(Layer.Params):
        """Params of ImageModel."""

        image_size: int = param("Height and width of the images of training.", default=224)
        channels: int = param("Number of channels of an image.", default=3)
        classes: int | None = param(
            "Number of classes. None: no classifier, the model is an encoder.", default=REQUIRED
        )

    has_features: ClassVar[bool] = False
    """Whether the model can do without a classifier."""

    num_spatial_dims: ClassVar[int] = 2
    """2 for images; 3 for volumes, [batch, depth, height, width, channels]."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p, name = self.params, type(self).__name__
        if p.classes is None and not self.has_features:
            raise ValueError(f"{name}: classes is None, but this model needs a number of classes")
        if min(p.image_size, p.channels, 1 if p.classes is None else p.classes) < 1:
            raise ValueError(
                f"{name}: image_size {p.image_size}, channels {p.channels} and classes "
                f"{p.classes} must be at least 1"
            )

    @property
    def feature_dim(self) -> int:
        """Size of the features of a model without a classifier."""
        raise NotImplementedError(f"{type(self).__name__} has no feature_dim")

    def pieces(self) -> list[Piece]:
        """Returns the parts of the model; the last one returns the logits or features as "x"."""
        raise NotImplementedError(f"{type(self).__name__} has no pieces()")

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        flow: Flow = {"x": x}
        for piece in self.pieces():
            flow = piece.run(theta, flow, ctx)
        return flow["x"]

    def images(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the input of the first layer: checked, and in the dtype of the weights."""
        x, channels = tf.convert_to_tensor(x), self.params.channels
        if x.shape.rank != self.num_spatial_dims + 2 or x.shape[-1] != channels:
            dims = ", ".join(spatial_dims(self.num_spatial_dims))
            kind = "images" if self.num_spatial_dims == 2 else "volumes"
            raise ValueError(
                f"{type(self).__name__}: x is {x.shape}, but must be {kind} [batch, {dims}, "
                f"{channels}]: channels is {channels}"
            )
        x = tf.cast(x, self.params.dtype) if not x.dtype.is_floating else x
        return window_ops.constrain_image(ctx, x)

    def logits(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the scores in float32 or wider, sharded by examples only."""
        return widen(ctx.constrain(x, ("batch", None)))


class PooledImageModel(ImageModel):
    """Base of the image classifiers that end with global average pooling and a linear layer.

    Shapes:
      as ImageModel
    Children:
      pool, dropout, classifier: after all other children; see `classify_pooled`
    """

    pool: GlobalAveragePool
    dropout: Dropout
    classifier: Linear

    def classify_pooled(
        self, input_dim: int, init: Initializer.Params, dropout_rate: float
    ) -> None:
        """Adds the last layers: pooling, dropout and the classifier."""
        self.child("pool", GlobalAveragePool.Params())
        self.child("dropout", Dropout.Params(rate=dropout_rate))
        classifier = Linear.Params(
            dtype=self.params.dtype,
            input_dim=input_dim,
            output_dim=self.params.classes,
            init=init,
            dims=("channels", "classes"),
        )
        self.child("classifier", classifier)

    def classifier_piece(self) -> Piece:
        """Returns the last layers as a piece."""
        layers = {"pool": self.pool, "dropout": self.dropout, "classifier": self.classifier}
        return Piece("classifier", layers, self._run_classifier)

    def _run_classifier(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        x = self.pool.fprop(theta.pool, flow["x"], ctx)
        x = self.dropout.fprop(theta.dropout, x, ctx)
        return {**flow, "x": self.logits(self.classifier.fprop(theta.classifier, x, ctx), ctx)}
