"""The Transformers by which GPipe measures the largest model that fits: Transformer-L, ever deeper.

Tokens are random, as memory and speed alone are measured. To learn from text:
`--set input=tekso.tasks.lm.input:TextStream --set input.files=GLOB …`.

Each is a pipeline over as many accelerators as it needs there, with rematerialisation but for the
smallest; `--mode=inspect_pipeline` shows it. A micro-batch is an example. Over 32 and more stages a
batch of 32 would leave the accelerators idle most of the time: there it has 4 examples a stage, the
least number with which the paper finds the idle time negligible.

Source: Huang et al. 2018 (arXiv 1811.06965), table 1: sequences of 1024, batches of 32, 12 bytes a
weight (float32 weight, gradient and RMSProp slot). Section 2.3: M ≥ 4K.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.pipeline.plan import Rematerialize
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.experiment import Experiment, Run
from tekso.framework.learner import Learner
from tekso.framework.optimizers.rmsprop import RMSProp
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.synthetic import SyntheticTokens
from tekso.tasks.lm.task import LanguageModel


@register
class Layers3(Experiment):
    """3 layers of width 2048; 282 million weights: what fits on one accelerator of 8 GB."""

    NUM_LAYERS = 3
    NUM_STAGES = 1
    NUM_MICRO_BATCHES = 1
    BATCH_SIZE = 32
    REMATERIALIZE: Rematerialize = "none"

    def task(self) -> Params:
        """32 heads, feed-forward 8192, biases, sinusoidal positions, an untied softmax.

        There are two norms a layer and none after the last one.
        """
        layer = TransformerLayer.Params(
            attention=MultiHeadAttention.Params(num_heads=32, mask="causal"),
            feed_forward=FeedForward.Params(hidden_dim=8192, activation="relu"),
        )
        model = TransformerLm.Params(
            dim=2048,
            embedding=Embedding.Params(scale="sqrt_dim"),
            stack=Stack.Params(num_layers=self.NUM_LAYERS, layer=layer),
            final_norm=None,
            softmax=Softmax.Params(use_bias=True),
        )
        return LanguageModel.Params(model=model)

    def input(self) -> Params:
        """Windows of 1024 random tokens."""
        return SyntheticTokens.Params(vocab_size=32_000, length=1024, batch_size=self.BATCH_SIZE)

    def learner(self) -> Params:
        """RMSProp with one slot a weight."""
        return Learner.Params(
            optimizer=RMSProp.Params(decay=0.99),
            schedule=schedules.InverseSquareRoot.Params(model_dim=2048),
            clip_global_norm=1.0,
        )

    def run(self) -> Params:
        """100 steps."""
        return Run.Params(steps=100, log_every_steps=1)

    def execution(self) -> Params:
        """All forwards, then all backwards."""
        return Pipelined.Params(
            num_stages=self.NUM_STAGES,
            num_micro_batches=self.NUM_MICRO_BATCHES,
            schedule="gpipe",
            rematerialize=self.REMATERIALIZE,
        )


@register
class Layers13(Layers3):
    """13 layers; 786 million weights: one accelerator with rematerialisation."""

    NUM_LAYERS = 13
    NUM_MICRO_BATCHES = 32
    REMATERIALIZE = "all"


@register
class Layers103(Layers13):
    """103 layers; 5.3 billion weights: 8 accelerators."""

    NUM_LAYERS = 103
    NUM_STAGES = 8


@register
class Layers415(Layers13):
    """415 layers; 21 billion weights: 32 accelerators."""

    NUM_LAYERS = 415
    NUM_STAGES = 32
    NUM_MICRO_BATCHES = BATCH_SIZE = 4 * NUM_STAGES


@register
class Layers1663(Layers13):
    """1663 layers; 83.9 billion weights: 128 accelerators."""

    NUM_LAYERS = 1663
    NUM_STAGES = 128
    NUM_MICRO_BATCHES = BATCH_SIZE = 4 * NUM_STAGES
