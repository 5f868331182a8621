"""The language models of GPipe's scaling experiment: Transformer-L with L layers.

Tokens are random, because only memory and speed are measured. To train on text:
`--set input=tekso.tasks.lm.input:TextStream --set input.files=GLOB …`.

Each model is a pipeline over as many accelerators as in the paper, with rematerialisation except
for the smallest; `--mode=inspect_pipeline` shows the pipeline. A micro-batch is one example. With
32 or more stages, a batch of 32 would leave the accelerators idle most of the time. These models
therefore have 4 examples per stage in a batch, the smallest number for which the paper finds the
idle time negligible.

Source: Huang et al. 2018 (arXiv 1811.06965), table 1: sequences of 1024, batches of 32, 12 bytes
per weight (float32 weight, gradient and RMSProp slot). Section 2.3: M ≥ 4K.
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
    """3 layers of width 2048; 282 million weights: the largest for one 8 GB accelerator."""

    NUM_LAYERS = 3
    NUM_STAGES = 1
    NUM_MICRO_BATCHES = 1
    BATCH_SIZE = 32
    REMATERIALIZE: Rematerialize = "none"

    def task(self) -> Params:
        """Uses 32 heads, feed-forward 8192, biases, sinusoidal positions and an untied softmax.

        There are two norms per layer and no final norm.
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
        """RMSProp with one slot per weight."""
        return Learner.Params(
            optimizer=RMSProp.Params(decay=0.99),
            schedule=schedules.InverseSquareRoot.Params(model_dim=2048),
            clip_global_norm=1.0,
        )

    def run(self) -> Params:
        """100 steps."""
        return Run.Params(steps=100, log_every_steps=1)

    def execution(self) -> Params:
        """A GPipe schedule: all forward passes, then all backward passes."""
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
