"""Language models for measuring speed: random tokens in memory, simple settings."""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, Run
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.synthetic import SyntheticTokens
from tekso.tasks.lm.task import LanguageModel


@register
class Small(Experiment):
    """4 layers of width 256, 16 rows of 128 tokens, a vocabulary of 8,192."""

    VOCAB_SIZE = 8192
    DIM = 256
    NUM_HEADS = 4
    NUM_LAYERS = 4
    BATCH_SIZE = 16

    def task(self) -> Params:
        """Uses a tied embedding, sinusoidal positions, pre-norm, ReLU, biases and no dropout."""
        layer = TransformerLayer.Params(
            attention=MultiHeadAttention.Params(num_heads=self.NUM_HEADS, mask="causal"),
            feed_forward=FeedForward.Params(hidden_dim=4 * self.DIM, activation="relu"),
        )
        model = TransformerLm.Params(
            vocab_size=self.VOCAB_SIZE,
            dim=self.DIM,
            embedding=Embedding.Params(scale="sqrt_dim"),
            stack=Stack.Params(num_layers=self.NUM_LAYERS, layer=layer),
        )
        return LanguageModel.Params(model=model)

    def input(self) -> Params:
        """Uniform random tokens."""
        return SyntheticTokens.Params(
            vocab_size=self.VOCAB_SIZE, length=128, batch_size=self.BATCH_SIZE
        )

    def learner(self) -> Params:
        """Adam at 1e-3, without clipping."""
        return Learner.Params(
            optimizer=Adam.Params(), schedule=schedules.Constant.Params(value=1e-3)
        )

    def run(self) -> Params:
        """100 steps."""
        return Run.Params(steps=100, log_every_steps=10)


@register
class Wide(Small):
    """6 layers of width 512, 8 rows of 128 tokens, a vocabulary of 16,384."""

    VOCAB_SIZE = 16_384
    DIM = 512
    NUM_HEADS = 8
    NUM_LAYERS = 6
    BATCH_SIZE = 8
