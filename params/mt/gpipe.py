"""The multilingual Transformers of GPipe: T(L, H, A), one model for all languages.

L encoder and L decoder layers of width 1024, feed-forward H, A heads of 64, 64,000 tokens. Each is
a pipeline over as many accelerators as there, which `--mode=inspect_pipeline` shows.

The corpus of the paper, 25 billion pairs of 103 languages with English, was never published. Give
one, in lines of source, target and language of the target between tabs:
`--set input.corpus.files=GLOB --set input.corpus.languages=['de','fr',…]`.

Source: Huang et al. 2018 (arXiv 1811.06965), section 5; languages by temperature 5: Arivazhagan et
al. 2019. Not in the paper, and chosen here: norms before each part, biases everywhere, three tables
apart (with which the sizes are those printed), batches and steps.
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
        """L + L layers; labels smoothed by 0.1."""
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
        """64,000 sub-word pieces of all languages; 256 rows of 256."""
        return PackedPairs.Params(
            corpus=Tsv.Params(language_column=2),
            tokenizer=SentencePiece.Params(vocab_size=64_000),
            source_length=256,
            target_length=256,
            temperature=5.0,
            batch_size=256,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """What is held out, as it is."""
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
        """All forwards, then all backwards; four micro-batches a stage, recomputed."""
        return Pipelined.Params(
            num_stages=self.NUM_STAGES,
            num_micro_batches=4 * self.NUM_STAGES,
            schedule="gpipe",
            rematerialize="all",
        )


@register
class T12H16384A32(T6H8192A16):
    """T(12, 16384, 32), the wide one of 1.3B weights: 2 accelerators."""

    NUM_LAYERS, D_FF, HEADS = 12, 16_384, 32
    NUM_STAGES = 2


@register
class T24H8192A16(T6H8192A16):
    """T(24, 8192, 16), the deep one of 1.3B weights: 4 accelerators."""

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
