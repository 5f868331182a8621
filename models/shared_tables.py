"""SharedTables: base of encoder-decoders, whose source, target and softmax may share tables.

Legend: B batch, T target length, D input of the softmax, V target vocabulary.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.theta import Theta
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.sizes import with_sizes
from tekso.models.layers.softmax import Softmax


class SharedTables(Layer):
    """Base of the models from a source to a target: their tables of tokens.

    Its Params are in the subclasses: source_vocab_size, target_vocab_size, dim, source_embedding
    (None: the table of the target), target_embedding, softmax (None: tied to the target).

    Shapes:
      as in the subclasses
    Children:
      source_embedding, softmax (if set), target_embedding
    """

    source_embedding: Embedding
    target_embedding: Embedding
    softmax: Softmax

    def _add_embeddings(self) -> None:
        """Adds the tables of source and target.

        Raises:
          ValueError: they would share a table, but their vocabularies differ in size.
        """
        p: Any = self.params
        if p.source_embedding is not None:
            source = with_sizes(p.source_embedding, vocab_size=p.source_vocab_size, dim=p.dim)
            self.child("source_embedding", source)
        elif p.source_vocab_size != p.target_vocab_size:
            raise ValueError(
                f"{type(self).__name__}: source_vocab_size {p.source_vocab_size} and "
                f"target_vocab_size {p.target_vocab_size} differ, so they cannot share a table: "
                "set a separate source_embedding, as in --set task.model.source_embedding="
                "tekso.models.layers.embedding:Embedding --set "
                f"task.model.source_embedding.scale={p.target_embedding.scale}"
            )
        self._add_target_embedding()

    def _add_target_embedding(self) -> None:
        """Adds the table of the target."""
        p: Any = self.params
        target = with_sizes(p.target_embedding, vocab_size=p.target_vocab_size, dim=p.dim)
        self.child("target_embedding", target)

    def _add_softmax(self, input_dim: int) -> None:
        """Adds the output layer, unless it is tied to the table of the target."""
        p: Any = self.params
        if p.softmax is not None:
            sizes = {"input_dim": input_dim, "vocab_size": p.target_vocab_size}
            self.child("softmax", with_sizes(p.softmax, **sizes))

    def _source_embedding(self) -> tuple[str, Embedding]:
        """Returns the name of the layer with the source table, and the layer."""
        p: Any = self.params
        if p.source_embedding is None:
            return "target_embedding", self.target_embedding
        return "source_embedding", self.source_embedding

    def _softmax(self) -> tuple[str, Any]:
        """Returns the name of the layer with the output table, and the layer."""
        p: Any = self.params
        if p.softmax is None:
            return "target_embedding", self.target_embedding
        return "softmax", self.softmax

    def _logits(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the scores of tokens: x [..., D] -> [..., V]."""
        name, softmax = self._softmax()
        return softmax.logits(theta[name], x, ctx)

    def _cross_entropy(
        self,
        theta: Theta,
        x: tf.Tensor,
        labels: tf.Tensor,
        ctx: StepContext,
        label_smoothing: float,
    ) -> tf.Tensor:
        """Returns the cross-entropy of every label: x [B, T, D], labels [B, T] -> [B, T]."""
        name, softmax = self._softmax()
        return softmax.cross_entropy(theta[name], x, labels, ctx, label_smoothing=label_smoothing)
