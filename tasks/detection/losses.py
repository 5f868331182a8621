"""Losses of detectors, for `task.loss`: hard negative mining (SSD), or focal loss (RetinaNet)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.params import Configurable, param
from tekso.models.detection.focal_loss import focal_loss, focal_scores
from tekso.models.detection.multibox_loss import Matches, multibox_loss


class DetectionLoss(Configurable):
    """Base of the losses of detectors, and of the probabilities that belong to them."""

    class Params(Configurable.Params):
        """Params of DetectionLoss."""

    def of_images(
        self, logits: tf.Tensor, codes: tf.Tensor, matches: Matches, defaults: tf.Tensor
    ) -> tf.Tensor:
        """Returns the loss of every image.

        Shapes:
          logits: [batch, boxes, classes with the background], codes: [batch, boxes, 4]
          defaults: [boxes, 4]
          returns: [batch], float32 or wider
        """
        raise NotImplementedError(f"{type(self).__name__} has no of_images()")

    def probabilities(self, logits: tf.Tensor) -> tf.Tensor:
        """Returns the probabilities of the classes of every box.

        Shapes:
          logits: [batch, boxes, classes with the background]
          returns: the same shape, float32; the background, 0, may have any value
        """
        raise NotImplementedError(f"{type(self).__name__} has no probabilities()")


class HardNegativeMining(DetectionLoss):
    """Softmax cross-entropy of matched boxes, and of the background boxes with the largest one.

    Raises:
      ValueError: negatives_per_positive is below 0.
    Source: Liu et al. 2016, section 2.2.
    """

    class Params(DetectionLoss.Params):
        """Params of HardNegativeMining."""

        negatives_per_positive: int = param(
            "Background boxes that count, for each matched box.", default=3
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.negatives_per_positive < 0:
            raise ValueError(
                f"{p.path_of('negatives_per_positive')} is {p.negatives_per_positive}, but must be "
                "at least 0"
            )

    def of_images(
        self, logits: tf.Tensor, codes: tf.Tensor, matches: Matches, defaults: tf.Tensor
    ) -> tf.Tensor:
        """See `DetectionLoss`."""
        count = self.params.negatives_per_positive
        return multibox_loss(logits, codes, matches, defaults, negatives_per_positive=count)

    def probabilities(self, logits: tf.Tensor) -> tf.Tensor:
        """See `DetectionLoss`."""
        return tf.nn.softmax(tf.cast(logits, tf.float32))


class FocalLoss(DetectionLoss):
    """Sigmoid cross-entropy of all classes and boxes, weighted down where the model is confident.

    The score of the background is not used.

    Raises:
      ValueError: a number is out of range.
    Source: Lin et al. 2017, "Focal loss for dense object detection".
    """

    class Params(DetectionLoss.Params):
        """Params of FocalLoss."""

        alpha: float = param("Weight of matched boxes; others have 1 - alpha.", default=0.25)
        gamma: float = param("Exponent of what the truth lacks to the probability 1.", default=2.0)
        prior: float = param("Probability of every class before training.", default=0.01)
        ignored_above: float = param(
            "An unmatched default box that overlaps an object this much does not count.",
            default=0.4,
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not (0 < p.alpha < 1 and p.gamma >= 0 and 0 < p.prior < 1 and p.ignored_above > 0):
            raise ValueError(
                f"{p.path_of('alpha')} is {p.alpha}, gamma {p.gamma}, prior {p.prior} and "
                f"ignored_above {p.ignored_above}, but alpha and prior must be between 0 and 1, "
                "gamma at least 0, and ignored_above positive"
            )

    def of_images(
        self, logits: tf.Tensor, codes: tf.Tensor, matches: Matches, defaults: tf.Tensor
    ) -> tf.Tensor:
        """See `DetectionLoss`."""
        p = self.params
        return focal_loss(
            logits,
            codes,
            matches,
            defaults,
            alpha=p.alpha,
            gamma=p.gamma,
            prior=p.prior,
            ignored_above=p.ignored_above,
        )

    def probabilities(self, logits: tf.Tensor) -> tf.Tensor:
        """See `DetectionLoss`."""
        scores = focal_scores(logits, prior=self.params.prior)
        found = tf.sigmoid(tf.cast(scores, tf.float32))
        return tf.pad(found, [(0, 0), (0, 0), (1, 0)])
