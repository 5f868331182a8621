"""GPT-2 style language models in the sizes of the Megatron papers.

Text comes from `--set input.files=GLOB`; the last tenth of every file is held out.

Source: Radford et al. 2019 (GPT-2, M124); Shoeybi et al. 2019 (arXiv 1909.08053), section 4, for
the settings; Narayanan et al. 2021 (arXiv 2104.04473), table 1, for the sizes from M1700.
"""

from __future__ import annotations

import math

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, Run
from tekso.framework.initializers import Normal
from tekso.framework.input.byte_pairs import BytePairs
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.input.text_files import TextFiles
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.normalization import LayerNorm
from tekso.models.layers.positions import LearnedPositions
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.transformer_lm import TransformerLm
from tekso.tasks.lm.input import TextStream
from tekso.tasks.lm.task import LanguageModel


@register
class M124(Experiment):
    """12 layers of width 768, 12 heads; 125 million weights, known as 124M."""

    NUM_LAYERS = 12
    DIM = 768
    NUM_HEADS = 12
    LENGTH = 1024
    BATCH_SIZE = 512

    def task(self) -> Params:
        """Uses learned positions, pre-norm, GELU, biases, a final norm and a tied embedding."""
        init = Normal.Params(stddev=0.02)
        into_residual = Normal.Params(stddev=0.02 / math.sqrt(2 * self.NUM_LAYERS))
        norm = LayerNorm.Params(epsilon=1e-5)
        layer = TransformerLayer.Params(
            norm=norm,
            attention=MultiHeadAttention.Params(
                num_heads=self.NUM_HEADS,
                mask="causal",
                init=init,
                output_init=into_residual,
                dropout_rate=0.1,
            ),
            feed_forward=FeedForward.Params(
                hidden_dim=4 * self.DIM,
                activation="gelu_tanh",
                init=init,
                output_init=into_residual,
            ),
            dropout_rate=0.1,
        )
        model = TransformerLm.Params(
            dim=self.DIM,
            embedding=Embedding.Params(init=init),
            positions=LearnedPositions.Params(max_length=self.LENGTH, init=init),
            dropout_rate=0.1,
            stack=Stack.Params(num_layers=self.NUM_LAYERS, layer=layer),
            final_norm=norm,
        )
        return LanguageModel.Params(model=model)

    def input(self) -> Params:
        """Sub-word tokens of the given files; the pieces are learned from them."""
        return TextStream.Params(
            corpus=TextFiles.Params(),
            # GPT-2 has 50,257 tokens; Megatron pads the table to a multiple of 1024.
            tokenizer=SentencePiece.Params(vocab_size=51_200),
            length=self.LENGTH,
            batch_size=self.BATCH_SIZE,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """16 batches, spread evenly over the held-out text."""
        return {"dev": HeldOut.Params(split="dev", max_batches=16)}

    def learner(self) -> Params:
        """AdamW, cosine from 1.5e-4 to 1e-5, gradients clipped at norm 1."""
        return Learner.Params(
            optimizer=AdamW.Params(
                weight_decay=0.01, weight_decay_exclude=[".*/(scale|bias|b)", ".*_bias"]
            ),
            schedule=schedules.Cosine.Params(
                initial_value=1.5e-4, final_value=1e-5, warmup_steps=3000
            ),
            clip_global_norm=1.0,
        )

    def run(self) -> Params:
        """300,000 steps."""
        return Run.Params(steps=300_000, eval_every_steps=5000, checkpoint_every_steps=5000)


@register
class Gpt2(M124):
    """The published GPT-2 of 124 million weights, with its 50,257 tokens."""

    def task(self) -> Params:
        """The model of M124."""
        return super().task().set({"model.vocab_size": 50_257})

    def input(self) -> Params:
        """Tokens of the published merges.txt: --set input.tokenizer.file=merges.txt."""
        return super().input().set(tokenizer=BytePairs.Params())


@register
class M345(M124):
    """24 layers of width 1024, 16 heads; 355 million weights, known as 345M."""

    NUM_LAYERS = 24
    DIM = 1024
    NUM_HEADS = 16


@register
class M1700(M124):
    """24 layers of width 2304, 24 heads, sequences of 2048; 1.7 billion weights."""

    NUM_LAYERS = 24
    DIM = 2304
    NUM_HEADS = 24
    LENGTH = 2048


@register
class M3600(M1700):
    """30 layers of width 3072, 32 heads; 3.6 billion weights."""

    NUM_LAYERS = 30
    DIM = 3072
    NUM_HEADS = 32


@register
class M7500(M1700):
    """36 layers of width 4096, 32 heads; 7.5 billion weights."""

    NUM_LAYERS = 36
    DIM = 4096
    NUM_HEADS = 32


@register
class B18(M1700):
    """40 layers of width 6144, 48 heads; 18.4 billion weights."""

    NUM_LAYERS = 40
    DIM = 6144
    NUM_HEADS = 48
    BATCH_SIZE = 1024


@register
class B39(M1700):
    """48 layers of width 8192, 64 heads; 39.1 billion weights."""

    NUM_LAYERS = 48
    DIM = 8192
    NUM_HEADS = 64
    BATCH_SIZE = 1536


@register
class B76(M1700):
    """60 layers of width 10,240, 80 heads; 76.1 billion weights."""

    NUM_LAYERS = 60
    DIM = 10_240
    NUM_HEADS = 80
    BATCH_SIZE = 1792


@register
class B146(M1700):
    """80 layers of width 12,288, 96 heads; 145.6 billion weights."""

    NUM_LAYERS = 80
    DIM = 12_288
    NUM_HEADS = 96
    BATCH_SIZE = 2304


@register
class B310(M1700):
    """96 layers of width 16,384, 128 heads; 310.1 billion weights."""

    NUM_LAYERS = 96
    DIM = 16_384
    NUM_HEADS = 128
    BATCH_SIZE = 2160


@register
class B530(M1700):
    """105 layers of width 20,480, 128 heads; 529.6 billion weights."""

    NUM_LAYERS = 105
    DIM = 20_480
    NUM_HEADS = 128
    BATCH_SIZE = 2520


@register
class T1(M1700):
    """128 layers of width 25,600, 160 heads; 1,008 billion weights."""

    NUM_LAYERS = 128
    DIM = 25_600
    NUM_HEADS = 160
    BATCH_SIZE = 3072
