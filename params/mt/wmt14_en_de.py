"""The Transformers of "Attention is all you need" on WMT 2014 English to German (4.5M pairs).

Nothing is downloaded: prepare `wmt14_translate/de-en` with tensorflow-datasets. If it is not in the
default folder, set `--set input.corpus.data_dir=…`. To use text files, with a share held out for
dev and test:

    --set input.corpus=tekso.tasks.mt.parallel_files:ParallelFiles
    --set input.corpus.source_files=train.en --set input.corpus.target_files=train.de
    --set input.corpus.test_fraction=0.001
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.encoder_decoder import EncoderDecoder, decoder_layer
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.tasks.mt.packed_pairs import PackedPairs
from tekso.tasks.mt.task import Translation
from tekso.tasks.mt.tfds_pairs import TfdsPairs


@register
class Base(Experiment):
    """Transformer (base): 6 + 6 layers of width 512, feed-forward 2048, 8 heads.

    Published: BLEU 27.3.

    63.0 million weights with 37,000 tokens: one table for source, target and softmax, post-norm, no
    biases in attention.

    Source: Vaswani et al. 2017, sections 3, 5 and table 3.
    """

    DIM, D_FF, HEADS = 512, 2048, 8
    DROPOUT = 0.1
    STEPS = 100_000

    def task(self) -> Params:
        """The published sizes; label smoothing 0.1."""
        layer = TransformerLayer.Params(
            norm_position="post",
            attention=MultiHeadAttention.Params(num_heads=self.HEADS, use_bias=False),
            feed_forward=FeedForward.Params(hidden_dim=self.D_FF),
            dropout_rate=self.DROPOUT,
        )
        model = EncoderDecoder.Params(
            dim=self.DIM,
            dropout_rate=self.DROPOUT,
            encoder=Stack.Params(num_layers=6, layer=layer),
            encoder_norm=None,
            decoder=Stack.Params(num_layers=6, layer=decoder_layer(layer)),
            decoder_norm=None,
        )
        return Translation.Params(model=model, label_smoothing=0.1)

    def input(self) -> Params:
        """37,000 sub-word pieces; 96 rows of 256, nearly 25,000 tokens per side."""
        return PackedPairs.Params(
            corpus=TfdsPairs.Params(
                name="wmt14_translate/de-en", source_feature="en", target_feature="de"
            ),
            tokenizer=SentencePiece.Params(vocab_size=37_000),
            source_length=256,
            target_length=256,
            batch_size=96,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """Newstest 2013 and 2014."""
        return {"dev": HeldOut.Params(split="dev"), "test": HeldOut.Params(split="test")}

    def learner(self) -> Params:
        """Adam with the schedule of the paper: 4000 steps of warm-up."""
        return Learner.Params(
            optimizer=Adam.Params(beta1=0.9, beta2=0.98, epsilon=1e-9),
            schedule=schedules.InverseSquareRoot.Params(model_dim=self.DIM, warmup_steps=4000),
        )

    def run(self) -> Params:
        """As many steps as in the paper."""
        return Run.Params(
            steps=self.STEPS,
            log_every_steps=100,
            eval_every_steps=5000,
            checkpoint_every_steps=1000,
        )


@register
class Big(Base):
    """Transformer (big): width 1024, feed-forward 4096, 16 heads; 214M weights.

    Published: BLEU 28.4.

    Source: Vaswani et al. 2017, table 3.
    """

    DIM, D_FF, HEADS = 1024, 4096, 16
    DROPOUT = 0.3
    STEPS = 300_000
