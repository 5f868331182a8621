"""The multilingual Transformers of GPipe: T(L, H, A), one model for all languages.

T(L, H, A) has L encoder and L decoder layers of width 1024, feed-forward H, A heads of 64 and a
vocabulary of 64,000 tokens. Each model is a pipeline over as many accelerators as in the paper;
`--mode=inspect_pipeline` shows the pipeline.

The corpus of the paper, 25 billion pairs of 103 languages with English, was never published. Use
your own, with lines of tab-separated source, target and target language:
`--set input.corpus.files=GLOB --set input.corpus.languages=['de','fr',…]`.

Source: Huang et al. 2018 (arXiv 1811.06965), section 5; languages sampled with temperature 5:
Arivazhagan et al. 2019. Chosen here, because the paper does not have them: pre-norm layers, biases
everywhere, three separate tables (which give the published sizes), batch size and steps.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.encoder_decoder import EncoderDecoder, decoder_layer
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.embedding import Embedding
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.softmax import Softmax
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.tasks.mt.packed_pairs import PackedPairs
from tekso.tasks.mt.pair_files import Tsv
from tekso.tasks.mt.task import Translation


@register
class T6H8192A16(Experiment):
    """T(6, 8192, 16): 0.47B weights on 2 accelerators."""

    NUM_LAYERS, D_FF, HEADS = 6, 8192, 16
    NUM_STAGES = 2

    def task(self) -> Params:
        """L + L layers; label smoothing 0.1."""
        layer = TransformerLayer.Params(
            attention=MultiHeadAttention.Params(num_heads=self.HEADS, head_dim=64),
            feed_forward=FeedForward.Params(hidden_dim=self.D_FF),
            dropout_rate=0.1,
        )
        model = EncoderDecoder.Params(
            dim=1024,
            source_embedding=Embedding.Params(scale="sqrt_dim"),
            softmax=Softmax.Params(use_bias=True),
            dropout_rate=0.1,
            encoder=Stack.Params(num_layers=self.NUM_LAYERS, layer=layer),
            decoder=Stack.Params(num_layers=self.NUM_LAYERS, layer=decoder_layer(layer)),
        )
        return Translation.Params(model=model, label_smoothing=0.1)

    def input(self) -> Params:
        """64,000 sub-word pieces for all languages; 256 rows of 256."""
        return PackedPairs.Params(
            corpus=Tsv.Params(language_column=2),
            tokenizer=SentencePiece.Params(vocab_size=64_000),
            source_length=256,
            target_length=256,
            temperature=5.0,
            batch_size=256,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """The held-out pairs, with languages in their natural proportions."""
        return {"dev": HeldOut.Params(split="dev", changes={"temperature": 1.0})}

    def learner(self) -> Params:
        """Adam with the schedule of the Transformer."""
        return Learner.Params(
            optimizer=Adam.Params(beta1=0.9, beta2=0.98, epsilon=1e-9),
            schedule=schedules.InverseSquareRoot.Params(model_dim=1024, warmup_steps=8000),
            clip_global_norm=1.0,
        )

    def run(self) -> Params:
        """500,000 steps."""
        return Run.Params(
            steps=500_000,
            log_every_steps=100,
            eval_every_steps=10_000,
            checkpoint_every_steps=1000,
        )

    def execution(self) -> Params:
        """A GPipe schedule with four micro-batches per stage and rematerialisation."""
        return Pipelined.Params(
            num_stages=self.NUM_STAGES,
            num_micro_batches=4 * self.NUM_STAGES,
            schedule="gpipe",
            rematerialize="all",
        )


@register
class T12H16384A32(T6H8192A16):
    """T(12, 16384, 32), the wide model of 1.3B weights: 2 accelerators."""

    NUM_LAYERS, D_FF, HEADS = 12, 16_384, 32
    NUM_STAGES = 2


@register
class T24H8192A16(T6H8192A16):
    """T(24, 8192, 16), the deep model of 1.3B weights: 4 accelerators."""

    NUM_LAYERS, D_FF, HEADS = 24, 8192, 16
    NUM_STAGES = 4


@register
class T32H16384A32(T6H8192A16):
    """T(32, 16384, 32): 3B weights, 8 accelerators."""

    NUM_LAYERS, D_FF, HEADS = 32, 16_384, 32
    NUM_STAGES = 8


@register
class T64H16384A32(T6H8192A16):
    """T(64, 16384, 32): 6B weights, 128 layers, 16 accelerators."""

    NUM_LAYERS, D_FF, HEADS = 64, 16_384, 32
    NUM_STAGES = 16
