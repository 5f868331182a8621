"""Translation of your own parallel text: two files, line by line.

    --set input.corpus.source_files=train.en --set input.corpus.target_files=train.de

Without `input.corpus.dev_source_files` and `dev_target_files`, a share of the pairs is held out.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Experiment, KeepBest, Run
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
from tekso.models.lstm_encoder_decoder import LstmEncoderDecoder
from tekso.tasks.mt.bucketed_pairs import BucketedPairs
from tekso.tasks.mt.parallel_files import ParallelFiles
from tekso.tasks.mt.task import Translation


def transformer(
    *, num_layers: int, dim: int, hidden_dim: int, num_heads: int, dropout_rate: float
) -> EncoderDecoder.Params:
    """Returns a pre-norm Transformer with one table for source, target and softmax.

    As in Vaswani et al. 2017, dropout applies to embeddings and to the outputs of sublayers.
    """
    layer = TransformerLayer.Params(
        attention=MultiHeadAttention.Params(num_heads=num_heads),
        feed_forward=FeedForward.Params(hidden_dim=hidden_dim),
        dropout_rate=dropout_rate,
    )
    return EncoderDecoder.Params(
        dim=dim,
        dropout_rate=dropout_rate,
        encoder=Stack.Params(num_layers=num_layers, layer=layer),
        decoder=Stack.Params(num_layers=num_layers, layer=decoder_layer(layer)),
    )


@register
class Base(Experiment):
    """Transformer for tens of thousands of pairs: 4 + 4 layers of width 128, much dropout.

    Source: Wu et al. 2021, "Good for misconceived reasons" (arXiv 2105.14462), section 4.1: the
      "tiny" Transformer for 29,000 pairs.
    """

    def task(self) -> Params:
        """The Transformer with label smoothing 0.1; beam search with 4 hypotheses."""
        model = transformer(num_layers=4, dim=128, hidden_dim=256, num_heads=4, dropout_rate=0.3)
        return Translation.Params(model=model, label_smoothing=0.1)

    def input(self) -> Params:
        """About 4,096 tokens per side in a batch; 6,000 pieces, learned from both languages."""
        return BucketedPairs.Params(
            corpus=ParallelFiles.Params(),
            tokenizer=SentencePiece.Params(vocab_size=6000),
            source_length=128,
            target_length=128,
            bounds=[16, 32, 64],
            max_ratio=4.0,
            fill="tokens",
            batch_size=32,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """All held-out pairs."""
        return {"dev": HeldOut.Params(split="dev", batch_size=64)}

    def learner(self) -> Params:
        """Adam, warm-up and inverse square root decay; evaluates a moving average of weights."""
        return Learner.Params(
            optimizer=Adam.Params(beta2=0.98, epsilon=1e-9),
            schedule=schedules.InverseSquareRoot.Params(
                model_dim=1,
                scale=0.22,
                warmup_steps=2000,  # at most 0.0049
            ),
            clip_global_norm=1.0,
            ema_decay=0.999,
            ema_start="ramp",
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so narrow a model."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """12,000 steps; the checkpoint of the best BLEU is kept."""
        return Run.Params(
            steps=12000,
            eval_every_steps=1000,
            checkpoint_every_steps=1000,
            keep_best=KeepBest.Params(metric="bleu"),
        )


@register
class Lstm(Base):
    """LSTMs with attention for tens of thousands of pairs: 2 + 2 layers of 256 units, much dropout.

    Source: Bahdanau et al. 2015 (arXiv 1409.0473); the attention output is an input of the next
      step.
    """

    def task(self) -> Params:
        """The settings of the Transformer with an LSTM model."""
        return super().task().set(model=LstmEncoderDecoder.Params(dim=256, dropout_rate=0.3))

    def input(self) -> Params:
        """About 2,048 tokens per side in a batch: a token costs three times the Transformer's."""
        return super().input().set(batch_size=16)

    def learner(self) -> Params:
        """A shorter warm-up than the Transformer's, to a similar learning rate: at most 0.004."""
        changes = {"schedule.scale": 0.0894, "schedule.warmup_steps": 500}
        return super().learner().set(changes)

    def execution(self) -> Params:
        """The local devices; XLA compiles clusters of ops, which makes a step a tenth shorter."""
        return DataParallel.Params(xla="clusters")

    def run(self) -> Params:
        """6,000 steps."""
        return super().run().set(steps=6000)
